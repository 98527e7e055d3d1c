"""What a process holds, seen from outside: memory, threads, descriptors, mappings, from Linux' /proc.

The bench reads peak memory by it and `benchmarks/soak.py` growth: measured this way neither depends on what the process
says of itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Holdings", "holdings", "look", "reset_peak"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """`rss_bytes` includes `shared_bytes` (memfd and other shared-memory pages); `peak_bytes` is its peak."""

    rss_bytes: int
    peak_bytes: int
    anonymous_bytes: int
    shared_bytes: int
    threads: int
    descriptors: int
    mappings: int


def holdings(pid: int) -> Holdings:
    """Raises `OSError` if the process is gone."""
    proc = Path("/proc") / str(pid)
    fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
    kib = {name: int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM", "RssAnon", "RssShmem")}
    return Holdings(
        rss_bytes=kib["VmRSS"] * 1024,
        peak_bytes=kib["VmHWM"] * 1024,
        anonymous_bytes=kib["RssAnon"] * 1024,
        shared_bytes=kib["RssShmem"] * 1024,
        threads=int(fields["Threads"]),
        descriptors=len(os.listdir(proc / "fd")),
        mappings=(proc / "maps").read_text().count("\n"),
    )


def reset_peak(pid: int) -> None:
    """Make `peak_bytes` start again from the present. Raises `OSError` where the kernel does not allow it."""
    (Path("/proc") / str(pid) / "clear_refs").write_text("5")


def look(pids: Mapping[str, int], *, reset: bool = False) -> dict[str, Holdings]:
    """Name -> holdings of each process; with `reset` of those whose peak could be set back just before."""
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(PermissionError):
            if reset:
                reset_peak(pid)
            found[name] = holdings(pid)
    return found
