"""Saves on ranks with model-free states: every case commits or aborts with a name, in time.

One group of processes runs all cases. Faults of writers, ranks, disks and the store: test_faults.py.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from checkpoint.format import TorchDistReader
from checkpoint.layout import committed_path, committed_steps
from checkpoint.load import verify
from checkpoint.store import HostedStore
from tests.checkpoint import save_ranks
from tests.checkpoint.support import value
from tests.support import start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(260)]


def assert_complete(root, step, world_size=2, keys=("weight", "exp_avg")):
    with TorchDistReader(committed_path(root, step)) as folder:
        folder.index.check()
        for key in keys:
            assert torch.equal(folder.read(key), value(key, step)[: 64 * world_size])
        assert folder.common() == {"step": step}
        assert folder.read_object(f"rng/shard_1_{world_size}") == [{"rank": 1}]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """({case: what each rank found}, {case: its root})"""
    base = tmp_path_factory.mktemp("save")
    ready = base / "ready"
    ready.mkdir()
    store, doomed = HostedStore(), HostedStore()
    names = ["late_rank", "mismatch", "streaming", "replaced_while_idle", "retry", "preflight", "retention"]
    cases = {name: [] for name in [*names, "node_local"]}
    cases |= {"draining": [str(base / "durable")], "lost_store": [str(ready), doomed.address]}
    with start_ranks(save_ranks.several, 2, args=(store.address, str(base), cases), deadline_s=200) as ranks:
        end = time.monotonic() + 190
        while len(os.listdir(ready)) < 2 and time.monotonic() < end:
            if any(process.poll() is not None for process in ranks.processes):
                break  # `results` says why
            time.sleep(0.01)
        time.sleep(0.5)
        doomed.close()
        results = ranks.results(deadline_s=60)
    store.close()
    roots = {name: base / name / "root" for name in cases}
    return {name: [result[name] for result in results] for name in cases}, roots


def test_a_late_rank_is_named_leaves_nothing_and_the_next_save_commits(found):
    results, root = found[0]["late_rank"], found[1]["late_rank"]
    (in_time, after), (late, _) = results
    for got in (in_time, late):
        assert got["state"] == "failed"
        assert "rank 1 on" in got["error"]
        assert "never began" in got["error"]
    assert in_time["took_s"] < 4
    assert late["took_s"] < 2
    assert after["state"] == "committed"
    assert committed_steps(root) == [2]
    assert [n for n in os.listdir(root) if n.startswith(".")] == []


def test_states_that_do_not_fit_together_are_refused_by_key_and_rank(found):
    shape, missing, twice, good = found[0]["mismatch"][1]
    assert shape[0] == missing[0] == twice[0] == "failed"
    assert "weight: rank 1 sealed float32 (64, 256), rank 0 float32 (128, 256)" in shape[1]
    assert "exp_avg (128, 256) has holes" in missing[1]
    assert "rng/shard_0_2 was sealed by rank 0 and by rank 1" in twice[1]
    assert good == ("committed", "")


def test_a_state_larger_than_the_staging_memory_goes_through_it_in_parts(found):
    for state, error, staging, nbytes in found[0]["streaming"]:
        assert (state, error) == ("committed", "")
        assert nbytes > 3.9 * staging
    assert_complete(found[1]["streaming"], 1, keys=[f"t{i}" for i in range(16)])


def test_both_steps_are_drained_though_the_local_root_keeps_one(found):
    results, root = [events for events, _ in found[0]["draining"]], found[1]["draining"]
    durable = root.parents[1] / "durable"
    assert [e for e in results[0] if e[0] == "drained"] == [("drained", 1), ("drained", 2)]
    assert [e for e in results[1] if e[0] == "drained"] == []
    assert committed_steps(root) == [2]
    assert committed_steps(durable) == [1, 2]
    assert_complete(durable, 1)
    verify(committed_path(durable, 2))


def test_a_writer_that_died_while_idle_is_replaced(found):
    assert found[0]["replaced_while_idle"] == [("committed", "")] * 2
    assert_complete(found[1]["replaced_while_idle"], 2)


def test_an_aborted_save_is_retried_from_what_is_staged(found):
    assert found[0]["retry"] == [("committed", "")] * 2
    assert_complete(found[1]["retry"], 1)


def test_preflight_says_what_a_save_needs_and_refuses_a_limit_that_does_not_take_it(found):
    for _, (node_bytes, peak) in found[0]["draining"]:
        assert node_bytes > 2 * 2 * 64 * 256 * 4
        assert peak == 3 * node_bytes  # the kept one, the one in flight, and one whose drain may still read it
    for refused in found[0]["preflight"]:
        assert "will hold up to" in refused
        assert "only 400000 more can be written" in refused


def test_retention_deletes_after_the_commit_and_keeps_multiples(found):
    for most, left in found[0]["retention"]:
        assert most <= 1 + 1 + 2  # keep_last + one in flight + every second
        assert left == ["iter_0000002", "iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt"]


def test_ranks_with_folders_of_their_own_commit_one_record_each(found):
    assert [got["state"] for got in found[0]["node_local"]] == ["committed", "committed"]
    for rank in range(2):
        folder = committed_path(found[1]["node_local"] / f"node{rank}" / "root", 1)
        assert sorted(n.name for n in folder.glob("*.distcp")) == [f"__{rank}_0.distcp"]
        assert (folder / "commit.json").exists()
        assert (folder / "common.pt").exists()


def test_a_lost_store_ends_the_save_in_time_and_leaves_what_was_sealed(found):
    for got in found[0]["lost_store"]:
        assert got["state"] == "failed"
        assert "coordinator's store at 127.0.0.1" in got["error"]
        assert got["closed_s"] < 40
    left = [n for n in os.listdir(found[1]["lost_store"]) if n.startswith(".saving-")]
    assert len(left) == 1
