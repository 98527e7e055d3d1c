"""What the ranks of test_live_megatron.py run: many layouts one after the other in one group of processes.

mbridge, an independent loader, puts the weights of a Hugging Face folder into a live Megatron model; we export them
and compare with the folder. The parent compares logits.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAYOUTS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "vpp2": {"pp": 2, "vpp": 2},
    "dp2": {},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp4": {"tp": 4},
}
VOCAB_MULTIPLE = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class CommunicationCount(TorchDispatchMode):
    """Counts c10d operations below every Python wrapper."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.ops.append(func.__name__)
        return func(*args, **(kwargs or {}))


def run_cases(rank, world_size, folders, cases, out):
    """{case: what this rank found} for `cases` (model, layout): models are keys of `folders`."""
    warnings.simplefilter("ignore")
    results = {}
    for model, layout in cases:
        started = time.monotonic()
        results[model, layout] = export_case(folders[model], LAYOUTS[layout], Path(out, f"{model}-{layout}"))
        results[model, layout]["seconds"] = time.monotonic() - started
    return results


def export_case(folder, layout, out):
    from converters import rules_for
    from converters.live import LiveExporter, write_hf_folder
    from tests.converters.support import same
    from weightsync.bench.megatron import build_model, forward_logits

    config = json.loads(Path(folder, "config.json").read_text())
    dtype = getattr(torch, config["torch_dtype"])
    chunks = build_model(config, dtype=dtype, vocab_multiple=VOCAB_MULTIPLE, **layout)
    load_with_mbridge(chunks, config, folder, dtype)

    want = load_folder(folder)
    exporter = LiveExporter(chunks, rules_for(config), gather_bytes=1 << 16)
    planned = exporter.tensors()
    wrong, order, copied = [], [], 0
    for planned_tensor, tensor in exporter.export():
        name = planned_tensor.name
        order.append(name)
        assert tensor.is_contiguous()
        assert (planned_tensor.shape, planned_tensor.dtype) == (tuple(tensor.shape), tensor.dtype)
        if name.endswith("input_proj.weight"):
            # mbridge 0.15.1 copies input_proj to eh_proj as it is, although the two join their inputs in opposite
            # order. What it put in is then exported with its halves exchanged; the fp64 reference tells who is right.
            copied += 1
            tensor = torch.cat(tensor.chunk(2, 1)[::-1], 1)
        if name not in want or not same(tensor, want[name]):
            wrong.append(name)
    result = {
        "sender": exporter.groups.is_sender,
        "planned": [t.name for t in planned],
        "exported": order,
        "wrong": wrong,
        "mtp": copied,
        "folder": str(out),
    }
    write_hf_folder(chunks, out, config, file_bytes=1 << 16)
    if dtype == torch.float32:
        logits = forward_logits(chunks, tokens(config))
        if logits is not None and exporter.groups.tp_rank == 0:
            result["logits"] = [x[..., : config["vocab_size"]].numpy() for x in logits]
    return result


def tokens(config):
    return torch.randint(0, config["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(5))


def load_folder(folder):
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found = load_file(path)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def load_with_mbridge(chunks, config, folder, dtype):
    from mbridge import AutoBridge
    from transformers import AutoConfig, Qwen2Config

    # Transformers has no MiMo of its own.
    hf_config = Qwen2Config(**config) if config["model_type"] == "mimo" else AutoConfig.from_pretrained(folder)
    if config["model_type"] == "mimo":
        hf_config.model_type = "mimo"
        hf_config.__class__ = type("MiMoConfig", (Qwen2Config,), {"__contains__": lambda self, key: hasattr(self, key)})
    bridge = AutoBridge.from_config(hf_config, dtype=dtype)
    # The class attribute is changed for good by the first tied model of a process.
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    bridge._DIRECT_MAPPING = {**bridge._DIRECT_MAPPING, "output_layer.weight": head}
    bridge.make_vocab_size_divisible_by = VOCAB_MULTIPLE
    bridge.vocab_size = config["vocab_size"]
    models = [chunk.module if hasattr(chunk, "module") else chunk for chunk in chunks]
    bridge.padded_vocab_size = models[0].vocab_size
    with torch.no_grad():
        bridge.load_weights(models, str(folder), memory_efficient=True)
