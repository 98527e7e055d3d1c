"""Table of the DSpark drafter of `training_hooks.dspark_drafter`: our own layout, version 1, all of it role "draft".

No trainer has such a module yet; the Megatron side is what a `dspark_module` of Megatron-Core's own layers would have:
fused linear layers with the norm before them, as in a decoder.
"""

from __future__ import annotations

from converters.errors import ConfigMismatch
from converters.families.dense import MLP_NORM, QKV_NORM, gqa, layers, mlp, vocabulary
from converters.rules.config import ModelConfig
from converters.rules.table import Family, Row, Section

__all__ = ["DSPARK"]

_VERSION = 1
_HEADS = ("vanilla", "gated", "rnn")


def _known(config: ModelConfig) -> None:
    if (version := config.get("dspark_version")) != _VERSION:
        raise ConfigMismatch(
            f"config has dspark_version = {version!r}: the rules know version {_VERSION}; use the release that wrote it"
        )
    if (head := _head(config)) not in _HEADS:
        raise ConfigMismatch(f"config has markov_head = {head!r} in dspark_config: expected one of {', '.join(_HEADS)}")


def _head(config: ModelConfig) -> object:
    return (config.get("dspark_config") or {}).get("markov_head")


DSPARK = Family(
    name="dspark",
    architectures=("DSparkDraftModel",),
    model_types=("dspark",),
    sections=(
        Section(
            rows=(
                Row("fc.weight", "fc.weight"),
                Row("hidden_norm.weight", "hidden_norm.weight"),
                Row("mask_embedding", "mask_embedding"),
            ),
            mcore="dspark_module.",
            role="draft",
            group="dspark",
        ),
        Section(
            rows=(QKV_NORM, *gqa(), MLP_NORM, *mlp()),
            mcore="dspark_module.decoder.layers.{i}.",
            hf="model.layers.{i}.",
            repeat=layers,
            role="draft",
            group="dspark",
        ),
        Section(
            rows=(
                Row("decoder.final_layernorm.weight", "norm.weight"),
                Row("markov_head.embedding.weight", "markov_head.embedding.weight", op=vocabulary),
                Row("markov_head.out.weight", "markov_head.out.weight", op=vocabulary),
                Row("markov_head.gate.weight", "markov_head.gate.weight", when=lambda c: _head(c) == "gated"),
                Row("markov_head.joint.weight", "markov_head.joint.weight", when=lambda c: _head(c) == "rnn"),
                Row("confidence_head.weight", "confidence_head.weight"),
                Row("confidence_head.bias", "confidence_head.bias"),
            ),
            mcore="dspark_module.",
            role="draft",
            group="dspark",
        ),
    ),
    check=_known,
)
