"""What of a training state a save holds and a load wants, and state of the user's own, by callbacks.

    "model"       weights and buffers                "optimizer"   its state, and the schedule
    "rng"         random number generators           "extra"       registered state (`Extras`), and every other entry

`select` cuts a Megatron state dict by its entries, `section_of` tells where a key of a checkpoint belongs. Counters and
arguments, which say what a checkpoint is, always stay.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from checkpoint.errors import ConfigError, CoverageError

__all__ = ["CONTENTS", "Extras", "check_contents", "section_of", "select"]

CONTENTS = ("model", "optimizer", "rng", "extra")

_ENTRIES = (
    (re.compile(r"model\d*"), "model"),
    (re.compile(r"optimizer|opt_param_scheduler|lr_scheduler"), "optimizer"),
    (re.compile(r"rng|rng_state"), "rng"),
)
_ALWAYS = ("args", "checkpoint_version", "content_metadata", "iteration", "num_floating_point_operations_so_far")
_KEYS = (
    (re.compile(r"(chained_\d+\.)?optimizer\."), "optimizer"),
    (re.compile(r"rng(_state)?(/|$)"), "rng"),
    (re.compile(r"extra\."), "extra"),
)


def check_contents(contents: Collection[str]) -> tuple[str, ...]:
    """Raises ConfigError: an unknown name, or nothing at all."""
    if isinstance(contents, str) or not contents or (unknown := sorted(set(contents) - set(CONTENTS))):
        what = repr(contents) if isinstance(contents, str) or not contents else f"unknown {unknown}"
        raise ConfigError(f"contents must be some of {CONTENTS}, got {what}")
    return tuple(name for name in CONTENTS if name in contents)


def section_of(key: str) -> str:
    """Where a key of a checkpoint belongs, as Megatron and `Extras` name them; "model" if nothing else fits."""
    return next((section for pattern, section in _KEYS if pattern.match(key)), "model")


def select(state: Mapping[str, Any], contents: Collection[str]) -> dict[str, Any]:
    """The entries of a state dict that belong to `contents`.

    Raises:
        ConfigError: it has nothing of something that is asked for explicitly, the model or the optimizer.
    """
    if tuple(contents) == CONTENTS:
        return dict(state)

    def section(name: str) -> str:
        return next((s for pattern, s in _ENTRIES if pattern.fullmatch(name)), "extra")

    missing = {"model", "optimizer"} & set(contents) - {section(name) for name in state}
    if missing:
        raise ConfigError(f"contents names {sorted(missing)}, the state dict has only {sorted(state)}")
    return {name: value for name, value in state.items() if name in _ALWAYS or section(name) in contents}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Extra:
    save: Callable[[], Any]
    load: Callable[[Any], None]
    shared: bool
    reshard: Callable[[Sequence[Any], int, int], Any] | None
    optional: bool


class Extras:
    """State of the user's own: taken by one callback when a save begins, given back by another after a load."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._known: dict[str, _Extra] = {}

    def register(
        self,
        name: str,
        *,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        shared: bool = False,
        reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
        optional: bool = False,
    ) -> None:
        """See `Checkpointer.register`."""
        if not re.fullmatch(r"\w+", name) or name in self._known:
            raise ConfigError(f"extra state {name!r}: expected a new name of letters, digits and underscores")
        if shared and reshard is not None:
            raise ConfigError(f"extra state {name!r} is shared: there is nothing to reshard")
        self._known[name] = _Extra(save=save, load=load, shared=shared, reshard=reshard, optional=optional)

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(objects by key, common state) of now. An object is what Megatron calls a ShardedObject of one dimension."""
        objects = {_key(n, self._rank, self._world_size): [e.save()] for n, e in self._known.items() if not e.shared}
        common = {n: e.save() for n, e in self._known.items() if e.shared}
        return objects, {"extra": common} if common else {}

    def owns(self, key: str) -> bool:
        """Whether a key of a checkpoint is registered state; no state dict has to ask for it."""
        return any(key.startswith(f"extra.{name}/") for name in self._known)

    def read(self, keys: Collection[str], read: Callable[[str], Any], common: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's values by name; the callbacks are not run yet.

        Args:
            keys: of all objects of the checkpoint; `read` gives one.

        Raises:
            CoverageError: something is missing, or was saved by another number of ranks and cannot be resharded.
        """
        values = {}
        for name, extra in self._known.items():
            saved = sum(key.startswith(f"extra.{name}/") for key in keys)
            found = name in common.get("extra", {}) if extra.shared else saved > 0
            if not found:
                if extra.optional:
                    continue
                raise CoverageError(
                    f"the checkpoint has no extra state {name!r}: register it as optional, or leave it out"
                )
            if extra.shared:
                values[name] = common["extra"][name]
            elif saved == self._world_size:
                values[name] = read(_key(name, self._rank, saved))
            elif extra.reshard is not None:
                parts = [read(_key(name, rank, saved)) for rank in range(saved)]
                values[name] = extra.reshard(parts, self._rank, self._world_size)
            else:
                raise CoverageError(
                    f"extra state {name!r} was saved by {saved} ranks, now there are {self._world_size}: register it "
                    "with `reshard`, or leave 'extra' out of the contents"
                )
        return values

    def give_back(self, values: Mapping[str, Any]) -> None:
        """Run the callbacks."""
        for name, value in values.items():
            self._known[name].load(value)


def _key(name: str, rank: int, world_size: int) -> str:
    return f"extra.{name}/shard_{rank}_{world_size}"
