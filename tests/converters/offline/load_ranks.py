"""What the ranks of test_load.py run: stock Megatron-Core loads what was converted, and saves some of it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.converters.live_ranks import VOCAB_MULTIPLE, tokens

LAYOUTS = {"tp1": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def run_cases(rank, world_size, cases, out):
    """{case: logits of this rank, or None}; a case is (model, layers, parallel layout) -> (checkpoint, config)."""
    from weightsync.bench.megatron import cpu_runtime

    warnings.simplefilter("ignore")
    with cpu_runtime():
        return {case: load_case(*case, *args, Path(out)) for case, args in cases.items()}


def load_case(model, layers, layout, path, config, out):
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from weightsync.bench.megatron import build_model, forward_logits

    chunks = build_model(config, dtype=torch.float32, vocab_multiple=VOCAB_MULTIPLE, seed=3, **LAYOUTS[layout])
    metadata = dc.load_content_metadata(path)
    state = {"model": chunks[0].sharded_state_dict(metadata=metadata)}
    loaded = dc.load(state, path, strict=StrictHandling.RAISE_ALL)
    chunks[0].load_state_dict(loaded["model"])
    logits = forward_logits(chunks, tokens(config))
    if layers == "stacked" and layout != "tp1":
        save_case(chunks[0], metadata, out / f"{model}-{layout}")
    return None if logits is None else [x[..., : config["vocab_size"]].numpy() for x in logits]


def save_case(chunk, metadata, path):
    """What a trainer would save: shards of rows and columns, a padded vocabulary."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    dc.save(chunk.sharded_state_dict(metadata=metadata), str(path), get_default_save_sharded_strategy("torch_dist", 1))
    dist.barrier()
