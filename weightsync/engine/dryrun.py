"""Learn what a live loader does with a tensor, without a byte written, an attribute changed, or memory spent.

`routing` calls `dry_run` once per manifest and runner. The loader gets a tensor of the right shape that lies in
untouched zero memory; a dispatch mode records the copies it makes into parameters, with the region of the published
tensor that each one reads, and skips them.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from weightsync.engine.base import Runner
from weightsync.engine.regions import Region, overlap
from weightsync.engine.snapshot import Snapshot
from weightsync.engine.writes import REBINDING, Places, WriteKey, WriteWatch, nbytes_of, write_key
from weightsync.manifest import TensorSpec

__all__ = ["DryLoad", "Write", "dry_run"]

WIDEST = 8
"""Bytes per element of the source memory: a cast is shown at the same element offset in its own dtype."""
SMALL = 1 << 18
"""Up to so many elements a source lies on the runner's own device: small tensors are the ones loaders compute with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """One write to memory of a runner. `source`: for a copy straight from the published tensor, the elements it reads,
    in the same order as `target` (the view's own elements, counted from its first)."""

    key: WriteKey
    kind: Literal["copy", "fill", "computed"]
    source: Region | None = None
    value: float | int | bool | None = None

    @property
    def target(self) -> Region:
        return Region.of(0, self.key[1], self.key[2])


@dataclasses.dataclass(slots=True)
class DryLoad:
    """What one runner's loader does with one tensor."""

    name: str
    """As the loader knows it."""
    writes: list[Write] = dataclasses.field(default_factory=list)
    rebinds: list[str] = dataclasses.field(default_factory=list)
    """Attributes that it replaces."""
    elsewhere: bool = False
    """It writes to memory that is no parameter, buffer or tensor attribute."""
    error: str | None = None

    @property
    def taken(self) -> bool:
        """True if loading it has an effect."""
        return self.error is None and bool(self.writes or self.rebinds or self.elsewhere)

    @property
    def plain(self) -> bool:
        """True if it can be loaded in parts: nothing but copies from the tensor and constants."""
        return (
            not self.rebinds
            and not self.elsewhere
            and all(w.source is not None or (w.kind == "fill" and w.value is not None) for w in self.writes)
        )


class _Arena:
    """Zero memory that is never touched: `given` plays the published tensor, `derived` a cast or clone of it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        def reserve() -> torch.Tensor:
            if device.type == "cpu":
                # Anonymous pages cost nothing until written; reads see the kernel's zero page.
                return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)

        self.given, self.derived = reserve(), reserve()

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        stride, step = [], 1
        for n in reversed(shape):
            stride.append(step)
            step *= max(n, 1)
        return self.given.view(dtype).as_strided(tuple(shape), tuple(reversed(stride)), 0)

    def locate(self, t: torch.Tensor) -> tuple[torch.Tensor, Region] | None:
        """The memory that `t` is a view of, and its elements there; None if it lies elsewhere."""
        for base in (self.given, self.derived):
            start = base.data_ptr()
            if start <= t.data_ptr() < start + base.numel():
                offset = (t.data_ptr() - start) // t.dtype.itemsize
                return base, Region.of(offset, t.size(), t.stride())
        return None


class _Recorder(WriteWatch):
    def __init__(self, places: Places, arena: _Arena, into: DryLoad) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places, self.arena, self.into = places, arena, into
        self.opaque = False
        # Memory made during this load: free to be written. Kept alive so that no address is reused.
        self.fresh: dict[int, torch.Tensor] = {}

    def problem(self, text: str) -> bool:
        if self.into.error is None:
            self.into.error = text
        return False

    def writes(self, func: Any, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        old = [t for t in tensors if t.untyped_storage().data_ptr() not in self.fresh and t.numel()]
        if not old:
            return True
        name: str = func._schema.name
        for t in old:
            located = self.arena.locate(t)
            if located is not None:
                if located[0] is self.arena.given:
                    return self.problem(f"{name} writes into the tensor that the loader was given")
                self.opaque = True
                return False
        if name in REBINDING:
            return self.problem(f"{name} gives a live tensor other memory")
        if name == "aten::copy_":
            self._copy(args[0], args[1])
        elif name == "aten::_foreach_copy_":
            for dst, src in zip(args[0], args[1], strict=True):
                self._copy(dst, src)
        elif name in ("aten::fill_", "aten::zero_"):
            value = args[1] if name == "aten::fill_" else 0
            known = not isinstance(value, torch.Tensor)
            kind: Literal["fill", "computed"] = "fill" if known or args[0].numel() > 1 else "computed"
            self._record(Write(write_key(args[0]), kind, value=value if known else None))
        elif func._schema.overload_name.endswith("out") and "index" not in name and "scatter" not in name:
            for t in old:
                self._record(Write(write_key(t), "computed"))
        elif any(self.places.find_key(write_key(t)) for t in old):
            return self.problem(f"{name} changes a parameter in a way that is not a plain copy")
        else:
            self.into.elsewhere = True
        return False

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if dst.numel() != src.numel():
            self.problem(
                f"a tensor of shape {tuple(src.size())} is copied into one of shape {tuple(dst.size())}, "
                "which would repeat it"
            )
            return
        located = None if self.opaque else self.arena.locate(src)
        if located is None:
            self._record(Write(write_key(dst), "computed"))
        else:
            self._record(Write(write_key(dst), "copy", source=located[1]))

    def _record(self, write: Write) -> None:
        touched = self.places.find_key(write.key)
        if not touched:
            self.into.elsewhere = True
            return
        block = self.places.blocks[touched[0]]
        if len(touched) > 1 or write.key[0] < block.start or write.key[0] + nbytes_of(write.key) > block.stop:
            self.problem(f"a view of size {write.key[1]} reaches beyond the parameter that it starts in")
            return
        if write.source is not None and block.holder(write.key) is None:
            write = dataclasses.replace(write, source=None, kind="computed")  # bits of another dtype: not a cast
        if write.target.repeats:
            self.problem(f"a view of size {write.key[1]} and stride {write.key[2]} is written: elements repeat")
        if write.kind == "fill":
            for earlier in self.into.writes:
                if earlier.kind != "fill" and self._meet(earlier.key, write.key):
                    self.problem("a constant is written over elements that were loaded just before")
        self.into.writes.append(write)

    def _meet(self, a: WriteKey, b: WriteKey) -> bool:
        both = set(self.places.find_key(a)) & set(self.places.find_key(b))
        blocks = [self.places.blocks[i] for i in both]
        return any(overlap(block.region(a), block.region(b)) for block in blocks)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name: str = func._schema.name
        if name in ("aten::_to_copy", "aten::clone"):
            located = self.arena.locate(args[0])
            if located is not None and self._keeps_layout(args[0], located[1], kwargs):
                t = args[0]
                dtype = kwargs.get("dtype") or t.dtype
                offset = (t.data_ptr() - located[0].data_ptr()) // t.dtype.itemsize
                return self.arena.derived.view(dtype).as_strided(t.size(), t.stride(), offset)
        if name == "aten::view" and func._schema.overload_name == "dtype" and self.arena.locate(args[0]) is not None:
            self.opaque = True  # element offsets of the bits are not those of a cast
        out = func(*args, **kwargs)
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, torch.Tensor) and not func._schema.returns[0].alias_info:
                pointer = t.untyped_storage().data_ptr()
                if pointer and not self._is_old(t):
                    self.fresh[pointer] = t
        return out

    def _is_old(self, t: torch.Tensor) -> bool:
        # Some operators return an argument although their schema does not say so.
        return self.arena.locate(t) is not None or bool(t.numel() and self.places.find_key(write_key(t)))

    @staticmethod
    def _keeps_layout(t: torch.Tensor, region: Region, kwargs: Mapping[str, Any]) -> bool:
        """True if a clone of `t` has the strides of `t`."""
        memory_format = kwargs.get("memory_format")
        if memory_format is torch.contiguous_format:
            return t.is_contiguous()
        return memory_format in (None, torch.preserve_format) and region.is_interval and not region.repeats


def _load(runner: Runner, source: torch.Tensor, arena: _Arena, places: Places, into: DryLoad) -> None:
    try:
        with torch.no_grad(), _Recorder(places, arena, into):
            runner.load([(into.name, source)])
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001  whatever a foreign loader raises is the answer that was asked for
        into.error = into.error or f"{type(e).__name__}: {e}"


def dry_run(
    runner: Runner, specs: Sequence[tuple[TensorSpec, str]], places: Places, device: torch.device
) -> list[DryLoad]:
    """What `runner.load` does with each tensor alone, `specs` naming them as the loader knows them.

    Nothing is changed, also if the loader raises: writes are skipped, attributes, containers and bindings restored.
    What a loader does on threads of its own is not seen.
    """
    if not specs:
        return []
    largest = max((s.numel for s, _ in specs), default=1)
    host = _Arena(max(largest, 1) * WIDEST, torch.device("cpu"))
    own = host if device.type == "cpu" else _Arena(SMALL * WIDEST, device)

    def load(spec: TensorSpec, name: str) -> DryLoad:
        into = DryLoad(name)
        arena = own if spec.numel <= SMALL else host
        _load(runner, arena.tensor(spec.dtype, spec.shape), arena, places, into)
        return into

    snapshot = Snapshot(runner.module)
    try:
        loads = [load(spec, name) for spec, name in specs]
        rebound = [slot for slot, _ in snapshot.rebound()]
        if rebound:
            # Rare (an attribute such as hot_token_id is replaced): once more, to see by which tensors.
            snapshot.restore()
            loads = []
            for spec, name in specs:
                into = load(spec, name)
                for slot, names in snapshot.rebound(rebound):
                    into.rebinds += names
                    slot.restore()
                loads.append(into)
    finally:
        snapshot.restore()
    return loads
