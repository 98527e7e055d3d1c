"""Where a live Megatron-Core model has the states that a drafter reads, and how its ranks share them.

Called once after the model is built; what it returns feeds `training_hooks.capture` and `training_hooks.exchange`. The
owner of a layer is told by `layer.layer_number`, so uneven and interleaved pipeline splits need no arithmetic here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from training_hooks.capture import HiddenCapture, LayerRef, RowForm
from training_hooks.errors import CaptureError

__all__ = ["capture_from_megatron", "replica_place", "target_tables"]


def capture_from_megatron(chunks: Sequence[Any], layers: Iterable[LayerRef]) -> HiddenCapture:
    """A capture of those of `layers` that this rank's `chunks` hold (perhaps none).

    Raises:
        CaptureError: a reference beyond the model's layers.
    """
    from megatron.core import parallel_state

    wanted = {ref.canonical for ref in layers}
    models = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "decoder")]
    if not models:
        raise CaptureError("no Megatron language model in these chunks")
    config = models[0].config
    beyond = [str(ref) for ref in sorted(wanted) if ref.kind == "output_of" and ref.index >= config.num_layers]
    if beyond:
        raise CaptureError(f"the model has {config.num_layers} layers, there is no {beyond[0]}")
    points: dict[LayerRef, torch.nn.Module] = {}
    for model in models:
        if model.pre_process:
            points[LayerRef("input_to", 0)] = model.embedding
        for layer in model.decoder.layers:
            points[LayerRef("output_of", layer.layer_number - 1)] = layer
        norm = getattr(model.decoder, "final_layernorm", None)
        if norm is not None:
            points[LayerRef("final_norm")] = norm
    tp_rank, tp_size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    split = config.sequence_parallel and tp_size > 1
    form = RowForm(
        sequence_first=True,
        sp_rank=tp_rank if split else 0,
        sp_size=tp_size if split else 1,
        contributes=split or tp_rank == 0,
    )
    return HiddenCapture({ref: module for ref, module in points.items() if ref in wanted}, form)


def replica_place() -> tuple[int, int, int]:
    """(replica, rank in it, ranks of it): the arguments of `Exchange`; a replica is one data parallel rank's model."""
    from megatron.core import parallel_state as ps

    tp, cp, pp = (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_context_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
    )
    rank = ps.get_pipeline_model_parallel_rank()
    rank = (rank * cp + ps.get_context_parallel_rank()) * tp + ps.get_tensor_model_parallel_rank()
    return ps.get_data_parallel_rank(), rank, tp * cp * pp


def target_tables(chunks: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(embedding, output head) of the whole target, [padded vocabulary, h] each, in storage of their own.

    What a drafter's trainer keeps as frozen replicas. Collective over every rank of the replica, all of which hold both
    while it runs; with tied embeddings the two are equal.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    models = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "decoder")]
    first = next((m for m in models if m.pre_process), None)
    last = next((m for m in models if m.post_process), None)
    shards = [
        None if first is None else first.embedding.word_embeddings.weight,
        None
        if last is None
        else last.shared_embedding_or_output_weight()
        if last.share_embeddings_and_output_weights
        else last.output_layer.weight,
    ]
    tp, pp = ps.get_tensor_model_parallel_group(), ps.get_pipeline_model_parallel_group()
    owners = [ps.get_pipeline_model_parallel_first_rank(), ps.get_pipeline_model_parallel_last_rank()]
    like = next(models[0].parameters())
    shape = (models[0].vocab_size // tp.size(), models[0].config.hidden_size)
    tables = []
    for shard, owner in zip(shards, owners, strict=True):
        own = like.new_empty(shape) if shard is None else shard.detach().clone()
        dist.broadcast(own, src=owner, group=pp)
        parts = [torch.empty_like(own) for _ in range(tp.size())]
        dist.all_gather(parts, own, group=tp)
        tables.append(torch.cat(parts))
    return tables[0], tables[1]
