"""Tables of dense GQA decoders: Llama 2/3, Qwen2 and Qwen2.5, Qwen3, and MiMo (Qwen2 with MTP layers).

The pieces (`gqa`, `mlp`, `dense_layer`, `decoder`, ...) serve the other families' tables too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from converters.rules.config import ModelConfig
from converters.rules.ops import Op, Rows, concat, half_swap, interleave
from converters.rules.table import Copy, Family, Row, Section, under

__all__ = ["LLAMA", "MIMO", "QWEN2", "QWEN3"]


def qkv(config: ModelConfig) -> Op:
    """q, k, v -> per query group: its q heads, its k head, its v head."""
    per_group = config.heads // config.groups * config.head_dim
    return interleave(config.groups, (per_group, config.head_dim, config.head_dim))


def gate_up(config: ModelConfig) -> Op:
    size = config.integer("intermediate_size")
    return concat((size, size))


def vocabulary(config: ModelConfig) -> Op:
    return Rows(config.integer("vocab_size"))


def tied(config: ModelConfig) -> bool:
    return config.flag("tie_word_embeddings")


def layers(config: ModelConfig) -> int:
    return config.integer("num_hidden_layers")


Condition: TypeAlias = Callable[[ModelConfig], bool]

QKV = ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}")
GATE_UP = ("mlp.gate_proj.{}", "mlp.up_proj.{}")


def of(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """`names` filled in with "weight" or "bias"."""
    return tuple(name.format(kind) for name in names)


def always(config: ModelConfig) -> bool:
    return True


def never(config: ModelConfig) -> bool:
    return False


def has(key: str) -> Condition:
    """The config sets the flag `key`."""
    return lambda config: config.flag(key)


def count(*keys: str) -> Callable[[ModelConfig], int]:
    """The integer under the first of `keys` that the config or the family's defaults have."""
    return lambda config: config.integer(next((k for k in keys if config.get(k) is not None), keys[0]))


def mlp(bias: Condition = never) -> tuple[Row, ...]:
    """Gated MLP, without its norm."""
    return (
        Row("mlp.linear_fc1.weight", of(GATE_UP, "weight"), op=gate_up),
        Row("mlp.linear_fc1.bias", of(GATE_UP, "bias"), op=gate_up, when=bias),
        Row("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
        Row("mlp.linear_fc2.bias", "mlp.down_proj.bias", when=bias),
    )


def gqa(qkv_bias: Condition = never, output_bias: Condition = never, qk_norm: Condition = never) -> tuple[Row, ...]:
    """Grouped-query attention, without its norm."""
    return (
        Row("self_attention.linear_qkv.weight", of(QKV, "weight"), op=qkv),
        Row("self_attention.linear_qkv.bias", of(QKV, "bias"), op=qkv, when=qkv_bias),
        Row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", when=qk_norm),
        Row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", when=qk_norm),
        Row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
        Row("self_attention.linear_proj.bias", "self_attn.o_proj.bias", when=output_bias),
    )


QKV_NORM = Row("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
MLP_NORM = Row("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight")


def dense_layer(attention: tuple[Row, ...], feed_forward: tuple[Row, ...]) -> tuple[Row, ...]:
    """A decoder layer whose norms live in the linear layers after them."""
    return (QKV_NORM, *attention, MLP_NORM, *feed_forward)


def at(layer: Callable[[ModelConfig, int], bool], rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """`rows` in those layers only."""
    return tuple(dataclasses.replace(row, at=layer) for row in rows)


EMBEDDING = Row(
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    op=vocabulary,
    copies=(Copy(when=tied, hf="lm_head.weight", mcore="output_layer.weight"),),
)
FINAL_NORM = Row("decoder.final_layernorm.weight", "model.norm.weight")
OUTPUT_LAYER = Row("output_layer.weight", "lm_head.weight", op=vocabulary, when=lambda config: not tied(config))


def decoder(
    layer: tuple[Row, ...], *, copied: tuple[Copy, ...] = (), head: tuple[Copy, ...] = ()
) -> tuple[Section, ...]:
    """Embedding, `num_hidden_layers` times `layer`, final norm, output layer.

    `copied` and `head` are further Hugging Face names of embedding and output layer: MTP layers repeat them.
    """
    embedding = dataclasses.replace(EMBEDDING, copies=EMBEDDING.copies + copied)
    return (
        Section(rows=(embedding,)),
        Section(rows=layer, mcore="decoder.layers.{i}.", hf="model.layers.{i}.", repeat=layers),
        Section(rows=(FINAL_NORM, dataclasses.replace(OUTPUT_LAYER, copies=head))),
    )


# attention_bias stands for q, k, v and o here, while Qwen2 always has it on q, k, v and never on o.
LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    sections=decoder(dense_layer(gqa(has("attention_bias"), has("attention_bias")), mlp(has("mlp_bias")))),
)

QWEN2_LAYER = dense_layer(gqa(qkv_bias=always), mlp())
QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    sections=decoder(QWEN2_LAYER),
)

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    sections=decoder(dense_layer(gqa(has("attention_bias"), has("attention_bias"), always), mlp())),
    defaults={"head_dim": 128},
)

# MiMo joins (hidden state, embedding), Megatron (embedding, hidden state): the columns change halves.
MIMO_MTP = (
    Row("enorm.weight", "token_layernorm.weight"),
    Row("hnorm.weight", "hidden_layernorm.weight"),
    Row("eh_proj.weight", "input_proj.weight", op=lambda config: half_swap(config.hidden, dim=1)),
)
MIMO = Family(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    model_types=("mimo",),
    sections=(
        *decoder(QWEN2_LAYER),
        Section(
            rows=(
                *MIMO_MTP,
                *under(QWEN2_LAYER, mcore="transformer_layer."),
                Row("final_layernorm.weight", "final_layernorm.weight"),
            ),
            mcore="mtp.layers.{i}.",
            hf="model.mtp_layers.{i}.",
            repeat=lambda config: config.integer("num_nextn_predict_layers"),
            role="draft",
            group="mtp.layers.{i}",
        ),
    ),
    defaults={"num_nextn_predict_layers": 0},
)
