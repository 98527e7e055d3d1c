"""Who starts what a bench consists of: processes of this machine here, actors of a Ray cluster in `actors`.

`harness.Session` asks `launcher_of` for one and starts trainer ranks, then engines; `compare.LaneGroup` starts lanes by
it. Everything that a launcher starts ends with its `close`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from weightsync.bench import weights
from weightsync.bench.children import Child
from weightsync.bench.config import BenchConfig
from weightsync.bench.procfs import Holdings, look
from weightsync.bench.servers import ServerConfig, ServerHandle, launch_server, write_folders
from weightsync.embedded.engine import EngineConfig, EngineHandle, launch
from weightsync.manifest import dtype_name

__all__ = ["Engine", "Launcher", "LocalLauncher", "Worker", "launcher_of", "start_engine"]

SEED = 1
"""Of the trainer's made-up weights; real engines start from those of the next one."""
SERVER_START_S = 300.0
"""For a real engine to load, whatever the deadline of a publish."""


class Worker(Protocol):
    """One trainer rank or lane: takes one command at a time (`children.ask_all`)."""

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> str:
        """Address that it listens on, and that the others reach it at."""
        ...

    @property
    def pid(self) -> int: ...

    def send(self, message: Mapping[str, Any]) -> None: ...

    def receive(self, what: str, deadline: float) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """One running engine."""

    @property
    def name(self) -> str: ...

    @property
    def pids(self) -> Sequence[int]: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, deadline_s: float
    ) -> Mapping[str, Any]: ...


class Launcher(Protocol):
    def trainer(self, rank: int) -> Worker: ...

    def lane(self, rank: int) -> Worker:
        """Rank 0 beside trainer rank 0, rank r beside the engine rank r - 1."""
        ...

    def engines(self) -> list[Engine]:
        """Start them all at once and wait for them: a process spends its first seconds on importing torch."""
        ...

    def reach(self, engine: Engine) -> Mapping[str, Any]:
        """What a trainer makes its control client from (`trainer.TrainerRank.do_connect`)."""
        ...

    def look(self, pids: Mapping[str, int], *, reset: bool = False) -> dict[str, Holdings]:
        """As `procfs.look`, wherever these processes of this bench (name -> pid) are."""
        ...

    def describe(self) -> Mapping[str, Any] | None:
        """For the result: where everything ran, if not on this machine alone; no addresses."""
        ...

    def close(self) -> None: ...


def launcher_of(config: BenchConfig) -> Launcher:
    """Raises `ConfigError` if the cluster is not there, or has no room."""
    if config.launcher == "ray":
        from weightsync.bench.actors import RayLauncher

        return RayLauncher(config)
    return LocalLauncher(config)


def start_engine(
    config: BenchConfig, index: int, *, host: str, log: str, folders: Folders
) -> EngineHandle | ServerHandle:
    """Engine number `index`, which listens on `host` of this machine; its output goes to the file `log`.

    Raises:
        EngineError: it did not start.
    """
    target, drafter = weights.model_configs(config)
    if config.engine == "embedded":
        draft = None if config.draft == "none" else "mtp"
        return launch(
            EngineConfig(
                name=f"engine{index}",
                model=target.to_hf(),
                draft=drafter.to_hf() if drafter is not None else draft,
                tp=config.engine_tp,
                dtype=dtype_name(weights.dtype_of(config)),
                device=config.engine_device(index),
                host=host,
                command_deadline_s=config.deadline_s,
                start_deadline_s=config.deadline_s,
                log=log,
            )
        )
    folder, drafter_folder = folders.of(config)
    return launch_server(
        ServerConfig(
            name=f"engine{index}",
            kind=config.engine,
            python=config.engine_python or sys.executable,
            folder=folder,
            draft=config.draft,
            drafter=drafter_folder,
            tp=config.engine_tp,
            device="cuda" if torch.cuda.is_available() else "cpu",
            dtype=weights.dtype_of(config),
            host=host,
            arguments=config.engine_args,
            log=log,
            start_deadline_s=max(config.deadline_s, SERVER_START_S),
        )
    )


class Folders:
    """What real engines of this machine start from: made-up weights of another seed than the trainer's, made once, or
    the user's own folder."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._made: tuple[Path, Path | None] | None = None

    def of(self, config: BenchConfig) -> tuple[Path, Path | None]:
        """(target, drafter of its own)."""
        if config.folder is not None:
            return config.folder.resolve(), None
        if self._made is None:
            path = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-bench-")))
            tensors = weights.load(config, seed=SEED + 1)
            self._made = write_folders(config.engine, path, *weights.model_configs(config), tensors)
        return self._made

    def close(self) -> None:
        """Remove what was made."""
        self._stack.close()


class LocalLauncher:
    """Processes of this machine, on its loopback address."""

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        self._stack = contextlib.ExitStack()

    def trainer(self, rank: int) -> Worker:
        return self._child(f"trainer rank {rank}", "weightsync.bench.trainer")

    def lane(self, rank: int) -> Worker:
        return self._child(f"lane receiver {rank - 1}" if rank else "lane sender", "weightsync.bench.lanes")

    def _child(self, name: str, module: str) -> Worker:
        child = Child(name, module)
        self._stack.callback(child.close)
        return child

    def engines(self) -> list[Engine]:
        config = self._config
        # One file for all of them: the table is all that a bench prints.
        log = self._stack.enter_context(tempfile.NamedTemporaryFile(prefix="weightsync-bench-"))  # noqa: SIM115
        folders = Folders()
        self._stack.callback(folders.close)
        if config.engine != "embedded":
            folders.of(config)  # before the threads that would all make it
        with concurrent.futures.ThreadPoolExecutor(config.engines) as pool:
            starting = [
                pool.submit(start_engine, config, i, host="127.0.0.1", log=log.name, folders=folders)
                for i in range(config.engines)
            ]
        for future in starting:
            if future.exception() is None:
                self._stack.callback(future.result().stop)
        return [future.result() for future in starting]

    def reach(self, engine: Engine) -> Mapping[str, Any]:
        assert isinstance(engine, EngineHandle | ServerHandle)
        return {"url": engine.url, "api_key": engine.api_key, "name": engine.name}

    def look(self, pids: Mapping[str, int], *, reset: bool = False) -> dict[str, Holdings]:
        return look(pids, reset=reset)

    def describe(self) -> Mapping[str, Any] | None:
        return None

    def close(self) -> None:
        self._stack.close()
