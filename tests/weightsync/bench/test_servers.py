"""The process of a real engine that a bench starts; what it serves is in tests/engines/test_bench.py."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.ranks import ROOT

pytestmark = pytest.mark.multiproc

# Python is a program here that never becomes ready.
START = """
import pathlib, sys, torch
from weightsync.bench.servers import ServerConfig, launch_server
folder = pathlib.Path(sys.argv[1])
launch_server(ServerConfig(
    name="e", kind="vllm", python=str(folder / "python"), folder=folder, draft="none", drafter=None, tp=1, device="cpu",
    dtype=torch.bfloat16, log=str(folder / "log"), start_deadline_s=60.0,
))
"""


def await_(found, deadline_s=50.0):
    end = time.monotonic() + deadline_s
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def starter_children(pid):
    """The server, and the guard once it waits for the starter's end."""
    return [p for p in psutil.Process(pid).children() if "sh" in p.name() or "python" in p.name()]


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "python").write_text('#!/bin/sh\ntrap "" TERM\nsleep 300 &\necho $! > pid.new\nmv pid.new pid\nwait\n')
    (tmp_path / "python").chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", START, str(tmp_path)], env=env, stderr=subprocess.DEVNULL) as starter:
        below = await_(lambda: (tmp_path / "pid").exists() and psutil.Process(int((tmp_path / "pid").read_text())))
        server = below.parent()
        await_(lambda: len(starter_children(starter.pid)) == 2)
        starter.kill()
    for process in (below, server):
        await_(lambda p=process: not p.is_running() or p.status() == psutil.STATUS_ZOMBIE)
