"""Table of gpt-oss: experts packed, transposed and with gate and up alternating; attention sinks; biases everywhere.

Published folders hold the experts in MXFP4 (`_blocks` and `_scales`), decoded to bfloat16 on the way to Megatron.
"""

from __future__ import annotations

from converters.families.dense import QKV_NORM, always, decoder, gqa
from converters.families.moe import MOE_NORM, MOE_SPELLINGS, expert_size, num_experts
from converters.rules.config import ModelConfig
from converters.rules.encodings import mxfp4
from converters.rules.ops import Chain, Inverse, Op, Par, Same, Stack, Transpose, concat, interleave
from converters.rules.table import Family, Row

__all__ = ["GPT_OSS"]


def _apart(config: ModelConfig) -> tuple[Op, ...]:
    """[experts, gate and up alternating, ...] -> one [gate; up] for each expert."""
    n, size = num_experts(config), expert_size(config)
    return (
        Inverse(interleave(size, (1, 1), dim=1)),
        concat((size, size), dim=1),
        Inverse(Stack(n)),
        Par((Same(sharded=(size, size)),) * n),
    )


def _gate_up(config: ModelConfig) -> Op:
    return Chain((Transpose(1, 2), *_apart(config)))


def _gate_up_bias(config: ModelConfig) -> Op:
    return Chain(_apart(config))


def _down(config: ModelConfig) -> Op:
    return Chain((Transpose(1, 2), Inverse(Stack(num_experts(config)))))


def _down_bias(config: ModelConfig) -> Op:
    return Inverse(Stack(num_experts(config)))


GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    sections=decoder(
        (
            QKV_NORM,
            *gqa(qkv_bias=always, output_bias=always),
            Row("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
            MOE_NORM,
            Row("mlp.router.weight", "mlp.router.weight"),
            Row("mlp.router.bias", "mlp.router.bias"),
            Row("mlp.experts.linear_fc1.weight{e}", "mlp.experts.gate_up_proj", op=_gate_up, each=num_experts),
            Row("mlp.experts.linear_fc1.bias{e}", "mlp.experts.gate_up_proj_bias", op=_gate_up_bias, each=num_experts),
            Row("mlp.experts.linear_fc2.weight{e}", "mlp.experts.down_proj", op=_down, each=num_experts),
            Row("mlp.experts.linear_fc2.bias{e}", "mlp.experts.down_proj_bias", op=_down_bias, each=num_experts),
        )
    ),
    defaults={"head_dim": 64, "num_local_experts": 128},
    spellings=MOE_SPELLINGS,
    encoding=mxfp4,
)
