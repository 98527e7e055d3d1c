"""Save again and again with retention, and watch the disk and what every process holds.

    python benchmarks/soak_checkpoint.py [--saves 100] [--warmup 20] [--mb 8] [--keep-last 2] [--json FILE]

Two ranks share a root. While they save, this process adds up the bytes below it, hundreds of times a second. Status 1
if they ever exceed the peak that `preflight` stated, or if after the warm-up a trainer or a writer grows by more than
4 KiB per save, or holds another number of descriptors, threads, mappings or child processes than it did.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak import EDGE, growth_per_publish
from checkpoint import Checkpointer, Retention, SaveConfig
from checkpoint.disk import folder_bytes
from checkpoint.layout import committed_steps
from checkpoint.plan import Shard, State
from checkpoint.store import HostedStore
from tests.support import start_ranks
from weightsync.bench.procfs import holdings

ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # as in benchmarks/soak.py: mappings by chance otherwise
MAX_GROWTH_BYTES = 4096
COUNTED = ("descriptors", "threads", "mappings", "children")
SPREAD = {"mappings": 2}
SETTLE_S = 0.1


def state(rank, world_size, step, mb):
    import torch

    rows = max(1, int(mb * 1e6 / 4 / 4 / 1024))
    shards = [
        Shard(
            key=f"t{i}",
            tensor=torch.full((rows, 1024), float(step + i)),
            global_shape=(rows * world_size, 1024),
            offset=(rank * rows, 0),
            shape=(rows, 1024),
        )
        for i in range(4)
    ]
    return State(shards=shards, objects={f"rng/shard_{rank}_{world_size}": [{"step": step}]}, common={"step": step})


def children():
    """Child processes of this one, by any of its threads."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        try:
            found += len(Path(f"/proc/self/task/{task}/children").read_text().split())
        except OSError:
            continue  # the thread ended
    return found


def rank_main(rank, world_size, address, root, saves, mb, keep_last):
    """[{"trainer": ..., "writer": ...}] after each save, the stated peak, and seconds held."""
    config = SaveConfig(deadline_s=60, on_failure="raise", retention=Retention(keep_last=keep_last))
    samples, held = [], []
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        part = state(rank, world_size, 0, mb)
        peak = c.preflight(part).disk_peak_bytes
        for step in range(1, saves + 1):
            for shard in part.shards:
                shard.tensor.fill_(step)
            handle = c.save(step, part)
            held.append(handle.blocked_s)
            c.wait()
            time.sleep(SETTLE_S)
            sample = {}
            for name, pid in (("trainer", os.getpid()), ("writer", c.writer_pid)):
                sample[name] = {**dataclasses.asdict(holdings(pid)), "children": children()}
            samples.append(sample)
    return samples, peak, held


def soak(saves, warmup, mb, keep_last, base, say=print):
    """(what was seen, problems as text)"""
    os.environ |= ENVIRONMENT
    from benchmarks.soak_checkpoint import rank_main as fn  # as a module, so that other processes find it

    root = Path(base) / "root"
    root.mkdir()
    store, most, looked = HostedStore(), 0, 0
    args = (store.address, str(root), saves, mb, keep_last)
    with start_ranks(fn, 2, args=args, deadline_s=60 + 3 * saves) as ranks:
        while any(process.poll() is None for process in ranks.processes):
            most, looked = max(most, folder_bytes(root)), looked + 1
            time.sleep(0.001)
        results = ranks.results(deadline_s=10)
    store.close()
    peak = results[0][1]
    problems = []
    say(f"{saves} saves, {warmup} of them warm-up, {2 * mb:g} MB each, keep_last={keep_last}, {looked} looks")
    say(f"disk: stated peak {peak}, largest seen {most} ({most / peak:.4f})")
    if most > peak:
        problems.append(f"the root held {most} bytes, stated were at most {peak}")
    if (steps := committed_steps(root)) != list(range(saves - keep_last + 1, saves + 1)):
        problems.append(f"steps {steps} are left")
    say(f"{'process':12}{'RSS MiB':>10}{'bytes/save':>12}" + "".join(f"{c:>14}" for c in COUNTED))
    for rank, (samples, _, _) in enumerate(results):
        for kind in ("trainer", "writer"):
            seen = [sample[kind] for sample in samples[warmup:]]
            growth = growth_per_publish([s["rss_bytes"] for s in seen])
            counts = {c: sorted({s[c] for s in seen}) for c in COUNTED}
            cells = ["-".join(map(str, (v[0], v[-1]) if len(v) > 1 else v)) for v in counts.values()]
            name = f"{kind} {rank}"
            say(f"{name:12}{seen[-1]['rss_bytes'] / 2**20:10.1f}{growth:12.1f}" + "".join(f"{c:>14}" for c in cells))
            if growth > MAX_GROWTH_BYTES:
                problems.append(f"{name} grows by {growth:.0f} bytes per save, allowed are {MAX_GROWTH_BYTES}")
            problems += [
                f"{name}: {c} vary from {v[0]} to {v[-1]}" for c, v in counts.items() if v[-1] - v[0] > SPREAD.get(c, 0)
            ]
    held = statistics.median(h for _, _, held in results for h in held)
    say(f"training held: median {1e3 * held:.1f} ms")
    found = {"stated_peak_bytes": peak, "seen_peak_bytes": most, "looks": looked, "held_median_s": held}
    return found, problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--mb", type=float, default=8, help="per rank")
    parser.add_argument("--keep-last", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--dir", help="where checkpoints are written (default: the folder of temporary files)")
    args = parser.parse_args()
    if args.saves - args.warmup < 2 * EDGE:
        parser.error(f"at least {2 * EDGE} saves after the warm-up, of which the first and the last are compared")
    with tempfile.TemporaryDirectory(prefix="soak-", dir=args.dir) as base:
        found, problems = soak(args.saves, args.warmup, args.mb, args.keep_last, base)
    for problem in problems:
        print(f"soak: {problem}", file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), **found, "problems": problems}, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
