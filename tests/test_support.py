"""The helpers that other tests trust: `spawn_ranks`, and the fixture that finds what a test leaves behind."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import conftest
from tests.support import RankError, spawn_ranks, start_ranks

pytestmark = pytest.mark.multiproc


def _sum(rank, world_size, start):
    assert "WEIGHTSYNC_TEST" not in os.environ
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return int(total)


def _misbehave(rank, world_size, how):
    if rank == 0:
        time.sleep(60)
    if how == "raise":
        raise ValueError("no such layer")
    if how == "die":
        os._exit(7)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(60)


def test_ranks_return_results_in_order_of_rank():
    assert spawn_ranks(_sum, 2, args=(10,), gloo=True) == [21, 21]


def test_a_failing_rank_is_reported_at_once_and_no_process_stays():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: [\s\S]*ValueError: no such layer"):
        spawn_ranks(_misbehave, 2, args=("raise",))
    with pytest.raises(RankError, match="rank 1: died without a result, exit code 7"):
        spawn_ranks(_misbehave, 2, args=("die",))
    with pytest.raises(RankError, match=r"ranks \[0, 1\] still ran after 2 s"):
        spawn_ranks(_misbehave, 2, args=("hang",), deadline_s=2)
    assert time.monotonic() - start < 40
    assert conftest._children() == []


def test_a_stopped_rank_is_killed_on_leaving():
    with start_ranks(_misbehave, 2, args=("raise",)) as ranks:
        ranks.processes[0].send_signal(signal.SIGSTOP)
        with pytest.raises(RankError, match="no such layer"):
            ranks.results(deadline_s=30, expect_dead={0})
    assert [p.returncode is not None for p in ranks.processes] == [True, True]


def test_leftovers_are_named():
    before = conftest._holdings()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    listener = socket.create_server(("127.0.0.1", 0))
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    fd = os.memfd_create("weightsync-test")
    os.ftruncate(fd, 4096)
    mapping = mmap.mmap(fd, 4096)
    os.close(fd)
    try:
        left = "; ".join(conftest._left(before, conftest._holdings()))
        assert f"pid {child.pid}" in left
        assert f"port={listener.getsockname()[1]}" in left
        assert "forgotten" in left
        assert "memfd:weightsync-test" in left
    finally:
        conftest._kill([psutil.Process(child.pid)])
        child.wait()
        listener.close()
        release.set()
        thread.join()
        mapping.close()
    assert conftest._left(before, conftest._holdings()) == []
