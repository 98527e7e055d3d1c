"""Plans and streams the Hugging Face tensors of a live Megatron-Core model, one pipeline stage per stream.

Every rank makes one `LiveExporter` and the same calls. `tensors()` plans (from names, shapes and sharding attributes;
one exchange over the pipeline), `export()` gathers shards in buckets, hands full Megatron tensors to the rules and
yields what these make of them. Which stage exports a tensor that several hold (the embedding that tied heads and MTP
layers keep on the last stage too) is decided once: the first stage does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from converters.errors import ConverterError, LiveModelError, MappingError
from converters.live.gather import BucketGather, GatherBucket, Piece, Scratch, assemble, plan_buckets
from converters.live.groups import ParallelGroups
from converters.live.model import LiveTensor, collect, sync_params
from converters.rules import RuleSet, TensorMapping, account

__all__ = ["GATHER_BYTES", "ExportedTensor", "LiveExporter"]

GATHER_BYTES = 32 << 20

Span = Callable[[str, int], contextlib.AbstractContextManager[None]]


def _no_span(phase: str, nbytes: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportedTensor:
    """One Hugging Face tensor of this stage; `role` and `group` as the rules have them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str
    group: str | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """One mapping: Megatron pieces in, Hugging Face tensors out."""

    mapping: TensorMapping
    pieces: tuple[Piece, ...]
    exported: tuple[ExportedTensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    live: tuple[tuple[Any, ...], ...]
    units: tuple[_Unit, ...]


class LiveExporter:
    """Full Hugging Face tensors of this rank's stage, in the order of the rules.

    `chunks` are this rank's model chunks, bare or wrapped. `roles` narrows the export for good (`{"target"}` leaves
    MTP layers out). `gather_bytes` bounds a bucket of tensor-parallel shards, of which two are in memory on the sender
    and this rank's share of two on the others. A larger tensor is gathered by itself.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        rules: RuleSet,
        *,
        groups: ParallelGroups | None = None,
        roles: frozenset[str] | None = None,
        gather_bytes: int = GATHER_BYTES,
    ) -> None:
        if not chunks:
            raise LiveModelError("no model chunks given: pass the list that the trainer got from its model builder")
        self.groups = ParallelGroups.from_megatron() if groups is None else groups
        self._chunks = list(chunks)
        self._rules = rules
        self._roles = roles
        self._gather_bytes = gather_bytes
        self._device = next(p.device for chunk in chunks for p in chunk.parameters())
        self._plan: _Plan | None = None
        self._buckets: dict[frozenset[str] | None, list[GatherBucket]] = {}
        self._gather = BucketGather(self.groups.tp, self._device)
        self._scratch = Scratch(self._device)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that this rank keeps for exports."""
        return self._gather.buffer_bytes + self._scratch.nbytes

    def tensors(self) -> tuple[ExportedTensor, ...]:
        """What `export` yields on the sender of this stage. Collective on the first call, cached afterwards.

        Raises:
            LiveModelError: the parameters cannot be exported as they are.
            MappingError: rules and model do not fit: tensors unmapped, missing, or of a wrong shape.
        """
        return tuple(t for unit in self._planned().units for t in unit.exported)

    def export(
        self, *, roles: frozenset[str] | None = None, span: Span = _no_span
    ) -> Generator[tuple[ExportedTensor, torch.Tensor], None, None]:
        """Yields on the sender each tensor of `tensors()` whose role is in `roles` (None: all), full and contiguous.

        A tensor is valid until the next one is asked for. Collective: other ranks must exhaust the iterator, which
        yields them nothing. A sender that stops early finishes the gathers when the iterator is closed, so that
        nobody waits for it. `span(phase, nbytes)` times the phases "gather" and "convert".

        Raises:
            LiveModelError: the parameters cannot be exported as they are.
            MappingError: names, shapes, dtypes or sharding changed since `tensors()`.
        """
        plan = self._planned()
        with span("gather", 0):
            live = {name: t.tensor for name, t in self._read(plan).items()}
        if self.groups.replica:
            return
        units = [u for u in plan.units if roles is None or u.mapping.role in roles]
        if roles not in self._buckets:
            self._buckets[roles] = plan_buckets([u.pieces for u in units], self._gather_bytes)
        flight = _Flight(self._gather, self._buckets[roles], live)
        try:
            for bucket in self._buckets[roles]:
                with span("gather", bucket.nbytes * (self.groups.tp_size - 1)):
                    rows = flight.next()
                if not self.groups.is_sender:
                    continue
                for unit in (units[i] for i in bucket.units):
                    with span("convert", sum(p.full_nbytes for p in unit.pieces)):
                        tensors = self._convert(unit, bucket, rows, live)
                    yield from zip(unit.exported, tensors, strict=True)
        finally:
            flight.drain()

    def _planned(self) -> _Plan:
        if self._plan is None:
            self._plan = self._make_plan(self._read(None))
        return self._plan

    def _read(self, planned: _Plan | None) -> dict[str, LiveTensor]:
        """This rank's tensors, up to date and as planned; all ranks of the tensor-parallel group find out together."""
        problem: ConverterError | None = None
        live: dict[str, LiveTensor] = {}
        try:
            sync_params(self._chunks)
            live = collect(self._chunks, self._rules)
            now = tuple(t.meta for t in live.values())
            if planned is not None and now != planned.live:
                problem = MappingError(f"the model changed since it was planned: {_difference(planned.live, now)}")
        except ConverterError as e:
            problem = e
        self._agree(problem)
        return live

    def _agree(self, problem: ConverterError | None) -> None:
        """Raises on every rank of the group if one has a problem: the others would wait for its shards."""
        if self.groups.tp_size > 1:
            ok = torch.tensor([0 if problem else 1], dtype=torch.int64, device=self._device)
            dist.all_reduce(ok, dist.ReduceOp.MIN, group=self.groups.tp)
            if problem is None and not ok.item():
                raise LiveModelError("another rank of this tensor-parallel group cannot export: its error says why")
        if problem is not None:
            raise problem

    def _make_plan(self, live: Mapping[str, LiveTensor]) -> _Plan:
        owner = self._owners(live)
        units: list[_Unit] = []
        for mapping in self._rules.mappings():
            stages = {owner[name] for name in mapping.mcore if name in owner}
            if not self._wants(mapping) or self.groups.stage not in stages:
                continue
            if len(stages) > 1:
                raise MappingError(f"{' + '.join(mapping.mcore)} are spread over pipeline stages {sorted(stages)}")
            pieces = tuple(self._piece(live[name], mapping.blocks(name)) for name in mapping.mcore)
            exported = tuple(
                ExportedTensor(name=m.name, shape=m.shape, dtype=m.dtype, role=mapping.role, group=mapping.group)
                for m in mapping.hf_meta({p.name: (p.full_shape, p.dtype) for p in pieces})
            )
            units.append(_Unit(mapping=mapping, pieces=pieces, exported=exported))
        return _Plan(live=tuple(t.meta for t in live.values()), units=tuple(units))

    def _piece(self, live: LiveTensor, blocks: tuple[int, ...]) -> Piece:
        name, shape, dtype, dim = live.meta
        return Piece(name=name, shape=shape, dtype=dtype, dim=dim, parts=self.groups.tp_size, blocks=blocks)

    def _wants(self, mapping: TensorMapping) -> bool:
        return self._roles is None or mapping.role in self._roles

    def _owners(self, live: Mapping[str, LiveTensor]) -> dict[str, int]:
        """The stage that exports each Megatron tensor of the whole model."""
        names: list[list[str]] = [list(live)]
        if self.groups.num_stages > 1:
            gathered: list[Any] = [None] * self.groups.num_stages
            dist.all_gather_object(gathered, list(live), group=self.groups.pp)
            names = gathered
        owner: dict[str, int] = {}
        for stage, held in enumerate(names):
            for name in held:
                owner.setdefault(name, stage)
        found = account(self._rules, owner, "mcore")
        wanted = {name for m in self._rules.mappings() if self._wants(m) for name in m.mcore}
        missing = tuple(name for name in found.missing if name in wanted)
        dataclasses.replace(found, missing=missing).check("Megatron model")
        return owner

    def _convert(
        self, unit: _Unit, bucket: GatherBucket, rows: torch.Tensor, live: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        self._scratch.reset()
        full = {
            piece.name: assemble(piece, rows, bucket.offsets[piece.name], self._scratch)
            if piece.is_sharded
            else live[piece.name]
            for piece in unit.pieces
        }
        tensors = unit.mapping.to_hf(full)
        return [tensors[t.name] for t in unit.exported]


class _Flight:
    """The gathers of one export: one bucket ahead, and all of them in the end."""

    def __init__(self, gather: BucketGather, buckets: Sequence[GatherBucket], live: Mapping[str, torch.Tensor]) -> None:
        self._gather = gather
        self._live = live
        self._left = iter(buckets)
        gather.begin()
        self._in_flight = False
        self._broken = False

    def next(self) -> torch.Tensor:
        """The bytes of the next bucket (see `BucketGather.finish`); starts the one after it."""
        self._broken = True
        if not self._in_flight:
            self._start()
        rows = self._gather.finish()
        self._start()
        self._broken = False
        return rows

    def drain(self) -> None:
        """Finish what is left, unless a gather failed: then there is nobody to finish it with."""
        while self._in_flight and not self._broken:
            self.next()

    def _start(self) -> None:
        bucket = next(self._left, None)
        self._in_flight = bucket is not None
        if bucket is not None:
            self._gather.start(bucket, self._live)


def _difference(planned: Sequence[tuple[Any, ...]], now: Sequence[tuple[Any, ...]]) -> str:
    before, after = ({name: tuple(rest) for name, *rest in side} for side in (planned, now))
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            return f"{name} was {_describe(before.get(name))}, is {_describe(after.get(name))}; make a new exporter"
    return "its tensors come in another order; make a new exporter"


def _describe(meta: tuple[Any, ...] | None) -> str:
    if meta is None:
        return "absent"
    shape, dtype, dim = meta
    return f"{dtype} {tuple(shape)} sharded along {dim}"
