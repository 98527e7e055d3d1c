"""What a save needs, against what there is: before training, not at step 100.

In a container `df` shows the host's disk and `free` the host's memory; what ends the job is a quota. So every limit
that can be read is read and the smallest counts: the filesystem, an explicit `disk_limit_bytes`, the memory of the
machine and of every control group above this process. Quotas of users and projects that the filesystem does not tell
are found by reserving the space for a moment, where that costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint.errors import ConfigError, DiskError
from checkpoint.layout import committed_steps
from checkpoint.retention import Retention

__all__ = [
    "Filesystem",
    "Need",
    "check_need",
    "disk_left_bytes",
    "filesystem_of",
    "folder_bytes",
    "memory_left_bytes",
    "shm_left_bytes",
]

_CAUTIONS = {
    ("tmpfs", "ramfs"): "lies in memory: gone with the machine, and charged to the container's memory",
    ("overlay", "aufs"): "is the container's own layer: gone with it, and charged to its ephemeral storage",
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"): "is a network filesystem: all "
    "nodes share its bandwidth, and its cache may show others a rename late",
}
_RESERVABLE = ("ext4", "xfs", "btrfs")
"""Where reserving is one call of the kernel, whatever the size; elsewhere libc may write every block."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """Where a folder lies. `caution`: what that means for checkpoints, in words; empty for an ordinary disk."""

    kind: str
    mount: str
    caution: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What preflight found for one node. `disk_peak_bytes` is what its root will hold at most."""

    node_bytes: int
    disk_peak_bytes: int
    disk_held_bytes: int
    disk_left_bytes: int
    staging_bytes: int
    memory_left_bytes: int | None
    filesystem: Filesystem


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as e:
        raise ConfigError("reading memory and disks needs `psutil`: pip install 'weightsync[checkpoint]'") from e
    return psutil


def check_need(
    root: str | Path,
    retention: Retention,
    *,
    node_bytes: int,
    staging_bytes: int,
    disk_limit_bytes: int | None = None,
    drains: bool = False,
    reserve: bool = False,
) -> Need:
    """What saves of `node_bytes` need on this node, which is there.

    Without `keep_last` there is no end to what a root holds: then room for two more checkpoints is asked for.

    Args:
        staging_bytes: still to be allocated; 0: staging memory is there.
        drains: a checkpoint that is being copied stays beyond its time.
        reserve: also prove that the kernel gives the space.

    Raises:
        DiskError: it does not fit; says what is needed, held and left.
    """
    held, host = folder_bytes(root), socket.gethostname()
    peak = retention.disk_peak_bytes(node_bytes, committed_steps(root), drains=drains) or held + 2 * node_bytes
    need = Need(
        node_bytes=node_bytes,
        disk_peak_bytes=peak,
        disk_held_bytes=held,
        disk_left_bytes=disk_left_bytes(root, disk_limit_bytes, held),
        staging_bytes=staging_bytes,
        memory_left_bytes=memory_left_bytes(),
        filesystem=filesystem_of(root),
    )
    if peak - held > need.disk_left_bytes:
        raise DiskError(
            f"{root} on {host} ({need.filesystem.kind}) will hold up to {peak} bytes ({node_bytes} per checkpoint, "
            f"{retention}), holds {held}, and only {need.disk_left_bytes} more can be written: lower keep_last, or "
            "free space"
        )
    if reserve and peak > held and need.filesystem.kind in _RESERVABLE:
        _reserve(Path(root), peak - held)
    if need.memory_left_bytes is not None and staging_bytes > need.memory_left_bytes:
        raise DiskError(
            f"staging takes {staging_bytes} bytes of shared memory on {host}, {need.memory_left_bytes} are left: set "
            "staging_bytes to stream the state in parts"
        )
    return need


def _reserve(root: Path, nbytes: int) -> None:
    path = root / f".probe-{secrets.token_hex(4)}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskError(
                f"{root} has no room for {nbytes} more bytes, although its filesystem tells of room: {e.strerror}. Is "
                "there a quota of the user or the project?"
            ) from e
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


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
    free = shutil.disk_usage(root).free
    return free if limit_bytes is None else min(free, max(limit_bytes - held_bytes, 0))


def filesystem_of(path: str | Path) -> Filesystem:
    """Which filesystem a folder lies on; its kind is "?" where the platform does not tell."""
    real = Path(os.path.realpath(path))
    best = ("?", "/")
    for part in _psutil().disk_partitions(all=True):
        # Of several mounts at one place the last one is seen.
        if real.is_relative_to(part.mountpoint) and len(part.mountpoint) >= len(best[1]):
            best = (part.fstype or "?", part.mountpoint)
    kind = best[0].removeprefix("fuse.")
    caution = next((text for kinds, text in _CAUTIONS.items() if kind in kinds), "")
    return Filesystem(kind=kind, mount=best[1], caution=caution)


def shm_left_bytes(path: str | Path = "/dev/shm") -> int | None:  # noqa: S108
    """What can still be put into POSIX shared memory (data loaders and NCCL do); None where there is none."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def memory_left_bytes(
    cgroups: str | Path = "/sys/fs/cgroup", membership: str | Path = "/proc/self/cgroup"
) -> int | None:
    """Memory that can still be had: the smallest of what the machine and the control groups of this process leave."""
    left = [int(_psutil().virtual_memory().available)]
    for folder in _groups(Path(cgroups), Path(membership)):
        for limit, used, reclaimable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):  # "max", or another version of control groups
                bound = int((folder / limit).read_text())
                # Pages of files that nobody uses go first: a job that writes checkpoints fills its group with them.
                taken = int((folder / used).read_text()) - _stat(folder / "memory.stat", reclaimable)
                left.append(max(bound - taken, 0))
    return min(left)


def _groups(root: Path, membership: Path) -> Sequence[Path]:
    """Folders of this process's memory groups, from its own up to the root."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    found = [root, root / "memory"]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "" or "memory" in controllers.split(","):
            base = root if controllers == "" else root / "memory"
            inner = path.strip("/")
            while inner:
                found.append(base / inner)
                inner = inner.rpartition("/")[0]
    return found


def _stat(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(name + " "):
                return int(line.split()[1])
    return 0
