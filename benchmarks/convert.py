"""What a conversion costs beside copying the same bytes: `ckpt convert` both ways, `cp` plus fsync, and mbridge.

    python -m benchmarks.convert DIR [--gb 1.2 4] [--rounds 3] [--mbridge] [--json FILE]

Makes a Qwen3-shaped folder of random weights below DIR and, per round, copies it (`cp`, then fsync of every file) and
converts it, cache warm and cold, each conversion in a process of its own that has imported everything and planned once;
its anonymous memory is sampled and what it had before is taken off. The cache is made cold by POSIX_FADV_DONTNEED on
synced files. `--mbridge`: Hugging Face -> live Megatron-Core model -> `dist_checkpointing.save`, its imports and model
not counted. Dequantisation: decoding an fp8 folder of 128 x 128 blocks, bytes read per second beside the same copy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

H, F, HEADS, GROUPS, D, V = 1024, 3072, 16, 8, 128, 151936
SYNC_EVERY = 0.005


def make_folder(path, gb, *, fp8=False):
    """Qwen3 shapes with as many layers as `gb` needs, in shards of about 1 GB."""
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    per_layer = 2 * (H * D * (2 * HEADS + 2 * GROUPS) + 3 * H * F)
    num_layers = max(round((gb * 1e9 - 2 * V * H) / per_layer), 1)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": H, "intermediate_size": F,
        "num_hidden_layers": num_layers, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": D,
        "vocab_size": V, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
    }  # fmt: skip
    shapes = {
        "self_attn.q_proj.weight": (HEADS * D, H), "self_attn.k_proj.weight": (GROUPS * D, H),
        "self_attn.v_proj.weight": (GROUPS * D, H), "self_attn.o_proj.weight": (H, HEADS * D),
        "self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,), "mlp.gate_proj.weight": (F, H),
        "mlp.up_proj.weight": (F, H), "mlp.down_proj.weight": (H, F), "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }  # fmt: skip
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors, weight_map, number = {}, {}, 0

    def flush():
        nonlocal number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        tensors.clear()

    noise = torch.randn(V * H).bfloat16()
    tensors["model.embed_tokens.weight"] = noise.view(V, H)
    tensors["model.norm.weight"] = noise[:H].clone()
    for i in range(num_layers):
        for k, (name, shape) in enumerate(shapes.items()):
            start = 1000 * (11 * i + k)
            weight = noise[start : start + torch.Size(shape).numel()].view(shape).clone()
            full = f"model.layers.{i}.{name}"
            if fp8 and len(shape) == 2:
                tensors[full + "_scale_inv"] = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
                weight = weight.to(torch.float8_e4m3fn)
            tensors[full] = weight
        if sum(t.nbytes for t in tensors.values()) > 10**9:
            flush()
    if tensors:
        flush()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sync(path)


def sync(path):
    for file in [p for p in Path(path).rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def chill(path):
    sync(path)
    for file in [p for p in Path(path).rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(path):
    for file in [p for p in Path(path).rglob("*") if p.is_file()]:
        with open(file, "rb", buffering=0) as f:
            buffer = bytearray(8 << 20)
            while f.readinto(buffer):
                pass


def copy_seconds(source, target):
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    sync(target)
    return time.perf_counter() - began


def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def child(source, target, options):
    """One conversion in this process; prints seconds and the peak of anonymous memory above what was imported."""
    import torch.distributed.checkpoint.filesystem  # noqa: F401 - what writing .metadata would import

    import converters

    converters.convert(source, target, plan=True, **options)
    before = peak = anonymous()
    stop = threading.Event()

    def watch():
        nonlocal peak
        while not stop.wait(SYNC_EVERY):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    report = converters.convert(source, target, **options)
    seconds = time.perf_counter() - began
    stop.set()
    thread.join()
    print(json.dumps({"seconds": seconds, "anonymous_bytes": peak - before, "bytes": report.target_bytes}))


def mbridge_child(source, target):
    """Hugging Face -> live model -> save, as the trainers' scripts do; imports and the empty model do not count."""
    import warnings

    warnings.simplefilter("ignore")
    import psutil
    import torch.distributed as dist

    from tests.converters.live_ranks import load_with_mbridge
    from weightsync.bench.megatron import build_model, cpu_runtime

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with open(f"{source}/config.json") as file:
        config = json.load(file)
    with cpu_runtime():
        from megatron.core import dist_checkpointing as dc
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

        before = anonymous()
        chunks = build_model(config, dtype=torch.bfloat16)
        began = time.perf_counter()
        load_with_mbridge(chunks, config, source, torch.bfloat16)
        os.makedirs(target)
        module = chunks[0].module
        dc.save(module.sharded_state_dict(), target, get_default_save_sharded_strategy("torch_dist", 1))
        sync(target)
    print(json.dumps({"seconds": time.perf_counter() - began, "anonymous_bytes": anonymous() - before}))
    sys.stdout.flush()
    for process in psutil.Process().children(recursive=True):
        process.kill()  # Megatron's writer outlives its queue, and holds the pipe that the caller reads to its end
    os._exit(0)  # Megatron's groups are not taken down


def run(name, *args):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.convert", name, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(root, gb, rounds, options, with_mbridge):
    source, rows = root / "hf", {}
    make_folder(source, gb)
    run("child", source, root / "mcore", json.dumps(options))
    chill(root / "mcore")

    def add(row, value):
        rows.setdefault(row, []).append(value)

    for cache, prepare in (("warm", warm), ("cold", chill)):
        for _ in range(rounds):
            for direction, given in (("to mcore", source), ("to hf", root / "mcore")):
                prepare(given)
                add(f"cp + fsync, {direction}, {cache}", {"seconds": copy_seconds(given, root / "copy")})
                shutil.rmtree(root / "copy")
                prepare(given)
                add(f"convert, {direction}, {cache}", run("child", given, root / "out", json.dumps(options)))
                shutil.rmtree(root / "out")
    if with_mbridge:
        warm(source)
        add("mbridge, to mcore, warm", run("mbridge", source, root / "out"))
        shutil.rmtree(root / "out")
    shutil.rmtree(root / "mcore")
    shutil.rmtree(source)
    median = {row: statistics.median(v["seconds"] for v in values) for row, values in rows.items()}
    out = {}
    for row, values in rows.items():
        base = "cp + fsync" + row[row.index(",") :]
        out[row] = {
            "seconds": median[row],
            "all_seconds": [round(v["seconds"], 3) for v in values],
            "ratio_to_copy": median[row] / median[base],
            "anonymous_bytes": max((v.get("anonymous_bytes", 0) for v in values), default=0),
        }
    return out


def dequantise(root, rounds, options):
    source = root / "fp8"
    make_folder(source, 1.0, fp8=True)
    read = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    warm(source)
    found = []
    for _ in range(rounds):
        found.append(run("child", source, root / "out", json.dumps(options)))
        shutil.rmtree(root / "out")
    shutil.rmtree(source)
    seconds = statistics.median(v["seconds"] for v in found)
    return {
        "read_bytes": read,
        "written_bytes": found[0]["bytes"],
        "seconds": seconds,
        "read_bytes_per_s": read / seconds,
    }


def main():
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
        return
    if sys.argv[1:2] == ["mbridge"]:
        mbridge_child(sys.argv[2], sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, help="folder on the disk to measure")
    parser.add_argument("--gb", type=float, nargs="+", default=[1.2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-memory-mib", type=int, default=512)
    parser.add_argument("--mbridge", action="store_true")
    parser.add_argument("--no-fp8", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"workers": args.workers, "max_memory_bytes": args.max_memory_mib << 20}
    root = args.dir / f"convert-{os.getpid()}"
    root.mkdir(parents=True)
    try:
        result = {
            "schema_version": 1,
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "options": options,
            "rounds": args.rounds,
            "sizes": {f"{gb:g} GB": measure(root, gb, args.rounds, options, args.mbridge) for gb in args.gb},
            "fp8": None if args.no_fp8 else dequantise(root, args.rounds, options),
        }
    finally:
        shutil.rmtree(root)
    for size, rows in result["sizes"].items():
        for row, r in rows.items():
            print(
                f"{size}  {row:32} {r['seconds']:7.2f} s  {r['ratio_to_copy']:5.2f}  {r['anonymous_bytes'] >> 20} MiB"
            )
    if result["fp8"]:
        print(f"fp8: {result['fp8']['read_bytes_per_s'] / 1e9:.2f} GB/s read, {result['fp8']['seconds']:.2f} s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
