"""The tables of each family: every tensor of a Transformers model is accounted for, and lands where it should.

What Megatron computes from the result is shown elsewhere (live export, logits); here the layout is compared with loops
written from the definition, and planted mistakes must show.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from converters import ConfigMismatch, MappingError, UnsupportedFamilyError, account, rules_for
from converters.families.eagle3 import rename_dialect
from tests.converters.support import random_like, same, to_hugging_face, to_megatron

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
# Name -> (architecture, model type, config beyond SIZES); sizes are such that no two dimensions are mixed up unseen.
MODELS = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "llama-mha": ("LlamaForCausalLM", "llama", {"num_key_value_heads": 4}),
    "llama-biases": ("LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama-tied": ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"num_key_value_heads": 1}),
    "qwen2-tied": ("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}),
    "qwen3-biased": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 8, "attention_bias": True}),
}


def transformers_model(name):
    """(config.json as written by Transformers, random bf16 tensors under its names, whether its head is tied)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, model_type, extra = MODELS[name]
    config = AutoConfig.for_model(model_type, **SIZES | extra, architectures=[architecture])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]  # what save_pretrained leaves out
    return config.to_dict(), random_like(shapes)


def mimo(mtp_layers=2, **extra):
    config = SIZES | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": mtp_layers,
    }
    hidden, kv = 24, 12
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (20, hidden),
        "mlp.up_proj.weight": (20, hidden),
        "mlp.down_proj.weight": (hidden, 20),
    }
    joint = {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
        "final_layernorm.weight": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (50, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (50, hidden)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    for i in range(mtp_layers):
        shapes |= {f"model.mtp_layers.{i}.{name}": shape for name, shape in (layer | joint).items()}
    return config | extra, random_like(shapes)


def eagle3(dialect="midlayer.", embedding=False, **extra):
    config = SIZES | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 30,
    }
    layer = {
        "input_layernorm.weight": (24,),
        "hidden_norm.weight": (24,),
        "self_attn.q_proj.weight": (24, 48),
        "self_attn.k_proj.weight": (12, 48),
        "self_attn.v_proj.weight": (12, 48),
        "self_attn.o_proj.weight": (24, 24),
        "post_attention_layernorm.weight": (24,),
        "mlp.gate_proj.weight": (20, 24),
        "mlp.up_proj.weight": (20, 24),
        "mlp.down_proj.weight": (24, 20),
    }
    shapes = {dialect + name: shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (24, 72), "norm.weight": (24,), "lm_head.weight": (30, 24)}
    shapes |= {"d2t": ((30,), torch.int64), "t2d": ((50,), torch.bool)}
    if embedding:
        shapes["embed_tokens.weight"] = (50, 24)
    return config | extra, random_like(shapes)


def check_whole_model(config, tensors, rules, megatron):
    """Accounted for on both sides, bitwise and dtype-strict round trip, and the same shapes without data."""
    assert account(rules, tensors).ok
    assert account(rules, megatron, "mcore").ok
    back = to_hugging_face(rules, megatron)
    assert back.keys() == tensors.keys()
    assert [name for name in tensors if not same(back[name], tensors[name])] == []
    assert all(t.is_contiguous() for t in back.values())
    for mapping in rules.mappings():
        if mapping.mcore[0] not in megatron:
            continue
        header = {name: (megatron[name].shape, megatron[name].dtype) for name in mapping.mcore}
        metas = mapping.hf_meta(header)
        assert [(m.name, m.shape, m.dtype) for m in metas] == [
            (name, tuple(tensors[name].shape), tensors[name].dtype) for name in mapping.hf
        ]


@pytest.fixture(scope="module", params=MODELS)
def known(request):
    return request.param, *transformers_model(request.param)


def test_every_transformers_tensor_is_used_once_and_comes_back_bit_by_bit(known):
    name, config, tensors = known
    rules, megatron = to_megatron(config, tensors)
    check_whole_model(config, tensors, rules, megatron)
    assert {m.role for m in rules.mappings()} == {"target"}
    assert ("output_layer.weight" in megatron) == ("tied" not in name)


def test_qkv_holds_each_query_group_with_its_key_and_value_head(known):
    _, config, tensors = known
    _, megatron = to_megatron(config, tensors)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    for kind in ("weight", "bias"):
        source = "model.layers.1.self_attn.{}_proj." + kind
        if source.format("q") not in tensors:
            continue
        q, k, v = (tensors[source.format(x)].float().numpy() for x in "qkv")
        rows = []
        for group in range(groups):
            for head in range(heads // groups):
                start = (group * (heads // groups) + head) * dim
                rows.append(q[start : start + dim])
            rows.append(k[group * dim : (group + 1) * dim])
            rows.append(v[group * dim : (group + 1) * dim])
        fused = megatron[f"decoder.layers.1.self_attention.linear_qkv.{kind}"]
        assert np.array_equal(fused.float().numpy(), np.concatenate(rows))


def test_gate_comes_before_up_and_is_sharded_apart(known):
    _, config, tensors = known
    rules, megatron = to_megatron(config, tensors)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = (tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert same(megatron[name], torch.cat((gate, up)))
    assert rules.by_mcore(name).blocks(name) == (20, 20)
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert rules.by_mcore(qkv).blocks(qkv) == ()


SWAPS = [
    ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
    ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
    ("model.mtp_layers.0.token_layernorm.weight", "model.mtp_layers.0.hidden_layernorm.weight"),
    ("model.mtp_layers.0.input_layernorm.weight", "model.mtp_layers.1.input_layernorm.weight"),
]


@pytest.mark.parametrize("pair", SWAPS)
def test_two_tensors_of_one_shape_in_each_others_place_show(pair):
    config, tensors = mimo()
    _, right = to_megatron(config, tensors)
    a, b = pair
    _, wrong = to_megatron(config, tensors | {a: tensors[b], b: tensors[a]})
    assert any(not same(right[name], wrong[name]) for name in right)


def test_q_and_k_of_one_shape_in_each_others_place_show():
    config, tensors = transformers_model("llama-mha")
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    _, right = to_megatron(config, tensors)
    _, wrong = to_megatron(config, tensors | {q: tensors[k], k: tensors[q]})
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert not same(right[name], wrong[name])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_mimo_has_any_number_of_mtp_layers(count):
    config, tensors = mimo(count)
    rules, megatron = to_megatron(config, tensors)
    check_whole_model(config, tensors, rules, megatron)
    draft = [m for m in rules.mappings() if m.role == "draft"]
    assert {m.group for m in draft} == {f"mtp.layers.{i}" for i in range(count)}
    assert all(n.startswith("model.mtp_layers.") for m in draft for n in m.hf)
    assert all(not n.startswith("model.mtp_layers.") for m in rules.mappings() if m.role == "target" for n in m.hf)


def test_mimo_joins_hidden_state_first_megatron_the_embedding_first():
    config, tensors = mimo(1)
    _, megatron = to_megatron(config, tensors)
    hidden_state, embedding = torch.randn(24), torch.randn(24)
    by_mimo = tensors["model.mtp_layers.0.input_proj.weight"].float() @ torch.cat((hidden_state, embedding))
    eh_proj = megatron["mtp.layers.0.eh_proj.weight"].float()
    torch.testing.assert_close(eh_proj @ torch.cat((embedding, hidden_state)), by_mimo)
    assert not torch.allclose(eh_proj @ torch.cat((hidden_state, embedding)), by_mimo)
    assert same(megatron["mtp.layers.0.enorm.weight"], tensors["model.mtp_layers.0.token_layernorm.weight"])
    assert same(megatron["mtp.layers.0.hnorm.weight"], tensors["model.mtp_layers.0.hidden_layernorm.weight"])


def test_mappings_come_in_streaming_order():
    rules = rules_for(mimo(1)[0])
    heads = [m.mcore[0].split(".")[:3] for m in rules.mappings()]
    marks = list(dict.fromkeys(".".join(h[:3]) if h[0] in ("decoder", "mtp") else h[0] for h in heads))
    assert marks == [
        "embedding", "decoder.layers.0", "decoder.layers.1", "decoder.final_layernorm.weight", "output_layer",
        "mtp.layers.0",
    ]  # fmt: skip


def test_tensors_that_load_as_one_share_a_group():
    rules = rules_for(SIZES | {"architectures": ["LlamaForCausalLM"]})
    grouped = {m.group: m.hf for m in rules.mappings() if m.group}
    assert len(grouped) == 2 * 2
    assert all(len(names) > 1 for names in grouped.values())


@pytest.mark.parametrize("dialect", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("embedding", [False, True])
def test_eagle3_is_known_in_both_dialects(dialect, embedding):
    config, tensors = eagle3(dialect, embedding)
    rules, megatron = to_megatron(config, tensors)
    check_whole_model(config, tensors, rules, megatron)
    assert {(m.role, m.group) for m in rules.mappings()} == {("draft", "eagle3")}
    assert megatron["eagle_module.d2t"].dtype == torch.int64
    assert megatron["eagle_module.t2d"].dtype == torch.bool
    # Which norm is which can't be seen in shapes.
    assert same(megatron["eagle_module.enorm.weight"], tensors[dialect + "input_layernorm.weight"])
    assert same(
        megatron["eagle_module.decoder.layers.0.input_layernorm.weight"], tensors[dialect + "hidden_norm.weight"]
    )


def test_eagle3_dialects_turn_into_each_other():
    config, tensors = eagle3("midlayer.")
    _, other = eagle3("layers.0.")
    renamed = {rename_dialect(name, "layers.0."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() == other.keys()
    assert {rename_dialect(name, "midlayer.") for name in renamed} == tensors.keys()
    _, a = to_megatron(config, tensors)
    _, b = to_megatron(config, renamed)
    assert a.keys() == b.keys()
    assert all(same(a[name], b[name]) for name in a)
    written = to_hugging_face(rules_for(config, dialect="layers.0."), a)
    assert written.keys() == other.keys()
    with pytest.raises(ConfigMismatch, match="'upper'"):
        rename_dialect("fc.weight", "upper")
    with pytest.raises(ConfigMismatch, match=r"no dialect 'layers\.0\.'"):
        rules_for(mimo()[0], dialect="layers.0.")


def test_eagle3_modules_of_other_writers_have_known_names():
    rules = rules_for(eagle3()[0])
    for given, canonical in {
        "decoder.layer.self_attention.linear_proj.weight": "decoder.layers.0.self_attention.linear_proj.weight",
        "norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "eagle_output_layer.weight",
        "hidden_norm.weight": "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "fc.weight": "fc.weight",
    }.items():
        assert rules.canonical("module.eagle_module." + given) == "eagle_module." + canonical
        assert rules.by_mcore("eagle_module." + given) is not None


def test_eagle3_with_the_targets_vocabulary_needs_no_d2t():
    config, tensors = eagle3(draft_vocab_size=None)
    tensors = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    tensors["lm_head.weight"] = torch.zeros(50, 24)
    assert account(rules_for(config, tensors), tensors).ok


def test_a_tied_head_is_written_only_if_the_source_had_it_or_on_request():
    config, tensors = transformers_model("qwen2-tied")
    rules = rules_for(config)
    assert rules.mcore_copies == {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert rules.by_hf("lm_head.weight") is None
    assert rules.by_mcore("module.output_layer.weight") is None
    with_head = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert account(rules, with_head).unmapped == ("lm_head.weight",)
    rules, megatron = to_megatron(config, with_head)
    check_whole_model(config, with_head, rules, megatron)
    assert "lm_head.weight" in to_hugging_face(rules_for(config, emit_copies=True), megatron)
    live = [*megatron, "output_layer.weight"]
    found = account(rules, live, "mcore")
    assert found.ok
    assert found.ignored == ("output_layer.weight",)
    with_head["lm_head.weight"][3, 3] += 1
    with pytest.raises(MappingError, match=r"lm_head\.weight.*differs"):
        to_megatron(config, with_head)


def test_vocabulary_padding_is_cut_by_the_configs_vocab_size():
    config, tensors = transformers_model("llama")
    rules, megatron = to_megatron(config, tensors)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        megatron[name] = torch.cat((megatron[name], torch.full((14, 24), 9.0, dtype=torch.bfloat16)))
    back = to_hugging_face(rules, megatron)
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_block_scaled_weights_are_decoded_and_their_scales_accounted_for():
    config, tensors = transformers_model("qwen3")
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if "_proj." in name:
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = torch.full([-(-n // 16) for n in tensor.shape], 0.5)
    rules, megatron = to_megatron(config, stored)
    assert account(rules, stored).ok
    down = "model.layers.0.mlp.down_proj.weight"
    want = (stored[down].float() * 0.5).bfloat16()
    assert same(megatron["decoder.layers.0.mlp.linear_fc2.weight"], want)
    assert same(to_hugging_face(rules, megatron)[down], want)
    assert to_hugging_face(rules, megatron).keys() == tensors.keys()
    del stored[down + "_scale_inv"]
    with pytest.raises(MappingError, match=f"{down} is torch.float8_e4m3fn and has no scales"):
        to_megatron(config, stored)


def test_accounting_names_what_is_unmapped_missing_or_given_twice():
    config, tensors = mimo(1)
    rules = rules_for(config)
    names = [n for n in tensors if n != "model.norm.weight"]
    names += ["model.layers.2.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    found = account(rules, names)
    assert found.unmapped == ("model.layers.2.mlp.up_proj.weight",)
    assert found.missing == ("model.norm.weight",)
    assert found.duplicate == ("lm_head.weight",)
    assert found.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    with pytest.raises(MappingError, match=r"folder x: 1 unmapped \(model\.layers\.2.*1 missing.*1 duplicate"):
        found.check("folder x")


def test_megatron_names_are_accounted_for_in_any_spelling():
    config, tensors = mimo(1)
    rules, megatron = to_megatron(config, tensors)
    local = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.0.input_layernorm.weight",
        "mtp.layers.0.eh_proj.weight": "module.mtp.layers.0.eh_proj.weight",
    }
    names = [
        local.get(n, n).replace("mtp.layers.0.transformer_layer", "mtp.layers.0.mtp_model_layer") for n in megatron
    ]
    assert account(rules, [*names, "decoder.layers.0.mlp.linear_fc1._extra_state"], "mcore").ok
    twice = account(rules, [*megatron, *local.values()], "mcore")
    assert set(twice.duplicate) == set(local)


def test_a_mapping_takes_its_own_tensors_only():
    rules = rules_for(mimo()[0])
    mapping = rules.by_hf("model.norm.weight")
    with pytest.raises(MappingError, match=r"takes \['decoder\.final_layernorm\.weight'\], got \[\]"):
        mapping.to_hf({})
    qkv = rules.by_hf("model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(MappingError, match=r"k_proj\.weight.*shape \(47, 24\), expected 2 x 24 = 48 along dimension 0"):
        qkv.to_hf({qkv.mcore[0]: torch.zeros(47, 24)})


def test_the_family_is_found_by_architecture_and_by_type_only_where_there_is_none():
    assert rules_for(SIZES | {"model_type": "qwen2"}).family == "qwen2"
    assert rules_for(eagle3()[0]).family == "eagle3"
    with pytest.raises(UnsupportedFamilyError, match=r"Qwen2ForRewardModel.*known architectures: .*MiMoForCausalLM"):
        rules_for(SIZES | {"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"})
    with pytest.raises(UnsupportedFamilyError, match="known architectures"):
        rules_for({})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"num_hidden_layers": "2"}, "expected an integer"),
        ({"num_key_value_heads": 3}, "4 attention heads for 3"),
        ({"hidden_size": 30}, "hidden_size 30 for 4 heads and no head_dim"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, words):
    with pytest.raises(ConfigMismatch, match=words):
        rules_for(SIZES | {"architectures": ["LlamaForCausalLM"]} | change)


def test_eagle3_of_two_layers_is_refused():
    with pytest.raises(ConfigMismatch, match="num_hidden_layers = 2"):
        rules_for(eagle3(num_hidden_layers=2)[0])
