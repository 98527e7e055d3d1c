"""What a model computes after a conversion, shown without a GPU: Transformers' logits against Megatron-Core's.

`verify_semantics` does it for the family of a config, with a tiny random model; `build_model` and `forward_logits` are
its Megatron side, which bench, demo and tests use too. Needs the packages `megatron-core` and `transformers`, imported
when asked for.
"""

from __future__ import annotations

from converters.semantic.cpu import cpu_runtime
from converters.semantic.model import build_model, forward_logits
from converters.semantic.verify import SemanticReport, verify_semantics

__all__ = ["SemanticReport", "build_model", "cpu_runtime", "forward_logits", "verify_semantics"]
