"""A whole publish to real SGLang servers, target and draft, beside their own per-tensor update of the target alone.

    .venv/bin/python benchmarks/sglang_publish.py [--releases 0.5.23] [--layers 12] [--publishes 7] [--json]

Run it in the development environment; it starts servers in those of `make sglang`, with the stand-ins that the tests
need on a CPU. Per release one server with random MiMo weights and an MTP layer, published to by both ways in turn, over
gloo on loopback. `own` is SGLang's documented way: pause (abort), one update call that names every tensor of the
target, a broadcast per tensor in its own group (in a session, where the release has them), one flush, resume. `ours` is
`Publisher.publish` with the same pause, target and draft. Seconds are wall times of the whole publish at the trainer.

Status 1 if ours takes longer than own in the median.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from benchmarks.drafted import random_weights, shape  # noqa: E402
from tests.engines.sglang_server import RELEASES, Server  # noqa: E402
from tests.engines.sglang_stock import TIMEOUT, join  # noqa: E402
from weightsync.bench.machine import describe_machine, describe_versions  # noqa: E402
from weightsync.config import PublishConfig  # noqa: E402
from weightsync.embedded.known import write_hf_folder  # noqa: E402
from weightsync.publisher import Publisher  # noqa: E402
from weightsync.sources.state_dict import StateDictSource  # noqa: E402

BOUND = 1.0
DEADLINE_S = 60.0


class OwnTrainer:
    """Rank 0 of SGLang's update group, in a process of its own: broadcasts every tensor once per line that it reads."""

    def __init__(self, server, tensors, folder):
        self.server, self.names = server, list(tensors)
        self.meta = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors.values()]
        file = folder / "own.safetensors"
        save_file(tensors, file)
        (folder / "names.json").write_text(json.dumps(self.names))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "--child", str(port), str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        self.ask("/init_weights_update_group", group_name="own", backend="gloo", **group)
        self.hear("ready")

    def ask(self, path, **body):
        status, reply = self.server.post(path, **body)
        if status != 200:
            sys.exit(f"SGLang {self.server.release} answered {status} to {path}: {reply}")

    def hear(self, word):
        if (said := self.process.stdout.readline().strip()) != word:
            sys.exit(f"SGLang's own trainer said {said!r}, expected {word!r}")

    def publish(self, number):
        sessions = self.server.release != "0.5.10.post1"
        self.ask("/pause_generation", mode="abort")
        self.process.stdin.write("send\n")
        self.process.stdin.flush()
        if sessions:
            self.ask("/begin_weight_update", selector="target")
        dtypes, shapes = zip(*self.meta, strict=True)
        update = {"names": self.names, "dtypes": dtypes, "shapes": shapes, "group_name": "own", "flush_cache": False}
        if sessions:
            update["selector"] = "target"
        self.ask("/update_weights_from_distributed", weight_version=str(number), **update)
        self.hear("sent")
        if sessions:
            self.ask("/end_weight_update")
        self.ask("/flush_cache")
        self.ask("/continue_generation")

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def child(port, folder):
    tensors = load_file(Path(folder) / "own.safetensors")
    names = json.loads((Path(folder) / "names.json").read_text())
    group = join(port, "own")
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp, options.timeout = 0, True, TIMEOUT
    print("ready", flush=True)
    for _ in sys.stdin:
        for work in [group.broadcast([tensors[n]], options) for n in names]:
            work.wait()
        print("sent", flush=True)


def measure(release, config, weights, publishes):
    with tempfile.TemporaryDirectory() as tmp:
        folder = write_hf_folder(Path(tmp) / "model", config, random_weights_of_all(config))
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "qwen2"}))
        options = ["--model-path", str(folder), "--speculative-num-steps", "1", "--speculative-eagle-topk", "1"]
        options += ["--speculative-num-draft-tokens", "2", "--speculative-algorithm", "NEXTN"]
        server = Server(Path(tmp), release, "mtp", options=options)
        own = None
        try:
            server.wait()
            own = OwnTrainer(server, weights["target"], Path(tmp))
            source = StateDictSource(weights["target"], drafts={"draft": weights["draft"]})
            run = PublishConfig(run_id="bench", pause_mode="abort", deadline_s=DEADLINE_S, control_s=DEADLINE_S)
            seconds, report = {"own": [], "ours": []}, None
            with Publisher(source, [server.control], run) as p:
                for number in range(publishes + 1):
                    began = time.perf_counter()
                    own.publish(number)
                    between = time.perf_counter()
                    report = p.publish(number, force=True)
                    seconds["ours"].append(time.perf_counter() - between)
                    seconds["own"].append(between - began)
        finally:
            if own is not None:
                own.close()
            server.close()
    target = sum(t.nbytes for t in weights["target"].values())
    median = {way: statistics.median(s[1:]) for way, s in seconds.items()}
    return {
        "seconds": {way: s[1:] for way, s in seconds.items()},
        "first": {way: s[0] for way, s in seconds.items()},
        "median_s": median,
        "ratio": median["ours"] / median["own"],
        "wire_bytes": {"own": target, "ours": report.wire_bytes},
        "phases": report.phases,
    }


def random_weights_of_all(config):
    return {n: t for tensors in random_weights(config, 0).values() for n, t in tensors.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", default=",".join(RELEASES), help=f"default: {','.join(RELEASES)}")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--publishes", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return 0
    config = shape(args.layers)
    weights = random_weights(config, 1)
    releases = {r: measure(r, config, weights, args.publishes) for r in args.releases.split(",")}
    result = {
        "parameters": sum(t.numel() for tensors in weights.values() for t in tensors.values()),
        "bound": BOUND,
        "releases": releases,
        "machine": describe_machine(),
        "versions": describe_versions() | {f"sglang {r}": r for r in releases},
    }
    missed = [r for r, row in releases.items() if row["ratio"] > BOUND]
    if args.json:
        print(json.dumps(result))
        return int(bool(missed))
    print(f"SGLang servers, {result['parameters'] / 1e6:.0f}M parameters with MTP, bf16 to float32, median of", end=" ")
    print(f"{args.publishes} publishes; bound: ours / own <= {BOUND}")
    for release, row in releases.items():
        for way, label in (("own", "own, per tensor, target alone"), ("ours", "weightsync, target and draft")):
            seconds, mb = row["median_s"][way], row["wire_bytes"][way] / 1e6
            ratio = f" {row['ratio']:6.2f}" if way == "ours" else ""
            print(f"  {release:13}{label:31}{seconds:8.3f} s {mb:6.0f} MB{ratio}")
        print("    phases: " + ", ".join(f"{k} {v:.3f}" for k, v in row["phases"].items()))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
