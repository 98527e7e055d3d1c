"""Megatron-Core layer specs built from `layers`: what the Transformer Engine spec is where there is CUDA.

`model.build_model` picks them where there is none. `attention` and `feed_forward` of a layer are told by the config
alone: latent attention, delta net or grouped queries; dense or experts.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from converters.semantic.layers import (
    ColumnGroupedLinear,
    DuplicatedLinear,
    LatentCoreAttention,
    LayerNormColumnParallelLinear,
    RMSNorm,
    RowGroupedLinear,
)

__all__ = ["CpuSpecProvider", "block_spec", "layer_spec"]


class CpuSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """Megatron-Core's own modules, except for those that Transformer Engine has under other parameter names."""

    def linear(self) -> type:
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        if not moe_use_grouped_gemm:
            linears = {"linear_fc1": self.column_parallel_linear(), "linear_fc2": self.row_parallel_linear()}
            return SequentialMLP, MLPSubmodules(**linears)
        if moe_use_legacy_grouped_gemm:
            return GroupedMLP, None
        return TEGroupedMLP, MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)


def layer_spec(config: TransformerConfig, *, experts: bool, delta_net: bool = False) -> ModuleSpec:
    """One decoder layer (or MTP layer) of `config`."""
    backend = CpuSpecProvider()
    latent = config.multi_latent_attention
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm if latent else IdentityOp,
            self_attention=_latent(backend)
            if latent
            else _delta_net(backend)
            if delta_net
            else _grouped(config, backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if experts else IdentityOp,
            mlp=get_mlp_module_spec_for_backend(
                backend,
                num_experts=config.num_moe_experts if experts else None,
                moe_grouped_gemm=config.moe_grouped_gemm,
                moe_use_legacy_grouped_gemm=config.moe_use_legacy_grouped_gemm,
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers that this pipeline stage (chunk `vp_stage` of it) builds."""
    sparse = get_moe_layer_pattern(config) if config.num_moe_experts else [0] * config.num_layers
    kinds = zip(sparse, config.linear_attention_freq or [0] * config.num_layers, strict=True)
    specs = [layer_spec(config, experts=bool(moe), delta_net=bool(linear)) for moe, linear in kinds]
    start = get_transformer_layer_offset(config, vp_stage)
    mine = specs[start : start + get_num_layers_to_build(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=mine, layer_norm=RMSNorm)


def _grouped(config: TransformerConfig, backend: CpuSpecProvider) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_layer_norm_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _latent(backend: CpuSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=backend.column_parallel_layer_norm_linear(),
            linear_kv_down_proj=backend.linear(),
            linear_kv_up_proj=backend.column_parallel_layer_norm_linear(),
            core_attention=LatentCoreAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )


def _delta_net(backend: CpuSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_layer_norm_linear(),
            out_norm=backend.layer_norm(rms_norm=True),
            out_proj=backend.row_parallel_linear(),
        ),
    )
