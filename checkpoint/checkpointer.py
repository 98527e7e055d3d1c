"""What a trainer holds: save a state, learn what became of it without waiting, load the best that there is.

    checkpointer = Checkpointer(root, rank=r, world_size=n)     # on every rank, once; the only use of a process group
    handle = checkpointer.save(step, state)                     # returns when the state is staged
    checkpointer.poll()                                         # every step: reads a flag; callbacks run here
    checkpointer.close()

Every rank calls `save` in the same order. `plan` lays the state out, `stage` copies it into shared memory, `supervise`
watches the writer process that does the rest; `load` chooses and proves what is read.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checkpoint.config import SaveConfig
from checkpoint.disk import Need, disk_left_bytes, folder_bytes, memory_left_bytes
from checkpoint.drain import DrainQueue
from checkpoint.errors import ConfigError, DiskError, SaveError, StoreLost, WriterLost
from checkpoint.events import LoadResult, SaveEvent, SaveHandle
from checkpoint.layout import LeftOver, clean_up, committed_steps
from checkpoint.load import LoadGroup, candidates, load_best
from checkpoint.plan import Plan, State, digest_common, make_plan
from checkpoint.stage import Stager
from checkpoint.store import HostedStore, Store
from checkpoint.supervise import InFlight, Supervisor

__all__ = ["Checkpointer"]

log = logging.getLogger("checkpoint")


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
        self._saves = self._loads = self._failures_in_a_row = 0
        self._stager = Stager()
        self._supervisor = Supervisor(
            {
                "root": str(self.root),
                "rank": rank,
                "world_size": world_size,
                "store": self._address,
                "run_id": self._run_id,
                "trainer_pid": os.getpid(),
                "deadline_s": self.config.start_deadline_s,
                "nodes": None,
                "hosts": None,
            },
            self.config,
        )
        self.node = int(self._supervisor.places["nodes"][str(rank)])
        """The lowest rank that sees the same root."""
        leads, url = self.node == rank, self.config.durable_url
        self.removed: list[LeftOver] = clean_up(self.root) if leads else []
        """What dead attempts of earlier runs left and this start removed."""
        drains = DrainQueue(self.root, url, self.config.durable_bytes_per_s) if leads and url is not None else None
        self._supervisor.watch(drains)

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

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer; None while it is being replaced."""
        return self._supervisor.writer_pid

    def preflight(self, state: State | dict[str, Any], *, deadline_s: float = 60.0) -> Need:
        """Check that disk and memory take the saves of such a state, and touch the staging memory; every rank calls it.

        Without `keep_last` there is no end to what a root holds: then room for two checkpoints is asked for.

        Raises:
            DiskError: it does not fit; says what is needed, held and left. LoadError: a rank did not call in time.
        """
        plan = self._plan(self._as_state(state, None))
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
        if self._stager.staging is None and need.memory_left_bytes is not None and staging > need.memory_left_bytes:
            raise DiskError(
                f"staging takes {staging} bytes of shared memory on {socket.gethostname()}, {need.memory_left_bytes} "
                "are left: set staging_bytes to stream the state in parts"
            )
        self._supervisor.await_idle(-1)
        self._ensure_staging(plan)
        return need

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
        self._supervisor.await_idle(step)
        handle.waited_s = time.monotonic() - began
        part = self._as_state(state, content_metadata)
        plan = self._plan(part)
        handle.nbytes = plan.nbytes
        active = InFlight(
            handle=handle,
            plan=plan,
            common=digest_common(part.common),
            end=began + self.config.deadline_s,
            attempt=attempt,
        )
        self._ensure_staging(plan)
        try:
            self._supervisor.launch(active)
            self._stager.copy(plan, ended=lambda: self._supervisor.is_over(active))
        except WriterLost as e:
            # The watching thread replaces the writer; this attempt is over for this rank, and so for all.
            active.lost = str(e)
        handle.blocked_s = time.monotonic() - began
        self._supervisor.events.append(SaveEvent(kind="staged", step=step, handle=handle))
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

    def _plan(self, state: State) -> Plan:
        config = self.config
        return make_plan(state, rank=self.rank, num_files=config.num_files, staging_bytes=config.staging_bytes)

    def _ensure_staging(self, plan: Plan) -> None:
        if (new := self._stager.ensure(plan)) is not None:
            self._supervisor.use(new)

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
            hosts={int(k): v for k, v in self._supervisor.places["hosts"].items()},
            end=time.monotonic() + deadline_s,
        )

    def _mates(self) -> list[int]:
        """Ranks of this node, ascending."""
        return sorted(int(rank) for rank, node in self._supervisor.places["nodes"].items() if node == self.node)

    def poll(self) -> list[SaveEvent]:
        """What happened since the last call; runs the callback. Never waits.

        Raises:
            SaveError: a save failed and `on_failure` is "raise", or too many failed in a row.
        """
        events, queue = [], self._supervisor.events
        while queue:
            event = queue.popleft()
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
        handle = self._supervisor.wait(deadline_s)
        self.poll()
        return handle

    def wait_drained(self, deadline_s: float) -> bool:
        """Wait until everything committed by this rank's node is durable; False at the deadline."""
        done = self._supervisor.wait_drained(deadline_s)
        self.poll()
        return done

    def close(self, deadline_s: float | None = None) -> None:
        """Let the save in flight end, then stop the writer. Idempotent; errors of that save are raised after."""
        if self._supervisor.closing:
            return
        try:
            self.wait(deadline_s)
        finally:
            self._supervisor.close()
            self._part()
            self._stager.close()

    def _part(self) -> None:
        """Rank 0 serves the store until everybody has said goodbye, or the grace is over."""
        try:
            client = Store(self._address, self._run_id + "/", reply_timeout_s=self.config.grace_s)
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
