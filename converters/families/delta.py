"""Tables of Qwen3-Next and Qwen3.5: gated delta nets with a gated full attention every few layers, shared expert, MTP.

Qwen3-Next joins the inputs of a delta net key head by key head, Qwen3.5 part by part; Megatron part by part. Qwen3.5
may hold the experts of a layer in one tensor: the source's names tell, for decoder and MTP apart. Its vision tower
(`model.visual.`) has no rules.
"""

from __future__ import annotations

import dataclasses
import re

from converters.errors import ConfigMismatch
from converters.families.dense import MLP_NORM, QKV_NORM, Condition, at, count, decoder, gqa, mlp
from converters.families.moe import MOE_SPELLINGS, experts, shared_experts
from converters.rules.config import ModelConfig
from converters.rules.names import Spelling
from converters.rules.ops import Chain, Inverse, Op, Par, Same, Shift, concat, interleave
from converters.rules.table import Family, Row, Section, under

__all__ = ["QWEN3_5", "QWEN3_5_MULTIMODAL", "QWEN3_NEXT"]


def _sizes(config: ModelConfig) -> tuple[int, int, int, int, int]:
    """Key heads, value heads per key head, size of all keys, size of all values, value heads."""
    keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if not keys or values % keys:
        raise ConfigMismatch(f"config has {values} value heads for {keys} key heads of its linear attention")
    k, v = config.integer("linear_key_head_dim") * keys, config.integer("linear_value_head_dim") * values
    return keys, values // keys, k, v, values


def _parts(config: ModelConfig) -> tuple[int, ...]:
    """Rows of q, k, v, z, b and a in Megatron's in_proj."""
    _, _, k, v, heads = _sizes(config)
    return (k, k, v, v, heads, heads)


def by_key_head(config: ModelConfig) -> Op:
    """in_proj_qkvz (per key head: q, k, its v, its z) and in_proj_ba (its b, its a) -> in_proj."""
    groups, per_group, k, v, _ = _sizes(config)
    qkvz = interleave(groups, (k // groups, k // groups, v // groups, v // groups))
    ba = interleave(groups, (per_group, per_group))
    return Chain((Par((Inverse(qkvz), Inverse(ba))), concat(_parts(config))))


def by_part(config: ModelConfig) -> Op:
    """in_proj_qkv, in_proj_z, in_proj_b and in_proj_a -> in_proj."""
    _, _, k, v, _ = _sizes(config)
    return Chain((Par((Inverse(concat((k, k, v))), Same(), Same(), Same())), concat(_parts(config))))


def conv(config: ModelConfig) -> Op:
    _, _, k, v, _ = _sizes(config)
    return Same(sharded=(k, k, v))


def gated_qkv(config: ModelConfig) -> Op:
    """q_proj (per head: query, gate), k, v -> per query group: its queries, its gates, its key and its value head."""
    dim, per_group = config.head_dim, config.heads // config.groups
    apart = Par((Inverse(interleave(config.heads, (dim, dim))), Same(), Same()))
    return Chain((apart, interleave(config.groups, (per_group * dim, per_group * dim, dim, dim))))


def _is_full(config: ModelConfig, layer: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is None:
        return (layer + 1) % config.integer("full_attention_interval") == 0
    return bool(kinds[layer] == "full_attention")


def _is_linear(config: ModelConfig, layer: int) -> bool:
    return not _is_full(config, layer)


def _linear(in_proj: Row) -> tuple[Row, ...]:
    return (
        Row("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        in_proj,
        Row("self_attention.conv1d.weight", "linear_attn.conv1d.weight", op=conv),
        Row("self_attention.A_log", "linear_attn.A_log"),
        Row("self_attention.dt_bias", "linear_attn.dt_bias"),
        # All other norms are zero-centred on both sides, this one in Megatron only.
        Row("self_attention.out_norm.weight", "linear_attn.norm.weight", op=lambda config: Shift(-1.0)),
        Row("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
    )


LINEAR_BY_KEY_HEAD = _linear(
    Row(
        "self_attention.in_proj.weight",
        ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
        op=by_key_head,
    )
)
LINEAR_BY_PART = _linear(
    Row(
        "self_attention.in_proj.weight",
        tuple(f"linear_attn.in_proj_{p}.weight" for p in ("qkv", "z", "b", "a")),
        op=by_part,
    )
)
_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
FULL = (
    QKV_NORM,
    Row("self_attention.linear_qkv.weight", _QKV, op=gated_qkv),
    *(row for row in gqa(qk_norm=lambda config: True) if "linear_qkv" not in row.mcore),
)
# Local spec: the norm of a delta net's input is a module of its own.
DELTA_SPELLINGS = (
    Spelling(
        r"^(decoder\.layers\.\d+)\.self_attention\.linear_qkv\.layer_norm_weight$",
        r"\1.self_attention.in_proj.layer_norm_weight",
    ),
)

_has_experts: Condition = lambda config: bool(count("num_experts", "num_local_experts")(config))  # noqa: E731
_is_dense: Condition = lambda config: not _has_experts(config)  # noqa: E731


def _feed_forward(prefix: str) -> tuple[Row, ...]:
    """Experts or, in the small models of Qwen3.5, a dense MLP; packed iff the source has such a tensor at `prefix`."""

    def packed(config: ModelConfig) -> bool:
        return config.stores("mlp.experts.gate_up_proj", within=prefix)

    shared = shared_experts("shared_expert", count("shared_expert_intermediate_size"))
    sparse = (
        *experts(packed=packed),
        *shared,
        Row("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    )
    return (*_when(_has_experts, sparse), *_when(_is_dense, (MLP_NORM, *mlp())))


def _when(condition: Condition, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """`rows` where `condition` holds as well as their own."""

    def both(row: Row) -> Row:
        own = row.when
        return dataclasses.replace(row, when=lambda config: condition(config) and own(config))

    return tuple(both(row) for row in rows)


def _mtp_count(config: ModelConfig) -> int:
    """What the config says, else what the source has: configs of Qwen3-Next do not mention their MTP layer."""
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if config.get(key) is not None:
            return config.integer(key)
    return len({m[0] for name in config.names if (m := re.match(r"mtp\.layers\.\d+\.", name))})


def _one_mtp_layer(config: ModelConfig) -> None:
    # A second one would share `mtp.fc` and its norms with the first; Megatron's layers have their own.
    if (n := _mtp_count(config)) > 1:
        raise ConfigMismatch(f"the model has {n} MTP layers: the rules of this family know one only")


MTP = Section(
    rows=(
        Row("enorm.weight", "pre_fc_norm_embedding.weight"),
        Row("hnorm.weight", "pre_fc_norm_hidden.weight"),
        Row("eh_proj.weight", "fc.weight"),
        *under(FULL + _feed_forward("mtp."), mcore="transformer_layer.", hf="layers.{i}."),
        Row("final_layernorm.weight", "norm.weight"),
    ),
    mcore="mtp.layers.{i}.",
    hf="mtp.",
    repeat=_mtp_count,
    role="draft",
    group="mtp.layers.{i}",
)


def _family(name: str, architectures: tuple[str, ...], types: tuple[str, ...], linear: tuple[Row, ...]) -> Family:
    return Family(
        name=name,
        architectures=architectures,
        model_types=types,
        sections=(
            *decoder((*at(_is_linear, linear), *at(_is_full, FULL), *_feed_forward("model."))),
            MTP,
        ),
        defaults={"full_attention_interval": 4, "head_dim": 256, "num_experts": 0},
        spellings=(*MOE_SPELLINGS, *DELTA_SPELLINGS),
        check=_one_mtp_layer,
    )


QWEN3_NEXT = _family("qwen3_next", ("Qwen3NextForCausalLM",), ("qwen3_next",), LINEAR_BY_KEY_HEAD)
QWEN3_5 = _family(
    "qwen3_5",
    ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    ("qwen3_5_text", "qwen3_5_moe_text"),
    LINEAR_BY_PART,
)
# The published models: the language model is one part, with a config of its own.
QWEN3_5_MULTIMODAL = dataclasses.replace(
    QWEN3_5,
    name="qwen3_5_multimodal",
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5", "qwen3_5_moe"),
    part=("text_config", "model.", "model.language_model."),
)
