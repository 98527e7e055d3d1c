"""Spellings of Megatron names, as tables.

Canonical is the per-layer live name of a Transformer Engine model with the GLOBAL layer index and no `module.` prefix,
such as `decoder.layers.7.self_attention.linear_qkv.layer_norm_weight`. Live exporters turn a chunk's local layer index
into the global one before they ask here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from converters.errors import MappingError

__all__ = ["SPELLINGS", "Spelling", "candidates", "canonical_name", "is_ignored", "stacked_key", "unstacked_name"]


class Spelling(NamedTuple):
    """Where `pattern` is found, `replacement` (as in `re.sub`) leads to the canonical name."""

    pattern: str
    replacement: str


_LAYER = r"^(decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)"
_EXPERT = r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$"

# Applied in order, each to the result of those before.
SPELLINGS = (
    Spelling(r"^(?:module\.)+", ""),
    # Megatron-Core main; 0.16.1 and all checkpoints on disk say transformer_layer.
    Spelling(r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
    # Local spec: norms are modules of their own. A family that has them canonical (MLA, MoE) is asked first, by name.
    Spelling(_LAYER + r"\.input_layernorm\.(weight|bias)$", r"\1.self_attention.linear_qkv.layer_norm_\2"),
    Spelling(_LAYER + r"\.pre_mlp_layernorm\.(weight|bias)$", r"\1.mlp.linear_fc1.layer_norm_\2"),
    # SequentialMLP; the grouped experts of Transformer Engine number the weight itself.
    Spelling(_EXPERT, r".experts.\2.\3\1"),
)

# Not weights, by side: bytes of Transformer Engine state; a buffer that old Transformers wrote and none reads.
_IGNORED = {"mcore": r"\._extra_state(/|$)", "hf": r"\.rotary_emb\.inv_freq$"}

_STACKED_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_STACKED_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")


def candidates(name: str, spellings: tuple[Spelling, ...] = SPELLINGS) -> list[str]:
    """`name` and what each spelling table entry in turn makes of it; the last is the fully canonical one."""
    out = [name]
    for pattern, replacement in spellings:
        name = re.sub(pattern, replacement, name)
        if name != out[-1]:
            out.append(name)
    return out


def canonical_name(name: str) -> str:
    """The canonical name for any spelling of a live, per-layer name of a dense model.

    `RuleSet.canonical` knows the family and is to be preferred: in an MoE or MLA layer a norm of its own is canonical.
    """
    return candidates(name)[-1]


def is_ignored(name: str, side: str) -> bool:
    """Whether `name` on `side` ("hf" or "mcore") is known not to be a weight."""
    return re.search(_IGNORED[side], name) is not None


def stacked_key(name: str) -> tuple[str, tuple[int, ...]]:
    """The key and leading indices under which the homogeneous `torch_dist` layout stores canonical `name`.

    `decoder.layers.7.mlp.linear_fc2.weight` -> `("decoder.layers.mlp.linear_fc2.weight", (7,))`; an expert's weight
    adds the expert's index. MTP layers are never stacked, their experts are.
    """
    key = name
    index: tuple[int, ...] = ()
    if layer := _STACKED_LAYER.match(key):
        key, index = f"decoder.layers.{layer[2]}", (int(layer[1]),)
    if expert := _STACKED_EXPERT.match(key):
        key, index = f"{expert[1]}.experts.{expert[2]}.{expert[3]}", (*index, int(expert[4]))
    return key, index


def unstacked_name(key: str, index: tuple[int, ...]) -> str:
    """Inverse of `stacked_key`.

    Raises:
        MappingError: `index` has not as many entries as `key` has stacked axes.
    """
    layered = re.match(r"^decoder\.layers\.(?!\d)", key)
    expert = re.match(r"^(.*\.mlp\.experts)\.experts\.(linear_fc[12])\.(weight|bias)$", key)
    if len(index) != bool(layered) + bool(expert):
        raise MappingError(f"stacked key {key!r} does not take the leading indices {index}")
    name = f"{expert[1]}.{expert[2]}.{expert[3]}{index[-1]}" if expert else key
    return name.replace("decoder.layers.", f"decoder.layers.{index[0]}.", 1) if layered else name
