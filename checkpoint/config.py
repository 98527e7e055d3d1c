"""How saves behave (`SaveConfig`). Checked when it is built; an option that nobody reads does not exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from checkpoint.errors import ConfigError
from checkpoint.retention import Retention

__all__ = ["SaveConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """Options of a `Checkpointer`; the same on every rank."""

    deadline_s: float = 600.0
    """From a rank's call of `save` to its vote; who has not sealed by then is named in the verdict."""
    stall_s: float = 30.0
    """A writer that hands no byte to the kernel for so long, or is not scheduled, is given up."""
    grace_s: float = 5.0
    """How much later than the deadline a rank waits for the coordinator's verdict before it decides for an abort."""
    start_deadline_s: float = 120.0
    """For all ranks to build their Checkpointer."""
    num_files: int = 2
    """Data files per rank of weights, and as many of everything else, written in parallel."""
    spread_replicas: bool = True
    """From the second save on, shards that several ranks hold are written by those that the seals of the save before
    show to have time for it. False: by the ranks of the main replicas."""
    staging_bytes: int | None = None
    """Shared memory per rank; None: the size of its state. A larger state is streamed through it while `save` waits."""
    on_failure: Literal["warn", "retry", "raise"] = "warn"
    """An aborted save is logged; or tried again from the staged state (`retries` times); or raised by `poll`."""
    retries: int = 1
    max_consecutive_failures: int = 3
    """After so many failed saves in a row `poll` raises, whatever `on_failure` says."""
    retention: Retention = dataclasses.field(default_factory=Retention)
    durable_url: str | None = None
    """Committed steps are copied there in the background, by the lowest rank of each node (see `checkpoint.drain`)."""
    durable_bytes_per_s: float | None = None
    """Upper bound of the rate of copying."""
    durable_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For fsspec's filesystem, as JSON takes them: `{"endpoint_url": "http://..."}`."""
    disk_limit_bytes: int | None = None
    """What a root may hold, where a quota applies that the filesystem does not tell; checked by `preflight`."""
    progress: bool = True
    """Rank 0 draws a progress bar while a save is written, if standard error is a terminal and `tqdm` is installed."""
    keep_aborted: bool = False
    """Leave the files of aborted attempts on disk."""

    def __post_init__(self) -> None:
        for name in ("deadline_s", "stall_s", "grace_s", "start_deadline_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(self, name)!r}")
        for name, least in (("num_files", 1), ("retries", 0), ("max_consecutive_failures", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)!r}")
        if self.staging_bytes is not None and self.staging_bytes < 1:
            raise ConfigError(f"staging_bytes must be positive or None, got {self.staging_bytes!r}")
        if self.disk_limit_bytes is not None and self.disk_limit_bytes < 1:
            raise ConfigError(f"disk_limit_bytes must be positive or None, got {self.disk_limit_bytes!r}")
        if self.durable_bytes_per_s is not None and not self.durable_bytes_per_s > 0:
            raise ConfigError(f"durable_bytes_per_s must be positive or None, got {self.durable_bytes_per_s!r}")
        if self.on_failure not in ("warn", "retry", "raise"):
            raise ConfigError(f"on_failure must be 'warn', 'retry' or 'raise', got {self.on_failure!r}")
