"""The trainer's end of its writer process: start it, send it commands, read its events, see whether it lives.

Nothing here waits for the writer, except `start`, which has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checkpoint.errors import WriterLost
from checkpoint.staging import Staging

__all__ = ["WriterProcess", "child_environment"]

PROGRAM = "from checkpoint.writer import main; main()"
_LAUNCHER = ("TORCHELASTIC", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")


class WriterProcess:
    """A running writer.

    Args:
        start: its first command, without `op`.

    Raises:
        WriterLost: it did not come up within `start["deadline_s"]`; holds what it said.
    """

    def __init__(self, start: dict[str, Any]) -> None:
        self._channel, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                pass_fds=(theirs.fileno(),),
                cwd="/",  # a module of the user's folder named `checkpoint` or `torch` must not be taken instead
                env=child_environment(),
            )
        finally:
            theirs.close()
        self.pid = self.process.pid
        self._buffer = b""
        self._closed = False
        self.plan: Any = None
        """Structure of the plan that it knows."""
        self.ready: dict[str, Any]
        self._send(start, [])
        end = time.monotonic() + start["deadline_s"] + 5
        while True:
            events = self.events(max(end - time.monotonic(), 0))
            for event in events:
                if event["event"] == "ready":
                    self.ready = event
                    return
                self.kill()
                raise WriterLost(f"the writer of rank {start['rank']} could not start: {event.get('error', event)}")
            if self.dead or time.monotonic() >= end:
                said = self.fate() or "it did not answer"
                self.kill()
                raise WriterLost(
                    f"the writer of rank {start['rank']} did not start in {start['deadline_s']:g} s: {said}"
                )

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def dead(self) -> bool:
        """It ended, or closed its end of the channel."""
        return self._closed or self.process.poll() is not None

    def fate(self) -> str | None:
        """How it ended, in words; None while it runs."""
        code = self.process.poll()
        if code is None and self._closed:
            # The kernel closes the channel of a dying process a moment before its exit code can be had.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(0.5)
        if code is None:
            return "closed its channel" if self._closed else None
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        """What it has said; waits at most `timeout_s` for the first word."""
        if self._closed:
            return []
        ready, _, _ = select.select([self._channel], [], [], timeout_s)
        if ready:
            try:
                data = self._channel.recv(1 << 16)
            except OSError:
                data = b""
            self._closed = not data
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def send_staging(self, staging: Staging) -> None:
        """Hand the staging memory over."""
        self._send({"op": "staging", "nbytes": staging.nbytes}, [staging.fd])

    def send(self, op: str, **command: Any) -> None:
        """Raises WriterLost: it does not take commands any more."""
        self._send({"op": op, **command}, [])

    def _send(self, command: dict[str, Any], fds: list[int]) -> None:
        # A plan can be megabytes: in a file of its own it never fills the channel, and a stopped writer stops nobody.
        fd = os.memfd_create("checkpoint-command", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(command, separators=(",", ":")).encode())
            file.flush()
            self._channel.setblocking(False)
            try:
                socket.send_fds(self._channel, [b"c"], [fd, *fds])
            except OSError as e:
                raise WriterLost(f"the writer (pid {self.pid}) takes no commands: {self.fate() or e}") from e
            finally:
                self._channel.setblocking(True)

    def kill(self) -> None:
        """End it at once; returns when it is gone, or after 5 s if the kernel holds it."""
        self.process.kill()
        self._end(5.0)

    def close(self, timeout_s: float) -> None:
        """Let it end by itself, then kill it."""
        with contextlib.suppress(OSError):  # it closed first
            self._channel.shutdown(socket.SHUT_RDWR)
        self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # held in the kernel by a dead disk: its parent is not
                self.process.wait(1.0)
        self._closed = True
        self._channel.close()


def child_environment() -> dict[str, str]:
    """For processes that this package starts: they find it, take one thread per operator and no GPU.

    The rank's variables, which name its place in the job, are left out: a process that reads them could join in by
    accident.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER) and k not in ("RANK", "WORLD_SIZE")}
    package_root = str(Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, [env.get("PYTHONPATH")])])
    env["OMP_NUM_THREADS"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
