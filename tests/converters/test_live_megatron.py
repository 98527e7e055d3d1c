"""A live Megatron-Core model that an independent loader filled exports what was in the folder, in bits and logits."""

from __future__ import annotations

import json

import pytest
import torch

from converters.semantic.reference import reference_logits
from tests.converters.live_ranks import DTYPES, load_folder, run_cases, tokens
from tests.support import spawn_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mimo": "MiMoForCausalLM",
}


# Model names: family, number of MTP layers where it has some, "-tied", dtype.
MODELS = {
    "llama": ["fp32", "bf16"],
    "llama-tied": ["fp32"],
    "qwen2": ["fp32"],
    "qwen2-tied": ["fp32", "bf16"],
    "qwen3": ["fp32"],
    "qwen3-tied": ["bf16"],
    "mimo1": ["fp32"],
    "mimo2": ["fp32", "bf16"],
    "mimo1-tied": ["fp32"],
}
ALL = [f"{name}-{dtype}" for name, dtypes in MODELS.items() for dtype in dtypes]
CASES = {
    1: [(model, "tp1") for model in ALL],
    2: [
        *((model, "tp2") for model in ALL),
        *((model, "pp2") for model in ("llama-fp32", "qwen2-tied-bf16", "mimo1-fp32", "mimo1-tied-fp32", "mimo2-bf16")),
        *((model, "vpp2") for model in ("llama-tied-fp32", "qwen3-fp32", "mimo2-fp32", "mimo1-tied-fp32")),
        ("qwen3-fp32", "tp2sp"),
        ("qwen2-fp32", "dp2"),
    ],
    4: [
        *((model, "tp2pp2") for model in ("qwen3-fp32", "qwen2-tied-fp32", "mimo2-fp32", "mimo1-tied-fp32")),
        ("llama-bf16", "tp4"),
    ],
}


def make_folder(name, folder):
    """A Hugging Face folder of random weights; those that Transformers knows are saved by Transformers."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    family, *marks = name.split("-")
    depth = int(family[4:]) if family.startswith("mimo") else 0
    kind = "mimo" if depth else family
    dtype = DTYPES[marks[-1]]
    config = {
        **BASE,
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "tie_word_embeddings": "tied" in marks,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if depth:
        config["num_nextn_predict_layers"] = depth
    known = {**config, "model_type": "qwen2" if depth else kind}
    generator = torch.Generator().manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known), dtype=dtype)
    for parameter in model.parameters():
        randomise(parameter.data, generator)
    model.save_pretrained(folder)
    if depth:
        tensors = load_folder(folder)
        layer = {k: v for k, v in tensors.items() if k.startswith("model.layers.0.")}
        h = BASE["hidden_size"]
        for i in range(depth):
            prefix = f"model.mtp_layers.{i}."
            extra = {prefix + k.removeprefix("model.layers.0."): torch.empty_like(v) for k, v in layer.items()}
            norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
            extra |= {f"{prefix}{norm}.weight": torch.empty(h, dtype=dtype) for norm in norms}
            extra[prefix + "input_proj.weight"] = torch.empty(h, 2 * h, dtype=dtype)
            for tensor in extra.values():
                randomise(tensor, generator)
            tensors |= extra
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def randomise(tensor, generator):
    # Vectors are norms and biases: away from 1 and 0, where a lost or a swapped one would not show.
    noise = torch.randn(tensor.shape, generator=generator)
    tensor.copy_(noise * 0.1 if tensor.dim() > 1 else 1 + 0.2 * noise)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {name: make_folder(name, root / name) for name in ALL}


@pytest.fixture(scope="module")
def exports(folders, tmp_path_factory):
    """{(model, layout): [result of each rank]}, from one group of processes per world size."""
    out = tmp_path_factory.mktemp("exported")
    found = {}
    for world_size, cases in CASES.items():
        ranks = spawn_ranks(run_cases, world_size, args=(folders, cases, str(out)), gloo=True, deadline_s=100)
        found |= {case: [rank[case] for rank in ranks] for case in cases}
    return found


PARAMS = [pytest.param(case, id="-".join(case)) for cases in CASES.values() for case in cases]


@pytest.mark.parametrize("case", PARAMS)
def test_export_equals_what_mbridge_loaded(exports, folders, case):
    ranks = exports[case]
    assert [name for rank in ranks for name in rank["wrong"]] == []
    exported = [name for rank in ranks for name in rank["exported"]]
    assert sorted(exported) == sorted(load_folder(folders[case[0]])), "each tensor exactly once, over all ranks"
    for rank in ranks:
        assert rank["exported"] == (rank["planned"] if rank["sender"] else [])


@pytest.mark.parametrize("case", PARAMS)
def test_written_folder_holds_the_same_tensors(exports, folders, case):
    from tests.converters.support import same

    written, source = load_folder(exports[case][0]["folder"]), load_folder(folders[case[0]])
    assert written.keys() == source.keys()
    for name, tensor in written.items():
        if name.endswith("input_proj.weight"):
            tensor = torch.cat(tensor.chunk(2, 1)[::-1], 1)
        assert same(tensor, source[name]), name


FP32 = [case for case in (c for cases in CASES.values() for c in cases) if case[0].endswith("fp32")]


@pytest.mark.parametrize("case", [pytest.param(c, id="-".join(c)) for c in FP32 if not c[0].startswith("mimo")])
def test_transformers_computes_megatrons_logits_from_the_written_folder(exports, case):
    from transformers import AutoModelForCausalLM

    ranks = exports[case]
    (logits,) = megatron_logits(ranks)
    model = AutoModelForCausalLM.from_pretrained(ranks[0]["folder"])
    assert model.dtype == torch.float32
    with torch.no_grad():
        want = model(tokens(BASE)).logits
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)


MIMO = [pytest.param(c, id="-".join(c)) for c in FP32 if c[0].startswith("mimo")]


@pytest.mark.parametrize("case", MIMO)
def test_a_plain_reference_computes_megatrons_mtp_logits_from_the_written_folder(exports, case):
    assert mtp_error(exports[case]) < 1e-5


@pytest.mark.parametrize("case", MIMO[:2])
def test_the_reference_sees_what_a_round_trip_does_not(exports, case):
    """A rule that is wrong in both directions alike gives back what went in; only the logits tell."""

    def swapped(tensors):
        return {
            name: torch.cat(tensor.chunk(2, 1)[::-1], 1) if name.endswith("input_proj.weight") else tensor
            for name, tensor in tensors.items()
        }

    def norms_exchanged(tensors):
        other = {"token_layernorm": "hidden_layernorm", "hidden_layernorm": "token_layernorm"}
        part = lambda name: name.split(".")[-2]  # noqa: E731
        return {
            name: tensors[name.replace(part(name), other[part(name)])] if part(name) in other else tensor
            for name, tensor in tensors.items()
        }

    assert mtp_error(exports[case], swapped) > 1e-2
    assert mtp_error(exports[case], norms_exchanged) > 1e-2


def mtp_error(ranks, change=lambda tensors: tensors):
    """Largest difference between Megatron's logits and the reference's, over the main head and all depths."""
    folder = ranks[0]["folder"]
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    want = reference_logits(change(load_folder(folder)), config, tokens(BASE))
    got = megatron_logits(ranks)
    assert len(got) == len(want) == 1 + config["num_nextn_predict_layers"]
    errors = [
        (g[:, : g.shape[1] - k] - w[:, : w.shape[1] - k]).abs().max().item()
        for k, (g, w) in enumerate(zip(got, want, strict=True))
    ]
    return max(errors)


def megatron_logits(ranks):
    (logits,) = [rank["logits"] for rank in ranks if "logits" in rank and rank["sender"]]
    return [torch.from_numpy(x) for x in logits]
