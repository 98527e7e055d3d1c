"""Chrome trace of the publishes of a bench: the spans of every process on one clock (open in Perfetto or chrome://tracing)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["chrome_trace", "write_trace"]


def chrome_trace(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Events of `PublishReport.events` (`process`, `name`, `start_s`, `dur_s`, `args`) in Chrome's format.

    One row per process and phase, since the phases of one process overlap; times in microseconds from the first span.
    """
    spans = sorted(events, key=lambda e: e["start_s"])
    origin = spans[0]["start_s"] if spans else 0.0
    rows: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    for e in spans:
        process, name = e["process"], e["name"]
        if process not in processes:
            processes[process] = len(processes) + 1
            rows.append(_label("process_name", processes[process], 0, process))
        if (process, name) not in threads:
            threads[process, name] = len(threads) + 1
            rows.append(_label("thread_name", processes[process], threads[process, name], name))
        rows.append(
            {
                "ph": "X",
                "name": name,
                "pid": processes[process],
                "tid": threads[process, name],
                "ts": round((e["start_s"] - origin) * 1e6, 3),
                "dur": round(e["dur_s"] * 1e6, 3),
                "args": dict(e["args"]),
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(path: str | Path, events: Iterable[Mapping[str, Any]]) -> None:
    Path(path).write_text(json.dumps(chrome_trace(events)))
