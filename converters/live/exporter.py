"""Plans and streams the Hugging Face tensors of a live Megatron-Core model, one pipeline stage per stream.

Every rank makes one `LiveExporter` and the same calls. `tensors()` plans (from names, shapes and sharding attributes;
one exchange over the pipeline), `export()` gathers shards in buckets, hands full Megatron tensors to the rules and
yields what these make of them. Which stage exports a tensor that several hold (the embedding that tied heads and MTP
layers keep on the last stage too) is decided once: the first stage does.

Experts are gathered over a group of their own, from all its ranks at once: the n-th expert of each share in one
message, so the experts of a layer come share by share (0, 4, 1, 5, ... of eight over two shares).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from converters.errors import ConverterError, LiveModelError, MappingError
from converters.live.gather import BucketGather, GatherBucket, Piece, Scratch, assemble, plan_buckets
from converters.live.groups import ParallelGroups
from converters.live.model import LiveTensor, collect, expert_layer, is_expert, shifted, sync_params
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
class _Held:
    """Where a full Megatron tensor of this stage comes from: the rows of `piece` from `first` on, or this rank alone.

    `local` is the name under which this rank holds its part of the message; of experts each share has its own.
    """

    piece: Piece
    local: str
    message: Piece
    first: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One mapping: Megatron tensors in, Hugging Face tensors out."""

    mapping: TensorMapping
    held: tuple[_Held, ...]
    exported: tuple[ExportedTensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """Mappings whose parts travel in the same messages."""

    jobs: tuple[_Job, ...]
    messages: tuple[Piece, ...]
    expert: bool

    @property
    def role(self) -> str:
        return self.jobs[0].mapping.role


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
        if not any(is_expert(name) for mapping in rules.mappings() for name in mapping.mcore):
            self.groups = self.groups.without_experts()
        self._chunks = list(chunks)
        self._rules = rules
        self._roles = roles
        self._gather_bytes = gather_bytes
        self._device = next(p.device for chunk in chunks for p in chunk.parameters())
        self._plan: _Plan | None = None
        self._buckets: dict[frozenset[str] | None, list[_Bucket]] = {}
        self._gathers = {
            False: BucketGather(self.groups.tp, self._device),
            True: BucketGather(self.groups.expert, self._device),
        }
        self._scratch = Scratch(self._device)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that this rank keeps for exports."""
        return sum(gather.buffer_bytes for gather in self._gathers.values()) + self._scratch.nbytes

    def tensors(self) -> tuple[ExportedTensor, ...]:
        """What `export` yields on the sender of this stage. Collective on the first call, cached afterwards.

        Raises:
            LiveModelError: the parameters cannot be exported as they are.
            MappingError: rules and model do not fit: tensors unmapped, missing, or of a wrong shape.
        """
        return tuple(t for unit in self._planned().units for job in unit.jobs for t in job.exported)

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
        if not self.groups.takes_part:
            return
        units = [u for u in plan.units if roles is None or u.role in roles]
        if roles not in self._buckets:
            self._buckets[roles] = _plan_buckets(units, self._gather_bytes)
        members = {False: self.groups.replica == 0, True: self.groups.expert_replica == 0}
        flight = _Flight({e: g for e, g in self._gathers.items() if members[e]}, self._buckets[roles], live)
        try:
            for bucket in self._buckets[roles]:
                others = (self.groups.expert_size if bucket.expert else self.groups.tp_size) - 1
                with span("gather", bucket.gather.nbytes * others):
                    rows = flight.next()
                if not self.groups.is_sender:
                    continue
                for job in (job for i in bucket.gather.units for job in units[i].jobs):
                    with span("convert", sum(h.piece.full_nbytes for h in job.held)):
                        tensors = self._convert(job, bucket.gather, rows, live)
                    yield from zip(job.exported, tensors, strict=True)
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
        """Raises on every rank whose shards meet those of one that has a problem: it would wait for them."""
        ok = torch.tensor([0 if problem else 1], dtype=torch.int64, device=self._device)
        # The smaller of the two kinds of group lies within the larger: the news crosses both.
        for group, size in sorted(
            ((self.groups.tp, self.groups.tp_size), (self.groups.expert, self.groups.expert_size)), key=lambda g: g[1]
        ):
            if size > 1:
                dist.all_reduce(ok, dist.ReduceOp.MIN, group=group)
        if problem is None and not ok.item():
            raise LiveModelError("another rank of this stage cannot export: its error says why")
        if problem is not None:
            raise problem

    def _make_plan(self, live: Mapping[str, LiveTensor]) -> _Plan:
        held = self._held(live)
        owner = self._owners(held)
        jobs: list[_Job] = []
        for mapping in self._rules.mappings():
            stages = {owner[name] for name in mapping.mcore if name in owner}
            if not self._wants(mapping) or self.groups.stage not in stages:
                continue
            if len(stages) > 1:
                raise MappingError(f"{' + '.join(mapping.mcore)} are spread over pipeline stages {sorted(stages)}")
            parts = tuple(held[name](mapping.blocks(name)) for name in mapping.mcore)
            exported = tuple(
                ExportedTensor(name=m.name, shape=m.shape, dtype=m.dtype, role=mapping.role, group=mapping.group)
                for m in mapping.hf_meta({h.piece.name: (h.piece.full_shape, h.piece.dtype) for h in parts})
            )
            jobs.append(_Job(mapping=mapping, held=parts, exported=exported))
        return _Plan(live=tuple(t.meta for t in live.values()), units=tuple(self._units(jobs)))

    def _units(self, jobs: Sequence[_Job]) -> Iterator[_Unit]:
        """Jobs one by one, but experts that travel together as one, where the first of them stands."""
        for expert, run in itertools.groupby(jobs, lambda job: self._of_experts(job.held[0].local)):
            together: dict[tuple[str, ...], list[_Job]] = {}
            for job in run:
                # Names of experts repeat from share to share, all others are their own.
                together.setdefault(tuple(dict.fromkeys(h.local for h in job.held)), []).append(job)
            for group in together.values():
                messages = {h.local: h.message for job in group for h in job.held}
                yield _Unit(jobs=tuple(group), messages=tuple(messages.values()), expert=expert)

    def _of_experts(self, name: str) -> bool:
        return self.groups.expert_size > 1 and is_expert(name)

    def _held(self, live: Mapping[str, LiveTensor]) -> dict[str, Callable[[tuple[int, ...]], _Held]]:
        """How each Megatron tensor of this stage is put together, once its rule has told what is sharded by itself."""
        out: dict[str, Callable[[tuple[int, ...]], _Held]] = {}
        local_experts = collections.Counter(expert_layer(name) for name, t in live.items() if t.expert)
        for name, tensor in live.items():
            if not tensor.expert:
                out[name] = functools.partial(self._of_one, tensor, name, name, 0, self.groups.tp_size)
                continue
            for share in range(self.groups.ep_size):
                number = shifted(name, share * local_experts[expert_layer(name)])
                out[number] = functools.partial(self._of_one, tensor, number, name, share, self.groups.etp_size)
        return out

    def _of_one(
        self, live: LiveTensor, name: str, local: str, share: int, ranks: int, blocks: tuple[int, ...]
    ) -> _Held:
        _, shape, dtype, dim = live.meta
        parts = ranks if dim is not None else 1
        piece = Piece(name=name, shape=shape, dtype=dtype, dim=dim, parts=parts, blocks=blocks)
        if not self._of_experts(local):
            return _Held(piece=piece, local=local, message=piece)
        stacked = Piece(name=local, shape=(1, *shape), dtype=dtype, dim=0, parts=self.groups.expert_size)
        return _Held(piece=piece, local=local, message=stacked, first=share * self.groups.etp_size)

    def _wants(self, mapping: TensorMapping) -> bool:
        return self._roles is None or mapping.role in self._roles

    def _owners(self, live: Collection[str]) -> dict[str, int]:
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
        self, job: _Job, bucket: GatherBucket, rows: torch.Tensor, live: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        self._scratch.reset()
        full: dict[str, torch.Tensor] = {}
        for held in job.held:
            piece = held.piece
            if not held.message.is_sharded:
                full[piece.name] = live[held.local]
            else:
                mine = rows[held.first : held.first + piece.parts]
                full[piece.name] = assemble(piece, mine, bucket.offsets[held.local], self._scratch)
        tensors = job.mapping.to_hf(full)
        return [tensors[t.name] for t in job.exported]


class _Bucket(NamedTuple):
    """A bucket, and whether the experts' group gathers it."""

    expert: bool
    gather: GatherBucket


def _plan_buckets(units: Sequence[_Unit], gather_bytes: int) -> list[_Bucket]:
    out: list[_Bucket] = []
    for expert, run in itertools.groupby(range(len(units)), lambda i: units[i].expert):
        numbers = list(run)
        for bucket in plan_buckets([units[i].messages for i in numbers], gather_bytes):
            renumbered = tuple(numbers[i] for i in bucket.units)
            out.append(_Bucket(expert, dataclasses.replace(bucket, units=renumbered)))
    return out


class _Flight:
    """The gathers of one export: one bucket ahead, and all of them in the end. Buckets of other groups pass by."""

    def __init__(
        self, gathers: Mapping[bool, BucketGather], buckets: Sequence[_Bucket], live: Mapping[str, torch.Tensor]
    ) -> None:
        self._gathers = gathers
        self._live = live
        self._left = iter(buckets)
        for gather in gathers.values():
            gather.begin()
        self._in_flight: _Bucket | None = None
        self._broken = False

    def next(self) -> torch.Tensor:
        """The bytes of the next bucket (see `BucketGather.finish`); starts the one after it."""
        self._broken = True
        if self._in_flight is None:
            self._start()
        assert self._in_flight is not None
        gather = self._gathers.get(self._in_flight.expert)
        rows = torch.empty(0) if gather is None else gather.finish()
        self._start()
        self._broken = False
        return rows

    def drain(self) -> None:
        """Finish what is left, unless a gather failed: then there is nobody to finish it with."""
        while self._in_flight is not None and not self._broken:
            self.next()

    def _start(self) -> None:
        self._in_flight = next(self._left, None)
        if self._in_flight is not None and (gather := self._gathers.get(self._in_flight.expert)) is not None:
            gather.start(self._in_flight.gather, self._live)


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
