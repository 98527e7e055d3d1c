"""Real Megatron-Core: what we commit equals what stock saves, and loads in stock and in ours, in several layouts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.megatron import boxes
from tests.checkpoint import megatron_ranks
from tests.support import spawn_ranks


@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4))
def test_boxes_cover_a_flat_range_once_and_in_order(data, shape):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    flat = torch.arange(size).view(shape)
    found = []
    parts = boxes(shape, start, end)
    for offset, extent, first in parts:
        box = flat[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        found += box.reshape(-1).tolist()
        assert box.reshape(-1)[0] == first
    assert found == list(range(start, end))
    assert len(parts) <= max(2 * len(shape) - 1, 1)


def check(results, names):
    for rank, name in itertools.product(range(len(results)), names):
        found = results[rank][name]
        where = f"rank {rank}, {name}: {found}"
        assert found["state"] == "committed", where
        assert found["collectives"] == {}, where
        assert found.get("collectives of the optimizer", {}) == {}, where
        assert found["same keys"], where
        assert found["different"] == [], where
        assert found["num tensors"] > 10, where
        for load in found["loads"]:
            assert load["bad"] == [], where
            assert load["count"] > 0, where
            assert load.get("losses equal", True), where


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_save_without_a_collective_what_stock_saves_and_stock_loads_it_in_every_layout(tmp_path):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    names = ["tp2 plain", "pp2 plain", "dp2 gathered", "dp2 distributed", "tp2 dp_reshardable", "ep2 chained"]
    results = spawn_ranks(megatron_ranks.cases, 2, args=(str(tmp_path), names), gloo=True, deadline_s=200)
    check(results, names)


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_four_ranks_save_without_a_collective_what_stock_saves_and_stock_loads_it_in_every_layout(tmp_path):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    names = ["tp2pp2 plain", "tp2dp2 distributed"]
    results = spawn_ranks(megatron_ranks.cases, 4, args=(str(tmp_path), names), gloo=True, deadline_s=200)
    check(results, names)


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_loading_falls_back_from_damage_to_durable_and_older_and_says_why(tmp_path):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    root, durable = tmp_path / "root", tmp_path / "durable"
    ranks = spawn_ranks(megatron_ranks.ladder, 2, args=(str(root), str(durable)), gloo=True, deadline_s=200)
    assert "no word from rank 1 on" in ranks[0]["silent"]
    for found in ranks:
        assert found["newest"] == (3, "local", True, [])
        assert found["chosen"] == (1, "local", True, [])
        assert found["stock loads damage"]
        step, tier, good, why = found["older"]
        assert (step, tier, good) == (2, "local", True)
        assert "step 3 (local)" in why[0]
        assert "__1_0.distcp was changed after it was sealed" in why[0]
        assert found["durable"][:3] == (2, "durable", True)
        assert ["step 3 (local)" in w or "step 2 (local)" in w for w in found["durable"][3]] == [True, True]
        assert found["durable of the oldest"][:3] == (1, "durable", True)
        assert any("__0_0.distcp" in w and "missing" in w for w in found["durable of the oldest"][3])
        assert "no checkpoint could be loaded" in found["nothing"]
        assert found["nothing"].count("step") >= 5
        assert "'rep'" in found["dropped"]
        assert "asked for by no rank" in found["dropped"]
        assert found["weights only"][:3] == (4, "local", True)
    check_contents([found["contents"] for found in ranks])


def check_contents(ranks):
    four_weights = 4 * 4 << 19
    assert ranks[0]["bytes", 1] - ranks[1]["bytes", 1] > four_weights - 10_000
    for step in (2, 3):
        assert abs(ranks[0]["bytes", step] - ranks[1]["bytes", step]) < 10_000
    for rank, found in enumerate(ranks):
        assert found["all"] == (True, 3, {"data": {"at": 10 + rank}, "curriculum": [1, 2]})
        assert found["stock"]
        assert found["apart"]
        assert found["weights"] == (True, ["iteration", "model"], {})
        assert "was changed after it was sealed" in found["damaged"]
        assert found["saved"] == ([f"w{i}" for i in range(4)], [])
        assert found["weights of four"]
        state, error = found["different opinions"]
        assert state == "failed"
        assert "rank 1 on" in error
        assert "spread its replicas" in error
        assert found["afterwards"] == "committed"


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nodes_with_own_disks_load_what_stock_cannot(tmp_path):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    roots = [tmp_path / f"node{i}" for i in range(2)]
    for path in roots:
        path.mkdir()
    results = spawn_ranks(megatron_ranks.node_local, 2, args=([str(r) for r in roots],), gloo=True, deadline_s=200)
    assert [r["stock has metadata"] for r in results] == [True, False]
    for found in results:
        assert found["own node"]
        assert found["both nodes"]
        assert "missing" in found["without peers"]
