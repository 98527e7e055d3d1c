"""The engine expresses families that have no table yet: docs/design/0004-converter-rules.md, tried out here.

Mixture of experts (one by one, packed, packed and interleaved), multi-head latent attention with an MTP layer that
repeats embedding and head, gated delta net with gated attention.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from converters import account
from converters.families.dense import EMBEDDING, FINAL_NORM, OUTPUT_LAYER, always, layers
from converters.rules.ops import Chain, Inverse, Par, Same, Shift, Stack, Transpose, concat, interleave
from converters.rules.table import Copy, Family, Row, Section, build, under
from tests.converters.support import random_like, same

E, F, H = 3, 4, 6  # experts, intermediate size of one, hidden size


def count(key):
    return lambda config: config.integer(key)


experts = count("num_experts")


def family(rows, **more):
    section = Section(rows=rows, mcore="decoder.layers.{i}.", hf="model.layers.{i}.", repeat=layers)
    return Family(name="tried", architectures=("Tried",), sections=(section,), **more)


def there_and_back(rules, hf):
    """All Megatron tensors, after checking that each tensor is used once and comes back bit by bit."""
    assert account(rules, hf).ok
    megatron, back = {}, {}
    for mapping in rules.mappings():
        megatron |= mapping.to_mcore({name: hf[name] for name in mapping.hf_sources(hf)})
    assert account(rules, megatron, "mcore").ok
    for mapping in rules.mappings():
        back |= mapping.to_hf({name: megatron[name] for name in mapping.mcore})
    assert back.keys() == hf.keys()
    assert [name for name in hf if not same(hf[name], back[name])] == []
    return megatron


def unpacked(config):
    return Chain((Inverse(Stack(E)), Par((Same(sharded=(F, F)),) * E)))


def packed(config):
    return config.stores("experts.gate_up_proj")


MOE = (
    Row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    Row("mlp.router.weight", "mlp.gate.weight"),
    Row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", optional=True),
    Row(
        "mlp.experts.linear_fc1.weight{e}",
        ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        op=lambda config: concat((F, F)),
        each=experts,
        when=lambda config: not packed(config),
    ),
    Row("mlp.experts.linear_fc1.weight{e}", "mlp.experts.gate_up_proj", op=unpacked, each=experts, when=packed),
    Row(
        "mlp.experts.linear_fc2.weight{e}",
        "mlp.experts.{e}.down_proj.weight",
        each=experts,
        when=lambda config: not packed(config),
    ),
    Row(
        "mlp.experts.linear_fc2.weight{e}",
        "mlp.experts.down_proj",
        op=lambda config: Inverse(Stack(E)),
        each=experts,
        when=packed,
    ),
)
ROUTED = {"post_attention_layernorm.weight": (H,), "mlp.gate.weight": (E, H)}
ROUTED |= {"mlp.gate.e_score_correction_bias": ((E,), torch.float32)}


def test_experts_one_by_one_and_packed_are_told_apart_by_the_source():
    one_by_one = ROUTED | {
        f"mlp.experts.{e}.{n}_proj.weight": (H, F) if n == "down" else (F, H)
        for e in range(E)
        for n in ("gate", "up", "down")
    }
    hf = random_like({f"model.layers.0.{name}": spec for name, spec in one_by_one.items()})
    values = {"num_hidden_layers": 1, "num_experts": E}
    rules = build(family(MOE), values, names=hf)
    apart = there_and_back(rules, hf)
    assert apart["decoder.layers.0.mlp.router.expert_bias"].dtype == torch.float32
    # A live SequentialMLP, and the norm that a dense layer would fuse.
    local = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"
    assert rules.canonical(local) == "decoder.layers.0.mlp.experts.linear_fc1.weight2"
    assert rules.by_mcore("module.decoder.layers.0.pre_mlp_layernorm.weight") is not None

    prefix = "model.layers.0.mlp.experts."
    whole = {name: tensor for name, tensor in hf.items() if ".experts." not in name}
    whole[prefix + "gate_up_proj"] = torch.stack(
        [torch.cat([hf[f"{prefix}{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in range(E)]
    )
    whole[prefix + "down_proj"] = torch.stack([hf[f"{prefix}{e}.down_proj.weight"] for e in range(E)])
    packed_rules = build(family(MOE), values, names=whole)
    together = there_and_back(packed_rules, whole)
    assert together.keys() == apart.keys()
    assert all(same(together[name], apart[name]) for name in apart)
    for found in (rules, packed_rules):
        name = "decoder.layers.0.mlp.experts.linear_fc1.weight1"
        assert found.by_mcore(name).blocks(name) == (F, F)


def test_packed_transposed_interleaved_experts():
    op = Chain(
        (
            Transpose(1, 2),
            Inverse(interleave(F, (1, 1), dim=1)),
            concat((F, F), dim=1),
            Inverse(Stack(E)),
            Par((Same(sharded=(F, F)),) * E),
        )
    )
    rows = (Row("mlp.experts.linear_fc1.weight{e}", "mlp.experts.gate_up_proj", op=lambda config: op, each=experts),)
    source = "model.layers.0.mlp.experts.gate_up_proj"
    hf = random_like({source: (E, H, 2 * F)})
    megatron = there_and_back(build(family(rows), {"num_hidden_layers": 1, "num_experts": E}), hf)
    for e in range(E):
        columns = [hf[source][e, :, k] for k in (*range(0, 2 * F, 2), *range(1, 2 * F, 2))]
        assert same(megatron[f"decoder.layers.0.mlp.experts.linear_fc1.weight{e}"], torch.stack(columns))


MLA = (
    Row("input_layernorm.weight", "input_layernorm.weight"),
    Row("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    Row("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    Row("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    Row("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    Row("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    Row("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    Row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
mtp = count("num_nextn_predict_layers")


def in_mtp(name):
    return Copy(when=always, hf="model.layers.{j}." + name, repeat=mtp, first=layers)


DEEPSEEK = Family(
    name="deepseek",
    architectures=("Tried",),
    sections=(
        Section(rows=(dataclasses.replace(EMBEDDING, copies=(in_mtp("embed_tokens.weight"),)),)),
        Section(rows=MLA, mcore="decoder.layers.{i}.", hf="model.layers.{i}.", repeat=layers),
        Section(rows=(FINAL_NORM, dataclasses.replace(OUTPUT_LAYER, copies=(in_mtp("shared_head.head.weight"),)))),
        Section(
            rows=(
                Row("eh_proj.weight", "eh_proj.weight"),
                *under(MLA, mcore="transformer_layer."),
                Row("final_layernorm.weight", "shared_head.norm.weight"),
            ),
            mcore="mtp.layers.{i}.",
            hf="model.layers.{j}.",
            repeat=mtp,
            first=layers,
            role="draft",
        ),
    ),
)


@pytest.mark.parametrize("copied", [True, False])
def test_latent_attention_with_an_mtp_layer_numbered_on_that_may_repeat_embedding_and_head(copied):
    values = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "vocab_size": 8}
    plain = build(DEEPSEEK, values)
    shapes = {name: (8, H) if "embed" in name or "head.w" in name else (H,) for m in plain.mappings() for name in m.hf}
    hf = random_like(shapes)
    assert "model.layers.2.shared_head.norm.weight" in hf
    if copied:
        hf["model.layers.2.embed_tokens.weight"] = hf["model.embed_tokens.weight"].clone()
        hf["model.layers.2.shared_head.head.weight"] = hf["lm_head.weight"].clone()
    megatron = there_and_back(build(DEEPSEEK, values, names=hf), hf)
    assert len(megatron) == len(shapes)


G, R, DK, DV = 2, 3, 2, 4  # key heads, value heads per key head, their sizes
LINEAR = (
    Row(
        "self_attention.in_proj.weight",
        ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
        op=lambda config: Chain(
            (
                Par((Inverse(interleave(G, (DK, DK, R * DV, R * DV))), Inverse(interleave(G, (R, R))))),
                concat((G * DK, G * DK, G * R * DV, G * R * DV, G * R, G * R)),
            )
        ),
    ),
    Row("self_attention.out_norm.weight", "linear_attn.norm.weight", op=lambda config: Shift(-1.0)),
    Row("self_attention.A_log", "linear_attn.A_log"),
)
N, D = 2, 3  # query heads per group, head size, of the gated full attention
FULL = (
    Row(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        op=lambda config: Chain(
            (
                Par((Inverse(interleave(G * N, (D, D))), Same(), Same())),
                interleave(G, (N * D, N * D, D, D)),
            )
        ),
    ),
)
HYBRID = (
    *(dataclasses.replace(row, at=lambda config, layer: layer % 2 == 0) for row in LINEAR),
    *(dataclasses.replace(row, at=lambda config, layer: layer % 2 == 1) for row in FULL),
)


def test_gated_delta_net_and_gated_attention_alternate():
    hf = random_like(
        {
            "model.layers.0.linear_attn.in_proj_qkvz.weight": (G * (2 * DK + 2 * R * DV), H),
            "model.layers.0.linear_attn.in_proj_ba.weight": (2 * G * R, H),
            "model.layers.0.linear_attn.A_log": ((G * R,), torch.float32),
            "model.layers.1.self_attn.q_proj.weight": (2 * G * N * D, H),
            "model.layers.1.self_attn.k_proj.weight": (G * D, H),
            "model.layers.1.self_attn.v_proj.weight": (G * D, H),
        }
    )
    hf["model.layers.0.linear_attn.norm.weight"] = torch.linspace(0.5, 2.0, DV).bfloat16()
    rules = build(family(HYBRID), {"num_hidden_layers": 2})
    megatron = there_and_back(rules, hf)

    per_head = 2 * DK + 2 * R * DV
    qkvz = hf["model.layers.0.linear_attn.in_proj_qkvz.weight"].float().numpy()
    ba = hf["model.layers.0.linear_attn.in_proj_ba.weight"].float().numpy()
    rows = []
    for start, stop in itertools.pairwise((0, DK, 2 * DK, 2 * DK + R * DV, per_head)):
        rows += [qkvz[g * per_head + r] for g in range(G) for r in range(start, stop)]
    for part in range(2):
        rows += [ba[g * 2 * R + part * R + r] for g in range(G) for r in range(R)]
    name = "decoder.layers.0.self_attention.in_proj.weight"
    assert np.array_equal(megatron[name].float().numpy(), np.stack(rows))
    assert rules.by_mcore(name).blocks(name) == (4, 4, 24, 24, 6, 6)

    q, k, v = (hf[f"model.layers.1.self_attn.{x}_proj.weight"].float().numpy() for x in "qkv")
    rows = []
    for g in range(G):
        for part in range(2):  # the queries of the group, then their gates
            rows += [q[((g * N + n) * 2 + part) * D + d] for n in range(N) for d in range(D)]
        rows += [*k[g * D : (g + 1) * D], *v[g * D : (g + 1) * D]]
    fused = megatron["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert np.array_equal(fused.float().numpy(), np.stack(rows))
