"""`ckpt doctor`: what a save will meet on this machine; with `--bench`, whether the storage or the process is slow.

The bench writes the same bytes to the same folder in turns: by plain threads that write and sync one file each, which
know nothing of checkpoints, and by a real save of a real `Checkpointer`. What the plain writers reach is the storage's;
what we lose against it is ours, and the save's own times say in which step. Everything written is removed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint.cli.outcome import Commands, Outcome, rate_text, size_text, table
from checkpoint.cli.places import existing_folder
from checkpoint.disk import disk_left_bytes, filesystem_of, folder_bytes, memory_left_bytes, shm_left_bytes
from checkpoint.errors import CheckpointError, ConfigError

__all__ = ["add_commands"]

SCHEMA_VERSION = 1
PACKAGES = {
    "torch": "everything",
    "xxhash": "saving and verifying",
    "psutil": "preflight, resource watch",
    "megatron-core": "Megatron state dicts",
    "fsspec": "draining",
    "s3fs": "draining to s3://",
    "tqdm": "progress bars",
    "tensorstore": "reading legacy zarr",
}
REQUIRED = ("torch", "xxhash", "psutil")
FAIR = 1.3
"""A save that takes so many times as long as plain writers is what the storage allows; above it we are to blame."""
STEP_BYTES = 8 << 20


def add_commands(commands: Commands) -> None:
    command = commands.add_parser(
        "doctor", help="what a save will meet here; --bench: is the storage or the process slow"
    )
    command.add_argument("root", nargs="?", metavar="ROOT", help="folder given, or to be given, to Checkpointer")
    command.add_argument("--bench", metavar="DIR", help="measure plain writers beside our own in this folder")
    command.add_argument("--mb", type=float, default=1024.0, metavar="MB", help="10^6 bytes per round (default: 1024)")
    command.add_argument("--files", type=int, default=2, metavar="N", help="files, written in parallel (default: 2)")
    command.add_argument("--rounds", type=int, default=3, metavar="N", help="medians of so many (default: 3)")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> Outcome:
    if args.mb <= 0 or args.files < 1 or args.rounds < 1:
        raise ConfigError("--mb, --files and --rounds must be positive")
    report: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "packages": _packages()}
    problems = [
        f"{name} is not installed: needed for {PACKAGES[name]}" for name in REQUIRED if report["packages"][name] is None
    ]
    if not hasattr(os, "memfd_create"):
        problems.append("this platform has no memfd: states cannot be staged")
    readable = report["packages"]["psutil"] is not None
    report["memory_left_bytes"] = memory_left_bytes() if readable else None
    report["shm_left_bytes"] = shm_left_bytes() if readable else None
    report["root"] = _root(Path(args.root), problems) if readable and args.root is not None else None
    report["bench"] = None
    if args.bench is not None:
        report["bench"] = _bench(existing_folder(args.bench), int(args.mb * 1e6), args.files, args.rounds)
    report["problems"] = problems
    return Outcome(report=report, lines=_lines(report), status=1 if problems else 0)


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _root(root: Path, problems: list[str]) -> dict[str, Any]:
    near = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    if not near.is_dir():
        problems.append(f"{near} is no folder")
    elif not os.access(near, os.W_OK):
        problems.append(f"{near} is not writable for this user")
    return {
        "path": str(root),
        "exists": near == root.absolute(),
        "held_bytes": folder_bytes(root),
        "left_bytes": disk_left_bytes(near),
        "filesystem": dataclasses.asdict(filesystem_of(near)),
    }


def _bench(folder: Path, nbytes: int, num_files: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, which take turns; a first one warms both up."""
    if (left := disk_left_bytes(folder)) < 3 * nbytes:
        raise ConfigError(f"{folder} has {left} bytes left, the bench writes up to {3 * nbytes}: lower --mb")
    scratch = folder / f".ckpt-bench-{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        return _measure(scratch, nbytes, num_files, rounds)
    finally:
        shutil.rmtree(scratch)


def _measure(scratch: Path, nbytes: int, num_files: int, rounds: int) -> dict[str, Any]:
    import torch

    from checkpoint.checkpointer import Checkpointer
    from checkpoint.config import SaveConfig
    from checkpoint.plan import Shard, State
    from checkpoint.retention import Retention

    rows = max(nbytes // (num_files * 4 * 1024 * 1024), 1)
    shape = (rows * 1024, 1024)
    shards = [
        Shard(key=f"w{i}", tensor=torch.rand(shape), global_shape=shape, offset=(0, 0), shape=shape)
        for i in range(num_files)
    ]
    nbytes = sum(s.tensor.numel() * 4 for s in shards)
    data = torch.cat([s.tensor.view(-1) for s in shards]).view(torch.uint8).numpy().data
    ours: list[dict[str, float]] = []
    plain, written, digest = [], [], []
    config = SaveConfig(num_files=num_files, retention=Retention(keep_last=1), max_consecutive_failures=1)
    with Checkpointer(scratch / "ours", rank=0, world_size=1, config=config) as checkpointer:
        for number in range(rounds + 1):
            took, wrote = _plain_write(scratch, data, num_files)
            hashed = _digest(data)
            saved = _save(checkpointer, number, State(shards=shards, objects={}, common={}))
            if number:
                plain.append(took)
                written.append(wrote)
                digest.append(hashed)
                ours.append(saved)
    median = {name: statistics.median(row[name] for row in ours) for name in ours[0]}
    ratio = median["committed_s"] / statistics.median(plain)
    return {
        "folder": str(scratch.parent),
        "filesystem": dataclasses.asdict(filesystem_of(scratch)),
        "nbytes": nbytes,
        "files": num_files,
        "rounds": rounds,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "plain_s": statistics.median(plain),
        "plain_write_s": statistics.median(written),
        "plain_spread": max(plain) / min(plain),
        "digest_s": statistics.median(digest),
        "ours": median,
        "ratio": ratio,
        "blame": "storage" if ratio <= FAIR else "process",
    }


def _plain_write(scratch: Path, data: memoryview, num_files: int) -> tuple[float, float]:
    """(seconds until synced, seconds until handed to the kernel) of as many threads as files."""
    share = -(-len(data) // num_files)

    def write(number: int) -> float:
        fd = os.open(scratch / f"plain.{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            part = data[number * share : (number + 1) * share]
            while part:
                part = part[os.write(fd, part[:STEP_BYTES]) :]
            handed = time.monotonic()
            os.fsync(fd)
        finally:
            os.close(fd)
        return handed

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(num_files) as pool:
        handed = max(pool.map(write, range(num_files)))
    took = time.monotonic() - began
    for number in range(num_files):
        (scratch / f"plain.{number}").unlink()
    return took, handed - began


def _digest(data: memoryview) -> float:
    from checkpoint.format.files import new_digest

    began, digest = time.monotonic(), new_digest()
    for at in range(0, len(data), STEP_BYTES):
        digest.update(data[at : at + STEP_BYTES])
    return time.monotonic() - began


def _save(checkpointer: Any, step: int, state: Any) -> dict[str, float]:
    import psutil

    before = psutil.Process(checkpointer.writer_pid).cpu_times()
    began = time.monotonic()
    handle = checkpointer.save(step, state)
    checkpointer.wait()
    took = time.monotonic() - began
    if handle.state != "committed":
        raise CheckpointError(f"the save of the bench failed: {handle.error}")
    after = psutil.Process(checkpointer.writer_pid).cpu_times()
    times = {name: float(handle.result["times"][name]) for name in ("write_s", "sync_s", "sealed_s", "committed_s")}
    cpu = after.user + after.system - before.user - before.system
    # From the call of `save`: what a trainer sees, the copy into staging memory included.
    return {**times, "committed_s": took, "blocked_s": handle.blocked_s, "writer_cpu_s": cpu}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield "packages: " + ", ".join(f"{name} {version or 'missing'}" for name, version in report["packages"].items())
    memory, shm = report["memory_left_bytes"], report["shm_left_bytes"]
    if memory is not None:
        yield f"memory left {size_text(memory)}, /dev/shm left {'none' if shm is None else size_text(shm)}"
    if (root := report["root"]) is not None:
        there = "" if root["exists"] else " (will be made)"
        yield f"{root['path']}{there}: {root['filesystem']['kind']}, holds {size_text(root['held_bytes'])}, " + (
            f"{size_text(root['left_bytes'])} left"
        )
        if root["filesystem"]["caution"]:
            yield f"  it {root['filesystem']['caution']}"
    if (bench := report["bench"]) is not None:
        yield from _bench_lines(bench)
    yield from (f"problem: {problem}" for problem in report["problems"])
    yield f"{len(report['problems'])} problem(s)"


def _bench_lines(bench: dict[str, Any]) -> Iterator[str]:
    nbytes, ours, plain_write = bench["nbytes"], bench["ours"], bench["plain_write_s"]
    yield (
        f"{bench['folder']} ({bench['filesystem']['kind']}): {size_text(nbytes)} in {bench['files']} files, medians of "
        f"{bench['rounds']}, {bench['cpus']} CPUs"
    )
    yield from table(
        [
            ["", "seconds", "rate"],
            ["plain: handed to the kernel", f"{plain_write:.3f}", rate_text(nbytes / plain_write)],
            ["plain: written and synced", f"{bench['plain_s']:.3f}", rate_text(nbytes / bench["plain_s"])],
            ["ours: save() returned", f"{ours['blocked_s']:.3f}", rate_text(nbytes / max(ours["blocked_s"], 1e-9))],
            ["ours: written, digested", f"{ours['write_s']:.3f}", rate_text(nbytes / max(ours["write_s"], 1e-9))],
            ["ours: synced after that", f"{ours['sync_s']:.3f}", ""],
            ["ours: loadable", f"{ours['committed_s']:.3f}", rate_text(nbytes / ours["committed_s"])],
            ["ours: writer's CPU time", f"{ours['writer_cpu_s']:.3f}", ""],
            ["digest alone, one thread", f"{bench['digest_s']:.3f}", rate_text(nbytes / bench["digest_s"])],
        ]
    )
    ratio, spread = bench["ratio"], bench["plain_spread"]
    if bench["blame"] == "storage":
        yield f"storage: plain writers are as slow ({ratio:.2f} x; up to {FAIR} x is theirs): no setting of ours helps"
    else:
        busy = ours["writer_cpu_s"] / max(ours["write_s"] + ours["sync_s"], 1e-9)
        yield (
            f"process: our save takes {ratio:.2f} x the plain writers' time; its writer was on a CPU for {busy:.2f} of "
            "the time that it wrote: near 1 per file, CPUs are short; far below, raise num_files"
        )
    if spread > 2:
        yield f"the plain writers' own rounds differ by {spread:.1f} x: something else uses this storage, measure again"
