"""The model families that have rules, and how a config finds its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from converters.errors import UnsupportedFamilyError
from converters.families.delta import QWEN3_5, QWEN3_5_MULTIMODAL, QWEN3_NEXT
from converters.families.dense import LLAMA, MIMO, QWEN2, QWEN3
from converters.families.dspark import DSPARK
from converters.families.eagle3 import EAGLE3
from converters.families.gpt_oss import GPT_OSS
from converters.families.mla import DEEPSEEK_V3
from converters.families.moe import GLM4_MOE, MIXTRAL, QWEN3_MOE
from converters.rules.ruleset import RuleSet
from converters.rules.table import Family, build

__all__ = ["FAMILIES", "family_of", "rules_for"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    MIXTRAL,
    DEEPSEEK_V3,
    GLM4_MOE,
    MIMO,
    EAGLE3,
    DSPARK,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MULTIMODAL,
    GPT_OSS,
)


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that `architectures` names, or `model_type` where a config has no architectures.

    Raises:
        UnsupportedFamilyError: none does; the message lists what is known.
    """
    architectures = hf_config.get("architectures") or ()
    model_type = hf_config.get("model_type")
    for family in FAMILIES:
        if any(a in family.architectures for a in architectures):
            return family
        # With an architecture given the type is too coarse: a drafter or a reward model shares its target's.
        if not architectures and model_type in family.model_types:
            return family
    known = ", ".join(sorted(a for family in FAMILIES for a in family.architectures))
    raise UnsupportedFamilyError(
        f"no rules for architectures {list(architectures)}, model_type {model_type!r}; known architectures: {known}"
    )


def rules_for(
    hf_config: Mapping[str, Any],
    names: Collection[str] | None = None,
    *,
    emit_copies: bool = False,
    dialect: str | None = None,
) -> RuleSet:
    """The rules of the model that `hf_config` (a parsed config.json) describes.

    `names` are the Hugging Face tensor names of the source, if known: they decide about copies of tied tensors
    (`lm_head.weight`), which otherwise are written only with `emit_copies`, and about the EAGLE3 `dialect`.

    Raises:
        UnsupportedFamilyError: unknown family.
        ConfigMismatch: the config lacks a value that the rules need, or holds one that cannot be.
    """
    return build(family_of(hf_config), hf_config, names=names, emit_copies=emit_copies, dialect=dialect)
