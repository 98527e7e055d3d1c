"""Everything that needs a CUDA device, in one command of less than ten minutes, for the day a card is there.

    python benchmarks/gpu.py [--dry-run] [--only STEP ...] [--out benchmarks/results]

Steps: the card's own rates (copy, digest), rows of `weightsync bench`, and the tests marked `gpu` (CUDA IPC to a
colocated engine, the transports' faults on a card, digests equal on CPU and CUDA, published bytes equal to a CPU
engine's, pointers unchanged under a captured CUDA graph). Every step has a limit of its own and runs whatever the
others did. Writes one JSON file that names the card, and prints a table; status 1 if a step failed. Needs torch with
CUDA and the development dependencies of the tests; NCCL rows appear where there are two cards.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BENCH = [sys.executable, "-m", "weightsync.cli", "bench", "--quiet", "--publishes", "8", "--json"]
BUDGET_S = 590


class Step(NamedTuple):
    name: str
    limit_s: int
    command: list[str]
    min_cards: int = 1
    is_json: bool = True


STEPS = [
    Step("rates", 40, [sys.executable, "benchmarks/gpu.py", "--rates"]),
    Step("ipc-1-engine", 60, [*BENCH, "--transport", "ipc", "--engines", "1"]),
    Step("ipc-2-engines", 60, [*BENCH, "--transport", "ipc", "--engines", "2"]),
    Step("ipc-tp2-eagle3", 60, [*BENCH, "--transport", "ipc", "--engine-tp", "2", "--draft", "eagle3"]),
    Step("shm-1-engine-host", 60, [*BENCH, "--transport", "shm", "--engines", "1"]),
    Step("nccl-1-engine", 60, [*BENCH, "--transport", "nccl", "--engines", "1"], min_cards=2),
    Step("tests", 240, [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/weightsync"], is_json=False),
]


def card():
    """Name, memory, driver and number of the cards, from torch alone."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def rates(nbytes=1 << 30):
    """Bytes per second of a copy on the card, of the digest there, and of a copy from pinned host memory."""
    import torch

    sys.path.insert(0, str(ROOT))
    from weightsync.digest import digest, digest_tensor

    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    pinned = torch.empty(nbytes // 4, dtype=torch.uint8, pin_memory=True)

    def best(function):
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    part = source[: 64 << 20]
    return {
        "copy_bytes_per_s": nbytes / best(lambda: target.copy_(source)),
        "digest_bytes_per_s": nbytes / best(lambda: digest_tensor(source)),
        "pinned_to_card_bytes_per_s": pinned.numel() / best(lambda: target[: pinned.numel()].copy_(pinned)),
        "digest_equal_on_cpu_and_card": digest(part) == digest(part.cpu()),
    }


def run(step):
    """What a step said, how long it took, and how it ended."""
    start = time.monotonic()
    try:
        done = subprocess.run(step.command, cwd=ROOT, capture_output=True, text=True, timeout=step.limit_s)
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as e:
        texts = [t.decode(errors="replace") if isinstance(t, bytes) else t or "" for t in (e.stdout, e.stderr)]
        status, (out, err) = f"over its limit of {step.limit_s} s", texts
    result = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    if status == 0 and step.is_json:
        return {**result, "result": json.loads(out)}
    return {**result, "output": (out + err)[-6000:]}


def line_of(name, outcome):
    """One row of the table."""
    cells = [name, "ok" if outcome["status"] == 0 else f"failed: {outcome['status']}", f"{outcome['seconds']:g}"]
    summary = outcome.get("result", {}).get("summary")
    if summary is not None:
        median = summary["publish_s"]["median"]
        rate = summary["unique_bytes"] / median / 1e9
        acceptance = f"{summary['acceptance_before']:.2f} / {summary['acceptance_after']:.2f}"
        cells.append(f"publish {median:.4f} s, {rate:.1f} GB/s, acceptance {acceptance}")
    elif "result" in outcome:
        cells.append(
            ", ".join(f"{k} {v / 1e9:.0f}e9" if k.endswith("_s") else f"{k} {v}" for k, v in outcome["result"].items())
        )
    else:
        cells.append((outcome.get("output") or "").strip().rsplit("\n", 1)[-1][:160])
    return "| " + " | ".join(cells) + " |"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    parser.add_argument("--only", nargs="*", choices=[s.name for s in STEPS], metavar="STEP")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--rates", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rates:
        print(json.dumps(seen := rates()))
        return 0 if seen["digest_equal_on_cpu_and_card"] else 1
    steps = [s for s in STEPS if args.only is None or s.name in args.only]
    if args.dry_run:
        for step in steps:
            cards = f", from {step.min_cards} cards on" if step.min_cards > 1 else ""
            print(f"{step.name} (at most {step.limit_s} s{cards}): {' '.join(['python', *step.command[1:]])}")
        print(f"at most {sum(s.limit_s for s in steps)} s")
        return 0
    found = card()
    if found is None:
        print("gpu: torch finds no CUDA device in this process; --dry-run shows the plan", file=sys.stderr)
        return 2
    outcomes = {}
    print(f"{found['name']}, torch {found['torch']}, CUDA {found['cuda']}\n")
    print("| step | status | seconds | what was seen |\n|---|---|---|---|")
    for step in steps:
        if found["count"] >= step.min_cards:
            outcomes[step.name] = run(step)
            print(line_of(step.name, outcomes[step.name]), flush=True)
    today = datetime.date.today().isoformat()
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"gpu_{found['name'].replace(' ', '-').lower()}_{today}.json"
    (args.out / name).write_text(json.dumps({"card": found, "date": today, "steps": outcomes}, indent=1) + "\n")
    failed = [n for n, o in outcomes.items() if o["status"] != 0]
    for n in failed:
        print(f"gpu: {n}: {outcomes[n].get('output', '')}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
