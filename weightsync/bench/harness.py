"""Runs a bench: trainer ranks and engines as processes (or actors), publishes between them, other ways beside them.

`Session` has a launcher start them and is what `benchmarks/` builds on too; `run_bench` is one whole run. Engines start
with random weights, the trainer holds others whose draft fits their target: publishing the target alone shows what a
draft that does not belong to it costs, publishing both that it is mended, by real decoding.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weightsync.bench import weights
from weightsync.bench.children import ask_all
from weightsync.bench.compare import LaneGroup
from weightsync.bench.config import BenchConfig
from weightsync.bench.launchers import SEED, Engine, Worker, launcher_of
from weightsync.bench.results import Measured, build
from weightsync.errors import ConfigError
from weightsync.manifest import TensorSpec
from weightsync.report import PublishReport

__all__ = ["Session", "run_bench"]

PROMPTS = ((1, 2, 3), (7, 5))
NEW_TOKENS = 16
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
        self.launcher = launcher_of(config)
        self._trainers: list[Worker] = []
        self.engines: list[Engine] = []
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
        """End every process that was started by this session's launcher."""
        self.launcher.close()

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for rank in range(self.config.trainer.world_size):
            self._trainers.append(self.launcher.trainer(rank))
        port = None
        for rank, child in enumerate(self._trainers):
            message = {"cmd": "configure", "rank": rank, "config": self.config.to_json(), "host": child.host}
            (answer,) = ask_all([child], message, self.config.deadline_s)
            port = answer.get("port", port)
        self._ask({"cmd": "join", "host": self._trainers[0].host, "port": port})
        # Trainer ranks make their weights while the engines start.
        for child in self._trainers:
            child.send({"cmd": "load", "seed": SEED})
        self.engines = self.launcher.engines()
        deadline = time.monotonic() + self.config.deadline_s
        loaded = [child.receive("load", deadline) for child in self._trainers]
        for answer in sorted(loaded, key=lambda a: int(a["stage"])):
            self.specs += [TensorSpec.from_json(s) for s in answer["specs"]]
        self._ask({"cmd": "connect", "engines": [dict(self.launcher.reach(e)) for e in self.engines]})
        self._note_memory_after_load()

    def _ask(self, message: Mapping[str, Any], patience: float = 1.0) -> list[dict[str, Any]]:
        return ask_all(self._trainers, message, patience * self.config.deadline_s)

    def processes(self) -> dict[str, int]:
        """Name -> pid of every trainer rank and engine rank."""
        trainers = {child.name: child.pid for child in self._trainers}
        return trainers | {
            f"{e.name} {'rank' if self.config.engine == 'embedded' else 'process'} {r}": pid
            for e in self.engines
            for r, pid in enumerate(e.pids)
        }

    # -- memory, from outside --------------------------------------------------------------------------------------

    def _note_memory_after_load(self) -> None:
        for name, now in self.launcher.look(self.processes(), reset=True).items():
            self._baseline[name] = now.rss_bytes
            self._shared[name] = now.shared_bytes

    def _watched(self) -> dict[str, int]:
        """Processes whose peak can be told."""
        return {name: pid for name, pid in self.processes().items() if name in self._baseline}

    def _note_peaks(self) -> None:
        """After every publish: a process may set its own high-water mark back when the next one begins."""
        for name, now in self.launcher.look(self._watched()).items():
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
        pids = self._watched()
        before = self.launcher.look(pids)
        replies = [e.generate(PROMPTS, max_tokens=NEW_TOKENS, deadline_s=self.config.deadline_s) for e in self.engines]
        for name, now in self.launcher.look(pids).items():
            # What decoding keeps (caches, the allocator's arenas) is no publish's.
            self._baseline[name] += now.rss_bytes - before[name].rss_bytes
        return sum(int(r["accepted"]) for r in replies) / sum(int(r["proposed"]) for r in replies)


def check(config: BenchConfig) -> None:
    """Raises `ConfigError` for what no process needs to be started to find out."""
    weights.model_configs(config)
    if config.engine != "embedded" and config.draft == "eagle3" and config.folder is not None:
        raise ConfigError(f"--engine {config.engine} --draft eagle3: the drafter is made up: use a built-in --model")
    local = config.launcher == "local"
    if (
        local
        and config.engine != "embedded"
        and config.engine_python is None
        and not importlib.util.find_spec(config.engine)
    ):
        raise ConfigError(
            f"--engine {config.engine}: it is not installed here: pass --engine-python with the interpreter of its "
            "environment, in which weightsync is installed, too"
        )
    if local and config.engine_python is not None and shutil.which(config.engine_python) is None:
        raise ConfigError(
            f"--engine-python {config.engine_python}: no such program here: pass the interpreter of the environment "
            f"that has {config.engine}, its bin/python"
        )
    if local and config.trainer.kind == "megatron" and not importlib.util.find_spec("megatron"):
        raise ConfigError("--trainer tp=...: Megatron-Core is not installed here: pip install 'weightsync[megatron]'")
    needed = config.trainer.pp + config.engine_ranks
    if config.transport == "ipc" and not torch.cuda.is_available():
        raise ConfigError("--transport ipc: trainer and engines share a CUDA device, and none is found: use shm")
    if config.transport == "nccl" and local and torch.cuda.device_count() < needed:
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
                launcher=session.launcher,
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
        real = {config.engine: str(getattr(session.engines[0], "version", ""))} if config.engine != "embedded" else {}
        cluster = session.launcher.describe()
    progress("")
    measured = Measured(
        seconds=seconds,
        reports=reports,
        first_publish_s=first_s,
        peak_extra_bytes=peaks,
        acceptance_before=before,
        acceptance_after=after,
        engine_versions=real,
        cluster=cluster,
        limit=limit,
        ways=ways,
    )
    return build(config, measured), [event for report in reports for event in report.events]
