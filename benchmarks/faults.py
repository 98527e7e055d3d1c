"""Breaks saves in every way that the table knows, and says whether what came of it is right.

    python benchmarks/faults.py --checkpoint [--only ROW ...] [--jobs 1] [--json FILE] [--list]

Each row of `benchmarks/fault_rows.py` saves one step in peace and meets its fault in the next. Printed are: seconds
that training was held; the verdict that survivors were told, after how long, and the ranks it names; the step that a
fresh start loads, compared bit by bit; bytes left behind beside committed steps, before and after that start. Status 1
if a row is wrong: a hang, a wrong load, a lost commit, a wrong name, a next save that fails, a process or a file left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.simplefilter("ignore")

import torch  # noqa: E402

from benchmarks.fault_rows import ROWS, select  # noqa: E402
from benchmarks.fault_runner import RunningRow  # noqa: E402

COLUMNS = f"{'row':30}{'held s':>7} {'verdict':17}{'after s':>8} {'named':7}{'loads':>6}{'left':>10}{'after':>7}"


def line(outcome):
    seconds = ["-" if v is None else f"{v:.2f}" for v in (outcome.blocked_s, outcome.verdict_s)]
    named = ",".join(map(str, outcome.named)) or "-"
    loads = "none" if outcome.loaded is None else outcome.loaded
    text = f"{outcome.name:30}{seconds[0]:>7} {outcome.verdict:17}{seconds[1]:>8} {named:7}{loads:>6}"
    text += f"{outcome.left_bytes:>10}{outcome.left_after_bytes:>7}  {'WRONG' if outcome.wrong else 'ok'}"
    return "\n".join([text + (f" ({outcome.how})" if outcome.how else ""), *(f"    {w}" for w in outcome.wrong)])


def run(rows, base, jobs=1, say=print):
    """Outcomes of the rows, `jobs` at a time. The process must have one thread, from which all others are forked."""
    import megatron.core.dist_checkpointing  # noqa: F401  (before the forks, which then need not)

    outcomes, running, rest = [], collections.deque(), collections.deque(enumerate(rows))
    with contextlib.ExitStack() as stack:
        while rest or running:
            while rest and len(running) < jobs:
                number, row = rest.popleft()
                folder = Path(base) / str(number)
                running.append((folder, stack.enter_context(RunningRow(row, folder))))
            folder, first = running.popleft()
            with first:
                outcomes.append(first.outcome())
            shutil.rmtree(folder, ignore_errors=True)
            say(line(outcomes[-1]))
    return outcomes


def machine():
    import megatron.core

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": megatron.core.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", action="store_true", required=True, help="the matrix of saves")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="rows that begin so")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time; seconds are only worth something with 1")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes there")
    parser.add_argument("--dir", help="where checkpoints are written (default: the folder of temporary files)")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    args = parser.parse_args()
    if args.list:
        print("\n".join(ROWS))
        return 0
    began = time.monotonic()
    print(COLUMNS)
    with tempfile.TemporaryDirectory(prefix="faults-", dir=args.dir) as base:
        outcomes = run(select(args.only), base, args.jobs, lambda text: print(text, flush=True))
    wrong = [outcome.name for outcome in outcomes if outcome.wrong]
    print(f"{len(outcomes)} rows, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
    if args.json:
        body = {"machine": machine(), "rows": [dataclasses.asdict(outcome) for outcome in outcomes]}
        Path(args.json).write_text(json.dumps(body, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
