"""How to publish: the one configuration object, checked when it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from weightsync import errors
from weightsync.guarantees import check_names

__all__ = ["WILDCARDS", "PublishConfig"]

WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - recognised in order to treat them apart


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig:
    """How to publish; equal on every trainer rank, but for the two addresses, which are of each rank's own host.

    Checked when built.

    Raises:
        errors.ConfigError: a value that cannot work.
    """

    run_id: str | None = None
    """Stable name of the training run; a new publisher with the same one takes over its engines. None: random."""
    transport: str = "gloo"
    """`gloo`, `nccl`, `shm` (same host), `ipc` (same GPU), or another torch.distributed backend by name (untested)."""
    bucket_bytes: int | None = None
    """Size of one transfer; None: what the transport recommends. Never more than the weights of a pipeline stage."""
    num_buffers: int | None = None
    """Buckets in flight on each side; None: what the transport recommends."""
    deadline_s: float = 120.0
    """For each phase of a publish: preflight, connect, stream, verify, commit."""
    control_s: float = 10.0
    """For an engine to answer a status call."""
    heartbeat_s: float = 10.0
    """An engine rank whose heartbeat stops for so long is lost, before any deadline passes."""
    pause_mode: Literal["abort", "wait", "keep"] = "wait"
    """What happens to running requests; see docs/concepts.md."""
    on_engine_failure: Literal["abort", "drop"] = "abort"
    """`drop`: publish to the engines that are left; before the decision only."""
    publish_dtype: torch.dtype | None = None
    """Cast floating-point tensors to it, except those of `keep_fp32`; None keeps every tensor's own."""
    keep_fp32: Sequence[str] = ("*.e_score_correction_bias", "*.expert_bias", "*.A_log", "*.dt_bias")
    """`fnmatch` patterns of HF names that `publish_dtype` never casts."""
    device: str | None = None
    """Where buckets are packed; None: the CPU if the transport moves CPU tensors, else the current accelerator."""
    bind_host: str = "127.0.0.1"
    """The only address that sockets of this trainer rank listen on. With a wildcard (`0.0.0.0`, `::`) the store listens
    on every address, the data plane on `advertise_host`."""
    advertise_host: str | None = None
    """Address under which engines reach the store; None: `bind_host`."""
    port_range: tuple[int, int] | None = None
    """First and last port for the store; None: any free one. Ports of the data plane are the kernel's choice: see
    docs/guides/networks.md."""
    takeover: bool = False
    """Take engines over from another run id."""
    require_same_torch: bool = True
    """Refuse engines whose torch differs in major or minor version."""
    require: Sequence[str] = ()
    """Guarantees (`weightsync.guarantees`) without which no engine is published to; stock engines lack some."""
    trace: bool = False
    """Keep every span for `PublishReport.events`."""

    @property
    def data_host(self) -> str:
        """The address that the data plane listens on."""
        return self.advertise_host or "" if self.bind_host in WILDCARDS else self.bind_host

    def __post_init__(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise errors.ConfigError(f"PublishConfig: {text}")

        bucket, buffers = self.bucket_bytes, self.num_buffers
        check(bucket is None or bucket >= 4096, f"bucket_bytes is {bucket}; expected at least 4096")
        check(buffers is None or buffers >= 2, f"num_buffers is {buffers}; expected at least 2, so that phases overlap")
        for name in ("deadline_s", "control_s", "heartbeat_s"):
            check(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; expected seconds > 0")
        check(self.pause_mode in ("abort", "wait", "keep"), f"pause_mode is {self.pause_mode!r}; abort, wait or keep")
        check(
            self.on_engine_failure in ("abort", "drop"),
            f"on_engine_failure is {self.on_engine_failure!r}; abort or drop",
        )
        check(self.run_id is None or bool(self.run_id.strip()), "run_id is empty")
        check(self.run_id is None or "/" not in self.run_id, f"run_id {self.run_id!r} contains '/'")
        check_names(self.require)
        check(
            self.bind_host not in WILDCARDS or self.advertise_host not in (None, *WILDCARDS),
            f"bind_host {self.bind_host!r} means every address; say with advertise_host which one engines use",
        )
        if self.port_range is not None:
            low, high = self.port_range
            check(0 < low <= high < 65536, f"port_range is {self.port_range}; expected (first, last) within 1..65535")
