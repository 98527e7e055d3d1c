"""Table of DeepSeek-V3 and R1, and of Kimi-K2, which has the same layers: multi-head latent attention, experts, MTP.

Weights may be stored in fp8 with one scale for each block (`converters.rules.encodings`). Of V3's MTP layer, number 61,
`embed_tokens` and `shared_head.head` repeat embedding and output layer; they are written iff the source has them.
"""

from __future__ import annotations

from converters.errors import ConfigMismatch
from converters.families.dense import MLP_NORM, at, decoder, has, mlp
from converters.families.moe import (
    EMBEDDING_COPIES,
    EXPERT_BIAS,
    HEAD_COPIES,
    MOE_SPELLINGS,
    SHARED,
    dense_first,
    experts,
    experts_after,
    mtp_layers,
)
from converters.rules.config import ModelConfig
from converters.rules.names import Spelling
from converters.rules.table import Family, Row

__all__ = ["DEEPSEEK_V3"]


def _compressed(config: ModelConfig) -> bool:
    return config.get("q_lora_rank") is not None


def _direct(config: ModelConfig) -> bool:
    return not _compressed(config)


MLA = (
    Row("input_layernorm.weight", "input_layernorm.weight"),
    Row("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", when=_direct),
    Row("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", when=_compressed),
    Row("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", when=_compressed),
    Row("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", when=_compressed),
    Row("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    Row("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    Row("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    Row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
# Local spec: the norms of the compressed query and key/value are modules of their own.
MLA_SPELLINGS = (
    Spelling(r"\.self_attention\.(q|kv)_layernorm\.weight$", r".self_attention.linear_\1_up_proj.layer_norm_weight"),
)

_SPARSE = (*experts(), EXPERT_BIAS, *SHARED)


def _as_published(config: ModelConfig) -> None:
    if (step := config.integer("moe_layer_freq")) != 1:
        raise ConfigMismatch(f"config has moe_layer_freq = {step}: the rules know experts in every layer only")
    if has("attention_bias")(config):
        raise ConfigMismatch("config has attention_bias = true: Megatron's latent attention has no biases")


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3", "kimi_k2"),
    sections=(
        *decoder(
            (*MLA, *at(dense_first, (MLP_NORM, *mlp())), *at(experts_after, _SPARSE)),
            copied=EMBEDDING_COPIES,
            head=HEAD_COPIES,
        ),
        mtp_layers((*MLA, *_SPARSE)),
    ),
    defaults={"first_k_dense_replace": 3, "n_shared_experts": 1, "num_nextn_predict_layers": 0, "moe_layer_freq": 1},
    spellings=(*MOE_SPELLINGS, *MLA_SPELLINGS),
    check=_as_published,
)
