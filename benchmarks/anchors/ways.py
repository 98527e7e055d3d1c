"""Ways of today to move one model's weights over loopback, with nothing of this project: the bench's yardstick.

    python benchmarks/anchors/ways.py RECEIVERS [ROUNDS] [--only NAME ...] [--json FILE]

One sender and RECEIVERS receivers (gloo) hold a Qwen3-0.6B-shaped bf16 model with one MTP layer; receivers load into
fused q/k/v and gate/up parameters. All ways take turns in every round, so they meet the same state of the machine; the
first round is not counted. `benchmarks/agree.py` holds the bench's own rows against these.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MIB = 1 << 20
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 151936, 1024, 28, 16, 8, 128, 3072


def layer(prefix):
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def model():
    target = {"embed_tokens": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        target |= layer(f"layers.{i}")
    target["norm"] = (HIDDEN,)
    draft = dict.fromkeys(("mtp.token_layernorm", "mtp.hidden_layernorm", "mtp.final_layernorm"), (HIDDEN,))
    draft["mtp.input_proj"] = (HIDDEN, 2 * HIDDEN)
    return target, draft | layer("mtp")


TARGET, DRAFT = model()
ALL = TARGET | DRAFT
SUBSET = DRAFT | {"embed_tokens": TARGET["embed_tokens"]}


def nbytes(shape):
    size = 2
    for n in shape:
        size *= n
    return size


TOTAL = sum(map(nbytes, ALL.values()))


def buckets(shapes, limit):
    out, size = [[]], 0
    for name, shape in shapes.items():
        if out[-1] and size + nbytes(shape) > limit:
            out.append([])
            size = 0
        out[-1].append(name)
        size += nbytes(shape)
    return out


class Side:
    """A sender's tensors, or a receiver's fused parameters."""

    def __init__(self, rank):
        self.sends = rank == 0
        self.flat = torch.ones(TOTAL, dtype=torch.uint8)
        self.other = self.flat if self.sends else torch.ones(TOTAL, dtype=torch.uint8)
        self.tensors = {}
        fused = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}
        for name, shape in ALL.items():
            parent, _, module = name.rpartition(".")
            if name in self.tensors:
                continue
            names = [f"{parent}.{m}" for m in fused.get(module, ())] if rank else []
            whole = [ALL[n] for n in names] or [shape]
            storage = torch.ones(sum(s[0] for s in whole), *shape[1:], dtype=torch.bfloat16)
            for n, part in zip(names or [name], storage.split([s[0] for s in whole]), strict=True):
                self.tensors[n] = part

    def views(self, flat, names):
        at = 0
        for name in names:
            size = nbytes(ALL[name])
            yield name, flat[at : at + size].view(torch.bfloat16).view(ALL[name])
            at += size

    def load(self, name, tensor):
        self.tensors[name].copy_(tensor)


def wait(works):
    for work in works:
        work.wait()


def broadcast(tensor):
    return dist.broadcast(tensor, 0, async_op=True)


def ack():
    """An engine's answer to the call that loaded one bucket."""
    dist.all_reduce(torch.zeros(1))


def in_chunks(side, size, overlap=False):
    chunks = side.flat.split(size)
    if overlap:
        wait([broadcast(c) for c in chunks])
    else:
        for chunk in chunks:
            broadcast(chunk).wait()


def memcpy(side):
    if not side.sends:
        side.other.copy_(side.flat)


def flat_then_load(side):
    broadcast(side.flat).wait()
    if not side.sends:
        for name, tensor in side.views(side.flat, ALL):
            side.load(name, tensor)


def per_tensor(side, shapes=ALL, limit=512 * MIB):
    for names in buckets(shapes, limit):
        fresh = [side.tensors[n] if side.sends else torch.empty(ALL[n], dtype=torch.bfloat16) for n in names]
        wait([broadcast(t) for t in fresh])
        if not side.sends:
            for name, tensor in zip(names, fresh, strict=True):
                side.load(name, tensor)
        ack()


def flatten(tensors):
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])


def flattened_bucket(side, shapes=ALL, limit=512 * MIB):
    for names in buckets(shapes, limit):
        if side.sends:
            broadcast(flatten(side.tensors[n] for n in names)).wait()
        else:
            empties = [torch.empty(ALL[n], dtype=torch.bfloat16) for n in names]
            flat = flatten(empties)
            broadcast(flat).wait()
            for name, tensor in side.views(flat, names):
                side.load(name, tensor)
            del empties, flat
        ack()


def two_pass_full(side):
    flattened_bucket(side)
    flattened_bucket(side)


def two_pass_subset(side):
    flattened_bucket(side)
    flattened_bucket(side, SUBSET)


WAYS = {
    "memcpy": memcpy,
    "broadcast_whole": lambda side: in_chunks(side, TOTAL),
    "broadcast_256mib": lambda side: in_chunks(side, 256 * MIB),
    "broadcast_64mib": lambda side: in_chunks(side, 64 * MIB),
    "broadcast_16mib": lambda side: in_chunks(side, 16 * MIB),
    "broadcast_64mib_async": lambda side: in_chunks(side, 64 * MIB, overlap=True),
    "broadcast_16mib_async": lambda side: in_chunks(side, 16 * MIB, overlap=True),
    "flat_then_load": flat_then_load,
    "per_tensor_broadcast": per_tensor,
    "flattened_bucket": flattened_bucket,
    "two_pass_full": two_pass_full,
    "two_pass_subset": two_pass_subset,
}


def limit(seconds):
    """The fastest broadcast plus one memcpy, by medians: what `weightsync bench` calls the limit."""
    broadcasts = [s for n, s in seconds.items() if n.startswith("broadcast_")]
    return min(map(statistics.median, broadcasts)) + statistics.median(seconds["memcpy"])


def run(rank, world_size, port, rounds, only, path):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    side = Side(rank)
    seconds = {name: [] for name in only or WAYS}
    for number in range(rounds + 1):
        for name, taken in seconds.items():
            dist.barrier()
            start = time.monotonic()
            WAYS[name](side)
            times = torch.tensor([start, time.monotonic()], dtype=torch.float64)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            if number:
                taken.append(float(times[1] - times[0]))
    if rank == 0:
        report(seconds, world_size - 1, path)
    dist.barrier()
    dist.destroy_process_group()


def report(seconds, receivers, path):
    print(f"{receivers} receivers, {TOTAL / 1e9:.3f} GB")
    for name, taken in seconds.items():
        print(f"{name:24}{statistics.median(taken):8.3f} s  (best {min(taken):.3f}, worst {max(taken):.3f})")
    if "memcpy" in seconds and any(n.startswith("broadcast_") for n in seconds):
        print(f"{'limit':24}{limit(seconds):8.3f} s")
    if path:
        with open(path, "w") as file:
            json.dump(seconds, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("receivers", type=int)
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--only", nargs="*", choices=WAYS, metavar="NAME")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    world_size = args.receivers + 1
    mp.start_processes(
        run, (world_size, store.port, args.rounds, args.only, args.json), nprocs=world_size, start_method="spawn"
    )


if __name__ == "__main__":
    main()
