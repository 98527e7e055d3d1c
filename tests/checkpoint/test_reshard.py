"""A save of one layout goes on in another: the same parameters and moments bit by bit, and the same training."""

from __future__ import annotations

import pytest

from tests.checkpoint import reshard_ranks
from tests.support import spawn_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    base = tmp_path_factory.mktemp("reshard")
    return spawn_ranks(reshard_ranks.observe_all, 1, args=(str(base), list(reshard_ranks.SAVES)), deadline_s=280)[0]


@pytest.mark.parametrize("name", reshard_ranks.SAME)
def test_ten_steps_after_a_load_in_the_same_layout_are_those_of_an_uninterrupted_run(seen, name):
    for state, error, _ in seen[name]["saved"]:
        assert (state, error) == ("committed", "")
    losses = seen[name]["saved"][0][2]
    assert len(set(losses)) == reshard_ranks.STEPS_AFTER
    for found in seen[name]["same ours"]:
        assert found["bad"] == []
        assert found["count"] > 20
        assert found["losses"] == losses


@pytest.mark.parametrize("load", list(reshard_ranks.DENSE_LOADS))
@pytest.mark.parametrize("name", ["tp2pp2 plain", "tp2dp2 distributed"])
def test_another_layout_has_the_same_parameters_and_moments_and_trains_on(seen, name, load):
    losses = seen[name]["saved"][0][2]
    for found in seen[name][f"{load} ours"]:
        assert found["bad"] == []
        assert found["count"] > 5
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        # Random states are one per place in the grid of PP and TP, which the last of these has in common.
        assert ("bound to the layout" in found["rng"]) == ((name, load) != ("tp2dp2 distributed", "tp2")), found["rng"]


CHAINS = [(name, load) for name, loads in reshard_ranks.OTHER_CHAINS.items() for load in loads]


@pytest.mark.parametrize(("name", "load"), CHAINS)
def test_stock_fails_on_another_number_of_optimizers(seen, name, load):
    """A limit of Megatron-Core 0.16.1, pinned: with EP 2 it chains two optimizers, with EP 1 it has one."""
    expected = "RuntimeError: Expected 2 entries" if load == "ep2" else "KeyError"
    for found in seen[name][f"{load} stock"]:
        assert found["error"].startswith(expected), found


@pytest.mark.parametrize(("name", "load"), CHAINS)
def test_another_number_of_optimizers_is_refused_by_name_and_the_weights_can_be_had(seen, name, load):
    counts = "is a chain of 2, the one to be loaded is a single one"
    if load == "ep2":
        counts = "is a single one, the one to be loaded is a chain of 2"
    for found in seen[name][f"{load} ours"]:
        assert found["error"].startswith("LoadError: the optimizer in ")
        assert counts in found["error"]
        assert 'contents=("model",)' in found["error"]
        if name == reshard_ranks.BY_CHECKPOINTER:
            assert "no checkpoint could be loaded" in found["refused"]
            assert counts in found["refused"]
        assert len(found["before"]) > 10  # nothing was filled in before it was refused
        assert found["bad"] == []
        assert found["count"] > 10
