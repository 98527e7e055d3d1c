"""What `common.pt` says about a model: the arguments that Megatron-LM compares, or takes over, when it loads.

`model_arguments` derives them from a Hugging Face config through one table. They describe the model only; a checkpoint
without a step, an optimizer or random state is a `release`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from converters.rules.config import ModelConfig

__all__ = ["common_state", "model_arguments"]

# Megatron-LM's name -> the config's. A missing key is left out: Megatron-LM compares only what is there.
_SAME = {
    "ffn_hidden_size": "intermediate_size",
    "hidden_size": "hidden_size",
    "kv_lora_rank": "kv_lora_rank",
    "max_position_embeddings": "max_position_embeddings",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
    "mtp_num_layers": "num_nextn_predict_layers",
    "norm_epsilon": "rms_norm_eps",
    "num_attention_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "q_lora_rank": "q_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "rotary_base": "rope_theta",
    "v_head_dim": "v_head_dim",
}
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def model_arguments(config: ModelConfig, *, qkv_bias: bool, qk_norm: bool, tied: bool) -> argparse.Namespace:
    """Megatron-LM's arguments for the model of `config`; the checkpoint itself has no parallelism."""
    found = {name: value for name, key in _SAME.items() if (value := config.get(key))}
    if isinstance(rope := config.get("rope_parameters"), Mapping) and "rope_theta" in rope:
        found["rotary_base"] = rope["rope_theta"]
    if "rotary_base" in found:
        found["rotary_base"] = int(found["rotary_base"])
    if experts := next((config.get(key) for key in _EXPERT_COUNTS if config.get(key)), None):
        found["num_experts"] = experts
    if config.get("kv_lora_rank"):
        found["multi_latent_attention"] = True
    else:
        found["kv_channels"] = config.head_dim
        found["num_query_groups"] = config.groups
        found["group_query_attention"] = config.groups != config.heads
    return argparse.Namespace(
        **found,
        add_bias_linear=False,
        add_position_embedding=True,
        add_qkv_bias=qkv_bias,
        ckpt_format="torch_dist",
        context_parallel_size=1,
        expert_model_parallel_size=1,
        normalization="RMSNorm",
        padded_vocab_size=config.integer("vocab_size"),
        pipeline_model_parallel_size=1,
        position_embedding_type="rope",
        qk_layernorm=qk_norm,
        swiglu=True,
        tensor_model_parallel_size=1,
        untie_embeddings_and_output_weights=not tied,
        use_distributed_optimizer=False,
        vocab_size=config.integer("vocab_size"),
    )


def common_state(arguments: argparse.Namespace, *, layers: str, iteration: int | None) -> dict[str, Any]:
    """`common.pt`: `content_metadata` tells Megatron-Core which layout to ask for."""
    return {
        "args": arguments,
        "checkpoint_version": 3.0,
        "content_metadata": {
            "non_homogeneous_layers": layers != "stacked",
            "singleton_local_shards": layers == "singleton",
        },
        "iteration": iteration or 0,
    }
