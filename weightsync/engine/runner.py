"""`ModuleRunner`: a live `torch.nn.Module` and its engine's loader, as the receiver wants to see them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from weightsync.errors import ConfigError

__all__ = ["ModuleRunner", "RenameTable"]

RenameTable = Mapping[str, Sequence[tuple[str, "str | None"]]]
"""Role -> (regular expression, replacement or None) pairs. The first one that matches a whole name renames it, with
backreferences, or says that the runner never takes it (None); names that none matches keep their name."""

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Rename = Callable[[str, str], "str | None"]


class ModuleRunner:
    """A `weightsync.engine.base.Runner` around one module.

    Args:
        name: `"target"` or `"draft[i]"`; unique in the engine rank.
        module: the live module; what a publish must cover.
        roles: roles it may be loaded from, its own first.
        load: takes (name, full tensor) pairs and copies them in place; default `module.load_weights`.
        rename: from (role, wire name) to the name that `load` knows, or None; a function or a `RenameTable`.
        frozen: `fnmatch` patterns of parameters that publishes never cover.
        casts: (published, parameter) dtype pairs that `load` may convert.
        on_begin, on_finish, on_abort: called by `begin`, `finish` (refresh derived state here) and `abort`.

    Raises:
        ConfigError: no role, no loader, or a name that is neither `target` nor `draft[i]`.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        *,
        roles: Sequence[str],
        load: Load | None = None,
        rename: Rename | RenameTable | None = None,
        frozen: Sequence[str] = (),
        casts: Collection[tuple[torch.dtype, torch.dtype]] = (),
        on_begin: Callable[[], Any] | None = None,
        on_finish: Callable[[], Any] | None = None,
        on_abort: Callable[[], Any] | None = None,
    ) -> None:
        if not re.fullmatch(r"target|draft\[\d+\]", name):
            raise ConfigError(f"runner name {name!r}: expected 'target' or 'draft[i]'")
        if isinstance(roles, str) or not roles or len(set(roles)) != len(roles):
            raise ConfigError(f"runner {name}: roles are {roles!r}; expected a list of distinct roles, its own first")
        if load is None:
            load = getattr(module, "load_weights", None)
            if load is None:
                raise ConfigError(f"runner {name}: {type(module).__name__} has no load_weights: pass load=")
        self.name = name
        self.module = module
        self.roles: tuple[str, ...] = tuple(roles)
        self.frozen: tuple[str, ...] = tuple(frozen)
        self.casts = frozenset(casts)
        self._load = load
        self._rename = rename if callable(rename) or rename is None else table_rename(rename)
        self._on_begin, self._on_finish, self._on_abort = on_begin, on_finish, on_abort

    def __repr__(self) -> str:
        return f"ModuleRunner({self.name!r}, {type(self.module).__name__}, roles={self.roles})"

    def rename(self, role: str, name: str) -> str | None:
        return name if self._rename is None else self._rename(role, name)

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            self._load(pairs)

    def begin(self) -> None:
        if self._on_begin is not None:
            self._on_begin()

    def finish(self) -> None:
        if self._on_finish is not None:
            self._on_finish()

    def abort(self) -> None:
        if self._on_abort is not None:
            self._on_abort()


def table_rename(table: RenameTable) -> Rename:
    """The function that a `RenameTable` describes. Raises `ConfigError` for what is no regular expression."""
    try:
        compiled = {role: [(re.compile(p), to) for p, to in rules] for role, rules in table.items()}
    except re.error as e:
        raise ConfigError(f"rename table: {e.pattern!r} is not a regular expression: {e}") from e

    def rename(role: str, name: str) -> str | None:
        for pattern, to in compiled.get(role, ()):
            match = pattern.fullmatch(name)
            if match is not None:
                return None if to is None else match.expand(to)
        return name

    return rename
