"""The bench's child processes: started by handle, spoken to in JSON lines over a socket pair, ended by handle.

`launchers` starts trainer ranks and lanes as `Child`; both run `serve` on their side. A child ends when
its socket closes, so none outlives a bench that dies. What a child prints goes to a temporary file whose last lines are
quoted when the child fails; nothing of it reaches the bench's stdout.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import PeerLost, TransferTimeout, WeightSyncError

if TYPE_CHECKING:
    from weightsync.bench.launchers import Worker

__all__ = ["Child", "answer_to", "ask_all", "serve"]

_TAIL_LINES = 12


class Child:
    """One process running `python -m <module> <fd> <args>`."""

    host = "127.0.0.1"

    def __init__(
        self, name: str, module: str, args: Sequence[str] = (), *, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self._sock = ours
        self._pending = b""
        self._log = tempfile.TemporaryFile(prefix="weightsync-bench-")  # noqa: SIM115  (closed by `close`)
        root = str(Path(__file__).resolve().parents[2])
        full_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        # A bench started from a source tree must find the same package in its children.
        full_env["PYTHONPATH"] = os.pathsep.join(p for p in (root, full_env.get("PYTHONPATH")) if p)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *args],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=full_env,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises `PeerLost` if the child is gone."""
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as e:
            raise PeerLost(self._lost(str(message.get("cmd"))), peer=self.name) from e

    def receive(self, what: str, deadline: float) -> dict[str, Any]:
        """The next answer; `deadline` is of `time.monotonic()`.

        Raises:
            TransferTimeout, PeerLost
            WeightSyncError: the child answered with an error of its own.
        """
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._sock], [], [], left)[0]:
                raise TransferTimeout(f"{self.name} did not answer {what!r} in time{self._tail()}", peer=self.name)
            data = self._sock.recv(1 << 16)
            if not data:
                raise PeerLost(self._lost(what), peer=self.name)
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WeightSyncError(f"{self.name}, {what}: {answer['error']}\n{answer['traceback']}")
        return answer

    def _lost(self, what: str) -> str:
        try:
            code: int | None = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            code = None
        return f"{self.name} closed its connection during {what!r} (exit code {code}){self._tail()}"

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "; its last output:\n  " + "\n  ".join(lines) if lines else "; it printed nothing"

    def close(self, grace_s: float = 5.0) -> None:
        """Ask the child to end by closing its socket; kill it if it has not after `grace_s`."""
        self._sock.close()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def ask_all(children: Sequence[Worker], message: Mapping[str, Any], deadline_s: float) -> list[dict[str, Any]]:
    """Send one command to every child, then collect every answer; order as in `children`."""
    deadline = time.monotonic() + deadline_s
    for child in children:
        child.send(message)
    return [child.receive(str(message["cmd"]), deadline) for child in children]


def serve(fd: int, handle: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Child side: answer commands until the parent closes the socket. Errors are sent back and end the child."""
    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as stream:
        for line in stream:
            answer = answer_to(handle, json.loads(line))
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
            if "error" in answer:
                return


def answer_to(handle: Callable[[dict[str, Any]], Mapping[str, Any]], message: dict[str, Any]) -> dict[str, Any]:
    """What `handle` returns for one command, or `error` and `traceback`, for whoever asked to raise."""
    try:
        return dict(handle(message))
    except Exception as e:  # noqa: BLE001  (the parent raises it, with this traceback)
        return {"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()}
