"""A tiny model of every family, loaded into real Megatron-Core by the rules: the same logits, the same bytes back.

Transformers computes the main head, a plain fp64 reference the MTP heads; mbridge is an independent loader. Layouts
cross tensor, pipeline, expert and expert-tensor parallelism with the three modules that hold experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from converters.offline import convert
from converters.semantic.tiny import tiny_config, write_tiny_folder
from converters.semantic.verify import BOUND, compare_heads
from tests.converters.live_ranks import load_folder
from tests.converters.semantic_ranks import run_cases
from tests.support import spawn_ranks

# One test of each world size waits for all of its cases.
pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(240)]

# Name -> (what a published config says about its structure, changes to the tiny one).
MODELS = {
    "llama": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, {}),
    "qwen2": ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}, {}),
    "qwen3": ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, {}),
    "qwen3_moe": ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}, {}),
    "qwen3_moe-mixed": (
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": False},
        {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "mixtral": ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, {}),
    "deepseek_v3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        {},
    ),
    "deepseek_v3-direct": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": None},
        {"num_nextn_predict_layers": 2, "num_hidden_layers": 4},
    ),
    "glm4_moe": (
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "num_nextn_predict_layers": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        {},
    ),
    "mimo": ({"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 2}, {}),
    "qwen3_next": (
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_nextn_predict_layers": 1},
        {},
    ),
    "qwen3_5": (
        {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "mtp_num_hidden_layers": 1,
        },
        {},
    ),
}
DENSE = ("llama", "qwen2", "qwen3")
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5")
MTP = ("deepseek_v3", "deepseek_v3-direct", "glm4_moe", "mimo", "qwen3_next", "qwen3_5")
BF16 = ("qwen3_moe-bf16", "deepseek_v3-bf16", "glm4_moe-bf16")

CONVERTED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "mimo",
    "qwen3_next",
    "qwen3_5",
)

CASES = {
    1: [
        *((model, "tp1sequential", "torch_dist") for model in CONVERTED),
        *((model, "tp1", "ranges") for model in MODELS),
        ("qwen3_moe", "local", "ranges"),
        ("qwen3_moe", "tp1", "mbridge"),
        ("qwen3", "tp1", "mbridge"),
    ],
    2: [
        # Dense models by ranges: the layouts of test_live_megatron.py are enough.
        *((model, layout, "ranges") for model in MODELS if model not in DENSE for layout in ("tp2", "pp2")),
        *((model, "ep2", "ranges") for model in EXPERTS),
        *((model, "ep2sequential", "ranges") for model in ("qwen3_moe", "deepseek_v3")),
        *((model, "ep2grouped", "ranges") for model in BF16),
        *((model, "tp2ep2etp1", "ranges") for model in ("qwen3_moe", "deepseek_v3")),
        ("glm4_moe", "etp2", "ranges"),
        *((model, layout, "torch_dist") for model in CONVERTED for layout in ("tp2sequential", "pp2sequential")),
        *((model, "ep2sequential", "torch_dist") for model in EXPERTS),
        ("qwen3_moe", "ep2", "mbridge"),
        ("qwen3_moe", "tp2", "mbridge"),
    ],
    4: [
        *((model, layout, "ranges") for model in ("qwen3_moe", "deepseek_v3", "glm4_moe") for layout in (
            "tp2ep2", "tp2ep2sequential", "pp2ep2", "ep4", "cp2ep2",
        )),
        ("mixtral", "tp2ep2", "ranges"),
        ("deepseek_v3-direct", "vpp2ep2", "ranges"),
        ("qwen3_moe-mixed", "vpp2ep2", "ranges"),
        ("qwen3_moe", "tp4", "ranges"),
        *((model, "tp2ep2grouped", "ranges") for model in BF16),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    out = {}
    for name in [*MODELS, *BF16]:
        model, dtype = name.removesuffix("-bf16"), torch.bfloat16 if name in BF16 else torch.float32
        published, changes = MODELS[model]
        folder = root / name
        out[name] = str(write_tiny_folder(tiny_config(published, **changes), folder, dtype=dtype, seed=len(name)))
    return out


@pytest.fixture(scope="module")
def checkpoints(folders, tmp_path_factory):
    """The folders converted to `torch_dist`, as stock Megatron reads it."""
    root = tmp_path_factory.mktemp("mcore")
    for model in CONVERTED:
        convert(folders[model], root / model, extra_state="linear")
    return {model: str(root / model / "release") for model in CONVERTED}


class Runs:
    """[result of each rank] by case; the cases of one world size run together, when the first of them is asked for."""

    def __init__(self, folders, checkpoints):
        self.args = (folders, checkpoints)
        self.done = {}

    def __getitem__(self, case):
        world_size = next(size for size, cases in CASES.items() if case in cases)
        if world_size not in self.done:
            folders, checkpoints = self.args
            args = (folders, CASES[world_size], checkpoints)
            self.done[world_size] = spawn_ranks(run_cases, world_size, args=args, gloo=True, deadline_s=200)
        return [rank[case] for rank in self.done[world_size]]


@pytest.fixture(scope="module")
def found(folders, checkpoints):
    return Runs(folders, checkpoints)


ALL = [case for cases in CASES.values() for case in cases]


def params(cases):
    return [pytest.param(case, id="-".join(case)) for case in cases]


@pytest.mark.parametrize("case", params(ALL))
def test_what_was_loaded_is_exported_bit_by_bit(found, folders, case):
    ranks = found[case]
    assert [name for rank in ranks for name in rank["wrong"]] == []
    exported = [name for rank in ranks for name in rank["exported"]]
    assert sorted(exported) == sorted(load_folder(folders[case[0]])), "each tensor exactly once, over all ranks"
    for rank in ranks:
        assert rank["exported"] == (rank["planned"] if rank["sender"] else [])


COMPUTED = [c for c in ALL if "bf16" not in c[0] and "cp" not in c[1]]


@pytest.mark.parametrize("case", params(COMPUTED))
def test_megatron_computes_the_logits_of_the_published_model(found, folders, case):
    heads = compare_heads(Path(folders[case[0]]), found[case][0]["config"], logits(found[case]))
    assert [head for head in heads if not head.ok] == []
    witnesses = {head.against for head in heads}
    assert witnesses == ({"fp64 reference"} if case[0] in MTP else set()) | (
        {"transformers"} if case[0] != "mimo" else set()
    )
    if case[0] in MTP:
        config = found[case][0]["config"]
        depths = config.get("num_nextn_predict_layers") or config["mtp_num_hidden_layers"]
        assert [h.name for h in heads if h.name != "main"] == [f"mtp {k + 1}" for k in range(depths)]


def logits(ranks):
    (found,) = [rank["logits"] for rank in ranks if "logits" in rank]
    return [torch.from_numpy(x) for x in found]


READ = [c for c in ALL if c[2] == "ranges"]


@pytest.mark.parametrize("case", params(READ))
def test_each_rank_reads_the_bytes_of_its_own_shards(found, case):
    for rank in found[case]:
        if case[0] == "mimo":
            assert {name.split(".")[-2] for name in rank["read_whole"]} <= {"eh_proj"}
        elif not rank["read_whole"]:
            assert rank["read_bytes"] == rank["held_bytes"]
        else:
            # The one norm of a delta net that is shifted, and replicated anyway.
            assert {name.split(".")[-2] for name in rank["read_whole"]} == {"out_norm"}
            assert rank["read_bytes"] == rank["held_bytes"]


WITNESSED = [c for c in ALL if c[2] == "mbridge"]


@pytest.mark.parametrize("case", params(WITNESSED))
def test_mbridge_loads_and_exports_the_same(found, case):
    assert [name for rank in found[case] for name in rank["mbridge"]] == []


def test_logits_are_of_the_order_of_one(found):
    """The bound on differences means something."""
    for case in COMPUTED:
        assert 0.5 < max(abs(x).max() for x in logits(found[case])).item() < 50, case
    assert BOUND == 1e-5
