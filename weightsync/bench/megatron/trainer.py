"""Trains small Megatron-Core models: the trainer of bench, demo and tests.

Order of calls, the same on every rank: `torch.distributed.init_process_group`, `build_model` (converters.semantic),
`make_optimizer`, then `train_step` once per step. Schedule, data-parallel wrapper and optimizer are Megatron-Core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from converters.semantic.cpu import cpu_runtime
from converters.semantic.model import run_schedule, unwrapped

__all__ = ["make_optimizer", "train_step"]


def make_optimizer(chunks: Sequence[Any], *, lr: float = 1e-2) -> Any:
    """Megatron's Adam over chunks built with `ddp` (distributed, if that config says so)."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config, ddp = chunks[0].config, chunks[0].ddp_config
    with cpu_runtime():
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=0.0,
                clip_grad=0.0,
                bf16=config.bf16,
                fp16=config.fp16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=ddp.use_distributed_optimizer,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            list(chunks),
        )


def train_step(
    chunks: Sequence[Any],
    optimizer: Any,
    *,
    step: int = 0,
    num_micro_batches: int = 2,
    micro_batch_size: int = 2,
    seq_len: int = 16,
    vocab_size: int | None = None,
    micro_batches: Sequence[torch.Tensor] | None = None,
) -> float | None:
    """One step of next-token (and MTP) loss on random tokens that depend on `step` and the data-parallel rank.

    Tokens are below `vocab_size`, which defaults to the (padded) vocabulary of the model. `micro_batches`, token ids
    [batch, seq_len + 1] each and equal on every rank of a model replica, take the place of random ones.

    Returns the mean next-token loss on the last pipeline stage, None on the others.
    """
    from megatron.core import parallel_state

    tokens = micro_batches
    if tokens is None:
        vocab = unwrapped(chunks[0]).vocab_size if vocab_size is None else vocab_size
        generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
        shape = (micro_batch_size, seq_len + 1)
        tokens = [torch.randint(0, vocab, shape, generator=generator) for _ in range(num_micro_batches)]
    with cpu_runtime():
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run_schedule(chunks, tokens, forward_only=False)
        optimizer.step()
    return sum(losses) / len(losses) if losses else None
