"""Saves and their faults, on ranks with model-free states: every case commits or aborts with a name, in time."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch

from checkpoint.format import TorchDistReader
from checkpoint.layout import committed_path, committed_steps
from checkpoint.load import verify
from checkpoint.store import HostedStore
from tests.checkpoint import save_ranks
from tests.checkpoint.support import value
from tests.support import spawn_ranks, start_ranks

pytestmark = pytest.mark.multiproc


@pytest.fixture
def store():
    hosted = HostedStore()
    yield hosted
    hosted.close()


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    return path


def assert_complete(root, step, world_size=2, keys=("weight", "exp_avg")):
    with TorchDistReader(committed_path(root, step)) as folder:
        folder.index.check()
        for key in keys:
            assert torch.equal(folder.read(key), value(key, step)[: 64 * world_size])
        assert folder.common() == {"step": step}
        assert folder.read_object(f"rng/shard_1_{world_size}") == [{"rank": 1}]


ABORTS = [
    # name, faulty rank, fault, words of the verdict
    ("killed while writing", 1, {"phase": "write", "do": "kill"}, "rank 1 on .*killed by SIGKILL.*phase write"),
    ("coordinator killed before its vote", 0, {"phase": "vote", "do": "kill"}, "rank 0 on .*SIGKILL.*phase vote"),
    ("stopped while writing", 1, {"phase": "write", "do": "stop"}, "rank 1 on .*(not been scheduled|said nothing)"),
    ("disk full", 1, {"phase": "write", "do": "ENOSPC"}, "rank 1 on .*No space left.*phase write"),
    ("quota exceeded", 0, {"phase": "write", "do": "EDQUOT"}, "rank 0 on .*[Qq]uota exceeded"),
    ("disk error in the seal", 1, {"phase": "seal", "do": "EIO"}, "rank 1 on .*Input/output error.*phase seal"),
    ("disk error in the metadata", 0, {"phase": "prepare", "do": "EIO"}, "rank 0 on .*Input/output.*phase prepare"),
    (
        "too slow",
        1,
        {"phase": "write", "do": 8},
        "rank 1 on .*(had not sealed at the deadline|nothing for).*phase write",
    ),
]
COMMITS = [
    ("undisturbed", None, None),
    ("slow but in time", 1, {"phase": "write", "do": 1}),
    ("killed after the verdict", 0, {"phase": "publish", "do": "kill"}),
    ("other rank killed after the verdict", 1, {"phase": "publish", "do": "kill"}),
]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_fault_of_a_writer_ends_in_a_verdict_that_names_it_and_the_next_save_commits(root, store):
    cases = []
    for name, faulty, fault, _ in ABORTS:
        cases.append((name, faulty, fault))
    cases += COMMITS
    options = {"deadline_s": 4.0, "stall_s": 1.5, "grace_s": 2.0, "max_consecutive_failures": 100}
    ranks = spawn_ranks(save_ranks.faults, 2, args=(store.address, str(root), cases, options), deadline_s=200)
    words = {name: words for name, _, _, words in ABORTS}
    for rank, results in enumerate(ranks):
        for step, (name, _, _) in enumerate(cases, 1):
            got = results[name]
            if name in words:
                assert got["state"] == "failed", (rank, name, got)

                assert re.search(words[name], got["error"]), (rank, name, got["error"])
                assert not committed_path(root, step).exists()
            else:
                assert got["state"] == "committed", (rank, name, got)
            # In time: the deadline, what a successor needs to start, and slack for a loaded machine.
            assert got["took_s"] < 4.0 + 2.0 + 12.0, (rank, name, got)
            assert got["blocked_s"] < 1.0, (rank, name, got)
            assert got["longest_poll_s"] < 1.0, (rank, name, got)
            assert not [n for n in got["listing"] if n.startswith(".")], (rank, name, got)
    for step, (name, _, _) in enumerate(cases, 1):
        if name not in words:
            assert_complete(root, step)
    committed = [e for e in ranks[0]["events"] if e[0] == "committed"]
    assert len(committed) == len(cases) - len(ABORTS)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_group_goes_through_late_ranks_mismatches_streaming_draining_retries_and_retention(root, store, tmp_path):
    names = ["late_rank", "mismatch", "streaming", "draining", "replaced_while_idle", "retry", "preflight", "retention"]
    durable = tmp_path / "durable"
    ranks = spawn_ranks(save_ranks.several, 2, args=(store.address, str(root), str(durable), names), deadline_s=200)
    check_late_rank(root / "late_rank/root", [r["late_rank"] for r in ranks])
    check_mismatch([r["mismatch"] for r in ranks])
    check_streaming(root / "streaming/root", [r["streaming"] for r in ranks])
    check_draining(root / "draining/root", durable, [r["draining"] for r in ranks])
    for rank in ranks:
        assert rank["replaced_while_idle"] == ("committed", "")
        assert rank["retry"] == ("committed", "")
    assert_complete(root / "replaced_while_idle/root", 2)
    assert_complete(root / "retry/root", 1)
    for node_bytes, peak, refused in [r["preflight"] for r in ranks]:
        assert node_bytes > 2 * 2 * 64 * 256 * 4
        assert peak == 2 * node_bytes
        assert "will hold up to" in refused
        assert "only 400000 more can be written" in refused
    check_retention(ranks[0]["retention"])


def check_late_rank(root, results):
    """The verdict names it, nothing of it stays, and the next save commits."""
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


def check_mismatch(results):
    """States that do not fit together are refused by key and rank."""
    shape, missing, twice, good = results[1]
    assert shape[0] == missing[0] == twice[0] == "failed"
    assert "weight: rank 1 sealed float32 (64, 256), rank 0 float32 (128, 256)" in shape[1]
    assert "exp_avg (128, 256) has holes" in missing[1]
    assert "rng/shard_0_2 was sealed by rank 0 and by rank 1" in twice[1]
    assert good == ("committed", "")


def check_streaming(root, results):
    """A state larger than the staging memory goes through it in parts."""
    for state, error, staging, nbytes in results:
        assert (state, error) == ("committed", "")
        assert nbytes > 3.9 * staging
    assert_complete(root, 1, keys=[f"t{i}" for i in range(16)])


def check_draining(root, durable, results):
    """Both steps are durable, though the local root keeps one."""
    assert [e for e in results[0] if e[0] == "drained"] == [("drained", 1), ("drained", 2)]
    assert [e for e in results[1] if e[0] == "drained"] == []
    assert committed_steps(root) == [2]
    assert committed_steps(durable) == [1, 2]
    assert_complete(durable, 1)
    verify(committed_path(durable, 2))


def check_retention(found):
    """The promise of disk is kept, and memory, descriptors and threads stay the same."""
    most, left, usage = found
    assert most <= 2 + 1 + 4  # keep_last + one in flight + every tenth
    steps = ["iter_0000010", "iter_0000020", "iter_0000030", "iter_0000039", "iter_0000040"]
    assert left == [*steps, "latest_checkpointed_iteration.txt"]
    warm = usage[5]
    assert usage[-1][:3] == warm[:3]
    assert usage[-1][3] - warm[3] < 16 << 20


def test_ranks_with_folders_of_their_own_commit_one_record_each(tmp_path, store):
    roots = []
    for rank in range(2):
        roots.append(tmp_path / f"node{rank}" / "root")
        roots[-1].mkdir(parents=True)
    results = spawn_ranks(save_ranks.node_local, 2, args=(store.address, [str(r) for r in roots]), deadline_s=60)
    assert [r["state"] for r in results] == ["committed", "committed"]
    for rank, root in enumerate(roots):
        folder = committed_path(root, 1)
        assert sorted(n.name for n in folder.glob("*.distcp")) == [f"__{rank}_0.distcp"]
        assert (folder / "commit.json").exists()
        assert (folder / "common.pt").exists()


def test_a_lost_store_ends_the_save_in_time_and_leaves_what_was_sealed(root, store, tmp_path):
    ready = tmp_path / "ready"
    ready.mkdir()
    with start_ranks(save_ranks.lost_store, 2, args=(store.address, str(root), str(ready)), deadline_s=60) as ranks:
        end = time.monotonic() + 40
        while len(os.listdir(ready)) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.5)
        store.close()
        results = ranks.results(deadline_s=60)
    for got in results:
        assert got["state"] == "failed"
        assert "coordinator's store at 127.0.0.1" in got["error"]
        assert got["closed_s"] < 40
    left = [n for n in os.listdir(root) if n.startswith(".saving-")]
    assert len(left) == 1
