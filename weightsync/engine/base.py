"""The seam on the engine side: what a receiver asks of the things that hold weights (`Runner`), and what a publisher
asks of a whole engine (`EngineControl`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from weightsync.errors import ConfigError
from weightsync.protocol import PublishCall

__all__ = ["EngineControl", "Runner", "check_controls"]


@runtime_checkable
class Runner(Protocol):
    """One model of one engine rank: the target, or one draft. Called on the thread that owns the model.

    `begin -> load* -> finish` loads a version in place, `abort` gives one up. Nothing here decides or serves.
    """

    @property
    def name(self) -> str:
        """`"target"` or `"draft[i]"`; unique in the engine rank, numbers runners only."""
        ...

    @property
    def roles(self) -> Sequence[str]:
        """Roles that this runner may be loaded from, its own first (its declared origin).

        A built-in MTP head lists its role and `"target"` (for embedding and output layer); an EAGLE3 drafter only its
        own, so that the target's `layers.0` or `lm_head` never reach it.
        """
        ...

    @property
    def frozen(self) -> Sequence[str]:
        """`fnmatch` patterns of parameters that publishes never cover."""
        ...

    @property
    def casts(self) -> frozenset[tuple[torch.dtype, torch.dtype]]:
        """(published, parameter) dtype pairs that this engine's loader is declared to convert."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The live module: its parameters and persistent buffers are what a publish must cover."""
        ...

    def rename(self, role: str, name: str) -> str | None:
        """Wire name -> the name this runner's loader knows (dialects), or None if this runner never takes it."""
        ...

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors (renamed) into the module in place, sharding as the engine does.

        Views in `pairs` are valid only until this returns. Names the module does not know are ignored or raise, as
        the engine does it: routing never relies on either.
        """
        ...

    def begin(self) -> None: ...

    def finish(self) -> None:
        """All tensors are in: refresh what is derived from weights (hot-token ids, sliced heads, packed copies)."""
        ...

    def abort(self) -> None: ...


class EngineControl(Protocol):
    """One engine as the publisher sees it; every method has a deadline and may be called from a helper thread.

    The replies prove nothing about ranks other than the one that answered: ranks acknowledge through the store.
    """

    @property
    def name(self) -> str: ...

    def status(self, *, deadline_s: float) -> Mapping[str, Any]:
        """At least `engine`, `instance`, `world_size`, `fenced`, `versions`, `run_id`, `epoch`, `torch`, `protocol`."""
        ...

    def preflight(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        """Every rank joins the store, routes the manifest and opens its data groups; nothing is written."""
        ...

    def pause(self, mode: str, *, deadline_s: float) -> Mapping[str, Any]:
        """Stop serving: `abort`, `wait` or `keep` the running requests; replies with the ids of those kept.

        A pause for a publish is a lease of a few deadlines: an engine that is not told to receive by then serves again,
        since a trainer that died in between will never resume it.
        """
        ...

    def receive(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        """Every rank receives, loads, verifies, acknowledges, awaits the decision and commits or aborts."""
        ...

    def commit(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        """Flush the prefix cache once, set the version once, resume."""
        ...

    def resume(self, *, deadline_s: float) -> Mapping[str, Any]:
        """Serve again what was served before `pause`: for a publish that failed before begin. Refused if fenced."""
        ...


def check_controls(engines: Sequence[EngineControl]) -> None:
    """Raises `ConfigError` for addresses, or handles of engines, in the place of control clients.

    They would fail in the middle of the first publish, and on rank 0 alone.
    """
    for engine in engines:
        if not all(hasattr(engine, name) for name in ("name", "preflight", "receive")):
            raise ConfigError(
                f"engines: {engine!r} is no control client: give HttpControl(url, api_key=...), "
                "`launch(...).control()`, or the client of that kind of engine"
            )
