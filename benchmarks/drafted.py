"""What the benchmarks of real engines serve: 142M random parameters (12 layers) in MiMo's shape, with an MTP draft."""

from __future__ import annotations

import torch

from weightsync.embedded.config import ModelConfig
from weightsync.embedded.loading import checkpoint_shapes


def shape(layers):
    return ModelConfig(
        family="mimo", vocab_size=32000, hidden_size=768, intermediate_size=2048, num_layers=layers, num_heads=12,
        num_kv_heads=12, head_dim=64, max_positions=512, num_mtp_layers=1,
    )  # fmt: skip


def random_weights(config, seed):
    """Role -> name -> tensor."""
    g = torch.Generator().manual_seed(seed)
    return {
        role: {n: torch.randn(s, generator=g).mul_(0.02).bfloat16() for n, s in tensors.items()}
        for role, tensors in checkpoint_shapes(config).items()
    }
