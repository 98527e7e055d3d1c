"""A whole publish to a real vLLM in this process, beside vLLM's own two sessions for target and draft, in one run.

    .venv-vllm/bin/python benchmarks/vllm_sessions.py [--layers 12] [--publishes 5] [--json]

Run it in vLLM's environment (`make vllm`). Each way gets a process, an engine and a trainer of its own, with the same
random MiMo weights and one MTP layer, over gloo on loopback. vLLM's own way is a transfer engine written as its
documentation says: a session per model, each of which receives the whole checkpoint in one flat broadcast, and lets the
model's loader pick. `raw` is that broadcast alone. Times are seconds of a whole publish, sender's packing included.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

# From a clone, without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.drafted import random_weights, shape
from weightsync.bench.machine import describe_machine, describe_versions
from weightsync.embedded.known import write_hf_folder

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
TIMEOUT = datetime.timedelta(seconds=120)


def start(folder, backend):
    from vllm import LLM

    return LLM(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=128,
        max_num_seqs=4, kv_cache_memory_bytes=64 << 20, weight_transfer_config={"backend": backend},
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )  # fmt: skip


def ours(folder, weights, publishes):
    from weightsync.config import PublishConfig
    from weightsync.engines.vllm.local import VllmControl
    from weightsync.publisher import Publisher
    from weightsync.sources.state_dict import StateDictSource

    control = VllmControl(start(folder, "weightsync"))
    source = StateDictSource(weights["target"], drafts={"draft": weights["draft"]})
    seconds, report = [], None
    with Publisher(source, [control], PublishConfig(run_id="bench")) as p:
        for number in range(publishes + 1):
            began = time.perf_counter()
            report = p.publish(number, force=True)
            seconds.append(time.perf_counter() - began)
    return {"publish": seconds[1:], "first": seconds[0], "wire_bytes": report.wire_bytes, "phases": report.phases}


def stock(folder, weights, publishes):
    from vllm.distributed.weight_transfer import base, factory
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    tensors = weights["target"] | weights["draft"]
    nbytes = sum(t.nbytes for t in tensors.values())
    store = dist.HashStore()
    groups = {}

    def join(rank):
        groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("bench", store), rank, 2, TIMEOUT)

    def broadcast(rank, buffer):
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        groups[rank].broadcast([buffer], options).wait()

    @dataclasses.dataclass
    class Init(base.WeightTransferInitInfo):
        pass

    @dataclasses.dataclass
    class Update(base.WeightTransferUpdateInfo):
        pass

    class Stock(base.WeightTransferEngine):
        init_info_cls, update_info_cls = Init, Update

        def init_transfer_engine(self, init_info):
            join(1)

        def start_weight_update(self):
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info):
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            broadcast(1, buffer)
            views, at = [], 0
            for name, t in tensors.items():
                views.append((name, buffer[at : at + t.nbytes].view(t.dtype).view(t.shape)))
                at += t.nbytes
            with disable_mtp_completeness_check():
                self.model.load_weights(iter(views))

        def finish_weight_update(self):
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self):
            pass

    factory.WeightTransferEngineFactory.register_engine("bench-stock", Stock)
    llm = start(folder, "bench-stock")
    joining = threading.Thread(target=join, args=(0,))
    joining.start()
    llm.init_weight_transfer_engine({"init_info": {}})
    joining.join()

    def send():
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])
        broadcast(0, flat)

    def session(begin):
        begin()
        sending = threading.Thread(target=send)
        sending.start()
        llm.update_weights({"update_info": {}})
        sending.join()
        llm.finish_weight_update()

    def raw():
        flat = torch.ones(nbytes, dtype=torch.uint8)
        sending = threading.Thread(target=broadcast, args=(0, flat))
        began = time.perf_counter()
        sending.start()
        broadcast(1, torch.ones(nbytes, dtype=torch.uint8))
        sending.join()
        return time.perf_counter() - began

    seconds, raws = [], []
    for number in range(publishes + 1):
        began = time.perf_counter()
        session(llm.start_weight_update)
        session(llm.start_draft_weight_update)
        llm.reset_prefix_cache()
        llm.update_weight_version(str(number))
        seconds.append(time.perf_counter() - began)
        raws.append(raw())
    return {"publish": seconds[1:], "first": seconds[0], "raw": raws[1:], "wire_bytes": 2 * nbytes}


def child(way, folder, layers, publishes):
    weights = random_weights(shape(layers), 1)
    result = {"ours": ours, "stock": stock}[way](folder, weights, publishes)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # vLLM's engine in this process takes seconds to take down


def measure(way, folder, layers, publishes):
    command = [sys.executable, __file__, "--child", way, "--folder", str(folder)]
    command += ["--layers", str(layers), "--publishes", str(publishes)]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=900, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{way} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=["ours", "stock"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder, args.layers, args.publishes)
    config = shape(args.layers)
    with tempfile.TemporaryDirectory() as tmp:
        weights = random_weights(config, 0)
        folder = write_hf_folder(Path(tmp), config, weights["target"] | weights["draft"])
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "qwen2"}))
        result = {way: measure(way, folder, args.layers, args.publishes) for way in ("stock", "ours")}
    params = sum(t.numel() for tensors in weights.values() for t in tensors.values())
    median = {way: statistics.median(r["publish"]) for way, r in result.items()}
    raw = statistics.median(result["stock"]["raw"])
    result |= {"parameters": params, "median_s": median, "raw_s": raw, "ratio": median["ours"] / median["stock"]}
    result |= {"machine": describe_machine(), "versions": describe_versions() | {"vllm": version("vllm-cpu")}}
    if args.json:
        print(json.dumps(result))
        return
    print(f"vLLM in one process, {params / 1e6:.0f}M parameters with MTP, bf16, {args.publishes} publishes, median")
    for way, label in (("stock", "two sessions"), ("ours", "weightsync")):
        mb = result[way]["wire_bytes"] / 1e6
        print(f"  {label:14}{median[way]:8.3f} s {mb:8.0f} MB received {median[way] / raw:7.2f} x one raw broadcast")
    print(f"  weightsync / two sessions: {result['ratio']:.2f}")
    print("  phases: " + ", ".join(f"{k} {v:.3f}" for k, v in result["ours"]["phases"].items()))


if __name__ == "__main__":
    main()
