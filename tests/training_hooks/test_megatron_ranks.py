"""Real Megatron-Core on gloo: MTP losses and gradients of every layout against one single-process float64 reference.

One group of processes per world size runs all scenarios of `megatron_ranks`; the tests below read what they saw.
"""

from __future__ import annotations

import functools

import pytest

from tests.support import RankError, spawn_ranks
from tests.training_hooks import matrix, megatron_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2}


@functools.cache
def _outcome(world_size):
    try:
        return spawn_ranks(megatron_ranks.main, world_size, gloo=True, deadline_s=240)
    except RankError as error:
        return error  # raised for every test that asks, instead of running everything again


def seen(world_size, name):
    """The results of one scenario by rank; raises what broke the group of processes."""
    outcome = _outcome(world_size)
    if isinstance(outcome, RankError):
        raise outcome
    return [results[name] for results in outcome]


def test_the_sample_of_the_matrix_covers_every_value_for_every_layout(capsys):
    sample = [c for c in matrix.CASES if c.dtype == "float64" and c.loss_scale is None and not c.selective]
    with capsys.disabled():
        more = len(matrix.CASES) - len(sample)
        print(f"\nparity matrix, {len(sample)} of {12 * len(matrix.LAYOUTS)} combinations and {more} more:")
        print("\n".join("  " + c.name for c in matrix.CASES))
    assert len({c.name for c in matrix.CASES}) == len(matrix.CASES)
    assert {c.layout for c in sample} == set(matrix.LAYOUTS)
    for field, values in (("depths", {1, 2, 3}), ("tied", {False, True}), ("recompute", {False, True})):
        assert {getattr(c, field) for c in sample} == values


@pytest.mark.parametrize("case", matrix.CASES, ids=lambda c: c.name)
def test_mtp_equals_the_reference_and_leaves_the_backbone_alone(case):
    results = seen(matrix.ranks_of(case), case.name)
    tolerance = TOLERANCE[case.dtype]
    holders = [r for r in results if r["mtp"]]
    assert holders
    for result in results:
        assert result["backbone"]
        assert result["tokens"]
    for result in holders:
        assert result["loss"] <= tolerance
        assert result["grad"] <= tolerance
        assert result["smallest"] > 0
    copies = {r["tp_rank"]: r["copy_sum"] for r in results if "copy_sum" in r}
    for result in results:
        if "first_sum" in result and copies:
            assert copies[result["tp_rank"]] == result["first_sum"]


@pytest.mark.parametrize(
    ("world_size", "name"), [(size, name) for size, names in megatron_ranks.TRAPS.items() for name in names]
)
def test_what_stock_gets_wrong_is_right_with_the_hook(world_size, name):
    assert seen(world_size, name) == [None] * world_size  # asserted where the model is


@pytest.mark.parametrize(
    ("world_size", "name"), [(size, name) for size, names in megatron_ranks.CAPTURES.items() for name in names]
)
def test_captured_rows_are_those_of_a_single_process(world_size, name):
    worst = [w for w in seen(world_size, f"capture-{name}") if w is not None]
    assert len(worst) == (2 if name == "dp2" else 1)  # one collecting rank per replica
    assert max(worst) <= (0.0 if name in megatron_ranks.BITWISE else 1e-12)


def test_rows_captured_under_fsdp2_are_those_of_megatron():
    worst, other = seen(2, "capture-fsdp2")
    assert other is None
    assert worst <= 1e-5


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_kernel_on_vocabulary_shards_equals_the_whole_vocabulary(world_size):
    for result in seen(world_size, f"kernel-{world_size}"):
        assert result["value"] <= 1e-12
        assert result["grad"] <= 1e-13
        assert result["accept"] <= 1e-14
        assert result["correct"]
        assert result["poison"]
