"""A small live Megatron-Core trainer for the bench, the demo and the tests; the library itself never imports it.

Models are built by `converters.semantic` (real `GPTModel` chunks from a Hugging Face config, on the CPU too), `trainer`
trains them.
"""

from __future__ import annotations

from converters.semantic import build_model, cpu_runtime, forward_logits
from weightsync.bench.megatron.trainer import make_optimizer, train_step

__all__ = ["build_model", "cpu_runtime", "forward_logits", "make_optimizer", "train_step"]
