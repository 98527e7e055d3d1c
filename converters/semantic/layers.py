"""Layers with Transformer Engine's parameter names, shapes and sharding attributes, and plain torch maths.

Real trainers run the Transformer Engine spec, whose fused modules own the layer norms (`linear_qkv.layer_norm_weight`)
and number the experts (`linear_fc1.weight3`). Transformer Engine needs CUDA; `spec` puts these in the same places where
there is none. Where its attributes mislead, so do these: a duplicated layer and the row-parallel experts claim to be
sharded along dimension 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import linear

__all__ = [
    "ColumnGroupedLinear",
    "DuplicatedLinear",
    "LatentCoreAttention",
    "LayerNormColumnParallelLinear",
    "RMSNorm",
    "RowGroupedLinear",
    "l2norm",
]


class RMSNorm(torch.nn.Module):
    """Parameters in `params_dtype`, statistics in fp32: what Transformer Engine's norm does."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(_norm_weight(config, hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self.weight, self.eps, self.offset)


class LayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear layer that owns the norm of its input, as Transformer Engine's does."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.layer_norm_weight = torch.nn.Parameter(_norm_weight(config, input_size))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = _rms_norm(input_, self.layer_norm_weight, self.eps, self.offset)
        return super().forward(normed, *args, **kwargs)


class LatentCoreAttention(torch.nn.Module):
    """Causal attention whose values have a head size of their own; Megatron's plain one knows a single size."""

    def __init__(self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        # Attention builds one of the wrong size first, without a scale; latent attention replaces it.
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[seq, batch, heads, size] each -> [seq, batch, heads x value size]."""
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.float().masked_fill(future, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole (the down projections of latent attention)."""

    parallel_mode = None

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Any, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        _claim_sharded(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """Nothing, under a key that checkpoints have."""

    def set_extra_state(self, state: Any) -> None:
        """There is none."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        # Every rank of the tensor-parallel group holds a replica, so does every data-parallel one.
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


class _GroupedLinear(torch.nn.Module):
    """One linear layer for each local expert, on consecutive runs of tokens: `weight0`, `bias0`, `weight1`, ..."""

    parallel_mode = None  # experts bring their own communication
    row = False

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        parts = pg_collection.expt_tp.size()
        rows, columns = (output_size, input_size // parts) if self.row else (output_size // parts, input_size)
        self.num_gemms = num_gemms
        self.skip_bias_add = skip_bias_add
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
            init_method(weight)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(torch.zeros(rows, dtype=config.params_dtype)))
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            _claim_sharded(parameter)

    def forward(self, x: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        biases = [getattr(self, f"bias{i}", None) for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.skip_bias_add else biases
        runs = x.split(list(tokens))
        out = torch.cat([linear(run, getattr(self, f"weight{i}"), added[i]) for i, run in enumerate(runs)])
        return out, [b for b in biases if b is not None] or None if self.skip_bias_add else None


class ColumnGroupedLinear(_GroupedLinear):
    """The first layer of experts, its rows sharded."""


class RowGroupedLinear(_GroupedLinear):
    """The second layer of experts, its columns sharded."""

    row = True


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Queries and keys of a delta net [..., head size] at unit length; statistics in fp32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _norm_weight(config: TransformerConfig, size: int) -> torch.Tensor:
    return torch.full((size,), 0.0 if config.layernorm_zero_centered_gamma else 1.0, dtype=config.params_dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x32 = x.float()
    scale = weight + offset if offset else weight
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * scale


def _claim_sharded(parameter: Any) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
