"""Families with experts, latent attention and delta nets: each published tensor is used once and comes back.

What Megatron computes from the result is shown in test_semantic.py; here are all layouts of the source, packed, encoded
and repeated tensors, and the spellings of live and stored Megatron names.
"""

from __future__ import annotations

import pytest
import torch

from converters import ConfigMismatch, MappingError, account, rules_for
from converters.rules.encodings import MxFp4
from converters.semantic.tiny import tiny_config, write_tiny_folder
from tests.converters.live_ranks import load_folder
from tests.converters.support import random_like, same, to_hugging_face, to_megatron

PUBLISHED = {
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
    },
    "kimi_k2": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_nextn_predict_layers": 0},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_nextn_predict_layers": 2,
        "attention_bias": True,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_nextn_predict_layers": 1,
    },
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 1,
    },
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: (config, bf16 tensors as Transformers writes them, MTP layers added)}"""
    root = tmp_path_factory.mktemp("hf")
    out = {}
    for name, published in PUBLISHED.items():
        config = tiny_config(published)
        write_tiny_folder(config, root / name, dtype=torch.bfloat16)
        out[name] = (config, load_folder(root / name))
    return out


def there_and_back(config, tensors):
    """(rules, Megatron tensors), after checking that each tensor is used once and comes back bit by bit."""
    rules, megatron = to_megatron(config, tensors)
    assert account(rules, tensors).ok
    assert account(rules, megatron, "mcore").ok
    back = to_hugging_face(rules, megatron)
    assert back.keys() == tensors.keys()
    assert [name for name in tensors if not same(back[name], tensors[name])] == []
    for mapping in rules.mappings():
        metas = mapping.hf_meta({n: (megatron[n].shape, megatron[n].dtype) for n in mapping.mcore})
        assert [(m.name, m.shape, m.dtype) for m in metas] == [
            (n, tuple(tensors[n].shape), tensors[n].dtype) for n in mapping.hf
        ]
    return rules, megatron


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_is_used_once_and_comes_back_bit_by_bit(models, name):
    config, tensors = models[name]
    rules, megatron = there_and_back(config, tensors)
    drafts = {m.group for m in rules.mappings() if m.role == "draft"}
    depths = config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers") or 0
    assert drafts == {f"mtp.layers.{i}" for i in range(depths)}
    for mcore, tensor in megatron.items():
        if mcore.endswith("router.expert_bias"):
            assert tensor.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_5_moe"])
def test_live_and_stored_spellings_are_known(models, name):
    config, tensors = models[name]
    rules, megatron = to_megatron(config, tensors)
    layer = "decoder.layers.1."
    spelled = {
        f"module.{layer}mlp.experts.local_experts.3.linear_fc2.weight": "mlp.experts.linear_fc2.weight3",
        # The local spec stores the norm of experts under the dense layer's name.
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    if name == "deepseek_v3":
        spelled["decoder.layers.1.self_attention.q_layernorm.weight"] = (
            "self_attention.linear_q_up_proj.layer_norm_weight"
        )
        spelled["decoder.layers.1.self_attention.kv_layernorm.weight"] = (
            "self_attention.linear_kv_up_proj.layer_norm_weight"
        )
        # Dense layers beside them have it in the linear layer.
        dense = rules.canonical("decoder.layers.0.pre_mlp_layernorm.weight")
        assert dense == "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
        live = "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight5"
        assert rules.canonical(live) == "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight5"
    else:
        spelled["decoder.layers.1.input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    if name == "qwen3_5_moe":
        first = rules.canonical("decoder.layers.0.input_layernorm.weight")
        assert first == "decoder.layers.0.self_attention.in_proj.layer_norm_weight"
    for given, canonical in spelled.items():
        assert rules.canonical(given) == layer + canonical
        assert layer + canonical in megatron


def test_an_mtp_layer_that_does_not_repeat_embedding_and_head_is_known_too(models):
    config, tensors = models["deepseek_v3"]
    copies = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    assert copies < tensors.keys()
    without = {name: tensor for name, tensor in tensors.items() if name not in copies}
    _, megatron = there_and_back(config, without)
    assert same(megatron["embedding.word_embeddings.weight"], tensors["model.layers.2.embed_tokens.weight"])
    wrong = dict(tensors)
    wrong["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(MappingError, match=r"shared_head\.head\.weight.*differs"):
        to_megatron(config, wrong)


def test_a_dropped_mtp_layer_is_named(models):
    config, tensors = models["glm4_moe"]
    left = [name for name in tensors if not name.startswith("model.layers.3.")]
    found = account(rules_for(config, left), left)
    assert "model.layers.3.eh_proj.weight" in found.missing
    found = account(rules_for(config | {"num_nextn_predict_layers": 1}, tensors), tensors)
    assert "model.layers.3.eh_proj.weight" in found.unmapped


def test_experts_are_packed_iff_the_source_packs_them_decoder_and_mtp_apart(models):
    config, tensors = models["qwen3_5_moe"]
    packed = {name: t for name, t in tensors.items() if not (name.startswith("model.") and ".experts." in name)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        each = [torch.cat([tensors[f"{prefix}{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in range(4)]
        packed[prefix + "gate_up_proj"] = torch.stack(each)
        packed[prefix + "down_proj"] = torch.stack([tensors[f"{prefix}{e}.down_proj.weight"] for e in range(4)])
    _, apart = there_and_back(config, tensors)
    _, together = there_and_back(config, packed)
    assert apart.keys() == together.keys()
    assert [name for name in apart if not same(apart[name], together[name])] == []


def test_the_language_model_of_a_multimodal_folder_has_its_own_config_and_prefix(models):
    config, tensors = models["qwen3_5_moe"]
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": config,
    }
    renamed = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
               for name, t in tensors.items()}  # fmt: skip
    _, megatron = there_and_back(whole, renamed)
    _, alone = to_megatron(config, tensors)
    assert [name for name in alone if not same(alone[name], megatron[name])] == []
    with pytest.raises(ConfigMismatch, match="no 'text_config'"):
        rules_for({k: v for k, v in whole.items() if k != "text_config"})


def test_what_stands_for_a_family_keeps_its_structure():
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {"model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1, "tie_word_embeddings": True},
    }
    tiny = tiny_config(whole)
    assert (tiny["model_type"], tiny["architectures"]) == ("qwen3_5_moe_text", ["Qwen3_5MoeForCausalLM"])
    assert (tiny["mtp_num_hidden_layers"], tiny["tie_word_embeddings"]) == (1, True)
    kimi = tiny_config({"model_type": "kimi_k2", "num_nextn_predict_layers": 0, "hidden_size": 7168})
    assert (kimi["model_type"], kimi["num_nextn_predict_layers"], kimi["hidden_size"]) == ("deepseek_v3", 0, 32)
    assert tiny_config({"model_type": "deepseek_v3", "q_lora_rank": None})["q_lora_rank"] is None


def test_qwen3_next_takes_its_mtp_layer_from_the_source_where_the_config_does_not_say(models):
    config, tensors = models["qwen3_next"]
    silent = {k: v for k, v in config.items() if k != "num_nextn_predict_layers"}
    there_and_back(silent, tensors)
    assert all(m.role == "target" for m in rules_for(silent).mappings())
    with pytest.raises(ConfigMismatch, match="2 MTP layers"):
        rules_for(config | {"num_nextn_predict_layers": 2})


def test_block_scaled_weights_of_deepseek_are_decoded(models):
    config, tensors = models["deepseek_v3"]
    config = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    stored, want = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in name:
            scale = torch.rand([-(-n // 16) for n in tensor.shape], generator=generator) + 0.5
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scale
            spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
            want[name] = (stored[name].float() * spread).bfloat16()
    rules, megatron = to_megatron(config, stored)
    assert account(rules, stored).ok
    back = to_hugging_face(rules, megatron)
    assert back.keys() == tensors.keys()
    assert [name for name in want if not same(back[name], want[name])] == []


def test_mxfp4_experts_are_decoded_into_the_layout_of_a_bf16_folder(models):
    config, tensors = models["gpt_oss"]
    config = config | {"quantization_config": {"quant_method": "mxfp4"}}
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    generator = torch.Generator().manual_seed(4)
    stored, want = dict(tensors), dict(tensors)
    for name, (rows, columns) in {"gate_up_proj": (96, 32), "down_proj": (32, 32)}.items():
        for layer in range(2):
            full = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 130, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
            plain = torch.zeros(4, rows, columns)
            for e, r, b, k in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
                byte, power = int(blocks[e, r, b, k]), 2.0 ** (int(scales[e, r, b]) - 127)
                for half, code in enumerate((byte & 15, byte >> 4)):
                    plain[e, r, b * 32 + 2 * k + half] = (-1 if code & 8 else 1) * values[code & 7] * power
            del stored[full]
            stored |= {full + "_blocks": blocks, full + "_scales": scales}
            want[full] = plain.bfloat16().mT.contiguous()
    config |= {"intermediate_size": 48}
    down = MxFp4().decode((stored["model.layers.0.mlp.experts.down_proj_blocks"],
                           stored["model.layers.0.mlp.experts.down_proj_scales"]))  # fmt: skip
    assert torch.equal(down, want["model.layers.0.mlp.experts.down_proj"])
    up = MxFp4().decode((stored["model.layers.1.mlp.experts.gate_up_proj_blocks"],
                         stored["model.layers.1.mlp.experts.gate_up_proj_scales"]))  # fmt: skip
    assert torch.equal(up, want["model.layers.1.mlp.experts.gate_up_proj"])
    rules = rules_for(config, stored)
    mapping = rules.by_hf("model.layers.1.mlp.experts.gate_up_proj_scales")
    got = mapping.to_mcore({name: stored[name] for name in mapping.hf_sources(stored)})
    plain = want["model.layers.1.mlp.experts.gate_up_proj"]
    gate = [plain[2, :, 2 * k] for k in range(48)]
    up = [plain[2, :, 2 * k + 1] for k in range(48)]
    assert torch.equal(got["decoder.layers.1.mlp.experts.linear_fc1.weight2"], torch.stack(gate + up))
    with pytest.raises(MappingError, match="MXFP4 blocks"):
        MxFp4().decode((blocks, scales[:1]))


def test_gpt_oss_experts_lie_transposed_with_gate_and_up_alternating(models):
    config, tensors = models["gpt_oss"]
    _, megatron = to_megatron(config, tensors)
    source = tensors["model.layers.0.mlp.experts.gate_up_proj"]  # [experts, hidden, 2 x size]
    size = source.shape[2] // 2
    for e in range(4):
        rows = [source[e, :, k] for k in (*range(0, 2 * size, 2), *range(1, 2 * size, 2))]
        assert same(megatron[f"decoder.layers.0.mlp.experts.linear_fc1.weight{e}"], torch.stack(rows))
        down = tensors["model.layers.0.mlp.experts.down_proj"][e].mT.contiguous()
        assert same(megatron[f"decoder.layers.0.mlp.experts.linear_fc2.weight{e}"], down)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_routed_experts": None}, "no 'num_experts'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"attention_bias": True}, "has no biases"),
    ],
)
def test_a_config_that_the_rules_do_not_cover_is_refused(change, words):
    config = tiny_config(PUBLISHED["deepseek_v3"]) | change
    with pytest.raises(ConfigMismatch, match=words):
        rules_for(config)


def test_hugging_face_names_of_a_round_trip_do_not_depend_on_the_order_of_the_source(models):
    config, tensors = models["glm4_moe"]
    shuffled = dict(sorted(random_like({name: tuple(t.shape) for name, t in tensors.items()}).items(), reverse=True))
    assert [m.hf for m in rules_for(config, shuffled).mappings()] == [
        m.hf for m in rules_for(config, tensors).mappings()
    ]
