"""The launcher of the demo: trainer ranks as processes, told one job, heard by handle, gone whatever happens.

    with Ranks(4, "examples.demo", logs=folder) as ranks:     # python -m examples.demo, four times
        ranks.send(job)
        for message in ranks.messages(deadline_s=60): ...     # what ranks show; each waits until the loop goes on

    this_rank().run(train)                                    # in the rank: train(job, show)

It does for one host what torchrun does: ranks find each other through a store that the launcher serves, in variables
that `torch.distributed` reads. A rank ends when its launcher does, and what it prints goes to a file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from weightsync.store import host_store

ROOT = Path(__file__).resolve().parents[1]
FD = "WEIGHTSYNC_DEMO_FD"
TAIL_LINES = 15


class RankFailed(Exception):
    """A rank died, or showed nothing until the deadline; the message quotes the end of its log."""


class Ranks:
    """`size` processes `python -m module`; leaving the `with` block kills those that still run."""

    def __init__(self, size: int, module: str, logs: str) -> None:
        self._store = host_store()
        self._logs = [Path(logs, f"rank-{rank}.log") for rank in range(size)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        try:
            for rank in range(size):
                self._start(rank, size, module)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, size: int, module: str) -> None:
        ours, theirs = Pipe()
        self._links.append(ours)
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p),
            "RANK": str(rank),
            # The store at MASTER_PORT is served already: rank 0 must not try to.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(size),
            FD: str(theirs.fileno()),
        }
        with theirs, self._logs[rank].open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self._processes.append(process)

    def send(self, job: dict[str, Any]) -> None:
        for rank, link in enumerate(self._links):
            try:
                link.send_bytes(json.dumps(job).encode())
            except OSError:
                raise self._failed(rank) from None

    def messages(self, deadline_s: float) -> Iterator[dict[str, Any]]:
        """What ranks show, until all have ended well. `deadline_s` is for the next one.

        Raises:
            RankFailed
        """
        running = dict(zip(self._links, range(len(self._links)), strict=True))
        end = time.monotonic() + deadline_s
        while running:
            ready = wait(running, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failed(min(running.values()), f"showed nothing for {deadline_s:g} s")
            for link in ready:
                assert isinstance(link, Connection)
                try:
                    message = json.loads(link.recv_bytes())
                except (EOFError, OSError):
                    rank = running.pop(link)
                    if self._exit_code(rank) != 0:
                        raise self._failed(rank) from None
                    continue
                yield message
                link.send_bytes(b"{}")
                end = time.monotonic() + deadline_s

    def _exit_code(self, rank: int) -> int | None:
        try:
            return self._processes[rank].wait(10)
        except subprocess.TimeoutExpired:
            return None

    def _failed(self, rank: int, what: str | None = None) -> RankFailed:
        what = what or f"ended with exit code {self._exit_code(rank)}"
        lines = self._logs[rank].read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return RankFailed("\n  ".join([f"trainer rank {rank} {what}; its last words:", *lines]))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for link in self._links:
            link.close()
        self._store.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rank:
    """This process, a rank that `Ranks` started."""

    def __init__(self, fd: int) -> None:
        # Ctrl-C reaches the whole process group: the launcher decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._link = Connection(fd)
        threading.Thread(target=self._end_with_launcher, daemon=True).start()

    def _end_with_launcher(self) -> None:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLRDHUP)
        poll.poll()
        os._exit(1)

    def run(self, train: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]) -> int:
        import torch

        torch.set_num_threads(1)
        train(json.loads(self._link.recv_bytes()), self._show)
        return 0

    def _show(self, message: dict[str, Any]) -> None:
        self._link.send_bytes(json.dumps(message).encode())
        self._link.recv_bytes()


def this_rank() -> Rank | None:
    """None in a process that `Ranks` did not start."""
    fd = os.environ.pop(FD, None)
    return None if fd is None else Rank(int(fd))
