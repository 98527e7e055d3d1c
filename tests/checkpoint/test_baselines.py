"""Failures of stock Megatron-Core 0.16.1 that this package exists for, beside what ours does under the same conditions.

Marked baselines: when stock no longer fails like this, the test says so, and the comparison has to be written anew.
Where stock hangs, its own stack says in which wait. T9 for ours: test_megatron.py (nodes with own disks). T16, chunks
that are silently zero: test_drain.py (legacy zarr).
"""

from __future__ import annotations

import pytest

from checkpoint.layout import committed_path
from checkpoint.load import verify
from tests.checkpoint import stock_ranks
from tests.support import spawn_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("baselines")


@pytest.fixture(scope="module")
def seen(base):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    return spawn_ranks(stock_ranks.observe_all, 1, args=(str(base),), deadline_s=200)[0]


@pytest.fixture
def stock(seen):
    return seen["stock"]


@pytest.fixture
def ours(seen):
    return seen["ours"]


def fine(ours, case, state="committed"):
    """On all ranks: that state, training was not held, and the process group works."""
    for found in ours:
        assert found[case]["state"] == state, found[case]
        assert found[case]["blocked_s"] < stock_ranks.SLOW_S / 3
        assert found[case]["group"]
    return ours[0][case]["error"]


def test_t1_without_psutil_stock_hangs_and_ours_commits(stock, ours):
    for rank in (0, 1):
        assert "count_queue" in stock["T1 no psutil"][rank] or "in join" in stock["T1 no psutil"][rank]
        assert "write_preloaded_data_multiproc" in stock["T1 no psutil"][rank]
    fine(ours, "T1 T2 plain")


def test_t2_without_cuda_stock_asserts_and_leaves_common_state_only(stock, ours):
    *ranks, files = stock["T2 no CUDA"]
    assert all("Torch not compiled with CUDA enabled" in said for said in ranks)
    assert files == ["common.pt"]
    fine(ours, "T1 T2 plain")


def test_t4_a_slow_disk_breaks_the_process_group_of_stock_and_not_ours(stock, ours, base):
    one, other, files = stock["T4 slow disk"]
    # The disk is one that takes longer than the other rank waits, however busy this machine is.
    assert "Timed out" in other
    assert "Error" in one
    assert "hangs in" not in one
    # All data is there, and nothing can be loaded.
    assert [name for name in files if name.endswith(".distcp")]
    assert ".metadata" not in files
    fine(ours, "T4 slow disk")
    assert min(found["T4 slow disk"]["took_s"] for found in ours) > stock_ranks.SLOW_S > stock_ranks.GLOO_TIMEOUT_S
    verify(committed_path(base / "ours/root", 2))


def test_t5_a_killed_writer_of_a_blocking_save_hangs_stock_and_is_named_by_ours(stock, ours):
    healthy, victim, files = stock["T5 killed, sync"]
    assert "Timed out" in healthy
    assert "hangs in" in victim
    assert "write_preloaded_data_multiproc" in victim
    assert ".metadata" not in files
    error = fine(ours, "T5 T6 killed", "failed")
    assert "rank 1 on" in error
    assert "killed by SIGKILL" in error


def test_t6_a_killed_writer_of_an_asynchronous_save_is_never_noticed_by_stock(stock, ours):
    *ranks, files = stock["T6 killed, async"]
    assert [said["finalized"] for said in ranks] == [[], []]
    assert ranks[1]["alive"]
    assert ".metadata" not in files
    fine(ours, "T5 T6 killed", "failed")
    fine(ours, "after")


def test_t7_a_worker_that_dies_when_it_starts_hangs_stock_and_is_named_by_ours(stock, ours):
    for said in stock["T7 persistent worker"][:2]:
        assert "hangs in" in said
        assert "async_utils.py" in said
        assert "in join" in said  # of its queue, for the process that is gone
    victim, other = ours[1]["T7 writer dies"], ours[0]["T7 writer dies"]
    assert "exited with code 3" in victim["error"]
    assert "ranks [1] did not start" in other["error"]
    for found in (victim, other):
        assert found["took_s"] < 15
        assert found["group"]


def test_t8_a_full_disk_leaves_the_files_of_stock_and_none_of_ours(stock, ours):
    one, other, files = stock["T8 disk full"]
    assert "CheckpointException" in one
    assert "CheckpointException" in other
    assert [name for name in files if name.endswith(".distcp")]
    assert ".metadata" not in files
    error = fine(ours, "T8 disk full", "failed")
    assert "rank 1 on" in error
    assert "No space left" in error
    assert ours[0]["listing"] == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000005",
        "latest_checkpointed_iteration.txt",
    ]


def test_t9_stock_saves_to_own_folders_what_it_cannot_load(stock):
    one, other, _ = stock["T9 own folders"]
    assert ".metadata" in one["files"]
    assert other["files"] == ["__1_0.distcp", "__1_1.distcp"] or ".metadata" not in other["files"]
    assert "is not a distributed checkpoint" in other["load"]
    assert one["load"] != "loaded"


def test_t10_stock_loads_a_flipped_bit_and_ours_falls_back(stock, ours):
    assert stock["T10 bit flip"][:2] == [{"right": True}, {"right": False}]
    for found in ours:
        got = found["T10 bit flip"]
        assert (got["step"], got["right"]) == (2, True)
        assert "__1_0.distcp was changed after it was sealed" in got["why"][0]


def test_t11_t12_of_the_resiliency_extension(seen):
    pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext")
    found = seen["resiliency"]
    assert isinstance(found, dict), found
    # The older one is deleted before the newer one was ever read.
    assert found["kept"] == ["iter_0000020_0_local.pt"]
    assert found["T11 latest"] == 20
    assert "PytorchStreamReader" in found["T11 load"]
    assert "SameMachineReplicationException" in found["T12 save"]
    assert found["T12 files"] == ["iter_0000030_0_local.dirty.pt"]
    step, right, why = found["ours T11"]
    assert (step, right) == (10, True)
    assert "truncated or overwritten" in why[0]
    state, files = found["ours T12"]
    assert state == "committed"
    assert files == ["iter_0000010", "iter_0000030", "latest_checkpointed_iteration.txt"]
