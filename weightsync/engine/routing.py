"""Which runner loads which published tensor: declared roles joined with what the live loaders really do.

`build_routes` runs on every engine rank in preflight, once per manifest. It asks each runner's loader, by a dry run,
what it would do with each tensor whose role the runner lists, and derives from addresses alone what is loaded where:

- a tensor that one runner takes goes there; one that two runners hold in memory of their own goes to both;
- memory shared between runners is loaded once, by the first runner in order (`alias` for the others);
- in one runner, tensors of its own role win over others that would be written to the same memory;
- tensors of different roles for one shared memory: the first is loaded, later ones must hold the same bytes (`verify`).

It then proves, element by element, that every parameter in scope is written exactly once. `check_union` is the
publisher's half: over all ranks of an engine, every tensor is taken, and read as a whole.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from weightsync.engine.base import Runner
from weightsync.engine.dryrun import DryLoad, Write, dry_run
from weightsync.engine.regions import Region, overlap, tally
from weightsync.engine.writes import Block, Place, Places
from weightsync.errors import RoutingError
from weightsync.manifest import TARGET, Manifest, TensorSpec, dtype_name

__all__ = ["Action", "Partial", "Route", "Routes", "build_routes", "check_union"]

MAX_PROBLEMS = 8

Partial = tuple[int, int, int]
"""(tensor, first, stop): elements of a published tensor that a rank reads, if it doesn't read all of them."""


@dataclasses.dataclass(slots=True)
class Action:
    """What one runner does with one tensor."""

    tensor: int
    runner: int
    load: DryLoad
    mode: Literal["load", "alias", "verify"] = "load"


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Where one tensor goes on this rank, by runner names."""

    loads: tuple[str, ...]
    aliases: tuple[str, ...]
    verifies: tuple[str, ...]

    @property
    def kind(self) -> str:
        """`target`, `draft[i]`, `both`, `alias`, `verify`, or `none` (not of this rank)."""
        if self.verifies:
            return "verify"
        if len(self.loads) > 1:
            return "both"
        if self.aliases:
            return "alias"
        return self.loads[0] if self.loads else "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routes:
    """The routing table of one rank for one manifest and scope, good as long as no parameter moves."""

    manifest: Manifest
    scope: str
    runners: tuple[str, ...]
    in_scope: tuple[int, ...]
    """Numbers of the runners that this publish covers."""
    places: Places
    actions: Mapping[int, tuple[Action, ...]]
    """Tensor -> `load` and `verify` actions, in runner order."""
    table: tuple[Route, ...]
    refusals: Mapping[int, str]
    """Tensors that nobody on this rank takes -> what the loaders said to them."""
    partial: Mapping[str, tuple[Partial, ...]]
    """Runner -> tensors that this rank loads only a part of (its shard)."""
    assembly_bytes: int
    """Extra memory for tensors larger than a bucket that a loader needs whole."""

    def moved(self, runners: Sequence[Runner]) -> list[tuple[int, str]]:
        """(runner number, name) of what has other memory than when the table was built: it is no longer good."""
        return self.places.moved(runners)

    def taken(self) -> dict[str, tuple[int, ...]]:
        """Runner -> the tensors that are loaded into it, or verified against it."""
        taken: dict[str, list[int]] = {self.runners[j]: [] for j in self.in_scope}
        for i, actions in sorted(self.actions.items()):
            for a in actions:
                taken[self.runners[a.runner]].append(i)
        return {name: tuple(tensors) for name, tensors in taken.items()}


def describe(spec: TensorSpec) -> str:
    return f"{spec.name!r} (role {spec.role}, shape {tuple(spec.shape)}, {dtype_name(spec.dtype)})"


def runners_in_scope(runners: Sequence[Runner], scope: str) -> tuple[int, ...]:
    """Numbers of the runners that a scope covers, by their own roles."""
    return tuple(j for j, r in enumerate(runners) if scope == "both" or (r.roles[0] == TARGET) == (scope == "target"))


def build_routes(
    manifest: Manifest, runners: Sequence[Runner], *, scope: str = "both", device: torch.device | str = "cpu"
) -> Routes:
    """Route every tensor of `manifest` on this rank. Changes nothing.

    Raises:
        RoutingError: naming tensors, runners, what was got and expected.
    """
    return _Builder(manifest, runners, scope, torch.device(device)).build()


class _Builder:
    def __init__(self, manifest: Manifest, runners: Sequence[Runner], scope: str, device: torch.device) -> None:
        self.manifest, self.runners, self.scope, self.device = manifest, runners, scope, device
        self.problems: list[str] = []
        self.in_scope = runners_in_scope(runners, scope)
        self.places = Places(runners)
        self.blocks = self.places.blocks
        # (tensor, runner, error) of loads that raised
        self.said: list[tuple[int, int, str]] = []

    def build(self) -> Routes:
        names = [r.name for r in self.runners]
        if len(set(names)) != len(names):
            raise RoutingError(f"runner names are not unique: {names}: give each runner of a rank its own")
        actions = self._dry_runs()
        self._resolve_collisions(actions)
        self._find_aliases(actions)
        self._find_verifies(actions)
        routed = [a for a in actions if a.mode != "alias"]
        for a in routed:
            self._check_action(a)
        self._check_coverage([a for a in routed if a.mode == "load"])
        if self.problems:
            more = len(self.problems) - MAX_PROBLEMS
            text = "; ".join(self.problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            raise RoutingError(text)
        by_tensor: dict[int, list[Action]] = {}
        for a in routed:
            by_tensor.setdefault(a.tensor, []).append(a)
        return Routes(
            manifest=self.manifest,
            scope=self.scope,
            runners=tuple(names),
            in_scope=self.in_scope,
            places=self.places,
            actions={i: tuple(a) for i, a in by_tensor.items()},
            table=self._table(actions),
            refusals=self._refusals(by_tensor),
            partial=self._partial(routed),
            assembly_bytes=self._assembly_bytes(by_tensor),
        )

    # -- what the loaders do -----------------------------------------------------------------------------------------

    def _dry_runs(self) -> list[Action]:
        """One action per (tensor, runner in scope that takes it), by tensor, then runner."""
        actions: list[Action] = []
        for j in self.in_scope:
            runner = self.runners[j]
            wanted: list[int] = []
            specs: list[tuple[TensorSpec, str]] = []
            for i, spec in enumerate(self.manifest.tensors):
                if spec.role in runner.roles and spec.numel:
                    name = runner.rename(spec.role, spec.name)
                    if name is not None:
                        wanted.append(i)
                        specs.append((spec, name))
            bound = {p.name for p in self.places.places if p.runner == j and p.kind != "attribute"}
            for i, load in zip(wanted, dry_run(runner, specs, self.places, self.device), strict=True):
                replaced = [n for n in load.rebinds if n.removesuffix(".data") in bound]
                if replaced:
                    load.error = load.error or f"replaces {replaced[0]} instead of copying into it"
                if load.error is not None:
                    self.said.append((i, j, load.error))
                elif load.taken:
                    actions.append(Action(i, j, load))
        return sorted(actions, key=lambda a: (a.tensor, a.runner))

    def _regions(self, a: Action) -> Iterator[tuple[int, Region, Write]]:
        """(block number, elements of the block, write) of every write."""
        for w in a.load.writes:
            (b,) = self.places.find_key(w.key)
            yield b, self.blocks[b].region(w.key), w

    # -- who loads ---------------------------------------------------------------------------------------------------

    def _resolve_collisions(self, actions: list[Action]) -> None:
        """In memory of one runner alone, tensors of its own role win over those of its other roles."""
        for j in self.in_scope:
            role = self.runners[j].roles[0]
            own: dict[int, list[Region]] = {}
            for a in actions:
                if a.runner == j and self.manifest.tensors[a.tensor].role == role:
                    for b, region, _ in self._regions(a):
                        own.setdefault(b, []).append(region)
            lost = set()
            for a in actions:
                if a.runner != j or self.manifest.tensors[a.tensor].role == role:
                    continue
                regions = list(self._regions(a))
                private = all({p.runner for p in self.blocks[b].places} == {j} for b, _, _ in regions)
                if regions and private and all(any(overlap(r, o) for o in own.get(b, ())) for b, r, _ in regions):
                    lost.add(id(a))
            actions[:] = [a for a in actions if id(a) not in lost]

    def _find_aliases(self, actions: list[Action]) -> None:
        """Of runners that would write one tensor to the same memory, the first one loads it."""
        by_tensor: dict[int, list[Action]] = {}
        for a in actions:
            by_tensor.setdefault(a.tensor, []).append(a)
        for i, group in by_tensor.items():
            done: dict[int, list[tuple[Region, Write]]] = {}
            for a in group:
                regions = list(self._regions(a))
                shared = [(b, r, w) for b, r, w in regions if any(overlap(r, o) for o, _ in done.get(b, ()))]
                if not shared:
                    for b, r, w in regions:
                        done.setdefault(b, []).append((r, w))
                    continue
                same = all(any((o, x.source) == (r, w.source) for o, x in done[b]) for b, r, w in shared)
                if len(shared) == len(regions) and same and not a.load.rebinds and not a.load.elsewhere:
                    a.mode = "alias"
                else:
                    self.problems.append(
                        f"tensor {describe(self.manifest.tensors[i])}: runners {self._name(group[0])} and "
                        f"{self._name(a)} share some of the memory they load it into, but not all or not alike; "
                        "expected the same copies or separate memory: share the whole parameter, or none of it"
                    )

    def _find_verifies(self, actions: list[Action]) -> None:
        """Later tensors of another role for memory that is loaded already: compared, not loaded."""
        done: dict[int, list[tuple[Region, Action]]] = {}
        for a in actions:
            if a.mode == "alias":
                continue
            role = self.manifest.tensors[a.tensor].role
            regions = list(self._regions(a))
            earlier = [[x for o, x in done.get(b, ()) if x.tensor != a.tensor and overlap(r, o)] for b, r, _ in regions]
            foreign = [x for found in earlier for x in found if self.manifest.tensors[x.tensor].role != role]
            if foreign:
                covered = all(
                    tally((r,), [o for o, x in done.get(b, ()) if x.tensor != a.tensor]).missing == 0
                    for b, r, _ in regions
                )
                # Constants (rows that pad a vocabulary) need no comparison: what was loaded first has set them.
                if covered and a.load.plain and any(w.source is not None for w in a.load.writes):
                    a.mode = "verify"
                    continue
                self.problems.append(
                    f"tensors {describe(self.manifest.tensors[foreign[0].tensor])} and "
                    f"{describe(self.manifest.tensors[a.tensor])} write the same memory of runner {self._name(a)} and "
                    "cannot be compared; expected one of them: leave one out, or give the draft memory of its own"
                )
            for b, r, _ in regions:
                done.setdefault(b, []).append((r, a))

    # -- checks ------------------------------------------------------------------------------------------------------

    def _touched(self, block: Block, region: Region) -> list[Place]:
        return [p for p in block.places if overlap(block.region(p.key), region)]

    def _frozen(self, p: Place) -> bool:
        return any(fnmatch.fnmatchcase(p.name, pattern) for pattern in self.runners[p.runner].frozen)

    def _check_action(self, a: Action) -> None:
        spec, runner = self.manifest.tensors[a.tensor], self.runners[a.runner]
        for b, region, write in self._regions(a):
            touched = self._touched(self.blocks[b], region)
            own = [p for p in touched if p.runner == a.runner]
            where = f"tensor {describe(spec)}: runner {runner.name} would write"
            if not own:
                other = f"{self.runners[touched[0].runner].name}'s {touched[0].name}" if touched else "unnamed memory"
                self.problems.append(f"{where} {other}, which it does not hold: fix its loader")
                continue
            name = own[0].name
            if frozen := [p.name for p in own if self._frozen(p)]:
                self.problems.append(
                    f"{where} {frozen[0]}, which is declared frozen: leave the tensor out of the source, or take the "
                    "pattern out of frozen"
                )
            owners = [p for p in touched if self.runners[p.runner].roles[0] == TARGET]
            if self.scope == "draft" and owners:
                self.problems.append(
                    f"{where} {name}, which is memory of the target ({owners[0].name}); a draft-only publish must not "
                    "change the target: publish scope 'both', or leave the tensor out"
                )
            dtype = own[0].key[3]
            if write.kind != "fill" and dtype != spec.dtype and (spec.dtype, dtype) not in runner.casts:
                self.problems.append(
                    f"{where} {name} as {dtype_name(dtype)}; the cast from {dtype_name(spec.dtype)} is not declared "
                    "for this runner: publish the parameter's dtype, or declare the cast"
                )

    def _check_coverage(self, loads: Sequence[Action]) -> None:
        """Every needed element of every block: one copy, or a fill."""
        written: dict[int, list[tuple[Region, Write, Action]]] = {}
        for a in loads:
            for b, region, write in self._regions(a):
                written.setdefault(b, []).append((region, write, a))
        for b, block in enumerate(self.blocks):
            writes = written.get(b, [])
            needed = self._needed(block, [r for r, _, _ in writes])
            if not needed and not writes:
                continue
            result = tally(
                [block.region(p.key) for p in needed],
                [r for r, w, _ in writes if w.kind != "fill"],
                [r for r, w, _ in writes if w.kind == "fill"],
            )
            if result.missing:
                assert result.first_missing is not None
                self._missing(block, needed, result.missing, result.first_missing, writes)
            if result.doubled:
                at = Region(result.first_doubled or 0, (), ())
                culprits = {a.tensor for r, w, a in writes if w.kind != "fill" and overlap(r, at)}
                names = [describe(self.manifest.tensors[i]) for i in sorted(culprits)]
                place = next((p for p in block.places if overlap(block.region(p.key), at)), block.places[0])
                self.problems.append(
                    f"runner {self.runners[place.runner].name}: {result.doubled} elements of {place.name} would be "
                    f"written more than once, by {', '.join(names)}; expected once: leave one out, or rename it"
                )

    def _needed(self, block: Block, written: Sequence[Region]) -> list[Place]:
        if self.scope == "draft" and any(self.runners[p.runner].roles[0] == TARGET for p in block.places):
            return []
        return [
            p
            for p in block.places
            if p.runner in self.in_scope
            and not self._frozen(p)
            and (
                p.kind == "parameter" or (p.kind == "buffer" and any(overlap(block.region(p.key), r) for r in written))
            )
        ]

    def _missing(
        self,
        block: Block,
        needed: Sequence[Place],
        count: int,
        first: int,
        writes: Sequence[tuple[Region, Write, Action]],
    ) -> None:
        at = Region(first, (), ())
        place = next(p for p in needed if overlap(block.region(p.key), at))
        runner = self.runners[place.runner]
        _, size, stride, dtype = place.key
        scale = dtype.itemsize // block.unit
        offset = (first - block.region(place.key).offset) // scale
        index = []
        for n, s in sorted(zip(size, stride, strict=True), key=lambda x: -x[1]):
            index.append(min(offset // s, n - 1) if s else 0)
            offset -= index[-1] * s
        given = sorted({describe(self.manifest.tensors[a.tensor]) for r, _, a in writes})
        got = f"written by {', '.join(given[:3])}" if given else "no published tensor is written to it"
        said = [(self.manifest.tensors[i], e) for i, j, e in self.said if j == place.runner]
        said.sort(key=lambda x: -difflib.SequenceMatcher(None, x[0].name, place.name).ratio())
        errors = "".join(f"; loading {describe(s)} failed: {e}" for s, e in said[:2])
        self.problems.append(
            f"runner {runner.name}: parameter {place.name} (shape {tuple(size)}, {dtype_name(dtype)}): "
            f"{count // scale} of its elements would not be written, the first at {index}; got: {got}{errors}; "
            "expected every element once: publish what is missing, correct the shape or the rename table, or declare "
            "the parameter frozen"
        )

    # -- the result --------------------------------------------------------------------------------------------------

    def _name(self, a: Action) -> str:
        return self.runners[a.runner].name

    def _table(self, actions: Sequence[Action]) -> tuple[Route, ...]:
        rows: list[dict[str, list[str]]] = [{} for _ in self.manifest.tensors]
        for a in actions:
            rows[a.tensor].setdefault(a.mode, []).append(self._name(a))
        return tuple(Route(*(tuple(row.get(mode, ())) for mode in ("load", "alias", "verify"))) for row in rows)

    def _refusals(self, taken: Mapping[int, Sequence[Action]]) -> dict[int, str]:
        refusals: dict[int, str] = {}
        for i, spec in enumerate(self.manifest.tensors):
            if i in taken or not spec.numel:
                continue
            said = [f"{self.runners[j].name} said {e}" for k, j, e in self.said if k == i]
            listing = [self.runners[j].name for j in self.in_scope if spec.role in self.runners[j].roles]
            if not listing:
                said.append(f"no runner in scope lists role {spec.role!r}")
            refusals[i] = "; ".join(said) or f"{', '.join(listing)} ignored it"
        return refusals

    def _partial(self, routed: Sequence[Action]) -> dict[str, tuple[Partial, ...]]:
        partial: dict[str, list[Partial]] = {}
        for a in routed:
            spec = self.manifest.tensors[a.tensor]
            copies = [w.source for w in a.load.writes if w.kind != "fill"]
            reads = [r for r in copies if r is not None]
            if not reads or len(reads) < len(copies):
                continue  # computed values: what they were made from is not known
            if sum(r.numel for r in reads) >= spec.numel:
                continue
            ranges = (
                [(r.start, r.stop) for r in reads]
                if all(r.is_interval for r in reads)
                else [(min(r.start for r in reads), max(r.stop for r in reads))]
            )
            partial.setdefault(self.runners[a.runner].name, []).extend((a.tensor, lo, hi) for lo, hi in ranges)
        return {name: tuple(p) for name, p in partial.items()}

    def _assembly_bytes(self, by_tensor: Mapping[int, Sequence[Action]]) -> int:
        parts = collections.Counter(s.tensor for bucket in self.manifest.buckets for s in bucket.segments)
        whole = [i for i, n in parts.items() if n > 1 and any(not a.load.plain for a in by_tensor.get(i, ()))]
        return max((self.manifest.tensors[i].nbytes for i in whole), default=0)


def check_union(
    manifest: Manifest,
    routes_by_rank: Mapping[int, Mapping[str, Sequence[int]]],
    partial_by_rank: Mapping[int, Mapping[str, Sequence[Partial]]] | None = None,
) -> list[str]:
    """What all ranks of an engine together do not take, from their acknowledgements; empty if all is well.

    Args:
        routes_by_rank: `Ack.routes` of every rank.
        partial_by_rank: `Ack.partial` of every rank; checks that the shards of a tensor add up to all of it.
    """
    problems: list[str] = []
    taken = {i for routes in routes_by_rank.values() for tensors in routes.values() for i in tensors}
    missing = [spec for i, spec in enumerate(manifest.tensors) if i not in taken and spec.numel]
    if missing:
        names = ", ".join(describe(s) for s in missing[:MAX_PROBLEMS])
        more = f" and {len(missing) - MAX_PROBLEMS} more" if len(missing) > MAX_PROBLEMS else ""
        problems.append(
            f"{len(missing)} published tensors are taken by no runner on any of {len(routes_by_rank)} ranks: "
            f"{names}{more}; expected each to be loaded somewhere: leave them out of the source, or add a runner or a "
            "rename rule"
        )
    if partial_by_rank is None:
        return problems
    whole = {
        (name, i)
        for rank, routes in routes_by_rank.items()
        for name, tensors in routes.items()
        for i in set(tensors) - {p[0] for p in partial_by_rank.get(rank, {}).get(name, ())}
    }
    shards: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for partial in partial_by_rank.values():
        for name, parts in partial.items():
            for i, low, high in parts:
                if (name, i) not in whole:
                    shards.setdefault((name, i), []).append((low, high))
    for (name, i), ranges in sorted(shards.items()):
        spec = manifest.tensors[i]
        end = 0
        for low, high in sorted(ranges):
            if low > end:
                break
            end = max(end, high)
        if end < spec.numel:
            row = max(spec.numel // spec.shape[0], 1) if spec.shape else 1
            problems.append(
                f"tensor {describe(spec)}: the ranks of runner {name} together read no further than element {end} (row "
                f"{end // row}) of {spec.numel}; expected all: its shape is not the one that the engine was built for"
            )
    return problems
