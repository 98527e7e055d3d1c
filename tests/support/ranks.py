"""Run one picklable function in several fresh processes, and end every one of them by handle.

    results = spawn_ranks(fn, 4, args=(...), gloo=True, deadline_s=60)     # fn(rank, world_size, *args) -> picklable

For fault tests, which need the processes in hand:

    with start_ranks(fn, 2, args=(...)) as ranks:
        ranks.processes[1].send_signal(signal.SIGSTOP)
        results = ranks.results(deadline_s=10, expect_dead={1})

`fn` must live at the top level of an importable module (a test module is one). Each process has one thread per torch
operator and its own process group, so that whatever it starts is ended with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS_S = 2.0


class RankError(AssertionError):
    """A rank raised (the message holds its traceback), died, or was still running at the deadline."""


def spawn_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    gloo: bool = False,
    deadline_s: float = 60.0,
) -> list[Any]:
    """`fn(rank, world_size, *args)` in `world_size` processes; returns their results by rank.

    With `gloo`, the default process group is initialised (gloo, loopback) before `fn` and destroyed after it.

    Raises:
        RankError: as soon as one rank fails, or at the deadline.
    """
    with start_ranks(fn, world_size, args=args, gloo=gloo, deadline_s=deadline_s) as ranks:
        return ranks.results(deadline_s=deadline_s)


def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    gloo: bool = False,
    deadline_s: float = 60.0,
) -> RankGroup:
    """Like `spawn_ranks`, but returns the running processes; use as a context manager.

    `deadline_s` bounds gloo operations, and after it each process prints its stacks to stderr.
    """
    return RankGroup(fn, world_size, args=args, gloo=gloo, deadline_s=deadline_s)


class RankGroup:
    """Processes started by `start_ranks`; leaving the `with` block kills those that still run."""

    def __init__(
        self, fn: Callable[..., Any], world_size: int, *, args: Sequence[Any], gloo: bool, deadline_s: float
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        self._buffers: list[bytearray] = []
        self._store, port = _host_store() if gloo else (None, 0)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        try:
            for rank in range(world_size):
                job = {
                    "fn": fn,
                    "rank": rank,
                    "world_size": world_size,
                    "args": tuple(args),
                    "port": port,
                    "deadline_s": deadline_s,
                }
                read_fd, write_fd = os.pipe()
                self._pipes.append(read_fd)
                self._buffers.append(bytearray())
                try:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "tests.support.rank_main", str(write_fd)],
                        stdin=subprocess.PIPE,
                        pass_fds=(write_fd,),
                        env=env,
                        cwd=ROOT,
                        start_new_session=True,
                    )
                finally:
                    os.close(write_fd)
                self.processes.append(process)
                assert process.stdin is not None
                with process.stdin:
                    process.stdin.write(pickle.dumps(job))
        except BaseException:
            self.close()
            raise

    def results(self, *, deadline_s: float, expect_dead: Collection[int] = ()) -> list[Any]:
        """Results by rank (None for those in `expect_dead`, which are not waited for)."""
        waiting = {r for r in range(len(self.processes)) if r not in expect_dead}
        results: list[Any] = [None] * len(self.processes)
        failed: list[str] = []
        end = time.monotonic() + deadline_s
        while waiting:
            left = end - time.monotonic()
            ready, _, _ = select.select([self._pipes[r] for r in waiting], [], [], max(left, 0))
            if not ready and left <= 0:
                failed = failed or [f"ranks {sorted(waiting)} still ran after {deadline_s} s"]
                break
            for rank in [r for r in waiting if self._pipes[r] in ready]:
                chunk = os.read(self._pipes[rank], 1 << 20)
                self._buffers[rank] += chunk
                if chunk:
                    continue
                waiting.remove(rank)
                ok, value = self._outcome(rank, end)
                results[rank] = value
                if not ok:
                    failed.append(f"rank {rank}: {value}")
                    # The first to fail is often the one that lost the culprit: hear that one, too.
                    end = min(end, time.monotonic() + _LAST_WORDS_S)
        if failed:
            raise RankError("\n".join(failed))
        return results

    def _outcome(self, rank: int, end: float) -> tuple[bool, Any]:
        if self._buffers[rank]:
            return pickle.loads(bytes(self._buffers[rank]))
        try:
            code = self.processes[rank].wait(max(end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            return False, "closed its result pipe without a result and still runs"
        return False, f"died without a result, exit code {code}"

    def close(self) -> None:
        for process in self.processes:
            # The group's id is the handle: it outlives its leader while a grandchild runs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(10)
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()
        self._store = None

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _host_store() -> tuple[Any, int]:
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # The store owns the descriptor from here on: a plain TCPStore would listen on every address.
        fd = listener.detach()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    return store, port
