"""What a save needs, against what there is: before training, not at step 100.

In a container `df` shows the host's disk and `free` the host's memory; what ends the job is a quota. So every limit
that can be read is read and the smallest counts: the filesystem, an explicit `disk_limit_bytes`, the cgroup's memory.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

__all__ = ["Need", "disk_left_bytes", "folder_bytes", "memory_left_bytes"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What preflight found for one node. `disk_peak_bytes` is what its root will hold at most."""

    node_bytes: int
    disk_peak_bytes: int
    disk_held_bytes: int
    disk_left_bytes: int
    staging_bytes: int
    memory_left_bytes: int | None


def folder_bytes(path: str | Path) -> int:
    """Bytes of all files below a folder, as they are now."""
    total = 0
    for base, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(Path(base) / name).st_size
            except FileNotFoundError:
                continue  # pruned meanwhile
    return total


def disk_left_bytes(root: str | Path, limit_bytes: int | None = None, held_bytes: int = 0) -> int:
    """What an unprivileged process can still write there; `limit_bytes` bounds what the root may hold in all."""
    stats = os.statvfs(root)
    free = stats.f_bavail * stats.f_frsize
    return free if limit_bytes is None else min(free, max(limit_bytes - held_bytes, 0))


def memory_left_bytes(cgroup: str | Path = "/sys/fs/cgroup", meminfo: str | Path = "/proc/meminfo") -> int | None:
    """Memory that can still be had: the smallest of what the machine and the control groups leave; None if unknown."""
    left = []
    for limit, used in (("memory.max", "memory.current"), ("memory.high", "memory.current")):
        left += _difference(Path(cgroup) / limit, Path(cgroup) / used)
    v1 = Path(cgroup) / "memory"
    left += _difference(v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes")
    try:
        for line in Path(meminfo).read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) << 10)
    except OSError:
        pass  # not Linux: the control groups are not there either
    return min(left) if left else None


def _difference(limit: Path, used: Path) -> list[int]:
    try:
        text = limit.read_text().strip()
        return [] if text == "max" else [max(int(text) - int(used.read_text()), 0)]
    except (OSError, ValueError):
        return []
