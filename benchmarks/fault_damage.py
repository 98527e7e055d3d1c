"""What happens to disks and files in a row of the fault matrix; see `benchmarks/fault_runner.py`, which calls it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["DISK", "damage", "small_disk"]

SMALL_DISK_BYTES = 16 << 20  # two checkpoints and a half


def own_mounts():
    """A user and a mount namespace for this process and its children: it may mount, and nobody else sees it."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER | CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "this kernel does not let an ordinary user make a mount namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def mount(*words):
    subprocess.run(["mount", *words], check=True, capture_output=True, text=True)


def small_disk(folder):
    """Puts a tmpfs at folder/disk; how it is done, in words."""
    try:
        own_mounts()
        mount("-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "none", str(folder / "disk"))
    except (OSError, subprocess.CalledProcessError) as e:
        return f"no mount namespace ({e})"
    return f"tmpfs of {SMALL_DISK_BYTES >> 20} MiB in a mount namespace"


def fill(folder, broken):
    """A stranger's file leaves room for half a checkpoint."""
    balloon, stats = folder / "disk/balloon", os.statvfs(folder / "disk")
    if broken:
        balloon.write_bytes(bytes(stats.f_bavail * stats.f_frsize - (3 << 20)))
    else:
        balloon.unlink()


def read_only(folder, broken):
    mount("-o", "remount,ro" if broken else "remount,rw", str(folder / "disk"))


DISK = {"fill": fill, "read_only": read_only}


def change(path, fn):
    data = bytearray(path.read_bytes())
    path.write_bytes(fn(data))


def flipped(data):
    data[len(data) // 2] ^= 16
    return data


def damage(kind, where):
    """`where` are the folders of step 2 by rank."""
    first = where[0]
    data = sorted(first.glob("__*_0.distcp"))[-1]
    half = data.stat().st_size // 2
    {
        "zero_tail": lambda: change(data, lambda d: d[:half] + bytes(len(d) - half)),
        "flip_data": lambda: change(data, flipped),
        "flip_metadata": lambda: change(first / ".metadata", flipped),
        "flip_common": lambda: change(first / "common.pt", flipped),
        "flip_commit": lambda: change(first / "commit.json", flipped),
        "truncate_data": lambda: os.truncate(data, half),
        "truncate_commit": lambda: os.truncate(first / "commit.json", 100),
        "remove_data": data.unlink,
        "remove_commit": (first / "commit.json").unlink,
        "garbage_tracker": lambda: (first.parent / "latest_checkpointed_iteration.txt").write_bytes(b"\0\xff"),
        "remove_node": lambda: shutil.rmtree(where[1].parent),
        "remove_node_step": lambda: shutil.rmtree(where[1]),
    }[kind]()
