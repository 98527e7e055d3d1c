"""Spellings of Megatron names lead to one canonical name; stacked keys to one name per layer and expert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters import MappingError, canonical_name
from converters.rules.names import is_ignored, stacked_key, unstacked_name

TRANSFORMER = "mtp.layers.1.transformer_layer."


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("decoder.layers.7.mlp.linear_fc2.weight", "decoder.layers.7.mlp.linear_fc2.weight"),
        ("module.module.output_layer.weight", "output_layer.weight"),
        (
            "decoder.layers.12.input_layernorm.weight",
            "decoder.layers.12.self_attention.linear_qkv.layer_norm_weight",
        ),
        ("module.decoder.layers.0.pre_mlp_layernorm.bias", "decoder.layers.0.mlp.linear_fc1.layer_norm_bias"),
        ("mtp.layers.1.mtp_model_layer.mlp.linear_fc2.weight", TRANSFORMER + "mlp.linear_fc2.weight"),
        (
            "module.mtp.layers.1.mtp_model_layer.input_layernorm.weight",
            TRANSFORMER + "self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
            "decoder.layers.3.mlp.experts.linear_fc1.weight5",
        ),
        # Not a norm that Transformer Engine fuses: the drafter's layer keeps its own.
        (
            "eagle_module.decoder.layers.0.input_layernorm.weight",
            "eagle_module.decoder.layers.0.input_layernorm.weight",
        ),
    ],
)
def test_every_spelling_has_one_canonical_name(spelling, canonical):
    assert canonical_name(spelling) == canonical
    assert canonical_name(canonical) == canonical


def test_state_that_is_no_weight_is_known_by_name():
    assert is_ignored("decoder.layers.0.mlp.linear_fc1._extra_state", "mcore")
    assert is_ignored("decoder.layers.mlp.linear_fc1._extra_state/shard_0_2", "mcore")
    assert is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq", "hf")
    assert not is_ignored("decoder.layers.0.mlp.linear_fc1.weight", "mcore")


@given(
    st.sampled_from(
        [
            ("decoder.layers.{l}.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc1.weight", "l"),
            ("decoder.layers.{l}.mlp.experts.linear_fc1.weight{e}",
             "decoder.layers.mlp.experts.experts.linear_fc1.weight", "le"),
            ("mtp.layers.0.transformer_layer.mlp.experts.linear_fc2.bias{e}",
             "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.bias", "e"),
            ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.weight", ""),
            ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight", ""),
        ]
    ),
    st.integers(0, 200),
    st.integers(0, 300),
)  # fmt: skip
def test_stacked_keys_and_names_are_a_bijection(case, layer, expert):
    template, key, axes = case
    name = template.format(l=layer, e=expert)
    index = tuple({"l": layer, "e": expert}[axis] for axis in axes)
    assert stacked_key(name) == (key, index)
    assert unstacked_name(key, index) == name


@pytest.mark.parametrize("index", [(), (1, 2)])
def test_a_stacked_key_with_another_number_of_axes_is_refused(index):
    with pytest.raises(MappingError, match="does not take the leading indices"):
        unstacked_name("decoder.layers.mlp.linear_fc1.weight", index)
