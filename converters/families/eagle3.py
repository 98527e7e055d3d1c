"""Table of the EAGLE3 drafter (one layer): a model of its own beside the target, all of it role "draft".

On the Hugging Face side two dialects are in use, `midlayer.*` and `layers.0.*`; the source's names decide, the first is
the default. The Megatron side is the `eagle_module` of NVIDIA's ModelOpt, whose `enorm` normalises the embedding and
whose layer's `input_layernorm` normalises the hidden state; the first layer's qkv has 2 x hidden_size columns.
`d2t` (int64) and `t2d` (bool) map draft and target vocabularies and pass through untouched.
"""

from __future__ import annotations

from converters.errors import ConfigMismatch
from converters.families.dense import gqa, has, mlp
from converters.rules.config import ModelConfig
from converters.rules.names import Spelling
from converters.rules.ops import Op, Rows
from converters.rules.table import Family, Row, Section, under

__all__ = ["EAGLE3", "rename_dialect"]

_LAYER = {"mcore": "decoder.layers.0.", "hf": "midlayer."}


def _draft_vocab(config: ModelConfig) -> int:
    return config.integer("vocab_size" if config.get("draft_vocab_size") is None else "draft_vocab_size")


def _draft_rows(config: ModelConfig) -> Op:
    return Rows(_draft_vocab(config))


def _target_rows(config: ModelConfig) -> Op:
    return Rows(config.integer("vocab_size"))


def _own_vocab(config: ModelConfig) -> bool:
    return _draft_vocab(config) != config.integer("vocab_size")


def _one_layer(config: ModelConfig) -> None:
    if (count := config.integer("num_hidden_layers")) != 1:
        raise ConfigMismatch(f"config has num_hidden_layers = {count}: EAGLE3 rules know drafters of one layer only")


# Other writers of the same module, and the local spec, whose norms are modules of their own.
_SPELLINGS = (
    Spelling(r"^eagle_module\.decoder\.layer\.", "eagle_module.decoder.layers.0."),
    Spelling(r"^eagle_module\.(?:decoder\.)?norm\.weight$", "eagle_module.decoder.final_layernorm.weight"),
    Spelling(r"^eagle_module\.lm_head\.weight$", "eagle_module.eagle_output_layer.weight"),
    Spelling(r"^eagle_module\.(?:hnorm|hidden_norm)\.weight$", "eagle_module.decoder.layers.0.input_layernorm.weight"),
    Spelling(
        r"^(eagle_module\.decoder\.layers\.0)\.pre_mlp_layernorm\.weight$", r"\1.mlp.linear_fc1.layer_norm_weight"
    ),
)

EAGLE3 = Family(
    name="eagle3",
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    sections=(
        Section(
            rows=(
                Row("embedding.word_embeddings.weight", "embed_tokens.weight", op=_target_rows, optional=True),
                Row("fc.weight", "fc.weight"),
                Row("enorm.weight", "midlayer.input_layernorm.weight"),
                Row("decoder.layers.0.input_layernorm.weight", "midlayer.hidden_norm.weight"),
                *under(gqa(has("attention_bias"), has("attention_bias")), **_LAYER),
                Row("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "midlayer.post_attention_layernorm.weight"),
                *under(mlp(has("mlp_bias")), **_LAYER),
                Row("decoder.final_layernorm.weight", "norm.weight"),
                Row("eagle_output_layer.weight", "lm_head.weight", op=_draft_rows),
                Row("d2t", "d2t", op=_draft_rows, when=_own_vocab),
                Row("t2d", "t2d", op=_target_rows, optional=True),
            ),
            mcore="eagle_module.",
            role="draft",
            group="eagle3",
        ),
    ),
    defaults={"num_hidden_layers": 1},
    spellings=_SPELLINGS,
    dialects=("midlayer.", "layers.0."),
    check=_one_layer,
)


def rename_dialect(name: str, dialect: str) -> str:
    """An EAGLE3 drafter's tensor name in `dialect` ("midlayer." or "layers.0."), whichever it is in now.

    Raises:
        ConfigMismatch: no such dialect.
    """
    if dialect not in EAGLE3.dialects:
        raise ConfigMismatch(f"unknown EAGLE3 dialect {dialect!r}, expected one of {', '.join(EAGLE3.dialects)}")
    for prefix in EAGLE3.dialects:
        if name.startswith(prefix):
            return dialect + name.removeprefix(prefix)
    return name
