"""Every test starts from the same environment and leaves nothing behind.

`clean_environment` restores variables and the working folder and seeds every generator; `no_leftovers` fails a test
after which a child process, a listening socket, a memfd mapping or a non-daemon thread of this process is new. Both
look only at this process and its children. Fixtures of a wider scope are set up before the first look, so what they
hold is no leftover; what is left at the end of the session is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
import threading
import time
from multiprocessing import resource_tracker

import psutil
import pytest
from hypothesis import settings

GRACE_S = 3.0
RETIRE_S = 60.0
"""What an operation may take that gloo forgot: until its own timeout (see `weightsync.transports._groups`)."""
PR_SET_CHILD_SUBREAPER = 36
LAUNCHER_VARIABLES = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}

# The same examples every time; the machine may be slow, so no deadline per example.
settings.register_profile("weightsync", derandomize=True, database=None, deadline=None)
settings.load_profile("weightsync")


def pytest_configure():
    # Before any test module imports torch: two cores are shared by all the ranks that a test starts.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in list(os.environ):
        if name.startswith("WEIGHTSYNC_") or name in LAUNCHER_VARIABLES:
            del os.environ[name]
    # Orphans of a child come to this process, so that a leftover cannot hide behind a dead parent.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_sessionfinish(session):
    left = _children()
    if left:
        _kill(left)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(f"\nprocesses left at the end of the session, now killed: {_describe(left)}\n")


@pytest.fixture(autouse=True)
def clean_environment():
    env, cwd = dict(os.environ), os.getcwd()
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)
    yield
    if dict(os.environ) != env:
        os.environ.clear()
        os.environ.update(env)
    os.chdir(cwd)


@pytest.fixture(autouse=True)
def no_leftovers(clean_environment):
    before = _holdings()

    def hand_over(pids):
        """Processes that a fixture of a wider scope ends: restarted by the test, held by the fixture."""
        before["process"] |= {psutil.Process(pid) for pid in pids}

    yield hand_over
    start = time.monotonic()
    collected = False
    while (left := _left(before, _holdings())) and time.monotonic() < start + (RETIRE_S if _retiring() else GRACE_S):
        if not collected:
            # What only a reference cycle holds is no leak.
            gc.collect()
            collected = True
        else:
            time.sleep(0.02)
    if left:
        _kill([p for p in _children() if p not in before["process"]])
        pytest.fail("left behind: " + "; ".join(left))


def _holdings():
    me = psutil.Process()
    return {
        "process": set(_children()),
        "listening socket": {c.laddr for c in me.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN},
        "memfd mapping": _memfds(),
        "thread": {t for t in threading.enumerate() if not t.daemon},
    }


def _retiring():
    return any(thread.name == "weightsync-retire" for thread in threading.enumerate())


def _left(before, now):
    left = []
    for kind, held in now.items():
        if new := held - before[kind]:
            left.append(f"{kind}: {_describe(new) if kind == 'process' else sorted(map(str, new))}")
    return left


def _children():
    """Live descendants of this process, without multiprocessing's resource tracker."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    children = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid != tracker and child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
    return children


def _memfds():
    """Mapped memfds as (inode, name); a mapping keeps its memory even when the descriptor is closed."""
    with open("/proc/self/maps") as maps:
        return {tuple(line.split(maxsplit=5)[4:]) for line in maps if "/memfd:" in line}


def _describe(processes):
    names = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(f"pid {process.pid} ({' '.join(process.cmdline())[:120]})")
    return names


def _kill(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=GRACE_S)
