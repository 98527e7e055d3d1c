"""Tables of GQA decoders with a mixture of experts: Qwen3-MoE, Mixtral, and GLM-4.5/4.6 (shared experts, MTP layers).

The pieces (`experts`, `moe_layer`, `mtp_layers`, ...) serve the other tables with experts too: mla.py, delta.py.
"""

from __future__ import annotations

from collections.abc import Callable

from converters.families.dense import (
    MLP_NORM,
    QKV_NORM,
    Condition,
    always,
    at,
    count,
    decoder,
    gqa,
    has,
    layers,
    mlp,
    never,
    tied,
)
from converters.rules.config import ModelConfig
from converters.rules.names import Spelling
from converters.rules.ops import Chain, Inverse, Op, Par, Same, Stack, concat
from converters.rules.table import Copy, Family, Row, Section, under

__all__ = ["GLM4_MOE", "MIXTRAL", "QWEN3_MOE"]

# Transformers 5 writes num_local_experts where the published configs of most families have another name.
num_experts = count("num_experts", "num_local_experts", "n_routed_experts")
expert_size = count("moe_intermediate_size", "intermediate_size")

# With experts the norm is a module of its own; the local spec nevertheless stores it under the dense layer's name.
MOE_SPELLINGS = (
    Spelling(
        r"^(decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.mlp\.linear_fc1\.layer_norm_(weight|bias)$",
        r"\1.pre_mlp_layernorm.\2",
    ),
)
MOE_NORM = Row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")
EXPERT_BIAS = Row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias")


def halves(config: ModelConfig) -> Op:
    """Gate and up of one expert."""
    return concat((expert_size(config),) * 2)


def unpacked(config: ModelConfig) -> Op:
    """gate_up_proj [experts, 2 x size, hidden] -> one weight for each expert."""
    each = Same(sharded=(expert_size(config),) * 2)
    return Chain((Inverse(Stack(num_experts(config))), Par((each,) * num_experts(config))))


def experts(
    gate: str = "mlp.experts.{e}.gate_proj.weight",
    up: str = "mlp.experts.{e}.up_proj.weight",
    down: str = "mlp.experts.{e}.down_proj.weight",
    router: str = "mlp.gate.weight",
    packed: Condition = never,
) -> tuple[Row, ...]:
    """Norm, router and experts; `packed` tells whether the source holds all experts in one tensor."""
    fc1, fc2 = "mlp.experts.linear_fc1.weight{e}", "mlp.experts.linear_fc2.weight{e}"

    def apart(config: ModelConfig) -> bool:
        return not packed(config)

    def stacked(config: ModelConfig) -> Op:
        return Inverse(Stack(num_experts(config)))

    return (
        MOE_NORM,
        Row("mlp.router.weight", router),
        Row(fc1, (gate, up), op=halves, each=num_experts, when=apart),
        Row(fc2, down, each=num_experts, when=apart),
        Row(fc1, "mlp.experts.gate_up_proj", op=unpacked, each=num_experts, when=packed),
        Row(fc2, "mlp.experts.down_proj", op=stacked, each=num_experts, when=packed),
    )


def shared_experts(hf: str, size: Callable[[ModelConfig], int], when: Condition = always) -> tuple[Row, ...]:
    """Experts that see every token, as one gated MLP of `size`; `hf` is their name there."""

    def joined(config: ModelConfig) -> Op:
        return concat((size(config),) * 2)

    return (
        Row(
            "mlp.shared_experts.linear_fc1.weight",
            (f"mlp.{hf}.gate_proj.weight", f"mlp.{hf}.up_proj.weight"),
            op=joined,
            when=when,
        ),
        Row("mlp.shared_experts.linear_fc2.weight", f"mlp.{hf}.down_proj.weight", when=when),
    )


def mtp_count(config: ModelConfig) -> int:
    return config.integer("num_nextn_predict_layers")


def in_mtp(name: str, when: Condition = always) -> Copy:
    """`name` of every MTP layer that is numbered on from the decoder's."""
    return Copy(when=when, hf="model.layers.{j}." + name, repeat=mtp_count, first=layers)


EMBEDDING_COPIES = (in_mtp("embed_tokens.weight"), in_mtp("shared_head.head.weight", tied))
HEAD_COPIES = (in_mtp("shared_head.head.weight"),)


def mtp_layers(layer: tuple[Row, ...]) -> Section:
    """MTP layers numbered on from the decoder's, as DeepSeek-V3 has them: embedding first, like Megatron."""
    return Section(
        rows=(
            Row("enorm.weight", "enorm.weight"),
            Row("hnorm.weight", "hnorm.weight"),
            Row("eh_proj.weight", "eh_proj.weight"),
            *under(layer, mcore="transformer_layer."),
            Row("final_layernorm.weight", "shared_head.norm.weight"),
        ),
        mcore="mtp.layers.{i}.",
        hf="model.layers.{j}.",
        repeat=mtp_count,
        first=layers,
        role="draft",
        group="mtp.layers.{i}",
    )


def dense_first(config: ModelConfig, layer: int) -> bool:
    return layer < config.integer("first_k_dense_replace")


def experts_after(config: ModelConfig, layer: int) -> bool:
    return not dense_first(config, layer)


def _qwen_sparse(config: ModelConfig, layer: int) -> bool:
    step = config.integer("decoder_sparse_step")
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _qwen_dense(config: ModelConfig, layer: int) -> bool:
    return not _qwen_sparse(config, layer)


QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    sections=decoder(
        (
            QKV_NORM,
            *gqa(has("attention_bias"), has("attention_bias"), always),
            *at(_qwen_sparse, experts()),
            *at(_qwen_dense, (MLP_NORM, *mlp())),
        )
    ),
    defaults={"head_dim": 128, "decoder_sparse_step": 1, "norm_topk_prob": False},
    spellings=MOE_SPELLINGS,
)

_MIXTRAL_EXPERT = "block_sparse_moe.experts.{e}."
MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    sections=decoder(
        (
            QKV_NORM,
            *gqa(),
            *experts(
                gate=_MIXTRAL_EXPERT + "w1.weight",
                up=_MIXTRAL_EXPERT + "w3.weight",
                down=_MIXTRAL_EXPERT + "w2.weight",
                router="block_sparse_moe.gate.weight",
            ),
        )
    ),
    spellings=MOE_SPELLINGS,
)


def shared_size(config: ModelConfig) -> int:
    return config.integer("n_shared_experts") * config.integer("moe_intermediate_size")


def has_shared(config: ModelConfig) -> bool:
    return shared_size(config) > 0


SHARED = shared_experts("shared_experts", shared_size, has_shared)
_GLM_ATTENTION = (QKV_NORM, *gqa(has("attention_bias"), qk_norm=has("use_qk_norm")))
GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    sections=(
        *decoder(
            (
                *_GLM_ATTENTION,
                *at(dense_first, (MLP_NORM, *mlp())),
                *at(experts_after, (*experts(), EXPERT_BIAS, *SHARED)),
            ),
            copied=EMBEDDING_COPIES,
            head=HEAD_COPIES,
        ),
        mtp_layers((*_GLM_ATTENTION, *experts(), EXPERT_BIAS, *SHARED)),
    ),
    defaults={
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "use_qk_norm": False,
    },
    spellings=MOE_SPELLINGS,
)
