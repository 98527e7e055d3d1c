"""Sizes of parallel groups are refused before anything is built, by Megatron's conditions and no others."""

from __future__ import annotations

import pytest

from converters.errors import TopologyError
from converters.live import ParallelGroups, Topology
from converters.semantic.tiny import tiny_config

QWEN3_MOE = tiny_config({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"})
LLAMA = tiny_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({}, 1),
        ({"tp": 2, "ep": 2, "etp": 1, **SP}, 4),  # EP * ETP is less than TP * DP
        ({"tp": 2, "ep": 4, "etp": 1, **SP}, 4),  # and may be the whole world,
        ({"tp": 4, "ep": 2, "etp": 1, **SP}, 4),  # or less than TP
        ({"ep": 2, "etp": 2}, 8),
        ({"pp": 2, "ep": 2, "cp": 2}, 8),
        ({"tp": 4, **SP}, 4),  # fewer key/value heads than ranks
    ],
)
def test_what_megatron_runs_passes(sizes, world):
    Topology(**sizes).check(world, QWEN3_MOE)


@pytest.mark.parametrize(
    ("sizes", "world", "words"),
    [
        ({"tp": 2, "pp": 2}, 6, r"TP2 PP2 CP1 EP1 ETP2 on 6 ranks: the world is no multiple of TP \* PP \* CP = 4"),
        ({"cp": 3}, 4, r"TP \* PP \* CP = 3"),
        ({"ep": 4, "pp": 2}, 4, r"the world is no multiple of EP \* ETP \* PP = 8"),
        ({"tp": 2, "ep": 2}, 2, r"EP \* ETP \* PP = 4"),  # ETP is TP unless said otherwise
        ({"ep": 0}, 2, "EP = 0: expected at least 1"),
        ({"vpp": 2}, 1, "VPP = 2 needs PP > 1"),
        ({"ep": 3}, 3, "4 experts are no multiple of EP = 3"),
        ({"etp": 3}, 3, "experts of size 16 are no multiple of ETP = 3"),
        ({"pp": 4}, 4, r"2 layers are no multiple of PP \* VPP = 4"),
        ({"tp": 3, **SP}, 3, "4 attention heads are no multiple of TP = 3.*2 key/value heads and TP = 3"),
        ({"tp": 2}, 2, "experts with TP = 2 need sequence parallelism"),
    ],
)
def test_what_it_does_not_is_refused_and_said(sizes, world, words):
    with pytest.raises(TopologyError, match=words):
        Topology(**sizes).check(world, QWEN3_MOE)


def test_a_dense_model_has_no_experts_to_share():
    Topology(tp=2).check(2, LLAMA)
    with pytest.raises(TopologyError, match="EP = 2, but the llama model has no experts"):
        Topology(ep=2).check(2, LLAMA)


def test_groups_that_do_not_add_up_are_refused():
    with pytest.raises(TopologyError, match="the expert group has 1 ranks, expected EP2 x ETP1"):
        ParallelGroups(ep_size=2)
