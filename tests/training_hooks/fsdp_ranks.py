"""The same weights in Megatron-Core (TP=2, sequence parallel) and under FSDP2 give the same captured rows."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from converters.live import write_hf_folder
from training_hooks.alignment import Layout
from training_hooks.capture import LayerRef, row_keys
from training_hooks.exchange import Exchange
from training_hooks.hf import capture_from_hf
from training_hooks.megatron.capture import capture_from_megatron, replica_place

LAYERS = (LayerRef("input_to", 0), LayerRef("input_to", 1), LayerRef("output_of", 2), LayerRef("final_norm"))
LENGTHS = (9, 12, 5, 8)
COLUMNS = 12
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 48, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


def check(rank):
    """Largest relative difference of any row, on rank 0."""
    from weightsync.bench.megatron import build_model

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 48, (len(LENGTHS), COLUMNS), generator=generator)
    chunks = build_model(HF_CONFIG, tp=2, sequence_parallel=True, seed=3)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.mul_(4)  # far from what a forgotten layer would give
    _, place, size = replica_place()
    store = dist.distributed_c10d._get_default_store()
    keys = row_keys(Layout.padded(LENGTHS, COLUMNS), range(len(LENGTHS)))
    causal = torch.ones(1, 1, COLUMNS, COLUMNS, dtype=torch.bool).triu(1)
    capture = capture_from_megatron(chunks, LAYERS)
    with capture.active(), torch.no_grad(), capture.micro_batch(keys):
        chunks[0](tokens, torch.arange(COLUMNS).expand(len(LENGTHS), -1), causal)
    exchange = Exchange(store, place, size, run="megatron", deadline_s=20)
    expected = dict(enumerate(LENGTHS))
    megatron = exchange.merge(capture.take(), step=0, expected=expected, layers=LAYERS)

    model = _sharded(chunks, rank)
    capture = capture_from_hf(model, LAYERS)
    mine = [k for k in range(len(LENGTHS)) if k % 2 == rank]
    layout = Layout.padded([LENGTHS[k] for k in mine], COLUMNS)
    with capture.active(), torch.no_grad(), capture.micro_batch(row_keys(layout, mine)):
        model(tokens[mine])
    exchange = Exchange(store, 0, 1, run="fsdp", replica=rank, deadline_s=20)
    own = exchange.merge(capture.take(), step=0, expected={k: LENGTHS[k] for k in mine}, layers=LAYERS)
    every = [None] * 2
    dist.all_gather_object(every, own)
    if megatron is None:
        return None
    worst = 0.0
    for ref, rows in megatron.items():
        values = {tuple(k): v for part in every for k, v in zip(part[ref].keys.tolist(), part[ref].values, strict=True)}
        wanted = torch.stack([values.pop(tuple(k)) for k in rows.keys.tolist()])
        assert not values
        worst = max(worst, ((rows.values - wanted).abs().max() / wanted.abs().max()).item())
    return worst


def _sharded(chunks, rank):
    """The weights of `chunks` in Transformers' model, one FSDP2 unit per layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with tempfile.TemporaryDirectory(prefix="capture-") as folder:
        shared = [f"{folder}/hf"]
        dist.broadcast_object_list(shared)
        write_hf_folder(chunks, shared[0], HF_CONFIG)
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(shared[0], dtype=torch.float32)
        dist.barrier()  # both have read it
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
