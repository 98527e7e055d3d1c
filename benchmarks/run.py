"""Run the matrix of benches that README.md and docs quote, one after the other, on a quiet machine.

    python benchmarks/run.py [--publishes 5] [--only SUBJECT ...] [--out benchmarks/results]

Writes one JSON file per row, `<subject>_<hardware>_<date>.json`, and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATRIX = {
    "gloo-1-engine": ["--transport", "gloo", "--engines", "1"],
    "gloo-3-engines": ["--transport", "gloo", "--engines", "3"],
    "shm-1-engine": ["--transport", "shm", "--engines", "1"],
    "shm-3-engines": ["--transport", "shm", "--engines", "3"],
    "gloo-eagle3": ["--transport", "gloo", "--engines", "1", "--draft", "eagle3"],
    "megatron-tp2-pp2": ["--transport", "gloo", "--engines", "1", "--trainer", "tp=2,pp=2"],
    "launcher-local": ["--launcher", "local"],
    "launcher-ray": ["--launcher", "ray"],
}
BOUNDS = {"gloo-1-engine": 1.35, "gloo-3-engines": 1.35, "shm-1-engine": 1.6, "shm-3-engines": 1.6}
"""Ratio of a publish to its limit that a row must stay under."""
LAUNCHERS_APART = 1.1
"""How many times the ratio of `launcher-local` that of `launcher-ray`, measured after it, may be."""
WAYS = ("per_tensor_broadcast", "flattened_bucket", "two_pass_full", "two_pass_subset", "ring_16mib_x4")


def hardware_of(machine):
    """For file names; the file itself names CPU, memory and kernel."""
    return f"{machine['cores']}-core-cpu"


def measure(subject, publishes):
    command = [sys.executable, "-m", "weightsync.cli", "bench", *MATRIX[subject]]
    command += ["--compare", "--publishes", str(publishes), "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{subject} failed with status {done.returncode}")
    return json.loads(done.stdout)


def row_of(subject, result):
    summary = result["summary"]
    ways = {w["name"]: w["ratio_to_ours"] for w in result["compare"]}
    peak = max(v for v in summary["peak_extra_bytes"].values() if v is not None) / 2**20
    cells = [
        subject,
        f"{summary['unique_bytes'] / 1e9:.3f}",
        f"{summary['publish_s']['median']:.3f} / {summary['publish_s']['p99']:.3f}",
        f"{summary['limit_s']['median']:.3f}",
        f"{summary['ratio_to_limit']:.2f}",
        *(f"{ways[w]:.2f}" if w in ways else "" for w in WAYS),
        f"{peak:.0f}",
        f"{summary['acceptance_before']:.2f} / {summary['acceptance_after']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=MATRIX, metavar="SUBJECT")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    head = ["row", "GB", "publish s, median / p99", "limit s", "ratio", *(f"{w} x" for w in WAYS), "peak MiB"]
    print("| " + " | ".join([*head, "acceptance before / after"]) + " |")
    print("|" + "---|" * (len(head) + 1))
    broken, ratios = [], {}
    for subject in args.only or MATRIX:
        result = measure(subject, args.publishes)
        name = f"{subject}_{hardware_of(result['machine'])}_{result['date']}.json"
        (args.out / name).write_text(json.dumps(result, indent=1) + "\n")
        print(row_of(subject, result), flush=True)
        ratios[subject] = result["summary"]["ratio_to_limit"]
        if result["summary"]["ratio_to_limit"] > BOUNDS.get(subject, float("inf")):
            broken.append(f"{subject}: {result['summary']['ratio_to_limit']:.2f}x its limit, bound {BOUNDS[subject]}x")
    if {"launcher-local", "launcher-ray"} <= set(ratios):
        apart = ratios["launcher-ray"] / ratios["launcher-local"]
        if apart > LAUNCHERS_APART:
            broken.append(f"launcher-ray: {apart:.2f}x the ratio of launcher-local, bound {LAUNCHERS_APART}x")
    for line in broken:
        print(f"run: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
