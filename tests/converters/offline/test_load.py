"""Stock Megatron-Core loads what `convert` writes, computes Transformers' logits, and its own saves convert back.

Loading is strict both ways: a key that the model asks for and the checkpoint lacks raises, and so does one too many.
"""

from __future__ import annotations

import json

import pytest
import torch

import converters
from converters.semantic.reference import reference_logits
from tests.converters.live_ranks import load_folder, tokens
from tests.converters.offline.load_ranks import LAYOUTS, run_cases
from tests.converters.offline.support import assert_same_tensors
from tests.converters.test_live_megatron import BASE, make_folder
from tests.support import spawn_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

MODELS = ("llama-fp32", "llama-tied-fp32", "qwen2-fp32", "qwen3-fp32", "mimo1-fp32", "mimo2-fp32")
CASES = [
    *((model, "stacked", layout) for model in MODELS for layout in LAYOUTS),
    ("qwen3-fp32", "per-layer", "tp2"),
    ("mimo2-fp32", "per-layer", "pp2"),
    ("llama-fp32", "singleton", "tp2"),
    ("mimo2-fp32", "singleton", "pp2"),
]
IDS = ["-".join(case) for case in CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {name: make_folder(name, root / name) for name in MODELS}


@pytest.fixture(scope="module")
def loaded(folders, tmp_path_factory):
    """({case: logits of the model}, folder of what stock Megatron-Core saved)."""
    root = tmp_path_factory.mktemp("mcore")
    cases = {}
    for model, layers, layout in CASES:
        path = root / f"{model}-{layers}"
        if not path.exists():
            converters.convert(folders[model], path, layout=layers, extra_state="linear", verify="bits")
        with open(f"{folders[model]}/config.json") as file:
            cases[model, layers, layout] = (str(path / "release"), json.load(file))
    ranks = spawn_ranks(run_cases, 2, args=(cases, str(root / "saved")), gloo=True, deadline_s=110)
    logits = {case: next(r[case] for r in reversed(ranks) if r[case] is not None) for case in CASES}
    return logits, root / "saved"


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_stock_load_computes_the_logits_of_the_folder(loaded, folders, case):
    model = case[0]
    got = [torch.from_numpy(x) for x in loaded[0][case]]
    if model.startswith("mimo"):
        with open(f"{folders[model]}/config.json") as file:
            want = reference_logits(load_folder(folders[model]), json.load(file), tokens(BASE))
        assert len(got) == len(want) == 1 + int(model[4])
    else:
        from transformers import AutoModelForCausalLM

        with torch.no_grad():
            want = [AutoModelForCausalLM.from_pretrained(folders[model]).eval()(tokens(BASE)).logits]
    for depth, (a, b) in enumerate(zip(got, want, strict=True)):
        length = a.shape[1] - depth
        assert (a[:, :length] - b[:, :length]).abs().max() < 1e-5


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "tp1"])
@pytest.mark.parametrize("model", MODELS)
def test_what_stock_megatron_saves_converts_back_to_the_same_folder(loaded, folders, tmp_path, model, layout):
    report = converters.convert(loaded[1] / f"{model}-{layout}", tmp_path / "h", hf=folders[model], verify="bits")
    assert (report.padding_elements > 0) == (layout == "tp2" or BASE["vocab_size"] % 8 > 0)
    assert_same_tensors(load_folder(tmp_path / "h"), load_folder(folders[model]))
    if not model.startswith("mimo"):
        from transformers import AutoModelForCausalLM

        _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "h", output_loading_info=True)
        assert not any(found.values())
