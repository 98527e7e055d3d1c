"""A small live Megatron-Core trainer for the bench, the demo and the tests; the library itself never imports it.

`trainer` builds and trains real `GPTModel` chunks from a Hugging Face config. Where there is no CUDA, `cpu` lets the
stock package run on the CPU over gloo and `spec` gives it layers with the parameter names of Transformer Engine.
Neither changes what Megatron-Core computes, how it shards or how it names parameters: an exporter that is right here is
right on GPUs.
"""

from __future__ import annotations

from weightsync.bench.megatron.cpu import cpu_runtime
from weightsync.bench.megatron.trainer import (
    build_model,
    forward_logits,
    init_parallel,
    make_optimizer,
    train_step,
    transformer_config,
)

__all__ = [
    "build_model",
    "cpu_runtime",
    "forward_logits",
    "init_parallel",
    "make_optimizer",
    "train_step",
    "transformer_config",
]
