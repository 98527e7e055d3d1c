"""Start and stop an embedded engine: one process per rank, spoken to through the control API like any other engine.

    with launch(EngineConfig(model="tiny", tp=2, draft="mtp")) as engine:
        publisher = Publisher(source, [engine.control()], ...)
        engine.generate([[1, 2, 3]], max_tokens=8)

Processes are started fresh (never forked, never the caller's main module) and ended by handle; they also end by
themselves when the launching process is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from weightsync.embedded.build import plan_models
from weightsync.embedded.links import receive, send
from weightsync.embedded.parallel import rank_device
from weightsync.engine.control import HttpControl
from weightsync.errors import ConfigError, EngineError

__all__ = ["EngineConfig", "EngineHandle", "launch"]

STOP_GRACE_S = 4.0
"""From closing the sockets to SIGKILL: a process that is stopped (SIGSTOP) or stuck ends no other way."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Raises `ConfigError` when built from values that cannot work."""

    model: str | Path | Mapping[str, Any] = "tiny"
    """A Hugging Face folder, the name of a shape (`config.SHAPES`) or a parsed config.json; without a folder, random
    weights."""
    tp: int = 1
    """Ranks, 1 or 2."""
    draft: str | Path | Mapping[str, Any] | None = None
    """None, `"mtp"` (from the same folder), or an EAGLE3 drafter: folder, config, or `"eagle3"` (default shape)."""
    dtype: str = "bfloat16"
    name: str = "engine"
    api_key: str | None = dataclasses.field(default=None, repr=False)
    """None: random, see `EngineHandle.api_key`."""
    host: str = "127.0.0.1"
    """The only address that the control API listens on, and the one that data groups use."""
    port: int = 0
    device: str = "cpu"
    """`cpu`; `cuda`: rank r on device r; `cuda:N`: rank r on N + r; or one per rank, `cuda:0,cuda:0`."""
    seed: int = 0
    """Of random weights."""
    num_draft: int = 4
    """Draft tokens per step, unless a request says otherwise."""
    max_running: int = 8
    prefix_entries: int = 16
    num_threads: int = 1
    tp_timeout_s: float = 30.0
    """Of one collective between the ranks; longer than any load of the host may stop a rank."""
    command_deadline_s: float = 60.0
    start_deadline_s: float = 120.0
    log: str | Path | None = None
    """File that the ranks' output is appended to; None: this process's stderr."""

    def __post_init__(self) -> None:
        plan_models(self.model, self.draft, self.dtype, self.tp)
        rank_device(self.device, 0, self.tp)
        if not self.name or any(c in self.name for c in "/ \n"):
            raise ConfigError(f"engine name {self.name!r}: expected a word without spaces and slashes")
        for field in ("num_threads", "max_running"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}: expected at least 1")
        for field in ("tp_timeout_s", "command_deadline_s", "start_deadline_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} is {getattr(self, field)}: expected seconds > 0")


def launch(config: EngineConfig) -> EngineHandle:
    """Start the ranks and wait until the engine answers.

    Raises:
        EngineError: a rank failed (its own words are in the message) or was not ready within `start_deadline_s`; no
            process is left.
    """
    handle = EngineHandle(config)
    try:
        handle._start()
    except BaseException:
        handle.stop()
        raise
    return handle


class EngineHandle:
    """A running engine; as a context manager it stops at the end. Made by `launch`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.name = config.name
        self.api_key = config.api_key or secrets.token_urlsafe(24)
        self.url = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [p.pid for p in self._processes]

    @property
    def processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """By rank; for tests that stop or kill one."""
        return tuple(self._processes)

    def control(self) -> HttpControl:
        """What a `Publisher` takes."""
        return HttpControl(self.url, api_key=self.api_key, name=self.name)

    def status(self, *, deadline_s: float = 10.0) -> Mapping[str, Any]:
        return self.control().status(deadline_s=deadline_s)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 16,
        speculate: int | None = None,
        deadline_s: float = 60.0,
    ) -> dict[str, Any]:
        """Decode greedily, with `speculate` draft tokens per step (0: plainly; None: `config.num_draft`).

        Returns:
            `tokens` (one list per prompt), `proposed`, `accepted`, `acceptance` (accepted/proposed, None if nothing was
            proposed), `versions`, and `outputs` with `finish_reason` and the versions that each request spans.

        Raises:
            EngineFenced: the engine holds no complete version.
            EngineError, ConfigError
        """
        body = {
            "prompts": [list(p) for p in prompts],
            "max_tokens": max_tokens,
            "speculate": speculate,
            "deadline_s": deadline_s,
        }
        return self.control().call("generate", body, deadline_s=deadline_s + 5)

    def weights(self, *, deadline_s: float = 60.0) -> list[dict[str, dict[str, dict[str, Any]]]]:
        """By rank: runner -> parameter or buffer -> `digest`, `data_ptr`, `shape`, `dtype`."""
        reply = self.control().call("weights", {"deadline_s": deadline_s}, deadline_s=deadline_s + 5)
        return [r["runners"] for r in reply["replies"]]

    def stop(self) -> None:
        """End every rank; returns when the processes are gone. May be called twice."""
        for link in self._links:
            link.close()
        self._links = []
        end = time.monotonic() + STOP_GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> EngineHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        config = self.config
        end = time.monotonic() + config.start_deadline_s
        instance = secrets.token_hex(8)
        pairs = [Pipe() for _ in range(1, config.tp)]  # rank 0's end and the other rank's
        with contextlib.ExitStack() as stack:
            for pair in pairs:
                for connection in pair:
                    stack.callback(connection.close)
            log = stack.enter_context(open(config.log, "ab")) if config.log is not None else sys.__stderr__
            for rank in range(config.tp):
                ours, theirs = Pipe()
                self._links.append(ours)
                peers = {r: p[0] for r, p in enumerate(pairs, 1)} if rank == 0 else {0: pairs[rank - 1][1]}
                with theirs:
                    fds = [theirs.fileno(), *(p.fileno() for p in peers.values())]
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "weightsync.embedded.worker", str(theirs.fileno())],
                            pass_fds=fds,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=_environment(),
                        )
                    )
                send(ours, self._message(rank, instance, {r: p.fileno() for r, p in peers.items()}))
        waiting = set(range(config.tp))
        while waiting:
            left = end - time.monotonic()
            ready = wait([self._links[r] for r in waiting], timeout=max(0.0, left))
            if not ready:
                raise EngineError(
                    f"engine {self.name}: rank(s) {sorted(waiting)} not ready within {config.start_deadline_s:g} s: "
                    "raise start_deadline_s, or look at its log",
                    engine=self.name,
                    rank=min(waiting),
                    phase="start",
                )
            for rank in sorted(waiting):
                if self._links[rank] in ready:
                    self._hear(rank)
                    waiting.discard(rank)

    def _message(self, rank: int, instance: str, peers: Mapping[int, int]) -> dict[str, Any]:
        config = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}
        for field in ("model", "draft"):
            if isinstance(config[field], Mapping):
                config[field] = dict(config[field])
            elif config[field] is not None:
                config[field] = str(config[field])
        config.pop("log")
        return {**config, "api_key": self.api_key, "rank": rank, "instance": instance, "peers": peers}

    def _hear(self, rank: int) -> None:
        try:
            said = receive(self._links[rank])
        except (EOFError, OSError):
            code = self._processes[rank].wait(STOP_GRACE_S)
            said = {"error": f"the process ended with code {code} before it was ready; look at its output"}
        if "error" in said:
            kind = ConfigError if said.get("type") == "ConfigError" else None
            text = f"engine {self.name} rank {rank} did not start: {said['error']}"
            if kind is not None:
                raise kind(text)
            raise EngineError(text, engine=self.name, rank=rank, phase="start", remote=said.get("remote"))
        if rank == 0:
            self.url = said["url"]


def _environment() -> dict[str, str]:
    # An engine started from a source tree must find the same package in its ranks.
    root = str(Path(__file__).resolve().parents[2])
    inherited = dict(os.environ)
    path = inherited.get("PYTHONPATH")
    return {**inherited, "PYTHONPATH": root if not path else root + os.pathsep + path}
