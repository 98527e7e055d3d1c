"""Which committed checkpoints stay: decided from the disk, after a commit, never before.

The promise: while a save is in flight a root holds at most what `keep` selects plus that save. `disk_peak_bytes` says
it in bytes, preflight checks it against the disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from checkpoint.errors import ConfigError
from checkpoint.layout import committed_path, committed_steps, remove_folder

__all__ = ["Retention", "doomed", "prune"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """`keep_last` newest steps (None: all), and every step that is a multiple of `keep_every` (None: no others)."""

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a positive number of checkpoints or None, got {value!r}")

    def keep(self, steps: Sequence[int]) -> set[int]:
        """Those of `steps` that stay."""
        if self.keep_last is None:
            return set(steps)
        kept = set(sorted(steps)[-self.keep_last :])
        return kept | {step for step in steps if self.keep_every and step % self.keep_every == 0}

    def disk_peak_bytes(
        self, checkpoint_bytes: int, steps_kept_before: Sequence[int] = (), *, drains: bool = False
    ) -> int | None:
        """The most that a root holds until `keep_every` keeps another step; None without a limit.

        What stays, what `keep_every` has kept already, the save in flight, and with `drains` the step that is being
        copied when its time is over.
        """
        if self.keep_last is None:
            return None
        extra = sum(1 for step in steps_kept_before if self.keep_every and step % self.keep_every == 0)
        return (self.keep_last + extra + 1 + drains) * checkpoint_bytes


def prune(root: str | Path, retention: Retention, protect: Collection[int] = ()) -> list[int]:
    """Remove the committed checkpoints that `retention` does not keep; returns their steps.

    The newest is never removed. `protect` are steps that are being read or drained.

    Raises:
        OSError: one could not be removed; those before it are gone.
    """
    going = doomed(root, retention, protect)
    for step in going:
        remove_folder(committed_path(root, step))
    return going


def doomed(root: str | Path, retention: Retention, protect: Collection[int] = ()) -> list[int]:
    """Steps that `prune` would remove now."""
    steps = committed_steps(root)
    kept = retention.keep(steps) | set(protect) | set(steps[-1:])
    return [step for step in steps if step not in kept]
