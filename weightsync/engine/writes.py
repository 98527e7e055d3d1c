"""Where the memory of live modules lies, and a mode that sees every write to it before it happens.

`Places` maps addresses to parameters: storage shared between runners or names, and parameters that are views of one
flat buffer, are told apart by address alone. `WriteWatch` is the mode under which loaders run: `dryrun` records and
skips their writes, `coverage` checks them against what the dry run recorded.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.engine.base import Runner
from weightsync.engine.regions import Region
from weightsync.errors import RoutingError

__all__ = ["REBINDING", "Block", "Place", "Places", "WriteKey", "WriteWatch", "nbytes_of", "write_key"]

REBINDING = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})
"""Operators that give a tensor object other memory, or move its memory."""

WriteKey = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Address, size, stride and dtype of the view written through: equal keys, the same elements in the same order."""


def write_key(t: torch.Tensor) -> WriteKey:
    return (t.data_ptr(), tuple(t.size()), t.stride(), t.dtype)


def nbytes_of(key: WriteKey) -> int:
    """Bytes from the first to the last element, gaps included."""
    _, size, stride, dtype = key
    return Region.of(0, size, stride).stop * dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One named tensor of one runner's module."""

    runner: int
    name: str
    kind: str
    """`parameter`, `buffer`, or `attribute` (a plain tensor attribute of some module)."""
    key: WriteKey
    tensor: torch.Tensor

    @property
    def start(self) -> int:
        return self.key[0]

    @property
    def stop(self) -> int:
        return self.start + nbytes_of(self.key)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A run of addresses whose places overlap each other: what is one piece of memory under several names."""

    start: int
    stop: int
    places: tuple[Place, ...]

    @property
    def unit(self) -> int:
        """Bytes per element in which regions of this block are counted."""
        return min(p.key[3].itemsize for p in self.places)

    def holder(self, key: WriteKey) -> Place | None:
        """A place of the view's dtype that holds all of it."""
        start, stop = key[0], key[0] + nbytes_of(key)
        return next((p for p in self.places if p.key[3] == key[3] and p.start <= start and stop <= p.stop), None)

    def region(self, key: WriteKey) -> Region:
        """The elements of a view, in units from the start of the block."""
        address, size, stride, dtype = key
        scale, rest = divmod(dtype.itemsize, self.unit)
        offset, shift = divmod(address - self.start, self.unit)
        if rest or shift:
            raise RoutingError(f"a view of {dtype} at byte {address - self.start} is not aligned to {self.unit} bytes")
        return Region.of(offset, (*size, scale), (*(s * scale for s in stride), 1))


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of every parameter, buffer and plain tensor attribute; tied ones under each name."""
    for prefix, sub in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, p in sub._parameters.items():
            if p is not None:
                yield "parameter", dot + name, p
        for name, b in sub._buffers.items():
            if b is not None:
                yield "buffer", dot + name, b
        for name, a in vars(sub).items():
            if isinstance(a, torch.Tensor):
                yield "attribute", dot + name, a


class Places:
    """The addresses of all tensors of all runners, as they are now.

    Raises:
        RoutingError: a parameter has no memory of its own (meta, offloaded, or a wrapper).
    """

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.places: list[Place] = []
        for i, runner in enumerate(runners):
            for kind, name, t in tensors_of(runner.module):
                if t.numel() == 0:
                    continue
                if t.is_meta or t.data_ptr() == 0:
                    if kind != "parameter":
                        continue
                    raise RoutingError(
                        f"runner {runner.name}: parameter {name} ({tuple(t.shape)}, {t.dtype}, {t.device}) has no "
                        "memory of its own: wake or load the engine before publishing; offloaded and wrapped "
                        "parameters are not supported"
                    )
                self.places.append(Place(i, name, kind, write_key(t), t))
        self.blocks: list[Block] = []
        group: list[Place] = []
        stop = 0
        for place in sorted(self.places, key=lambda p: (p.start, p.stop)):
            if group and place.start >= stop:
                self.blocks.append(Block(group[0].start, stop, tuple(group)))
                group = []
            stop = max(stop, place.stop) if group else place.stop
            group.append(place)
        if group:
            self.blocks.append(Block(group[0].start, stop, tuple(group)))
        self._starts = [b.start for b in self.blocks]

    def find(self, start: int, stop: int) -> range:
        """Numbers of the blocks that `start..stop` touches."""
        first = bisect.bisect_right(self._starts, start) - 1
        if first < 0 or self.blocks[first].stop <= start:
            first += 1
        last = bisect.bisect_left(self._starts, stop)
        return range(first, max(first, last))

    def find_key(self, key: WriteKey) -> range:
        return self.find(key[0], key[0] + nbytes_of(key))

    def moved(self, runners: Sequence[Runner]) -> list[tuple[int, str]]:
        """(runner number, name) of parameters and buffers whose address, shape or dtype is no longer what it was."""
        now = {
            (i, name): write_key(t)
            for i, runner in enumerate(runners)
            for kind, name, t in tensors_of(runner.module)
            if kind != "attribute"
        }
        was = {(p.runner, p.name): p.key for p in self.places if p.kind != "attribute"}
        added = [k for k in now if k not in was and now[k][0] and 0 not in now[k][1]]
        return [k for k, key in was.items() if now.get(k) != key] + added


@dataclasses.dataclass(frozen=True, slots=True)
class _Schema:
    written: tuple[tuple[int, str], ...]
    """Position and name of the arguments that the operator writes to."""
    views_only: bool
    """It changes sizes and strides of the tensor object, never bytes (`t_`, `squeeze_`)."""
    returns: tuple[int | None, ...]
    """For each result the entry of `written` that it is, or None."""


@functools.cache
def _schema(func: Any) -> _Schema:
    written, aliases = [], []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            written.append((i, a.name))
            aliases.append(set(a.alias_info.before_set))
    returns: list[int | None] = []
    for r in func._schema.returns:
        names = set(r.alias_info.before_set) if r.alias_info is not None else set()
        returns.append(next((k for k, alias in enumerate(aliases) if alias & names), None))
    views_only = torch.Tag.inplace_view in func.tags and func._schema.name not in REBINDING
    return _Schema(tuple(written), views_only, tuple(returns))


class WriteWatch(TorchDispatchMode):
    """Calls `writes` before an operator writes to tensors that exist already; if that says no, the write is skipped."""

    def writes(self, func: Any, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the operator may run. `tensors` are those that it would write to."""
        raise NotImplementedError

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that may run."""
        return func(*args, **kwargs)

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        schema = _schema(func)
        if not schema.written or schema.views_only:
            return self.run(func, args, kwargs)
        values = [args[i] if i < len(args) else kwargs.get(name) for i, name in schema.written]
        tensors = [
            t for v in values for t in (v if isinstance(v, (list, tuple)) else (v,)) if isinstance(t, torch.Tensor)
        ]
        if self.writes(func, tensors, args, kwargs):
            return self.run(func, args, kwargs)
        results = [values[k] if k is not None else None for k in schema.returns]
        return results[0] if len(results) == 1 else tuple(results) if results else None


# Set from outside the class body: torch wraps one found there so that its first call imports all of torch._dynamo,
# seconds and a hundred megabytes in the middle of a preflight.
WriteWatch.__torch_dispatch__ = WriteWatch._dispatch  # type: ignore[assignment,method-assign]
