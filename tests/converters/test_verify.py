"""Semantic verification sees what a round trip does not: each mistake is planted in both directions alike."""

from __future__ import annotations

import dataclasses
import sys
import warnings

import pytest
import torch

from converters.errors import ConverterError, MappingError, UnsupportedFamilyError
from converters.rules.ops import Chain, Op, Reorder, Same, half_swap
from converters.semantic import SemanticReport, verify_semantics
from converters.semantic.verify import Head
from tests.support import spawn_ranks

DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@dataclasses.dataclass(frozen=True)
class Rounded(Op):
    """fp32 through bf16 and back."""

    def to_mcore(self, hf):
        return (hf[0].bfloat16().float(),)

    def to_hf(self, mcore):
        return (mcore[0].bfloat16().float(),)


def replaced(ending, change):
    def plant(rules):
        mappings = tuple(
            dataclasses.replace(m, op=change(m, rules.config)) if m.mcore[0].endswith(ending) else m
            for m in rules.mappings()
        )
        assert mappings != tuple(rules.mappings())
        return dataclasses.replace(rules, all_mappings=mappings)

    return plant


def without_mtp(rules):
    kept = tuple(m for m in rules.mappings() if m.role == "target")
    return dataclasses.replace(rules, all_mappings=kept)


# Name -> (config, changes to the tiny model, what is done to the rules).
PLANTS = {
    "nothing": (DEEPSEEK, {}, lambda rules: rules),
    "eh_proj halves": (DEEPSEEK, {}, replaced("eh_proj.weight", lambda m, c: half_swap(c.hidden, dim=1))),
    "gate and up": (LLAMA, {}, replaced("linear_fc1.weight", lambda m, c: Chain((Reorder((1, 0)), m.op)))),
    "gate and up of one expert": (
        DEEPSEEK, {}, replaced("layers.1.mlp.experts.linear_fc1.weight3", lambda m, c: Chain((Reorder((1, 0)), m.op))),
    ),
    "q and k": (
        LLAMA,
        {"num_key_value_heads": 4},
        replaced("linear_qkv.weight", lambda m, c: Chain((Reorder((1, 0, 2)), m.op))),
    ),
    "norms of an MTP layer": (DEEPSEEK, {}, lambda rules: exchanged(rules, "enorm.weight", "hnorm.weight")),
    "router bias in bf16": (DEEPSEEK, {}, replaced("router.expert_bias", lambda m, c: Rounded())),
    "padded vocabulary": (LLAMA, {}, replaced("output_layer.weight", lambda m, c: Same())),
    "dropped MTP layer": (DEEPSEEK, {}, without_mtp),
}  # fmt: skip


def exchanged(rules, first, second):
    swap = {first: second, second: first}
    out = []
    for m in rules.mappings():
        ending = next((e for e in swap if m.mcore[0].endswith(e)), None)
        hf = m.hf if ending is None else (m.hf[0].replace(ending, swap[ending]),)
        out.append(dataclasses.replace(m, hf=hf))
    return dataclasses.replace(rules, all_mappings=tuple(out))


def run_plants(rank, world_size):
    """{name: report, or the error's text}"""
    from converters.families import rules_for
    from converters.live import load
    from converters.semantic.verify import check_semantics

    warnings.simplefilter("ignore")
    out = {}
    for name, (config, changes, plant) in PLANTS.items():

        def planted(values, names=None, plant=plant):
            return plant(rules_for(values, names))

        load.rules_for = planted
        try:
            out[name] = check_semantics(config, changes=changes, rules=planted)
        except ConverterError as e:
            out[name] = f"{type(e).__name__}: {e}"
        finally:
            load.rules_for = rules_for
    return out


@pytest.fixture(scope="module")
def reports():
    (found,) = spawn_ranks(run_plants, 1, deadline_s=100)
    return found


@pytest.mark.multiproc
@pytest.mark.slow
def test_right_rules_pass(reports):
    report = reports["nothing"]
    assert report.ok, report
    assert [(h.name, h.against) for h in report.heads] == [
        ("main", "transformers"), ("main", "fp64 reference"), ("mtp 1", "fp64 reference"),
    ]  # fmt: skip
    report.check()


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "heads"),
    [
        ("eh_proj halves", {"mtp 1"}),
        ("gate and up", {"main"}),
        ("gate and up of one expert", {"main", "mtp 1"}),
        ("q and k", {"main"}),
        ("norms of an MTP layer", {"mtp 1"}),
    ],
)
def test_a_swap_made_both_ways_alike_survives_the_round_trip_and_not_the_logits(reports, plant, heads):
    report = reports[plant]
    assert report.changed == ()
    assert {h.name for h in report.heads if not h.ok} == heads
    assert all(h.largest_difference > 1e-4 for h in report.heads if not h.ok)
    with pytest.raises(MappingError, match=r"do not keep what a model computes.*head is"):
        report.check()


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "changed"),
    [("router bias in bf16", "e_score_correction_bias"), ("padded vocabulary", "lm_head.weight")],
)
def test_values_and_shapes_that_are_lost_show_in_the_round_trip(reports, plant, changed):
    report = reports[plant]
    assert report.changed
    assert all(changed in name for name in report.changed)
    with pytest.raises(MappingError, match="do not come back as they were"):
        report.check()


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_dropped_mtp_layer_is_named(reports):
    assert reports["dropped MTP layer"].startswith("MappingError: ")
    assert "model.layers.2." in reports["dropped MTP layer"]


@pytest.mark.multiproc
@pytest.mark.slow
def test_verification_runs_in_a_process_of_its_own():
    report = verify_semantics({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"})
    assert report.ok
    assert report.to_json()["heads"][0]["against"] == "transformers"


def test_what_cannot_be_verified_says_why(monkeypatch):
    with pytest.raises(UnsupportedFamilyError, match="no tiny model of family eagle3"):
        verify_semantics({"architectures": ["LlamaForCausalLMEagle3"]})
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(UnsupportedFamilyError, match="needs transformers: pip install transformers"):
        verify_semantics(LLAMA)


def test_a_report_of_nothing_is_no_success():
    with pytest.raises(MappingError, match="nothing was compared"):
        SemanticReport(family="x", heads=()).check()
    nan = Head(name="main", against="transformers", largest_difference=float(torch.tensor(float("nan"))))
    assert not SemanticReport(family="x", heads=(nan,)).ok
