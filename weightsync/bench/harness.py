"""Runs a bench: trainer ranks and engines as processes, publishes between them, other ways beside them.

`Session` owns the processes and is what `benchmarks/` builds on too; `run_bench` is one whole run. Engines start with
random weights, the trainer holds others whose draft fits their target: publishing the target alone shows what a draft
that does not belong to it costs, publishing both that it is mended, by real decoding.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightsync.bench import weights
from weightsync.bench.children import Child, ask_all
from weightsync.bench.compare import LaneGroup
from weightsync.bench.config import BenchConfig
from weightsync.bench.procfs import holdings, reset_peak
from weightsync.bench.results import Measured, build
from weightsync.bench.servers import ServerConfig, ServerHandle, launch_server, write_folders
from weightsync.embedded.engine import EngineConfig, EngineHandle, launch
from weightsync.errors import ConfigError
from weightsync.manifest import TensorSpec, dtype_name
from weightsync.report import PublishReport

__all__ = ["Session", "run_bench"]

SEED = 1
PROMPTS = ((1, 2, 3), (7, 5))
NEW_TOKENS = 16
SERVER_START_S = 300.0
"""For a real engine to load, whatever the deadline of a publish."""
_PHASES_OF_A_PUBLISH = 6
"""Each has the publish's deadline; the trainer gives up by itself before the bench does."""

Progress = Callable[[str], None]


class Session:
    """Trainer ranks and engines that hold different weights; use as a context manager.

    Raises:
        ConfigError: a model or layout that cannot run here.
        WeightSyncError: a process that does not start within the deadline.
    """

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.version = 0
        self.specs: list[TensorSpec] = []
        """Of every stage, in streaming order."""
        self._target, self._drafter = weights.model_configs(config)
        self._stack = contextlib.ExitStack()
        self._trainers: list[Child] = []
        self.engines: list[EngineHandle | ServerHandle] = []
        self._baseline: dict[str, int] = {}
        self._shared: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that this session started."""
        self._stack.close()

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        size = self.config.trainer.world_size
        for rank in range(size):
            child = Child(f"trainer rank {rank}", "weightsync.bench.trainer")
            self._stack.callback(child.close)
            self._trainers.append(child)
        port = None
        for rank, child in enumerate(self._trainers):
            message = {"cmd": "configure", "rank": rank, "config": self.config.to_json()}
            (answer,) = ask_all([child], message, self.config.deadline_s)
            port = answer.get("port", port)
        self._ask({"cmd": "join", "port": port})
        # Trainer ranks make their weights while the engines start.
        for child in self._trainers:
            child.send({"cmd": "load", "seed": SEED})
        self._start_engines()
        deadline = time.monotonic() + self.config.deadline_s
        loaded = [child.receive("load", deadline) for child in self._trainers]
        for answer in sorted(loaded, key=lambda a: int(a["stage"])):
            self.specs += [TensorSpec.from_json(s) for s in answer["specs"]]
        addresses = [{"url": e.url, "api_key": e.api_key, "name": e.name} for e in self.engines]
        self._ask({"cmd": "connect", "engines": addresses})
        self._note_memory_after_load()

    def _start_engines(self) -> None:
        """All at once: a process spends its first seconds on importing torch."""
        # One file for all of them: the table is all that a bench prints.
        log = self._stack.enter_context(tempfile.NamedTemporaryFile(prefix="weightsync-bench-"))  # noqa: SIM115
        if self.config.engine != "embedded":
            self._start_all(launch_server, self._server_configs(log.name))
            return
        draft = None if self.config.draft == "none" else "mtp"
        configs = [
            EngineConfig(
                name=f"engine{i}",
                model=self._target.to_hf(),
                draft=self._drafter.to_hf() if self._drafter is not None else draft,
                tp=self.config.engine_tp,
                dtype=dtype_name(weights.dtype_of(self.config)),
                device=self.config.engine_device(i),
                command_deadline_s=self.config.deadline_s,
                start_deadline_s=self.config.deadline_s,
                log=log.name,
            )
            for i in range(self.config.engines)
        ]
        self._start_all(launch, configs)

    def _server_configs(self, log: str) -> list[ServerConfig]:
        """Real engines start from a folder: made-up weights of another seed than the trainer's, or the user's own."""
        config = self.config
        path = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-bench-")))
        if config.folder is None:
            tensors = weights.load(config, seed=SEED + 1)
            folder, drafter = write_folders(config.engine, path, self._target, self._drafter, tensors)
        else:
            folder, drafter = config.folder.resolve(), None
        return [
            ServerConfig(
                name=f"engine{i}",
                kind=config.engine,
                python=config.engine_python or sys.executable,
                folder=folder,
                draft=config.draft,
                drafter=drafter,
                tp=config.engine_tp,
                device="cuda" if torch.cuda.is_available() else "cpu",
                dtype=weights.dtype_of(config),
                arguments=config.engine_args,
                log=log,
                start_deadline_s=max(config.deadline_s, SERVER_START_S),
            )
            for i in range(config.engines)
        ]

    def _start_all(self, launch: Callable[[Any], Any], configs: Sequence[Any]) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(configs)) as pool:
            starting = [pool.submit(launch, config) for config in configs]
        for future in starting:
            if future.exception() is None:
                self.engines.append(future.result())
                self._stack.callback(self.engines[-1].stop)
        for future in starting:
            future.result()

    def _ask(self, message: Mapping[str, Any], patience: float = 1.0) -> list[dict[str, Any]]:
        return ask_all(self._trainers, message, patience * self.config.deadline_s)

    def processes(self) -> dict[str, int]:
        """Name -> pid of every trainer rank and engine rank."""
        trainers = {child.name: child.pid for child in self._trainers}
        return trainers | {
            f"{e.name} {'rank' if isinstance(e, EngineHandle) else 'process'} {r}": pid
            for e in self.engines
            for r, pid in enumerate(e.pids)
        }

    # -- memory, from outside --------------------------------------------------------------------------------------

    def _note_memory_after_load(self) -> None:
        for name, pid in self.processes().items():
            with contextlib.suppress(PermissionError):
                reset_peak(pid)
                now = holdings(pid)
                self._baseline[name] = now.rss_bytes
                self._shared[name] = now.shared_bytes

    def _note_peaks(self) -> None:
        """After every publish: a process may set its own high-water mark back when the next one begins."""
        for name, pid in self.processes().items():
            if name in self._baseline:
                now = holdings(pid)
                extra = now.peak_bytes - self._baseline[name]
                if not name.startswith("trainer"):
                    # Pages that both sides map are counted once: on the sender, which made them.
                    extra -= now.shared_bytes - self._shared[name]
                self._peaks[name] = max(self._peaks.get(name, 0), extra)

    @property
    def peak_extra_bytes(self) -> dict[str, int | None]:
        """Process -> peak resident memory of any publish so far minus that after load; None: it cannot be told."""
        return {name: self._peaks.get(name) for name in self.processes()}

    # -- what a run consists of ------------------------------------------------------------------------------------

    def publish(self, scope: str) -> tuple[float, PublishReport]:
        """Change the weights, publish them as the next version; returns the seconds of the slowest rank."""
        self.version += 1
        self._ask({"cmd": "step", "version": self.version})
        answers = self._ask({"cmd": "publish", "version": self.version, "scope": scope}, _PHASES_OF_A_PUBLISH)
        self._note_peaks()
        return max(a["seconds"] for a in answers), PublishReport.from_json(answers[0]["report"])

    def acceptance(self) -> float | None:
        """Share of the draft's tokens that the target accepts, over all engines; None without a draft."""
        if self.config.draft == "none":
            return None
        pids = {name: pid for name, pid in self.processes().items() if name in self._baseline}
        before = {name: holdings(pid).rss_bytes for name, pid in pids.items()}
        replies = [e.generate(PROMPTS, max_tokens=NEW_TOKENS, deadline_s=self.config.deadline_s) for e in self.engines]
        for name, pid in pids.items():
            # What decoding keeps (caches, the allocator's arenas) is no publish's.
            self._baseline[name] += holdings(pid).rss_bytes - before[name]
        return sum(int(r["accepted"]) for r in replies) / sum(int(r["proposed"]) for r in replies)


def check(config: BenchConfig) -> None:
    """Raises `ConfigError` for what no process needs to be started to find out."""
    weights.model_configs(config)
    if config.engine != "embedded" and config.draft == "eagle3" and config.folder is not None:
        raise ConfigError(f"--engine {config.engine} --draft eagle3: the drafter is made up: use a built-in --model")
    if config.engine != "embedded" and config.engine_python is None and not importlib.util.find_spec(config.engine):
        raise ConfigError(
            f"--engine {config.engine}: it is not installed here: pass --engine-python with the interpreter of its "
            "environment, in which weightsync is installed, too"
        )
    needed = config.trainer.pp + config.engine_ranks
    if config.transport == "ipc" and not torch.cuda.is_available():
        raise ConfigError("--transport ipc: trainer and engines share a CUDA device, and none is found: use shm")
    if config.transport == "nccl" and torch.cuda.device_count() < needed:
        raise ConfigError(
            f"--transport nccl: {config.engine_ranks} engine ranks and {config.trainer.pp} senders need {needed} CUDA "
            f"devices, one each; {torch.cuda.device_count()} found"
        )


def run_bench(config: BenchConfig, *, progress: Progress) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """One whole run; returns the result (`results.build`) and the spans of the measured publishes, if traced.

    Raises:
        ConfigError: before anything is started.
        WeightSyncError: a process failed, or did not answer in time.
    """
    check(config)
    seconds: list[float] = []
    reports: list[PublishReport] = []
    with contextlib.ExitStack() as stack:
        progress(f"{config.title}: starting trainer and engines")
        session = stack.enter_context(Session(config))
        lanes = None
        if config.compare:
            progress("starting lanes for the limit and other ways")
            lanes = LaneGroup(
                session.specs,
                receivers=config.engine_ranks,
                tp_size=config.engine_tp,
                backend="nccl" if config.transport == "nccl" else "gloo",
                shared=config.transport == "shm",
                deadline_s=config.deadline_s,
            )
            stack.callback(lanes.close)
        progress("first publish")
        first_s, _ = session.publish("both" if config.draft == "none" else "target")
        before = session.acceptance()
        for number in range(config.warmup):
            progress(f"warm-up {number + 1} of {config.warmup}")
            session.publish("both")
        if lanes is not None:
            progress("warm-up of other ways")
            lanes.round(warmup=True)
        for number in range(config.publishes):
            progress(f"publish {number + 1} of {config.publishes}")
            taken, report = session.publish("both")
            seconds.append(taken)
            reports.append(report)
            if lanes is not None:
                progress(f"publish {number + 1} of {config.publishes}: other ways")
                lanes.round()
        progress("decoding")
        after = session.acceptance()
        limit, ways = lanes.results() if lanes is not None else (None, [])
        peaks = session.peak_extra_bytes
        real = [e.version for e in session.engines if isinstance(e, ServerHandle)]
    progress("")
    measured = Measured(
        seconds=seconds,
        reports=reports,
        first_publish_s=first_s,
        peak_extra_bytes=peaks,
        acceptance_before=before,
        acceptance_after=after,
        engine_versions={config.engine: real[0]} if real else {},
        limit=limit,
        ways=ways,
    )
    return build(config, measured), [event for report in reports for event in report.events]
