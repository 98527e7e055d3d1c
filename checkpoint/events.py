"""What callers of `Checkpointer` get to see of a save (`SaveHandle`, `SaveEvent`) and of a load (`LoadResult`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from checkpoint.vote import Culprit, describe

__all__ = ["LoadResult", "SaveEvent", "SaveHandle"]

TERMINAL = ("committed", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveEvent:
    """A save reached a state.

    `kind`: "staged", "sealed" (this rank's data is on its disk), "committed" or "failed"; on the lowest rank of each
    node also "drained" (its files are in durable storage).
    """

    kind: str
    step: int
    handle: SaveHandle


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class SaveHandle:
    """One save. Reading it never waits."""

    step: int
    attempt: str
    nbytes: int
    """That this rank stages."""
    bytes_done: int = 0
    """Of those, handed to the disk so far."""
    state: str = "staged"
    blocked_s: float = 0.0
    """How long `save` held the caller; `waited_s` of it for the save before."""
    waited_s: float = 0.0
    culprits: tuple[Culprit, ...] = ()
    """Why it failed."""
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the writer measured, by name; `common_differs`: rank -> paths of common state that differ from rank 0's."""
    path: Path | None = None
    """Where it is, once committed."""
    drained: bool = False
    """Whether this node's files are in durable storage, too (on the lowest rank of each node)."""

    @property
    def done(self) -> bool:
        return self.state in TERMINAL

    @property
    def error(self) -> str:
        """Why it failed, in words; names ranks, hosts, phases, bytes."""
        return describe(self.culprits)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """What `Checkpointer.load` loaded; `passed_over` says of every better candidate why it was not taken."""

    step: int
    tier: str
    state: dict[str, Any]
    passed_over: tuple[str, ...]
