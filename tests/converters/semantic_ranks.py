"""What the ranks of test_semantic.py run: every family in every layout, one after the other in one group of processes.

A folder is loaded into a live model (by ranges, by stock Megatron from a converted checkpoint, or by mbridge), the
model computes logits, and what it exports is compared with the folder.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import torch

from tests.converters.live_ranks import load_folder

LAYOUTS = {
    "tp1": {},
    "local": {"layer_names": "local", "experts": "sequential"},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "ep2grouped": {"ep": 2, "experts": "grouped"},
    "ep2sequential": {"ep": 2, "experts": "sequential"},
    "tp2ep2etp1": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "etp2": {"tp": 1, "etp": 2},
    "tp2sequential": {"tp": 2, "sequence_parallel": True, "experts": "sequential"},
    "pp2sequential": {"pp": 2, "experts": "sequential"},
    "tp1sequential": {"experts": "sequential"},
    "tp4": {"tp": 4, "sequence_parallel": True},
    "tp2ep2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "tp2ep2sequential": {"tp": 2, "ep": 2, "sequence_parallel": True, "experts": "sequential"},
    "tp2ep2grouped": {"tp": 2, "ep": 2, "sequence_parallel": True, "experts": "grouped"},
    "pp2ep2": {"pp": 2, "ep": 2},
    "vpp2ep2": {"pp": 2, "vpp": 2, "ep": 2},
    "ep4": {"ep": 4},
    "cp2ep2": {"cp": 2, "ep": 2},
}


def run_cases(rank, world_size, folders, cases, checkpoints):
    """{case: what this rank found} for `cases` (model, layout, how it is loaded): models are keys of `folders`."""
    warnings.simplefilter("ignore")
    results = {}
    for model, layout, how in cases:
        started = time.monotonic()
        source = checkpoints[model] if how == "torch_dist" else folders[model]
        results[model, layout, how] = run_case(folders[model], source, LAYOUTS[layout], how)
        results[model, layout, how]["seconds"] = time.monotonic() - started
    return results


def run_case(folder, source, layout, how):
    from converters import rules_for
    from converters.live import LiveExporter
    from converters.live.model import collect
    from converters.semantic import build_model, forward_logits
    from converters.semantic.verify import tokens
    from tests.converters.support import same

    config = json.loads(Path(folder, "config.json").read_text())
    dtype = getattr(torch, config["torch_dtype"])
    want = load_folder(folder)
    rules = rules_for(config, want)
    chunks = build_model(config, dtype=dtype, vocab_multiple=8, **layout)
    result = {"config": config, **LOADERS[how](chunks, config, source)}
    held = collect(chunks, rules)
    padding = sum(
        max(0, t.tensor.numel() - _rows(name, t, config)) * t.tensor.element_size() for name, t in held.items()
    )
    result["held_bytes"] = sum(t.tensor.nbytes for t in held.values()) - padding
    exporter = LiveExporter(chunks, rules, gather_bytes=1 << 13)
    planned = exporter.tensors()
    wrong, order = [], []
    for tensor, value in exporter.export():
        order.append(tensor.name)
        assert value.is_contiguous()
        assert (tensor.shape, tensor.dtype) == (tuple(value.shape), value.dtype)
        if tensor.name not in want or not same(value, want[tensor.name]):
            wrong.append(tensor.name)
    result |= {
        "sender": exporter.groups.is_sender,
        "planned": [t.name for t in planned],
        "exported": order,
        "wrong": wrong,
    }
    if dtype == torch.float32 and layout.get("cp", 1) == 1:
        logits = forward_logits(chunks, tokens(config))
        if logits is not None and exporter.groups.is_sender:
            result["logits"] = [x.numpy() for x in logits]
    return result


def _rows(name, live, config):
    """Elements of a vocabulary's shard that are no padding; of other tensors, all."""
    from megatron.core import parallel_state

    if not name.startswith(("embedding.", "output_layer.")):
        return live.tensor.numel()
    first = parallel_state.get_tensor_model_parallel_rank() * live.tensor.shape[0]
    return min(max(config["vocab_size"] - first, 0), live.tensor.shape[0]) * live.tensor.shape[1]


def by_ranges(chunks, config, folder):
    from converters.live import load_hf_folder

    report = load_hf_folder(chunks, folder)
    return {"read_bytes": report.read_bytes, "read_whole": list(report.read_whole)}


def by_stock_megatron(chunks, config, checkpoint):
    """`dist_checkpointing.load`, strict about missing and unexpected keys alike."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from converters.semantic import cpu_runtime

    (chunk,) = chunks
    metadata = dist_checkpointing.load_content_metadata(checkpoint) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with cpu_runtime():
        wanted = chunk.sharded_state_dict(metadata=metadata)
        names = list(wanted)
        state = dist_checkpointing.load(wanted, checkpoint, strict=StrictHandling.RAISE_ALL)
        # Beside the weights come arguments and the like.
        chunk.load_state_dict({name: state[name] for name in names})
    return {}


def by_mbridge(chunks, config, folder):
    """Loaded by mbridge, then by us over the same model; which tensors and which of mbridge's exports differ."""
    from mbridge import AutoBridge
    from transformers import AutoConfig

    from converters.live import load_hf_folder
    from tests.converters.support import same

    bridge = AutoBridge.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    bridge.make_vocab_size_divisible_by = 8
    bridge.vocab_size = config["vocab_size"]
    (chunk,) = chunks
    bridge.padded_vocab_size = chunk.vocab_size
    with torch.no_grad():
        bridge.load_weights([chunk], str(folder), memory_efficient=True)
    theirs = {name: tensor.clone() for name, tensor in chunk.named_parameters()}
    for parameter in chunk.parameters():
        parameter.data.fill_(7.0)
    report = load_hf_folder(chunks, folder)
    differ = [name for name, tensor in chunk.named_parameters() if not same(tensor.data, theirs[name])]
    want = load_folder(folder)
    exported = {name: tensor.clone() for name, tensor in bridge.export_weights([chunk])}
    differ += [name for name, tensor in want.items() if name not in exported or not same(exported[name].cpu(), tensor)]
    differ += sorted(exported.keys() - want.keys())
    return {"read_bytes": report.read_bytes, "read_whole": list(report.read_whole), "mbridge": differ}


LOADERS = {"ranges": by_ranges, "torch_dist": by_stock_megatron, "mbridge": by_mbridge}
