"""A whole publish to real vLLM and SGLang engines beside their own ways, in one run; status 1 if a bound is missed.

    .venv/bin/python benchmarks/engines.py [--only vllm sglang] [--layers 12] [--publishes 5] [--out benchmarks/results]

Runs `vllm_sessions.py` in vLLM's environment (its own way: a session for the target and one for the draft) and
`sglang_publish.py` (its own way: a broadcast per tensor, target alone), one after the other on a quiet machine, with
the same 142M parameters of random weights with an MTP layer. Prints a table in Markdown; `--out` also writes JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = {"vllm": 0.55, "sglang": 1.0}
"""Ours divided by the engine's own way, at most."""
SCRIPTS = {
    "vllm": (ROOT / ".venv-vllm" / "bin" / "python", "vllm_sessions.py"),
    "sglang": (Path(sys.executable), "sglang_publish.py"),
}


def measure(engine, layers, publishes):
    python, script = SCRIPTS[engine]
    if not python.exists():
        raise SystemExit(f"{python.relative_to(ROOT)} is missing: run `make {engine}`")
    command = [str(python), str(ROOT / "benchmarks" / script), "--json"]
    command += ["--layers", str(layers), "--publishes", str(publishes)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    # A script ends with status 1 if its own bound is missed, after its JSON: the table below says so.
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{script} failed with status {done.returncode}") from None


def rows_of(engine, result):
    """(engine and version, own way, own seconds, own bytes, our seconds, our bytes)."""
    if engine == "vllm":
        own, ours = result["stock"], result["ours"]
        median = result["median_s"]
        name = f"vLLM {result['versions']['vllm']}, in process"
        yield name, "two sessions", median["stock"], own["wire_bytes"], median["ours"], ours["wire_bytes"]
        return
    for release, row in result["releases"].items():
        median, nbytes = row["median_s"], row["wire_bytes"]
        name = f"SGLang {release}, server"
        yield name, "per tensor, target alone", median["own"], nbytes["own"], median["ours"], nbytes["ours"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCRIPTS, metavar="ENGINE", help="vllm, sglang (default: both)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results, missed = {}, []
    print("| engine | own way | own s | own MB | weightsync s | MB | ratio | bound |")
    print("|---|---|---|---|---|---|---|---|")
    for engine in args.only or SCRIPTS:
        results[engine] = measure(engine, args.layers, args.publishes)
        for name, way, own_s, own_bytes, ours_s, our_bytes in rows_of(engine, results[engine]):
            ratio, bound = ours_s / own_s, BOUNDS[engine]
            cells = [name, way, f"{own_s:.3f}", f"{own_bytes / 1e6:.0f}", f"{ours_s:.3f}", f"{our_bytes / 1e6:.0f}"]
            print("| " + " | ".join([*cells, f"{ratio:.2f}", f"{bound}"]) + " |", flush=True)
            if ratio > bound:
                missed.append(f"{name}: {ratio:.2f}x of its own way, bound {bound}x")
            if engine == "vllm" and our_bytes >= own_bytes:
                missed.append(f"{name}: {our_bytes} bytes received, its own way {own_bytes}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        cores = next(iter(results.values()))["machine"]["cores"]
        file = args.out / f"engines_{cores}-core-cpu_{today}.json"
        file.write_text(json.dumps({"bounds": BOUNDS, "results": results, "missed": missed}, indent=1) + "\n")
    for line in missed:
        print(f"engines: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
