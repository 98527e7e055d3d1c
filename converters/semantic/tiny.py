"""Tiny random models of each family: a config with the structure of a given one, and its Hugging Face folder.

Transformers makes the folder in its published layout; the MTP layers that it drops are added in theirs. Norms and
biases are drawn away from 1 and 0, where a lost or a swapped one would not show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from converters.errors import UnsupportedFamilyError
from converters.families import family_of

__all__ = ["tiny_config", "write_tiny_folder"]

_BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK_ROUTING = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
    "partial_rotary_factor": 0.5,
}
# Sizes by family, where they differ from the base or come on top of it.
_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mimo": {},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_EXPERTS,
        **_DEEPSEEK_ROUTING,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,  # what Transformers takes for the norms within latent attention, whatever the config says
    },
    "glm4_moe": {**_EXPERTS, **_DEEPSEEK_ROUTING, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5},
    "qwen3_next": {**_EXPERTS, **_DELTA_NET, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_5": {**_EXPERTS, **_DELTA_NET, "num_experts": 4},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
# What makes a structure of its own is taken over from the config that is given.
_STRUCTURE = (
    "attention_bias",
    "mtp_num_hidden_layers",
    "norm_topk_prob",
    "num_nextn_predict_layers",
    "tie_word_embeddings",
    "use_qk_norm",
)
# MiMo is no model of Transformers; its decoder is Qwen2's. Kimi-K2 is DeepSeek-V3 under another name.
_KNOWN_AS = {"mimo": "qwen2"}
_SAME_AS = {"kimi_k2": "deepseek_v3"}


def tiny_config(hf_config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A config.json of the same family and structure as `hf_config`, with a few thousand parameters.

    Raises:
        UnsupportedFamilyError: no rules for the family, or no tiny model of it.
    """
    family = family_of(hf_config)
    if family.part:
        # The part has a table of the same rows, and Transformers a model of its own.
        part = {**hf_config, **(hf_config.get(family.part[0]) or {})}
        kind = str(part["model_type"])
        hf_config = {
            **part,
            "architectures": [
                a.replace("ConditionalGeneration", "CausalLM") for a in hf_config.get("architectures") or ()
            ],
            "model_type": kind if kind.endswith("_text") else kind + "_text",
        }
        family = family_of(hf_config)
    if family.name not in _SIZES:
        raise UnsupportedFamilyError(f"no tiny model of family {family.name}; there are: {', '.join(_SIZES)}")
    kept = {key: hf_config[key] for key in _STRUCTURE if hf_config.get(key) is not None}
    sizes = dict(_SIZES[family.name])
    if "q_lora_rank" in sizes and hf_config.get("q_lora_rank", 1) is None:
        sizes["q_lora_rank"] = None
    architectures = [a for a in hf_config.get("architectures") or () if a in family.architectures]
    model_type = hf_config.get("model_type") or next(iter(family.model_types), "")
    model_type = _SAME_AS.get(model_type, model_type)
    if family.name == "qwen3_5":
        dense = "text" in model_type and "moe" not in model_type
        sizes = {k: v for k, v in sizes.items() if not dense or k not in ("num_experts", *_EXPERTS)}
    base = {k: v for k, v in _BASE.items() if k != "head_dim" or "kv_lora_rank" not in sizes}
    return {
        **base,
        "tie_word_embeddings": False,
        **sizes,
        **kept,
        "architectures": architectures or [family.architectures[0]],
        "model_type": model_type,
        **changes,
    }


def write_tiny_folder(
    config: Mapping[str, Any], folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """A Hugging Face folder of random weights for a config of `tiny_config`; Transformers writes it.

    Raises:
        UnsupportedFamilyError: the `transformers` package is absent, or does not know the model type.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as e:
        raise UnsupportedFamilyError("a tiny model is made by the 'transformers' package: pip install it") from e
    from safetensors.torch import load_file, save_file

    known = _KNOWN_AS.get(config["model_type"], config["model_type"])
    values = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    try:
        hf = AutoConfig.for_model(known, **values, rope_parameters=rope)
    except ValueError as e:
        raise UnsupportedFamilyError(f"this release of Transformers has no model type {known!r}") from e
    generator = torch.Generator().manual_seed(seed)
    auto: Any = AutoModelForCausalLM  # its methods are not annotated
    model = auto.from_config(hf, dtype=dtype)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name: t.to(_published_dtype(name, t.dtype, dtype)) for name, t in load_file(path).items()}
    tensors |= {name: torch.empty(shape, dtype=own) for name, (shape, own) in _mtp_tensors(config, tensors).items()}
    zero_centred = str(config["model_type"]).startswith(("qwen3_next", "qwen3_5"))
    for name in sorted(tensors):
        _randomise(name, tensors[name], zero_centred, generator)
    tensors |= {name: tensors[source].clone() for name, source in _repeated(config).items() if source in tensors}
    save_file(tensors, path, metadata={"format": "pt"})
    dtype_name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype_name, "rope_parameters": rope}))
    return folder


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _published_dtype(name: str, written: torch.dtype, model: torch.dtype) -> torch.dtype:
    """Published folders keep the router's correction in fp32, and its weight in the model's dtype, as Megatron does."""
    if name.endswith("e_score_correction_bias"):
        return torch.float32
    return model if name.endswith("mlp.gate.weight") else written


def _mtp_tensors(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """Shapes of the MTP layers: a copy of the last decoder layer beside the tensors that join their inputs."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{layers - 1}."
    block = {k.removeprefix(last): (tuple(v.shape), v.dtype) for k, v in tensors.items() if k.startswith(last)}
    dtype = tensors["model.embed_tokens.weight"].dtype
    style = _MTP_NAMES.get(config["model_type"])
    out: Shapes = {}
    for i in range(_mtp_count(config)):
        assert style is not None, config["model_type"]
        layer, own, norms, join = style(i, layers)
        out |= {layer + name: spec for name, spec in block.items()}
        out |= {f"{own}{name}.weight": ((hidden,), dtype) for name in norms}
        out[f"{own}{join}.weight"] = ((hidden, 2 * hidden), dtype)
    return out


def _mtp_count(config: Mapping[str, Any]) -> int:
    return int(config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers") or 0)


def _numbered_on(i: int, layers: int) -> tuple[str, str, tuple[str, ...], str]:
    prefix = f"model.layers.{layers + i}."
    return prefix, prefix, ("enorm", "hnorm", "shared_head.norm"), "eh_proj"


def _mimo(i: int, layers: int) -> tuple[str, str, tuple[str, ...], str]:
    prefix = f"model.mtp_layers.{i}."
    return prefix, prefix, ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj"


def _qwen(i: int, layers: int) -> tuple[str, str, tuple[str, ...], str]:
    return f"mtp.layers.{i}.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc"


_MTP_NAMES: dict[str, Callable[[int, int], tuple[str, str, tuple[str, ...], str]]] = {
    "mimo": _mimo,
    "deepseek_v3": _numbered_on,
    "glm4_moe": _numbered_on,
    "qwen3_next": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_5_moe_text": _qwen,
}


def _repeated(config: Mapping[str, Any]) -> dict[str, str]:
    """Names under which published MTP layers repeat the embedding and the head."""
    if _MTP_NAMES.get(config["model_type"]) is not _numbered_on:
        return {}
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    out: dict[str, str] = {}
    for i in range(_mtp_count(config)):
        prefix = f"model.layers.{config['num_hidden_layers'] + i}."
        out |= {prefix + "embed_tokens.weight": "model.embed_tokens.weight", prefix + "shared_head.head.weight": head}
    return out


def _randomise(name: str, tensor: torch.Tensor, zero_centred: bool, generator: torch.Generator) -> None:
    noise = torch.randn(tensor.shape, generator=generator).clamp(-2.2, 2.2)
    if tensor.dim() > 1:
        tensor.copy_(noise * 0.1)
    else:
        around = 0.0 if zero_centred and name.endswith("norm.weight") and "linear_attn" not in name else 1.0
        tensor.copy_(around + 0.2 * noise)
