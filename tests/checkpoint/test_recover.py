"""A start makes checkpoints of attempts that are whole on all of their nodes, and removes what is of no use."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import subprocess
import sys
import time

import pytest

from checkpoint.errors import WriterLost
from checkpoint.layout import (
    committed_path,
    committed_steps,
    leftovers,
    owner_record,
    remove_older_attempts,
    saving_path,
    start_time,
)
from checkpoint.load import LoadGroup, verify
from checkpoint.recover import recover
from checkpoint.seals import read_commit
from checkpoint.store import HostedStore, Store
from tests.checkpoint.test_drain import commit
from tests.checkpoint.test_rebuild import uncommitted


@pytest.fixture
def store():
    hosted = HostedStore()
    yield hosted
    hosted.close()


def test_a_store_on_every_address_answers_on_those_of_both_versions():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as e:
        pytest.skip(f"no IPv6 on this machine: {e}")
    for host in ("127.0.0.1", "::1"):
        hosted = HostedStore("::", advertise_host=host)
        Store(hosted.address).close()
        hosted.close()


def start(store, roots, run, deadline_s=20.0):
    """What `recover` returns on each rank; every rank has a root of its own."""

    def one(rank):
        end = time.monotonic() + deadline_s
        hosts = dict.fromkeys(range(len(roots)), "h")
        group = LoadGroup(store=Store(store.address, run), rank=rank, world_size=len(roots), hosts=hosts, end=end)
        return recover(roots[rank], group, leads=True)

    with concurrent.futures.ThreadPoolExecutor(len(roots)) as pool:
        return list(pool.map(one, range(len(roots))))


def undecided(root, step, nodes=(0,)):
    """Committed folders turned back into those of an attempt that died between verdict and rename."""
    paths = []
    for folder in commit(root, step, nodes):
        path = saving_path(folder.parent, step, read_commit(folder / "commit.json").attempt)
        folder.rename(path)
        paths.append(path)
    return paths


def test_sealed_data_without_a_verdict_becomes_a_checkpoint(tmp_path, store):
    commit(tmp_path, 5)
    uncommitted(tmp_path, 7)
    assert start(store, [tmp_path], "a/")[0][0] == [7]
    assert committed_steps(tmp_path) == [5, 7]
    verify(committed_path(tmp_path, 7))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"


def test_all_nodes_of_an_attempt_must_have_it(tmp_path, store):
    roots = [tmp_path / "node0", tmp_path / "node1"]
    first, _ = undecided(tmp_path, 7, (0, 1))
    # The first node came as far as the rename.
    first.rename(committed_path(roots[0], 7))
    assert [finished for finished, _ in start(store, roots, "a/")] == [[], [7]]
    assert [committed_steps(root) for root in roots] == [[7], [7]]
    for path in undecided(tmp_path, 8, (0, 1)):
        assert path.exists()
    assert [finished for finished, _ in start(store, roots, "b/")] == [[8], [8]]
    alone, lost = undecided(tmp_path, 9, (0, 1))
    lost.rename(tmp_path / "elsewhere")
    assert start(store, roots, "c/") == [([], []), ([], [])]
    assert alone.exists()
    assert committed_steps(roots[0]) == [7, 8]


def test_what_is_older_than_a_checkpoint_or_may_still_be_written_is_not_finished(tmp_path, store):
    commit(tmp_path, 9)
    old = uncommitted(tmp_path, 7)
    living = uncommitted(tmp_path, 11)
    (living / "owner.0.json").write_bytes(owner_record(os.getpid()))
    ((finished, removed),) = start(store, [tmp_path], "a/")
    assert finished == []
    assert [left.path for left in removed] == [old]
    assert [left.path for left in leftovers(tmp_path)] == [living]


def test_a_dead_process_that_nobody_reaped_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    end = time.monotonic() + 20
    while start_time(process.pid) is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{process.pid}")
    assert start_time(process.pid) is None
    process.wait()


def test_a_silent_rank_is_named(tmp_path, store):
    group = LoadGroup(
        store=Store(store.address, "b/"), rank=0, world_size=2, hosts={1: "host-b"}, end=time.monotonic() + 0.2
    )
    with pytest.raises(WriterLost, match="no word from rank 1 on host-b"):
        recover(tmp_path, group, leads=True)


def test_only_older_attempts_of_the_same_run_are_removed(tmp_path):
    names = [(4, "aa.3"), (5, "aa.4"), (5, "aa.4r1"), (6, "aa.5"), (4, "bb.1"), (4, "strange")]
    for step, attempt in names:
        saving_path(tmp_path, step, attempt).mkdir()
    remove_older_attempts(tmp_path, "aa.4r1")
    assert [left.attempt for left in leftovers(tmp_path)] == ["bb.1", "strange", "aa.4r1", "aa.5"]
