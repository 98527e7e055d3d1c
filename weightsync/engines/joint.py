"""Collectives with an engine in which nothing of ours runs: its call, and our part in its data group, at one time.

The stock clients (`engines/vllm/stock.py`, `engines/sglang/stock.py`) ask the engine in the background and come to its
group as rank 0; whichever side fails, the other must not be waited for, and the engine's words say more than ours.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from weightsync import errors

__all__ = ["SLACK_S", "Asked", "Group", "join", "refused", "send"]

SLACK_S = 5.0
"""How much longer than our part the engine's answer may take: it says what went wrong."""

Asked = concurrent.futures.Future[Mapping[str, Any]]
"""The engine's answer, once there is one."""


class Group(Protocol):
    """Rank 0 of the data group that the engine's ranks join."""

    @property
    def words(self) -> Mapping[str, Any]:
        """What the engine must be told to find it."""
        ...

    def join(self, deadline_s: float, asked: Asked) -> None:
        """If the engine refuses (`asked`), nobody else will join. Raises `TransportError`."""
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor], deadline_s: float, asked: Asked) -> None:
        """Likewise."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def refused(asked: Asked) -> bool:
    return asked.done() and asked.exception() is not None


def join(engine: str, whose: str, group: Group, asked: Asked, deadline_s: float) -> None:
    """Open `group` with the engine, which was `asked` to; it is aborted if that fails.

    Args:
        whose: what the engine calls the group, for messages.

    Raises:
        EngineError: either side failed; with what the engine has said of it, if it has.
    """
    try:
        _jointly(engine, "preflight", f"opening {whose}", asked, lambda: group.join(deadline_s, asked), SLACK_S)
    except errors.EngineError:
        group.abort()
        raise


def send(engine: str, group: Group, pairs: Sequence[tuple[str, torch.Tensor]], asked: Asked, deadline_s: float) -> None:
    """Broadcast the tensors of `pairs` to the engine, which was `asked` to load them. Raises as `join`."""

    def part() -> None:
        group.broadcast([t for _, t in pairs], deadline_s, asked)

    what = f"loading {pairs[0][0]} and {len(pairs) - 1} more"
    _jointly(engine, "receive", what, asked, part, deadline_s + SLACK_S)


def _jointly(engine: str, phase: str, what: str, asked: Asked, part: Callable[[], None], answer_s: float) -> None:
    try:
        part()
        asked.result(answer_s)
    except (errors.WeightSyncError, concurrent.futures.TimeoutError) as e:
        told = asked.exception(0) if asked.done() else None
        text = str(told or e) or f"{type(e).__name__}: no answer in time"
        raise errors.EngineError(f"engine {engine}, {phase}: {what}: {text}", engine=engine, phase=phase) from e
