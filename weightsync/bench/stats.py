"""Median and p99 of a handful of seconds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

__all__ = ["Quantiles", "quantiles"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Seconds. `p99` is by nearest rank: with fewer than 100 samples, the largest."""

    median: float
    p99: float

    def to_json(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def quantiles(samples: Sequence[float]) -> Quantiles:
    """Raises `ValueError` if there are no samples."""
    if not samples:
        raise ValueError("quantiles of no samples")
    rank = math.ceil(0.99 * len(samples))
    return Quantiles(median=statistics.median(samples), p99=sorted(samples)[rank - 1])
