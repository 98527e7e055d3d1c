"""`weightsync bench --launcher ray`: trainer ranks, lanes and engines as actors of a Ray cluster.

`RayLauncher` reserves places (trainer ranks on as few nodes as possible; engines spread over the other nodes, if there
are any), starts `BenchWorker` and `BenchEngine` actors there and speaks to them as `harness` and `compare` speak to
processes. Each listens on the address of its own node. Trainers reach engines through their actors' handles; weights
move between the nodes as ever.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.actors import Cluster, EngineActor, Member, Place, node_host
from weightsync.bench.config import BenchConfig
from weightsync.bench.launchers import SERVER_START_S, Engine, Folders, Worker, start_engine
from weightsync.bench.machine import describe_machine
from weightsync.bench.procfs import Holdings, look
from weightsync.errors import WeightSyncError

__all__ = ["BenchEngine", "BenchWorker", "RayLauncher"]


class BenchWorker:
    """In an actor: one trainer rank or lane. `program` is its module, which has a function `make`."""

    def __init__(self, program: str) -> None:
        self._handle = importlib.import_module(program).make()

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        from weightsync.bench.children import answer_to

        return answer_to(self._handle, message)

    def look(self, pids: Mapping[str, int], reset: bool) -> dict[str, Holdings]:
        return look(pids, reset=reset)

    def machine(self) -> dict[str, Any]:
        return describe_machine()

    def weightsync_place(self) -> Place:
        return Place.here()

    def weightsync_stop(self) -> None:
        self._handle.close()


class BenchEngine(EngineActor):
    """In an actor: one engine, whose ranks are processes below it."""

    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        self._stack = contextlib.ExitStack()
        log = self._stack.enter_context(tempfile.NamedTemporaryFile(prefix="weightsync-bench-"))  # noqa: SIM115
        folders = Folders()
        self._stack.callback(folders.close)
        bench = BenchConfig.from_json(config)
        super().__init__(start_engine, bench, index, host=node_host(), log=log.name, folders=folders)

    async def about(self) -> dict[str, Any]:
        version = getattr(type(self.engine), "version", None)
        found = await self.run(version.fget, self.engine) if version is not None else None
        return {"name": self.engine.name, "pids": list(self.engine.pids), "version": found}

    async def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, deadline_s: float) -> dict[str, Any]:
        reply: dict[str, Any] = await self.run(
            self.engine.generate, prompts, max_tokens=max_tokens, deadline_s=deadline_s
        )
        return reply

    async def look(self, pids: Mapping[str, int], reset: bool) -> dict[str, Holdings]:
        return look(pids, reset=reset)

    async def machine(self) -> dict[str, Any]:
        return describe_machine()

    async def weightsync_stop(self) -> None:
        await super().weightsync_stop()
        self._stack.close()


class _Worker:
    """A `BenchWorker` as its launcher's side sees it: a `Worker`."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._ref: Any = None

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def host(self) -> str:
        assert self.member.place is not None
        return self.member.place.host

    @property
    def pid(self) -> int:
        return self.member.pid

    def send(self, message: Mapping[str, Any]) -> None:
        self._ref = self.member.submit("call", dict(message))

    def receive(self, what: str, deadline: float) -> dict[str, Any]:
        answer: dict[str, Any] = self.member.result(self._ref, what, max(deadline - time.monotonic(), 0.0))
        if "error" in answer:
            raise WeightSyncError(f"{self.member}, {what}: {answer['error']}\n{answer['traceback']}")
        return answer

    def close(self) -> None:
        """The launcher ends it."""


class _Engine:
    """A `BenchEngine`, likewise: an `Engine`."""

    def __init__(self, member: Member, about: Mapping[str, Any]) -> None:
        self.member = member
        self.name: str = about["name"]
        self.pids: Sequence[int] = about["pids"]
        self.version: str | None = about["version"]

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, deadline_s: float) -> dict[str, Any]:
        prompts = [list(p) for p in prompts]
        reply: dict[str, Any] = self.member.call(
            "generate", prompts, max_tokens, deadline_s, deadline_s=deadline_s + 10
        )
        return reply


class RayLauncher:
    """Raises `ConfigError` if there is no such cluster, or it has no room."""

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        self._members: dict[str, Member] = {}
        ranks, gpus = config.trainer.world_size, float(config.transport == "nccl")
        trainers = [{"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}] * ranks
        size = float(config.engine_tp)
        engines = [{"CPU": size, "GPU": size} if gpus else {"CPU": size}] * config.engines
        self._gpus = gpus
        self._cluster = Cluster(config.address, cpus=ranks + config.engine_ranks)
        try:
            if config.placement == "pack":
                slots = self._cluster.reserve([*trainers, *engines], spread=False)
                self._trainer_slots, self._engine_slots = slots[:ranks], slots[ranks:]
            else:
                self._trainer_slots = self._cluster.reserve(trainers, spread=False)
                taken = {slot.node for slot in self._trainer_slots}
                others = {str(n["NodeID"]) for n in self._cluster.nodes()} - taken
                avoid = sorted(taken) if others else []
                self._engine_slots = self._cluster.reserve(engines, spread=True, avoid=avoid)
        except BaseException:
            self._cluster.close()
            raise

    def trainer(self, rank: int) -> Worker:
        slot = self._trainer_slots[rank]
        name = f"trainer rank {rank}"
        member = self._cluster.start(
            BenchWorker, slot, args=["weightsync.bench.trainer"], name=name, cpus=1, gpus=self._gpus
        )
        return _Worker(self._ready(member))

    def lane(self, rank: int) -> Worker:
        engine = (rank - 1) // self._config.engine_tp
        slot = self._engine_slots[engine] if rank else self._trainer_slots[0]
        name = f"lane receiver {rank - 1}" if rank else "lane sender"
        return _Worker(self._ready(self._cluster.start(BenchWorker, slot, args=["weightsync.bench.lanes"], name=name)))

    def engines(self) -> list[Engine]:
        config, size = self._config, self._config.engine_tp
        starting = [
            self._cluster.start(
                BenchEngine, slot, args=[config.to_json(), i], name=f"engine{i}", cpus=size, gpus=size * self._gpus
            )
            for i, slot in enumerate(self._engine_slots)
        ]
        limit_s = config.deadline_s if config.engine == "embedded" else max(config.deadline_s, SERVER_START_S)
        end = time.monotonic() + limit_s + 10
        started: list[Engine] = []
        for member in starting:
            self._ready(member, end - time.monotonic())
            started.append(_Engine(member, member.call("about", deadline_s=30)))
        return started

    def _ready(self, member: Member, deadline_s: float | None = None) -> Member:
        self._members[member.name] = member.ready(self._config.deadline_s if deadline_s is None else deadline_s)
        return member

    def reach(self, engine: Engine) -> Mapping[str, Any]:
        assert isinstance(engine, _Engine)
        return {"actor": engine.member.handle, "name": engine.name}

    def look(self, pids: Mapping[str, int], *, reset: bool = False) -> dict[str, Holdings]:
        by_member: dict[str, dict[str, int]] = {}
        for name, pid in pids.items():
            # A trainer rank is an actor; an engine's processes are named after theirs.
            member = name if name in self._members else name.split(" ")[0]
            by_member.setdefault(member, {})[name] = pid
        asked = [(m, self._members[m].submit("look", theirs, reset)) for m, theirs in by_member.items()]
        found: dict[str, Holdings] = {}
        for name, ref in asked:
            found |= self._members[name].result(ref, "look", self._config.deadline_s)
        return found

    def describe(self) -> Mapping[str, Any] | None:
        """Nodes as numbers: their machines, and who ran where."""
        numbers: dict[str, int] = {}
        machines = []
        for member in self._members.values():
            assert member.place is not None
            if member.place.node not in numbers:
                numbers[member.place.node] = len(numbers)
                machines.append(member.call("machine", deadline_s=self._config.deadline_s))
        on = {name: numbers[m.place.node] for name, m in self._members.items() if m.place is not None}
        return {**self._cluster.versions, "nodes": machines, "on_node": on}

    def close(self) -> None:
        self._cluster.close()
