"""The trainer's side of saving: stage a state, hand it to the writer, and learn what became of it without waiting.

    checkpointer = Checkpointer(root, rank=r, world_size=n)     # on every rank, once; the only use of a process group
    handle = checkpointer.save(step, state)                     # returns when the state is staged
    checkpointer.poll()                                         # every step: reads a flag; callbacks run here
    checkpointer.close()

`save` copies the state into shared memory and returns. A thread of this process watches the writer: by its exit code,
by the words it leaves in shared memory, never by waiting for it. A writer that dies or stalls is named to the other
ranks and replaced. Every rank calls `save` in the same order.

long: one object with one lock, shared by two threads; apart, its halves would be harder to follow.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint.config import SaveConfig
from checkpoint.disk import Need, disk_left_bytes, folder_bytes, memory_left_bytes
from checkpoint.drain import DrainQueue
from checkpoint.errors import CheckpointError, ConfigError, DiskError, SaveError, StoreLost, WriterLost
from checkpoint.events import LoadResult, SaveEvent, SaveHandle
from checkpoint.layout import LeftOver, clean_up, committed_path, committed_steps
from checkpoint.load import LoadGroup, candidates, load_best
from checkpoint.plan import Plan, State, digest_common, make_plan
from checkpoint.process import WriterProcess
from checkpoint.staging import (
    ALIVE_NS,
    BATCHES_STAGED,
    BATCHES_WRITTEN,
    BYTES_DONE,
    PHASE,
    PHASES,
    PROGRESS_NS,
    Staging,
)
from checkpoint.store import HostedStore, Store
from checkpoint.vote import Culprit, decide_abort, describe, read_verdict, report_failure

__all__ = ["Checkpointer"]

log = logging.getLogger("checkpoint")

WATCH_EVERY_S = 0.02


@dataclasses.dataclass(kw_only=True, slots=True)
class _Active:
    handle: SaveHandle
    plan: Plan
    common: dict[str, str]
    end: float
    attempt: str
    tries: int = 0
    sealed: bool = False
    lost: str | None = None


class Checkpointer:
    """Saves from one rank.

    Args:
        root: folder of the checkpoints, on a disk of this node or on a shared one; ranks that see the same folder find
            that out by themselves.
        rank, world_size: of this process among all that save.
        store: "host:port" of a `HostedStore`. None: rank 0 hosts one, and the others learn its address by one broadcast
            over torch.distributed's default group (none is needed with `world_size=1`).
        bind_host: the address that rank 0's store listens on.
        on_event: called by `poll`, `wait` and `close` on their caller's thread with each `SaveEvent`.

    Raises:
        ConfigError: an argument.
        WriterLost: a writer did not start; names missing ranks, or folders that are seen by some ranks of a node only.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        rank: int,
        world_size: int,
        config: SaveConfig | None = None,
        store: str | None = None,
        bind_host: str = "127.0.0.1",
        on_event: Callable[[SaveEvent], None] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be within 0..{world_size - 1}, got {rank}")
        self.root = Path(root).absolute()
        self.rank, self.world_size = rank, world_size
        self.config = config or SaveConfig()
        self._on_event = on_event
        self._hosted: HostedStore | None = None
        self._address, self._run_id = self._rendezvous(store, bind_host)
        self.root.mkdir(parents=True, exist_ok=True)
        self._staging: Staging | None = None
        self._client: Store | None = None
        self._saves = 0
        self._loads = 0
        self._failures_in_a_row = 0
        self._views: tuple[Any, list[torch.Tensor]] = (None, [])
        self._events: collections.deque[SaveEvent] = collections.deque()
        self._changed = threading.Condition()
        self._active: _Active | None = None
        self._undrained: dict[int, SaveHandle] = {}
        self._drains: DrainQueue | None = None
        self._closing = False
        self._places: dict[str, Any] = {"nodes": None, "hosts": None}
        self._writer: WriterProcess | None = self._spawn()
        self._places = {name: self._writer.ready[name] for name in ("nodes", "hosts")}
        self.node = int(self._places["nodes"][str(rank)])
        if self.config.durable_url is not None and self.node == rank:
            self._drains = DrainQueue(self.root, self.config.durable_url, self.config.durable_bytes_per_s)
        self.removed: list[LeftOver] = clean_up(self.root) if self.node == rank else []
        """What dead attempts of earlier runs left and this start removed."""
        self._thread = threading.Thread(target=self._watch, name="checkpoint-watch", daemon=True)
        self._thread.start()

    def _rendezvous(self, store: str | None, bind_host: str) -> tuple[str, str]:
        """(address, run id) of the store."""
        if store is None and self.world_size > 1:
            import torch.distributed as dist

            if not dist.is_initialized() or dist.get_world_size() != self.world_size:
                raise ConfigError(
                    f"{self.world_size} ranks need a store: initialise torch.distributed with that many, or give the "
                    "address of a checkpoint.HostedStore"
                )
            box: list[Any] = [None]
            if self.rank == 0:
                self._hosted = HostedStore(bind_host)
                box = [self._hosted.address]
            dist.broadcast_object_list(box, src=0)
            store = str(box[0])
        elif store is None:
            self._hosted = HostedStore(bind_host)
            store = self._hosted.address
        # A store serves one run; a second Checkpointer on the same store is another run of it.
        client = Store(store)
        number = client.count(f"checkpoint/members/{self.rank}", 1)
        run_id = client.decide(f"checkpoint/run/{number}", secrets.token_hex(4))
        client.close()
        return store, str(run_id)

    def _spawn(self) -> WriterProcess:
        return WriterProcess(
            {
                "root": str(self.root),
                "rank": self.rank,
                "world_size": self.world_size,
                "store": self._address,
                "run_id": self._run_id,
                "trainer_pid": os.getpid(),
                "deadline_s": self.config.start_deadline_s,
                **self._places,
            }
        )

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer; None while it is being replaced."""
        writer = self._writer
        return writer.pid if writer is not None else None

    def preflight(self, state: State | dict[str, Any], *, deadline_s: float = 60.0) -> Need:
        """Check that disk and memory take the saves of such a state, and touch the staging memory; every rank calls it.

        Without `keep_last` there is no end to what a root holds: then room for two checkpoints is asked for.

        Raises:
            DiskError: it does not fit; says what is needed, held and left. LoadError: a rank did not call in time.
        """
        plan = make_plan(
            self._as_state(state, None),
            rank=self.rank,
            num_files=self.config.num_files,
            staging_bytes=self.config.staging_bytes,
        )
        group = self._group(deadline_s)
        self._loads += 1
        try:
            sizes = group.all_say(f"preflight/{self._loads}", [plan.nbytes, plan.staging_bytes])
        finally:
            group.store.close()
        mates = self._mates()
        node_bytes, staging = (sum(sizes[r][i] for r in mates) for i in (0, 1))
        retention, held = self.config.retention, folder_bytes(self.root)
        peak = retention.disk_peak_bytes(node_bytes, committed_steps(self.root)) or held + 2 * node_bytes
        need = Need(
            node_bytes=node_bytes,
            disk_peak_bytes=peak,
            disk_held_bytes=held,
            disk_left_bytes=disk_left_bytes(self.root, self.config.disk_limit_bytes, held),
            staging_bytes=staging,
            memory_left_bytes=memory_left_bytes(),
        )
        if peak - held > need.disk_left_bytes:
            raise DiskError(
                f"{self.root} on {socket.gethostname()} will hold up to {peak} bytes ({node_bytes} per checkpoint, "
                f"{retention}), holds {held}, and only {need.disk_left_bytes} more can be written: lower keep_last, or "
                "free space"
            )
        if self._staging is None and need.memory_left_bytes is not None and staging > need.memory_left_bytes:
            raise DiskError(
                f"staging takes {staging} bytes of shared memory on {socket.gethostname()}, {need.memory_left_bytes} "
                "are left: set staging_bytes to stream the state in parts"
            )
        self._await_idle(SaveHandle(step=-1, attempt="", nbytes=0))
        self._ensure_staging(plan)
        return need

    # Saving, on the training thread

    def save(self, step: int, state: State | dict[str, Any], *, content_metadata: Any = None) -> SaveHandle:
        """Stage a state and return; what follows happens elsewhere.

        Waits for the save before, if it has not ended: at most until that one's deadline.

        Args:
            step: number of the checkpoint; a committed one of the same number is replaced.
            state: a `State`, or a Megatron `sharded_state_dict` (ShardedTensor, ShardedObject, factories, ...).
            content_metadata: kept in the common state, where Megatron-Core's loader looks for it.

        Raises:
            ConfigError: the state cannot be saved; DiskError: no memory to stage it.
            WriterLost: there is no writer (with `on_failure="raise"`; else the handle says so).
            SaveError: as `poll`.
        """
        began = time.monotonic()
        self.poll()
        self._saves += 1
        attempt = f"{self._run_id}.{self._saves}"
        handle = SaveHandle(step=step, attempt=attempt, nbytes=0)
        self._await_idle(handle)
        part = self._as_state(state, content_metadata)
        plan = make_plan(part, rank=self.rank, num_files=self.config.num_files, staging_bytes=self.config.staging_bytes)
        handle.nbytes = plan.nbytes
        active = _Active(
            handle=handle,
            plan=plan,
            common=digest_common(part.common),
            end=began + self.config.deadline_s,
            attempt=attempt,
        )
        self._ensure_staging(plan)
        try:
            with self._changed:
                self._command(active)
                self._active = active
            self._stage(active)
        except WriterLost as e:
            # The watching thread replaces the writer; this attempt is over for this rank, and so for all.
            active.lost = str(e)
        handle.blocked_s = time.monotonic() - began
        self._events.append(SaveEvent(kind="staged", step=step, handle=handle))
        return handle

    def _as_state(self, state: State | dict[str, Any], content_metadata: Any) -> State:
        if isinstance(state, State):
            part = state
        else:
            from checkpoint.megatron import state_from_sharded

            part = state_from_sharded(state)
        if content_metadata is not None:
            part = dataclasses.replace(part, common={**part.common, "content_metadata": content_metadata})
        return part

    def _await_idle(self, handle: SaveHandle) -> None:
        began = time.monotonic()
        limit = began + self.config.deadline_s * (1 + self.config.retries) + 4 * self.config.grace_s + 60
        with self._changed:
            while (self._active is not None or self._writer is None) and not self._closing:
                if not self._changed.wait(max(limit - time.monotonic(), 0)) and time.monotonic() >= limit:
                    raise SaveError(f"step {handle.step}: the save before it did not end within its own deadline")
            if self._closing:
                raise SaveError("the Checkpointer is closed")
        handle.waited_s = time.monotonic() - began

    def _ensure_staging(self, plan: Plan) -> None:
        if self._staging is not None and self._staging.nbytes >= plan.staging_bytes:
            return
        self._views = (None, [])
        if self._staging is not None:
            self._staging.close()
        self._staging = Staging(plan.staging_bytes)
        writer = self._writer
        if writer is not None:
            writer.send_staging(self._staging)

    def _command(self, active: _Active) -> None:
        """Tell the writer; the caller holds the lock."""
        staging, writer, config = self._staging, self._writer, self.config
        assert staging is not None
        if writer is None:
            raise WriterLost(f"rank {self.rank} has no writer")
        staging.begin()
        plan = active.plan
        known = writer.plan == plan.structure
        writer.send(
            "save",
            attempt=active.attempt,
            step=active.handle.step,
            end=active.end,
            stall_s=config.stall_s,
            grace_s=config.grace_s,
            plan=None
            if known
            else {"items": plan.items, "batches": plan.batches, "num_files": plan.num_files, "nbytes": plan.nbytes},
            common=active.common,
            retention={"keep_last": config.retention.keep_last, "keep_every": config.retention.keep_every},
            keep_aborted=config.keep_aborted,
            # Only the one that is being read: durable storage that is down must not fill the local disk.
            protect=[] if self._drains is None else self._drains.reading,
        )
        writer.plan = plan.structure

    def _stage(self, active: _Active) -> None:
        staging, plan = self._staging, active.plan
        assert staging is not None
        if self._views[0] != plan.structure:
            self._views = (plan.structure, self._make_views(plan))
        views = self._views[1]
        if any(isinstance(s, torch.Tensor) and s.is_cuda for s in plan.sources):
            staging.register_cuda()
        raw = staging.raw
        for number, batch in enumerate(plan.batches):
            # Of two halves one is free again once the part before the last is written.
            while number >= 2 and staging.header[BATCHES_WRITTEN] < number - 1:
                if active.handle.done or self._active is not active or time.monotonic() > active.end:
                    return  # decided meanwhile; the watching thread has said why
                time.sleep(0.001)
            on_device = False
            for index, offset in batch:
                source = plan.sources[index]
                if isinstance(source, torch.Tensor):
                    on_device |= source.is_cuda
                    if source.numel():
                        views[index].copy_(source.detach().reshape(views[index].shape), non_blocking=source.is_cuda)
                else:
                    raw[offset : offset + len(source)] = source
            if on_device:
                torch.cuda.synchronize()
            staging.header[BATCHES_STAGED] = number + 1

    def _make_views(self, plan: Plan) -> list[torch.Tensor]:
        assert self._staging is not None
        views = [torch.empty(0)] * len(plan.items)
        for batch in plan.batches:
            for index, offset in batch:
                item = plan.items[index]
                if item["kind"] == "tensor" and item["nbytes"]:
                    flat = self._staging.data[offset : offset + item["nbytes"]]
                    source = plan.sources[index]
                    assert isinstance(source, torch.Tensor)
                    # Of the source's shape, not of the box: a view that is not contiguous is copied in one pass.
                    views[index] = flat.view(source.dtype).view(source.shape if source.dim() else ())
        return views

    # Loading

    def load(
        self,
        sharded_state_dict: dict[str, Any],
        *,
        step: int | None = None,
        peers: Sequence[str | Path] = (),
        durable: Sequence[str | Path] = (),
        allow_unused: Callable[[str], bool] = lambda _: False,
        trusted: bool = False,
        deadline_s: float = 1800.0,
    ) -> LoadResult:
        """Load the newest whole checkpoint into a Megatron `sharded_state_dict`; every rank calls it.

        Args:
            step: only this one; None: the newest that is whole on all ranks.
            peers: roots of other nodes that can be read from here, where nodes have disks of their own.
            durable: further roots, tried after the local one for each step (mounted storage; `drain` fills them).
            allow_unused: says of a key in the checkpoint that no rank has to ask for it (weights only:
                `lambda key: key.startswith("optimizer.")`).
            trusted: unpickle objects for real instead of refusing those that are not plain data.
            deadline_s: for all ranks together.

        Raises:
            LoadError: none could be loaded, with the reason of each; or a rank was silent, which is named.
        """
        from checkpoint.megatron import load_sharded, requested_keys

        found = [c for c in candidates(self.root, peers, durable) if step is None or c.step == step]
        self._loads += 1
        group = self._group(deadline_s)
        mates = self._mates()
        share = (mates.index(self.rank), len(mates))
        try:
            chosen, state, reasons = load_best(
                group,
                found,
                f"load/{self._loads}",
                share,
                lambda folder: load_sharded(sharded_state_dict, folder, trusted=trusted),
                lambda: requested_keys(sharded_state_dict),
                allow_unused,
            )
        finally:
            group.store.close()
        return LoadResult(step=chosen.step, tier=chosen.tier, state=state, passed_over=tuple(reasons))

    def _group(self, deadline_s: float) -> LoadGroup:
        return LoadGroup(
            store=Store(self._address, self._run_id + "/"),
            rank=self.rank,
            world_size=self.world_size,
            hosts={int(k): v for k, v in self._places["hosts"].items()},
            end=time.monotonic() + deadline_s,
        )

    def _mates(self) -> list[int]:
        """Ranks of this node, ascending."""
        return sorted(int(rank) for rank, node in self._places["nodes"].items() if node == self.node)

    def poll(self) -> list[SaveEvent]:
        """What happened since the last call; runs the callback. Never waits.

        Raises:
            SaveError: a save failed and `on_failure` is "raise", or too many failed in a row.
        """
        events = []
        while self._events:
            event = self._events.popleft()
            events.append(event)
            if self._on_event is not None:
                self._on_event(event)
            if event.kind == "committed":
                self._failures_in_a_row = 0
            if event.kind == "failed":
                self._failures_in_a_row += 1
                text = f"step {event.step} was not committed: {event.handle.error}"
                if self.config.on_failure == "raise":
                    raise SaveError(text)
                if self._failures_in_a_row >= self.config.max_consecutive_failures:
                    raise SaveError(f"{self._failures_in_a_row} saves in a row failed; the last: {text}")
        return events

    def wait(self, deadline_s: float | None = None) -> SaveHandle | None:
        """Wait until the save in flight has ended, then `poll`; returns its handle (None if there was none).

        Raises:
            SaveError: it did not within `deadline_s` (None: its own deadline and what ending it takes), or as `poll`.
        """
        with self._changed:
            active = self._active
            if active is not None:
                config = self.config
                patience = config.deadline_s * (1 + config.retries) + 4 * config.grace_s + 60
                if not self._changed.wait_for(lambda: active.handle.done, deadline_s or patience):
                    raise SaveError(
                        f"step {active.handle.step} is in phase {self._phase()} after {deadline_s or patience:g} s"
                    )
        self.poll()
        return active.handle if active is not None else None

    def close(self, deadline_s: float | None = None) -> None:
        """Let the save in flight end, then stop the writer. Idempotent; errors of that save are raised after."""
        if self._closing:
            return
        try:
            self.wait(deadline_s)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join(10)
            if self._drains is not None:
                self._drains.stop()
            if self._writer is not None:
                self._writer.close(5)
                self._writer = None
            self._part()
            self._views = (None, [])
            if self._staging is not None:
                self._staging.close()

    def _part(self) -> None:
        """Rank 0 serves the store until everybody has said goodbye, or the grace is over."""
        try:
            client = self._client or Store(self._address, self._run_id + "/", reply_timeout_s=self.config.grace_s)
            client.count("bye", 1)
            end = time.monotonic() + self.config.grace_s
            while self._hosted is not None and time.monotonic() < end:
                if client.count("bye") >= self.world_size:
                    break
                time.sleep(0.01)
            client.close()
        except StoreLost as e:
            log.info("closing without the store: %s", e)
        if self._hosted is not None:
            self._hosted.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Watching, on a thread of its own

    def _watch(self) -> None:
        while not self._closing:
            self._drain_some()
            writer = self._writer
            if writer is None:
                self._replace()
                continue
            # The pipe wakes this thread; the timeout is for what a dead or stopped writer cannot say.
            events = writer.events(WATCH_EVERY_S if self._active is not None else 0.1)
            for event in events:
                if event["event"] == "result" and (active := self._active) and event["attempt"] == active.attempt:
                    self._conclude(active, event)
            active = self._active
            if active is not None:
                if not active.sealed and self._phase() in PHASES[PHASES.index("vote") :]:
                    self._seal(active)
                if (reason := self._trouble(active, writer)) is not None:
                    self._give_up(active, writer, reason)
            elif writer.dead and not self._closing:
                log.warning("the idle writer of rank %d %s; it is replaced", self.rank, writer.fate())
                self._drop(writer)

    def _phase(self) -> str:
        return PHASES[self._staging.header[PHASE]] if self._staging is not None else "idle"

    def _seal(self, active: _Active) -> None:
        active.sealed = True
        if active.handle.state == "staged":
            active.handle.state = "sealed"
            self._events.append(SaveEvent(kind="sealed", step=active.handle.step, handle=active.handle))

    def _trouble(self, active: _Active, writer: WriterProcess) -> str | None:
        """Why this rank's writer has to be given up, or None."""
        if active.lost is not None:
            return active.lost
        if writer.dead:
            return f"its writer (pid {writer.pid}) {writer.fate()}"
        staging, now = self._staging, time.monotonic()
        assert staging is not None
        phase = self._phase()
        since_alive = now - staging.header[ALIVE_NS] / 1e9
        if since_alive > self.config.stall_s and phase != "finished":
            return f"its writer (pid {writer.pid}) has not been scheduled for {since_alive:.1f} s"
        staged = staging.header[BATCHES_STAGED] > staging.header[BATCHES_WRITTEN]
        since_progress = now - staging.header[PROGRESS_NS] / 1e9
        if phase == "write" and staged and since_progress > self.config.stall_s:
            return f"its writer (pid {writer.pid}) has written nothing for {since_progress:.1f} s"
        if now > active.end + 3 * self.config.grace_s:
            return f"its writer (pid {writer.pid}) did not end {now - active.end:.1f} s after the deadline"
        return None

    def _culprit(self, active: _Active, error: str) -> Culprit:
        staging = self._staging
        assert staging is not None
        done = min(int(staging.header[BYTES_DONE]), active.plan.nbytes)
        now = time.monotonic()
        began = active.end - self.config.deadline_s
        return Culprit(
            rank=self.rank,
            host=socket.gethostname(),
            phase=self._phase(),
            error=error,
            bytes_done=done,
            bytes_total=active.plan.nbytes,
            rate_bytes_s=done / max(now - began, 1e-6),
            heartbeat_age_s=now - staging.header[ALIVE_NS] / 1e9,
        )

    def _conclude(self, active: _Active, result: dict[str, Any]) -> None:
        active.handle.result = {k: v for k, v in result.items() if k not in ("event", "culprits", "outcome", "attempt")}
        if result["outcome"] == "committed":
            self._end(active, "committed", ())
            return
        self._failed(active, [Culprit(**c) for c in result["culprits"]], retry=result["outcome"] == "aborted")

    def _failed(self, active: _Active, culprits: list[Culprit], *, retry: bool) -> None:
        log.warning("step %d was not committed: %s", active.handle.step, describe(culprits))
        again = retry and self.config.on_failure == "retry" and active.tries < self.config.retries
        if again and len(active.plan.batches) == 1 and not self._closing:
            active.tries += 1
            active.attempt = f"{active.handle.attempt}r{active.tries}"
            active.end = time.monotonic() + self.config.deadline_s
            active.lost = None
            try:
                with self._changed:
                    self._command(active)
                    assert self._staging is not None
                    self._staging.header[BATCHES_STAGED] = 1
            except WriterLost as e:
                active.lost = str(e)
            return
        self._end(active, "failed", tuple(culprits))

    def _end(self, active: _Active, state: str, culprits: tuple[Culprit, ...]) -> None:
        if state == "committed":
            self._seal(active)
            active.handle.path = committed_path(self.root, active.handle.step)
        with self._changed:
            active.handle.culprits = culprits
            active.handle.state = state
            self._events.append(SaveEvent(kind=state, step=active.handle.step, handle=active.handle))
            if state == "committed" and self._drains is not None:
                self._drains.add(active.handle.step)
                self._undrained[active.handle.step] = active.handle
            self._active = None
            self._changed.notify_all()

    def _drain_some(self) -> None:
        if self._drains is None:
            return
        durable = self._drains.poll()
        for step in [step for step in self._undrained if step not in self._drains.pending]:
            with self._changed:
                handle = self._undrained.pop(step)
                if step in durable:  # else it was pruned first
                    handle.drained = True
                    self._events.append(SaveEvent(kind="drained", step=step, handle=handle))
                self._changed.notify_all()

    def wait_drained(self, deadline_s: float) -> bool:
        """Wait until everything committed by this rank's node is durable; False at the deadline."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._undrained, deadline_s)
        self.poll()
        return done

    def _give_up(self, active: _Active, writer: WriterProcess, reason: str) -> None:
        """Name the writer's end to everybody, learn the verdict, and start another writer that carries it out."""
        culprit = self._culprit(active, reason)
        log.warning("rank %d gives its writer up: %s", self.rank, culprit)
        self._drop(writer)
        verdict: dict[str, Any] | None = None
        try:
            if self._client is None:
                self._client = Store(self._address, self._run_id + "/", reply_timeout_s=self.config.grace_s)
            store = self._client
            report_failure(store, active.attempt, culprit)
            if self.rank != 0:
                verdict = store.wait(f"{active.attempt}/verdict", time.monotonic() + self.config.grace_s)
            if verdict is None:
                verdict = decide_abort(store, active.attempt, [culprit])
        except StoreLost as e:
            self._client = None
            self._failed(active, [culprit, self._culprit(active, str(e))], retry=False)
            return
        committed, culprits = read_verdict(verdict)
        # The successor is started before the outcome is told, so that the next save finds it.
        self._replace(finish=active)
        if committed:
            self._end(active, "committed", ())
        else:
            self._failed(active, culprits, retry=True)

    def _drop(self, writer: WriterProcess) -> None:
        with self._changed:
            self._writer = None
        writer.kill()

    def _replace(self, finish: _Active | None = None) -> None:
        try:
            writer = self._spawn()
            if self._staging is not None:
                writer.send_staging(self._staging)
            if finish is not None:
                writer.send(
                    "finish",
                    attempt=finish.attempt,
                    step=finish.handle.step,
                    grace_s=self.config.grace_s,
                    keep_aborted=self.config.keep_aborted,
                )
                end = time.monotonic() + 2 * self.config.grace_s
                while time.monotonic() < end and not writer.dead:
                    if any(e["event"] == "finished" for e in writer.events(end - time.monotonic())):
                        break
        except CheckpointError as e:
            log.warning("rank %d could not start another writer, trying again: %s", self.rank, e)
            time.sleep(1.0)
            return
        with self._changed:
            self._writer = writer
            self._changed.notify_all()
