"""Hold the bench's own limit and other ways against `anchors/ways.py`, run beside it on a quiet machine.

    python benchmarks/agree.py [RECEIVERS] [ROUNDS]

Prints both medians of every row; status 1 if the limits are more than 10 % apart.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.10
sys.path.insert(0, str(ROOT / "benchmarks" / "anchors"))


def main():
    receivers = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    import ways

    with tempfile.TemporaryDirectory() as folder:
        anchor_file = Path(folder) / "anchor.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "anchors" / "ways.py"), str(receivers), str(rounds)]
        subprocess.run([*command, "--json", str(anchor_file)], check=True, stdout=subprocess.DEVNULL)
        anchor = json.loads(anchor_file.read_text())
    command = [sys.executable, "-m", "weightsync.cli", "bench", "--compare", "--json"]
    command += ["--engines", str(receivers), "--publishes", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout)
    ours = {row["name"]: row["median_s"] for row in result["compare"]}
    print(f"{'row':24}{'bench s':>10}{'anchor s':>10}{'ratio':>8}")
    rows = [(name, ours[name], statistics.median(taken)) for name, taken in anchor.items() if name in ours]
    rows.append(("limit", result["summary"]["limit_s"]["median"], ways.limit(anchor)))
    for name, own, theirs in rows:
        print(f"{name:24}{own:10.3f}{theirs:10.3f}{own / theirs:8.2f}")
    _, own, theirs = rows[-1]
    return 1 if abs(own / theirs - 1) > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
