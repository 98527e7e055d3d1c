"""Known weights into a live Megatron-Core model: the rules of `converters` read the other way round, plus sharding.

Called once per rank after `trainer.build_model`, by the bench, whose published tokens must be known. It loads no
checkpoint formats and is no fast path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from converters.families import rules_for
from converters.live.model import collect
from weightsync.errors import ManifestError

__all__ = ["fill_from_hf"]


@torch.no_grad()
def fill_from_hf(
    chunks: Sequence[Any], hf_config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copy full Hugging Face `tensors` into this rank's `chunks`; returns its tensors by canonical Megatron name.

    Rows that only pad the vocabulary become zero.

    Raises:
        ManifestError: a tensor of the model got no value.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    rules = rules_for(hf_config)
    live = collect(chunks, rules)
    source_of = {name: rules.mcore_copies.get(name, name) for name in live}
    left = set(live)
    for mapping in rules.mappings():
        wanted = [name for name, source in source_of.items() if source in mapping.mcore]
        if not wanted:
            continue
        full = mapping.to_mcore({name: tensors[name] for name in mapping.hf})
        for name in wanted:
            source = source_of[name]
            part, dim = live[name].tensor, live[name].dim
            value = full[source] if dim is None else _shard(full[source], dim, mapping.blocks(source), rank, size)
            part.zero_()
            part[tuple(slice(0, n) for n in value.shape)].copy_(value)
            left.discard(name)
    if left:
        raise ManifestError(f"no Hugging Face tensor fills {len(left)} tensors of the model, e.g. {sorted(left)[:3]}")
    return {name: t.tensor for name, t in live.items()}


def _shard(full: torch.Tensor, dim: int, blocks: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """The part of one tensor-parallel rank; `blocks` of rows (gate and up) are sharded one by one."""
    parts = full.split(list(blocks), dim) if dim == 0 and blocks else (full,)
    out = []
    for part in parts:
        length = -(-part.shape[dim] // size)
        start = min(rank * length, part.shape[dim])
        out.append(part.narrow(dim, start, min(length, part.shape[dim] - start)))
    return torch.cat(out, dim)
