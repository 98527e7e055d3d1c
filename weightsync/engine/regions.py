"""Arithmetic on strided regions of memory: which elements a write covers, and which part of a copy a bucket holds.

Pure functions, used by `routing` (is every element of a parameter written exactly once?) and by `coverage` (which part
of a recorded copy can be made from the rows that have arrived?). Offsets, sizes and strides count elements; strides are
not negative, as torch's never are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

__all__ = ["Region", "Tally", "clip", "overlap", "tally"]


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The elements `offset + sum(i[d] * stride[d])` for all `0 <= i[d] < size[d]`."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, offset: int, size: Sequence[int], stride: Sequence[int]) -> Region:
        """The same elements without dimensions of size 1."""
        kept = [(n, s) for n, s in zip(size, stride, strict=True) if n != 1]
        return cls(offset, tuple(n for n, _ in kept), tuple(s for _, s in kept))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def start(self) -> int:
        return self.offset

    @property
    def stop(self) -> int:
        """One past the last element; `start` if empty."""
        if self.numel == 0:
            return self.offset
        return self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) + 1

    @property
    def is_interval(self) -> bool:
        """True if the elements are exactly `start..stop`, in whatever order."""
        return self.stop - self.start == self.numel

    @property
    def repeats(self) -> bool:
        """True if several indices name the same element for sure (stride 0)."""
        return any(n > 1 and s == 0 for n, s in zip(self.size, self.stride, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """`missing` needed elements were not written, `doubled` were written again; the first of each, or None."""

    missing: int
    doubled: int
    first_missing: int | None
    first_doubled: int | None


def _merge(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _gaps(needed: list[tuple[int, int]], have: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`needed` minus `have`; both merged and sorted."""
    gaps: list[tuple[int, int]] = []
    k = 0
    for begin, stop in needed:
        start = begin
        while k < len(have) and have[k][1] <= start:
            k += 1
        i = k
        while i < len(have) and have[i][0] < stop:
            if have[i][0] > start:
                gaps.append((start, have[i][0]))
            start = max(start, have[i][1])
            i += 1
        if start < stop:
            gaps.append((start, stop))
    return gaps


def tally(needed: Sequence[Region], copies: Sequence[Region], fills: Sequence[Region] = ()) -> Tally:
    """Compare what must be written with what was.

    Copies count once each; a fill (a constant put into padding) only makes up for elements that no copy wrote.
    Intervals are compared as such; anything else is counted element by element in a mask of one byte each.
    """
    if all(r.is_interval for r in (*needed, *copies, *fills)):
        doubled, first_doubled, end = 0, None, None
        for start, stop in sorted((r.start, r.stop) for r in copies if r.numel):
            if end is not None and start < end:
                doubled += min(stop, end) - start
                first_doubled = start if first_doubled is None else first_doubled
            end = stop if end is None else max(end, stop)
        have = _merge((r.start, r.stop) for r in (*copies, *fills))
        gaps = _gaps(_merge((r.start, r.stop) for r in needed), have)
        return Tally(sum(b - a for a, b in gaps), doubled, gaps[0][0] if gaps else None, first_doubled)
    everything = [r for r in (*needed, *copies, *fills) if r.numel]
    low, high = min(r.start for r in everything), max(r.stop for r in everything)
    mask = torch.zeros(high - low, dtype=torch.uint8)

    def view(r: Region) -> torch.Tensor:
        return mask.as_strided(r.size, r.stride, r.offset - low)

    def place(r: Region, hits: torch.Tensor) -> int:
        """Position, as an offset of the region's space, of the first true element of `hits`."""
        at = int(hits.flatten().to(torch.uint8).argmax())
        index: list[int] = []
        for n in reversed(r.size):
            at, i = divmod(at, n)
            index.append(i)
        return r.offset + sum(i * s for i, s in zip(reversed(index), r.stride, strict=True))

    doubled, first_doubled = 0, None
    for r in copies:
        hits = view(r) != 0
        if again := int(hits.sum()):
            doubled += again
            first_doubled = place(r, hits) if first_doubled is None else first_doubled
        view(r).fill_(1)
    for r in fills:
        view(r).fill_(1)
    missing, first_missing = 0, None
    for r in needed:
        hits = view(r) == 0
        if lacking := int(hits.sum()):
            missing += lacking
            first_missing = place(r, hits) if first_missing is None else first_missing
            view(r).fill_(1)  # needed regions may overlap (tied parameters): count an element once
    return Tally(missing, doubled, first_missing, first_doubled)


def overlap(a: Region, b: Region) -> bool:
    """True if some element is in both."""
    if a.numel == 0 or b.numel == 0 or a.start >= b.stop or b.start >= a.stop:
        return False
    if a.is_interval and b.is_interval:
        return True
    return tally((), (a, b)).doubled > 0


def clip(dst: Region, src: Region, start: int, stop: int) -> list[tuple[Region, Region]]:
    """The parts of the copy `dst[i] = src[i]` whose source elements lie in `start..stop`, as few pairs as needed.

    `dst` and `src` have the same size. Cutting goes along the source's largest stride first, so a cut at rows of a
    sliced matrix gives one pair.
    """
    low, high = src.start, src.stop
    if src.numel == 0 or high <= start or low >= stop:
        return []
    if low >= start and high <= stop:
        return [(dst, src)]
    d = max((d for d in range(len(src.size)) if src.size[d] > 1), key=lambda d: src.stride[d])
    n, s = src.size[d], src.stride[d]
    inner = high - low - (n - 1) * s
    # Slice i of dimension d spans low + i*s .. low + i*s + inner: find those inside, then those cut through.
    first, last = max(0, -((low - start) // s)), min(n, (stop - inner - low) // s + 1)
    touch_first, touch_last = max(0, (start - low - inner) // s + 1), min(n, -((low - stop) // s))
    out: list[tuple[Region, Region]] = []

    def part(i: int, count: int) -> tuple[Region, Region]:
        def cut(r: Region) -> Region:
            size = (*r.size[:d], count, *r.size[d + 1 :])
            return Region(r.offset + i * r.stride[d], size, r.stride)

        return cut(dst), cut(src)

    i = touch_first
    while i < touch_last:
        if first <= i < last:
            out.append(part(i, last - first))
            i = last
        else:
            out.extend(clip(*part(i, 1), start, stop))
            i += 1
    return out
