"""Actors of tests/weightsync/test_ray.py: engines, and async trainer ranks that publish, save and hand steps over."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import torch

from checkpoint import process
from checkpoint.checkpointer import Checkpointer
from checkpoint.config import SaveConfig
from checkpoint.store import HostedStore
from tests.checkpoint import faulty_writer
from tests.checkpoint.support import state
from tests.weightsync import fleet
from training_hooks.capture import LayerRef, Rows
from training_hooks.handoff import CapturedStep, SideThread
from weightsync import errors
from weightsync.actors import EngineActor, Place, node_host
from weightsync.config import PublishConfig
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.publisher import Publisher

TICK_S = 0.01
SLOW_S = 1.0
DEADLINE_S = 30.0
"""Of a publish and of a save; a busy machine takes seconds to kill a node."""


class Rollout(EngineActor):
    """A real embedded engine, and the user's own methods beside it."""

    def __init__(self, name):
        super().__init__(
            launch,
            EngineConfig(model=fleet.MODEL, draft="mtp", name=name, seed=99, host=node_host(), start_deadline_s=180),
        )

    async def serves(self, version):
        """Tokens and draft are those of `version` alone; raises otherwise."""
        await self.run(fleet.serves, self.engine, version)

    async def fenced(self):
        return (await self.run(self.engine.status))["fenced"]

    async def pids(self):
        return [os.getpid(), *self.engine.pids]


class Scripted:
    """An object with the methods of an engine's control: `pause` does what its mode says."""

    def pause(self, mode, *, deadline_s):
        if mode == "slow":
            time.sleep(deadline_s + 2)
        if mode == "fenced":
            raise errors.EngineFenced("holds no complete version", engine="inner", rank=1, phase="receive")
        if mode == "broken":
            raise KeyError("world_size")
        return {"kind": mode}

    def status(self, *, deadline_s):
        return {"deadline_s": deadline_s}

    commit = preflight = receive = resume = status


class Busy(EngineActor):
    def __init__(self):
        super().__init__(Scripted)

    async def hold(self):
        await self.run(time.sleep, 60)


class NoEngine:
    """An actor that does not derive from EngineActor."""


def same_step(a, b):
    rows = all(
        torch.equal(a.rows[r].keys, b.rows[r].keys) and torch.equal(a.rows[r].values, b.rows[r].values) for r in a.rows
    )
    tokens = all(torch.equal(a.tokens[k], b.tokens[k]) for k in a.tokens)
    return rows and tokens and (a.run, a.step, a.replica) == (b.run, b.step, b.replica) and list(a.rows) == list(b.rows)


def captured(step):
    keys = torch.tensor([[s, p] for s in (3, 11) for p in range(5)])
    values = torch.arange(10 * 8, dtype=torch.float32).view(10, 8) + 100 * step
    rows = {ref: Rows(keys=keys, values=(values + i).bfloat16()) for i, ref in enumerate(LAYERS)}
    tokens = {s: torch.arange(5) + s for s in (3, 11)}
    return CapturedStep(
        run="r", step=step, replica=0, rows=rows, tokens=tokens, supervised={s: t > s for s, t in tokens.items()}
    )


LAYERS = (LayerRef("input_to", 1), LayerRef("final_norm"))


class Trainer:
    """An async actor: what blocks goes through one thread; `ticks` tells how often the event loop ran meanwhile."""

    def __init__(self, rank, faults):
        os.environ["CHECKPOINT_TEST_FAULTS"] = faults
        process.PROGRAM = faulty_writer.PROGRAM
        torch.set_num_threads(1)
        self.rank, self.side, self.source = rank, SideThread(), fleet.Weights(1)
        self.publisher = self.checkpointer = self.hosted = None

    async def weightsync_place(self):
        return Place.here()

    async def _measured(self, fn, *args, **kwargs):
        """(result, how often the event loop ran meanwhile): not for how long it stood still, as a busy machine may."""
        ticks, done = [], asyncio.Event()

        async def tick():
            while not done.is_set():
                await asyncio.sleep(TICK_S)
                ticks.append(None)

        ticking = asyncio.create_task(tick())
        try:
            return await self.side.run(fn, *args, **kwargs), len(ticks)
        finally:
            done.set()
            await ticking

    # -- publishing ------------------------------------------------------------------------------------------------

    async def connect(self, engines):
        config = PublishConfig(
            run_id="ray",
            bind_host=node_host(),
            deadline_s=DEADLINE_S,
            control_s=30.0,
            heartbeat_s=5.0,
            bucket_bytes=64 << 10,
        )
        if self.publisher is None:
            self.publisher = await self.side.run(Publisher, self.source, engines, config)
        self.publisher.engines = engines
        return self.publisher._hosted.host, self.publisher._hosted.port

    async def publish(self, version, *, background=False):
        """One in whose middle the source takes `SLOW_S`: a loop that waited for it would show."""
        self.source.version = version
        await self.side.run(fleet.weights, version)
        self.source.at[5] = lambda: time.sleep(SLOW_S)
        began = time.monotonic()

        def run():
            if background:
                return self.publisher.publish_async(version).result(60)
            return self.publisher.publish(version)

        report, ticks = await self._measured(run)
        return {"outcome": report.outcome, "ticks": ticks, "seconds": time.monotonic() - began}

    async def publish_until(self, version, mark, go):
        """As `publish`; in mid-stream it makes the file `mark` and waits for the file `go`. Returns how it failed."""

        def meet():
            Path(mark).touch()
            end = time.monotonic() + DEADLINE_S
            while not Path(go).exists():
                assert time.monotonic() < end, "nobody broke anything"
                time.sleep(0.02)
            self.broken_at = time.monotonic()

        self.source.version, self.source.at[5] = version, meet
        try:
            await self.side.run(self.publisher.publish, version)
        except errors.PublishError as e:
            return {
                "kind": type(e).__name__,
                "error": str(e),
                "seconds": time.monotonic() - self.broken_at,
                "engines": {x.name: [x.outcome, x.error] for x in e.report.engines},
            }
        return {"kind": "committed"}

    # -- saving ----------------------------------------------------------------------------------------------------

    async def host_store(self):
        self.hosted = HostedStore(node_host())
        return self.hosted.address

    async def open_checkpointer(self, root, store, world_size):
        config = SaveConfig(deadline_s=DEADLINE_S, stall_s=5, grace_s=1)
        self.checkpointer = await self.side.run(
            Checkpointer, root, rank=self.rank, world_size=world_size, store=store, config=config
        )
        return [os.getpid(), self.checkpointer.writer_pid]

    async def save(self, step, world_size):
        """The writer takes `SLOW_S` before it writes, unless it was given another fault."""
        if not (Path(os.environ["CHECKPOINT_TEST_FAULTS"]) / f"fault.{self.rank}.json").exists():
            fault(os.environ["CHECKPOINT_TEST_FAULTS"], self.rank, phase="write", do=SLOW_S)

        def run():
            handle = self.checkpointer.save(step, state(self.rank, world_size, step))
            began = time.monotonic()
            self.checkpointer.wait()
            return {"state": handle.state, "error": handle.error, "seconds": time.monotonic() - began}

        found, ticks = await self._measured(run)
        return found | {"ticks": ticks}

    async def close(self):
        for held in (self.publisher, self.checkpointer, self.hosted):
            if held is not None:
                await self.side.run(held.close)
        self.publisher = self.checkpointer = self.hosted = None

    # -- handing over ----------------------------------------------------------------------------------------------

    async def hand_over(self, step):
        import ray

        return ray.put(captured(step))

    async def take_over(self, boxed):
        """`boxed`: a list with the reference, so that Ray does not resolve it on the way."""
        handed = await boxed[0]
        return same_step(handed, captured(handed.step)), handed.step


def fault(folder, rank, **words):
    (Path(folder) / f"fault.{rank}.json").write_text(json.dumps(words))
