"""Where the time of a publish goes: named spans, summed by phase, kept one by one only when a trace is wanted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["PHASES", "Timeline"]

PHASES = ("gather", "convert", "pack", "wire", "load_target", "load_draft", "verify", "commit")
"""What a user waits for, in the order of the bench's table."""


class Timeline:
    """Seconds and bytes by phase of one process; not thread-safe (one per thread, `merge` afterwards).

    Times are of `time.time()` based clocks so that the spans of processes of one host line up in a trace.
    """

    def __init__(self, *, trace: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}
        self.events: list[dict[str, Any]] | None = [] if trace else None
        self._epoch = time.time() - time.perf_counter()

    @contextlib.contextmanager
    def span(self, phase: str, nbytes: int = 0, **args: Any) -> Iterator[None]:
        """Time the block as `phase`; `args` go into the trace event."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, start, time.perf_counter(), nbytes, **args)

    def add(self, phase: str, start: float, end: float, nbytes: int = 0, **args: Any) -> None:
        """Record a span measured with `time.perf_counter()`."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + end - start
        self.nbytes[phase] = self.nbytes.get(phase, 0) + nbytes
        if self.events is not None:
            self.events.append({"name": phase, "start_s": self._epoch + start, "dur_s": end - start, "args": args})

    def to_json(self) -> dict[str, Any]:
        """`{"seconds": {phase: s}, "nbytes": {phase: n}, "events": [...] | None}`."""
        return {"seconds": dict(self.seconds), "nbytes": dict(self.nbytes), "events": self.events}
