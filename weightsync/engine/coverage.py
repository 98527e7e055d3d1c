"""Loading a publish into the runners, and the proof that exactly the routed writes happened.

The receiver builds one `Loading` per publish: `take` for every bucket, `finish` before it acknowledges. Loaders run
under a mode that compares every write to live memory with what the dry run recorded: one that no route expects is not
carried out, one that does not come is missed, and either fails the publish. Tensors larger than a bucket are copied
part by part through the recorded copies, or assembled where the loader does more than copy.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.engine.base import Runner
from weightsync.engine.dryrun import Write
from weightsync.engine.regions import Region, clip
from weightsync.engine.routing import Action, Routes, describe
from weightsync.engine.writes import REBINDING, Places, WriteKey, WriteWatch, write_key
from weightsync.errors import RoutingError
from weightsync.manifest import TARGET
from weightsync.plan import SegmentView
from weightsync.timeline import Timeline

__all__ = ["Loading"]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The same bits as integers, so that NaN equals itself."""
    return t.view(_INTEGERS[t.dtype.itemsize]) if t.dtype.itemsize in _INTEGERS else t


class _Proof(WriteWatch):
    """Lets the expected writes through, each as often as expected, and no other write to places."""

    def __init__(self, places: Places, expected: collections.Counter[WriteKey]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places, self.expected = places, expected
        self.unexpected: list[str] = []

    def writes(self, func: Any, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        for t in tensors:
            key = write_key(t)
            if self.expected[key] > 0 and func._schema.name not in REBINDING:
                self.expected[key] -= 1
            elif t.numel() and (touched := self.places.find_key(key)):
                name = self.places.blocks[touched[0]].places[0].name
                self.unexpected.append(f"{func._schema.name} on {name} (a view of size {key[1]})")
                return False
        return True


class Loading:
    """One publish on one rank, from the first bucket to the last. Call everything on the thread that owns the models.

    Args:
        routes: of this rank, built for these runners; no parameter may have moved since.
        timeline: gets the phases `load_target`, `load_draft` and `verify`.

    Every method raises `RoutingError` if a loader does not do what it did in the dry run.
    """

    def __init__(self, routes: Routes, runners: Sequence[Runner], timeline: Timeline) -> None:
        self._routes, self._runners, self._timeline = routes, runners, timeline
        self._tensors = routes.manifest.tensors
        self._seen = [0] * len(self._tensors)
        self._assembled: dict[int, torch.Tensor] = {}
        self._done: collections.Counter[tuple[int, int]] = collections.Counter()
        # Elements copied part by part, by (tensor, runner, number of the write).
        self._parts: collections.Counter[tuple[int, int, int]] = collections.Counter()

    @property
    def loaded(self) -> dict[str, int]:
        """Runner -> tensors that it has loaded or verified."""
        counts = {self._routes.runners[j]: 0 for j in self._routes.in_scope}
        for (_, j), n in self._done.items():
            counts[self._routes.runners[j]] += n
        return counts

    @property
    def num_tensors(self) -> int:
        """Tensors of which every byte has come."""
        return sum(seen >= spec.numel for seen, spec in zip(self._seen, self._tensors, strict=True))

    def take(self, views: Sequence[SegmentView]) -> None:
        """Load what one bucket holds; the views are not needed afterwards."""
        pairs: dict[int, list[tuple[Action, torch.Tensor]]] = {}
        verify: list[tuple[Action, SegmentView]] = []
        for view in views:
            self._seen[view.tensor] += view.view.numel()
            whole: torch.Tensor | None = view.view if view.whole else None
            actions = self._routes.actions.get(view.tensor, ())
            if not view.whole and any(a.mode == "load" and not a.load.plain for a in actions):
                whole = self._assemble(view)
            for a in actions:
                if a.mode == "verify":
                    verify.append((a, view))
                elif not view.whole and a.load.plain:
                    self._load_part(a, view)
                elif whole is not None:
                    pairs.setdefault(a.runner, []).append((a, whole))
        for j in sorted(pairs):
            self._load(j, pairs[j])
        for a, view in verify:
            with self._timeline.span("verify"):
                self._compare(a, view)

    def finish(self) -> None:
        """Every routed tensor was loaded, every write made as often as expected, and no parameter has moved."""
        self.check_complete()
        self.check_in_place()

    def check_complete(self) -> None:
        """Every routed tensor was loaded or verified."""
        missing = [
            f"{describe(self._tensors[a.tensor])} into {self._routes.runners[a.runner]}"
            for actions in self._routes.actions.values()
            for a in actions
            if not self._done[a.tensor, a.runner]
        ]
        if missing:
            raise RoutingError(
                f"{len(missing)} routed tensors were not loaded, the first is {missing[0]}: its bytes did not all "
                "arrive; publish again"
            )

    def check_in_place(self) -> None:
        """No parameter or buffer has other memory than when it was routed."""
        moved = self._routes.moved(self._runners)
        if moved:
            j, name = moved[0]
            raise RoutingError(
                f"runner {self._runners[j].name}: {name} (and {len(moved) - 1} more) has other memory than before the "
                "publish; loaders must copy in place, since captured graphs keep the address: fix the loader"
            )

    # -- whole tensors -----------------------------------------------------------------------------------------------

    def _load(self, j: int, pairs: Sequence[tuple[Action, torch.Tensor]]) -> None:
        """One call of the runner's loader, under proof."""
        runner = self._runners[j]
        expected = collections.Counter(w.key for a, _ in pairs for w in a.load.writes)
        proof = _Proof(self._routes.places, expected)
        start = time.perf_counter()
        try:
            with proof:
                runner.load([(a.load.name, tensor) for a, tensor in pairs])
        finally:
            nbytes = sum(t.nbytes for _, t in pairs)
            self._timeline.add(self._phase(j), start, time.perf_counter(), nbytes, tensors=len(pairs))
        if proof.unexpected:
            raise RoutingError(
                f"runner {runner.name}: its loader made {len(proof.unexpected)} writes that it did not make in the dry "
                f"run, the first {proof.unexpected[0]}, with {self._names(pairs)}; they were not carried out: fix the "
                "loader"
            )
        left = {key for key, n in expected.items() if n > 0}
        if left:
            skipped = [a for a, _ in pairs if any(w.key in left for w in a.load.writes)]
            raise RoutingError(
                f"runner {runner.name}: its loader left out {len(left)} writes that it made in the dry run, of "
                f"{describe(self._tensors[skipped[0].tensor])}: fix the loader"
            )
        for a, _ in pairs:
            self._done[a.tensor, j] += 1

    def _names(self, pairs: Sequence[tuple[Action, torch.Tensor]]) -> str:
        names = [a.load.name for a, _ in pairs]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _phase(self, j: int) -> str:
        return "load_target" if self._runners[j].roles[0] == TARGET else "load_draft"

    # -- tensors larger than a bucket ----------------------------------------------------------------------------------

    def _range(self, view: SegmentView) -> tuple[int, int]:
        """Elements of the tensor that a part holds."""
        spec = self._tensors[view.tensor]
        row = 1 if view.flat or not spec.shape else spec.numel // spec.shape[0]
        return view.row_start * row, view.row_end * row

    def _is_last(self, view: SegmentView) -> bool:
        return self._range(view)[1] == self._tensors[view.tensor].numel

    def _assemble(self, view: SegmentView) -> torch.Tensor | None:
        """Collect the parts of a tensor; returns it when it is complete."""
        spec = self._tensors[view.tensor]
        buffer = self._assembled.get(view.tensor)
        if buffer is None:
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=view.view.device)
            self._assembled[view.tensor] = buffer
        start, stop = self._range(view)
        buffer.view(-1)[start:stop].copy_(view.view.reshape(-1))
        return self._assembled.pop(view.tensor) if self._is_last(view) else None

    def _load_part(self, a: Action, view: SegmentView) -> None:
        """Make the recorded copies, as far as their sources lie in this part."""
        start, stop = self._range(view)
        begin = time.perf_counter()
        with torch.no_grad():
            if start == 0:
                for w in a.load.writes:
                    if w.kind == "fill":
                        assert w.value is not None
                        self._live(w, w.target).fill_(w.value)
            for number, w in enumerate(a.load.writes):
                for live, source, n in self._clipped(w, view, start, stop):
                    live.copy_(source)
                    self._parts[a.tensor, a.runner, number] += n
        self._timeline.add(self._phase(a.runner), begin, time.perf_counter(), view.view.nbytes, tensors=0)
        if self._is_last(view):
            self._check_parts(a)
            self._done[a.tensor, a.runner] += 1

    def _check_parts(self, a: Action) -> None:
        for number, w in enumerate(a.load.writes):
            got = self._parts[a.tensor, a.runner, number]
            if w.source is not None and got != w.source.numel:
                raise RoutingError(
                    f"runner {self._routes.runners[a.runner]}: {got} of {w.source.numel} elements of tensor "
                    f"{describe(self._tensors[a.tensor])} were copied part by part: the parts do not add up"
                )

    def _clipped(
        self, w: Write, view: SegmentView, start: int, stop: int
    ) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """(live view, source view, elements) of the copy `w` for the elements `start..stop` of the tensor."""
        if w.source is None:
            return []
        flat = view.view.reshape(-1)
        base = flat.storage_offset() - start
        return [
            (self._live(w, dst), flat.as_strided(src.size, src.stride, base + src.offset), src.numel)
            for dst, src in clip(w.target, w.source, start, stop)
        ]

    def _live(self, w: Write, region: Region) -> torch.Tensor:
        """The elements `region` of the view that `w` writes through, as a tensor."""
        address, _, _, dtype = w.key
        (b,) = self._routes.places.find_key(w.key)
        place = self._routes.places.blocks[b].holder(w.key)
        assert place is not None  # else the dry run would have called the write computed
        tensor = place.tensor.detach()
        offset = tensor.storage_offset() + (address - tensor.data_ptr()) // dtype.itemsize
        return tensor.as_strided(region.size, region.stride, offset + region.offset)

    # -- tensors for memory that another one has loaded --------------------------------------------------------------

    def _compare(self, a: Action, view: SegmentView) -> None:
        start, stop = self._range(view)
        for w in a.load.writes:
            for live, source, _ in self._clipped(w, view, start, stop):
                if not torch.equal(_bits(live), _bits(source.to(live.dtype))):
                    raise RoutingError(
                        f"tensor {describe(self._tensors[a.tensor])}: in runner {self._routes.runners[a.runner]} it "
                        "has the memory of a tensor of another role, which has been loaded, and their bytes differ; "
                        "expected equal bytes: leave it out of the source, or give the draft memory of its own"
                    )
        if self._is_last(view):
            self._done[a.tensor, a.runner] += 1
