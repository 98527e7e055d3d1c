"""Publish again and again and watch what every process holds: memory, descriptors, threads, mappings.

    python benchmarks/soak.py [--publishes 200] [--warmup 20] [--transport gloo] [--draft mtp] [--engine-tp 1]

Status 1 if, after the warm-up, any trainer or engine process grows by more than 1 KiB per publish, or holds another
number of descriptors, threads or mappings than it did. Torch's flight recorder is off meanwhile (see `ENVIRONMENT`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

# From a clone, without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weightsync.bench.config import BenchConfig
from weightsync.bench.harness import Session
from weightsync.bench.procfs import holdings

ENVIRONMENT = {
    # torch notes every operation of a group in a ring of 2000 entries, which takes hundreds of publishes to fill.
    "TORCH_FR_BUFFER_SIZE": "0",
    # glibc gives a thread an arena of its own when others happen to be busy: mappings by chance.
    "MALLOC_ARENA_MAX": "1",
}
"""Of every process, so that what grows is ours."""
MAX_GROWTH_BYTES = 1024
COUNTED = ("descriptors", "threads", "mappings")
SPREAD = {"mappings": 2}
"""A stack and its guard page, which glibc keeps when for once one thread more ran than ever before."""
SETTLE_S = 0.02
"""For threads of the last control calls, which end a moment after their answers were read."""
EDGE = 10
"""Samples that are averaged at both ends: memory is reported in pages and jitters by a few."""


def growth_per_publish(samples):
    """Bytes per publish between the medians of the first and the last samples."""
    edge = min(EDGE, len(samples) // 2)
    first, last = samples[:edge], samples[-edge:]
    return (statistics.median(last) - statistics.median(first)) / (len(samples) - edge)


def soak(config, publishes, warmup, say=print):
    """Returns problems as text; none is good. `say` gets a table of what was seen."""
    os.environ |= ENVIRONMENT
    seen = {}
    with Session(config) as session:
        for number in range(publishes):
            session.publish("both")
            if number >= warmup:
                time.sleep(SETTLE_S)
                for name, pid in session.processes().items():
                    seen.setdefault(name, []).append(holdings(pid))
    problems = []
    say(f"{config.title}: {publishes} publishes, {warmup} of them warm-up")
    say(f"{'process':20}{'RSS MiB':>10}{'bytes/publish':>15}" + "".join(f"{c:>14}" for c in COUNTED))
    for name, samples in seen.items():
        growth = growth_per_publish([s.rss_bytes for s in samples])
        counts = {c: sorted({getattr(s, c) for s in samples}) for c in COUNTED}
        row = f"{name:20}{samples[-1].rss_bytes / 2**20:10.1f}{growth:15.1f}"
        say(row + "".join(f"{'-'.join(map(str, (v[0], v[-1]) if len(v) > 1 else v)):>14}" for v in counts.values()))
        if growth > MAX_GROWTH_BYTES:
            problems.append(f"{name} grows by {growth:.0f} bytes per publish, allowed are {MAX_GROWTH_BYTES}")
        problems += [
            f"{name}: {c} vary from {v[0]} to {v[-1]}" for c, v in counts.items() if v[-1] - v[0] > SPREAD.get(c, 0)
        ]
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--transport", default="gloo")
    parser.add_argument("--draft", default="mtp")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--engine-tp", type=int, default=1)
    args = parser.parse_args()
    config = BenchConfig(
        model="tiny",
        draft=args.draft,
        transport=args.transport,
        engines=args.engines,
        engine_tp=args.engine_tp,
        bucket_mib=1 / 16,
    )
    problems = soak(config, args.publishes, args.warmup)
    for problem in problems:
        print(f"soak: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
