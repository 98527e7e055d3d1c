"""`python -m weightsync.embedded`: start one embedded engine by hand; it serves until it is interrupted."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path

from weightsync.embedded.config import SHAPES
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.errors import WeightSyncError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weightsync.embedded", description=__doc__)
    parser.add_argument("--model", default="tiny", help=f"Hugging Face folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--draft", help="mtp, eagle3 (default shape), or the folder of an EAGLE3 drafter")
    parser.add_argument("--tp", type=int, default=1, help="ranks (1 or 2)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--name", default="engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--device", default="cpu", help="cpu; cuda (rank r on device r), cuda:N (on N + r), or a list")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--api-key-file", type=Path, help="file that holds the key; without it a random one is printed")
    args = parser.parse_args(argv)
    fields = vars(args)
    key_file = fields.pop("api_key_file")
    # Before the ranks start: a signal in between would leave them to the kernel.
    done = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: done.set())
    try:
        key = key_file.read_text().strip() if key_file is not None else None
        with launch(EngineConfig(**fields, api_key=key)) as engine:
            shown = {"name": engine.name, "url": engine.url, "pids": engine.pids}
            if key is None:
                shown["api_key"] = engine.api_key
            print(json.dumps(shown), flush=True)
            while not done.wait(0.5):
                if any(p.poll() is not None for p in engine.processes):
                    print(f"engine {engine.name}: a rank ended", file=sys.stderr)
                    return 1
    except (OSError, WeightSyncError) as e:
        print(f"python -m weightsync.embedded: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
