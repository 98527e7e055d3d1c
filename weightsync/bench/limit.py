"""The limit: what the same bytes cost on the same machine with nothing but the unavoidable.

Over a broadcast backend: the fastest of several chunk sizes of one flat broadcast into warm, reused memory, plus one
memcpy of the bytes that each engine rank's runners load, in all receivers at once as they would. Over shared memory:
one copy in and one copy out per engine rank, warm, one thread each. Nothing overlaps in either sum, so a publish that
overlaps can come out below 1.

`lanes` runs `VARIANTS` on every lane; `compare` gathers their seconds and asks `combine` for the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from weightsync.bench.lanes import Lane
from weightsync.bench.stats import Quantiles, quantiles

__all__ = ["VARIANTS", "Limit", "combine", "names"]

MIB = 1 << 20


def _chunks(chunk_bytes: int | None, *, overlap: bool) -> Callable[[Lane], None]:
    def run(lane: Lane) -> None:
        chunks = lane.flat.split(chunk_bytes) if chunk_bytes else (lane.flat,)
        if overlap:
            for work in [lane.broadcast(c) for c in chunks]:
                work.wait()
        else:
            for c in chunks:
                lane.broadcast(c).wait()

    return run


_BROADCASTS: dict[str, tuple[int, Callable[[Lane], None]]] = {
    "broadcast_whole": (0, _chunks(None, overlap=False)),
    "broadcast_256mib": (256 * MIB, _chunks(256 * MIB, overlap=False)),
    "broadcast_64mib": (64 * MIB, _chunks(64 * MIB, overlap=False)),
    "broadcast_16mib": (16 * MIB, _chunks(16 * MIB, overlap=False)),
    "broadcast_64mib_async": (64 * MIB, _chunks(64 * MIB, overlap=True)),
    "broadcast_16mib_async": (16 * MIB, _chunks(16 * MIB, overlap=True)),
}
"""Name -> (chunk bytes, 0 for whole; variant)."""


def _memcpy(lane: Lane) -> None:
    if not lane.is_sender:
        lane.copy_loaded_bytes(lane.flat)


def _copy_in(lane: Lane) -> None:
    if lane.is_sender:
        assert lane.mapping is not None
        lane.mapping.copy_(lane.flat)


def _copy_out(lane: Lane) -> None:
    if not lane.is_sender:
        assert lane.mapping is not None
        lane.copy_loaded_bytes(lane.mapping)


VARIANTS: dict[str, Callable[[Lane], None]] = {
    **{name: variant for name, (_, variant) in _BROADCASTS.items()},
    "memcpy": _memcpy,
    "shared_copy_in": _copy_in,
    "shared_copy_out": _copy_out,
}


def names(*, shared: bool, nbytes: int) -> list[str]:
    """The variants to run for a payload of `nbytes`; chunk sizes that would not split it are left out."""
    if shared:
        return ["shared_copy_in", "shared_copy_out"]
    return [n for n, (chunk, _) in _BROADCASTS.items() if chunk < nbytes] + ["memcpy"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """`parts` are the names of the variants that make up the sum; `seconds` one sum per round."""

    parts: tuple[str, ...]
    seconds: tuple[float, ...]

    @property
    def quantiles(self) -> Quantiles:
        return quantiles(self.seconds)


def combine(seconds: Mapping[str, Sequence[float]]) -> Limit:
    """Sum the fastest broadcast (by median over the rounds) and the copy, or copy in and copy out, round by round.

    Args:
        seconds: variant name -> seconds per round, all of the same length.
    """
    if "shared_copy_in" in seconds:
        parts: tuple[str, ...] = ("shared_copy_in", "shared_copy_out")
    else:
        broadcasts = [n for n in seconds if n in _BROADCASTS]
        parts = (min(broadcasts, key=lambda n: quantiles(seconds[n]).median), "memcpy")
    rounds = zip(*(seconds[p] for p in parts), strict=True)
    return Limit(parts=parts, seconds=tuple(sum(r) for r in rounds))
