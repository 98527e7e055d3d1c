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
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from checkpoint.config import SaveConfig
from checkpoint.contents import CONTENTS, Extras, check_contents, section_of, select
from checkpoint.disk import Need, check_need
from checkpoint.drain import DrainQueue, refuse_root
from checkpoint.errors import ConfigError, SaveError, StoreLost, WriterLost
from checkpoint.events import LoadResult, SaveEvent, SaveHandle
from checkpoint.format.folder import TorchDistReader
from checkpoint.layout import LeftOver
from checkpoint.load import LoadGroup, candidates, load_best
from checkpoint.plan import INDEX_BYTES, RANK_BYTES, RECORD_BYTES, Plan, State, digest_common, make_plan
from checkpoint.recover import recover
from checkpoint.retention import Retention
from checkpoint.stage import Stager
from checkpoint.store import REPLY_TIMEOUT_S, HostedStore, Store
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
        bind_host, advertise_host, port_range: where rank 0's store listens, what others connect to: see `HostedStore`.
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
        advertise_host: str | None = None,
        port_range: tuple[int, int] | None = None,
        on_event: Callable[[SaveEvent], None] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be within 0..{world_size - 1}, got {rank}")
        self.root = Path(root).absolute()
        self.rank, self.world_size = rank, world_size
        self.config = config or SaveConfig()
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"{self.root} is no folder: name one for checkpoints, it may be new")
        if self.config.durable_url is not None:
            refuse_root(self.root, self.config.durable_url)
        self._on_event = on_event
        self._hosted: HostedStore | None = None
        self._address, self._run_id = self._rendezvous(store, (bind_host, advertise_host, port_range))
        self.root.mkdir(parents=True, exist_ok=True)
        self._saves = self._loads = self._failures_in_a_row = 0
        self._stager = Stager()
        self._extras = Extras(rank, world_size)
        self._supervisor = Supervisor(
            {
                "root": str(self.root),
                "rank": rank,
                "world_size": world_size,
                "store": self._address,
                "run_id": self._run_id,
                "rank_0_hosts": store is None,
                "trainer_pid": os.getpid(),
                "deadline_s": self.config.start_deadline_s,
                "reply_timeout_s": min(REPLY_TIMEOUT_S, self.config.deadline_s),
                "nodes": None,
                "hosts": None,
            },
            self.config,
        )
        self.node = int(self._supervisor.places["nodes"][str(rank)])
        """The lowest rank that sees the same root."""
        leads, url = self.node == rank, self.config.durable_url
        group = self._group(self.config.start_deadline_s)
        self.recovered: list[int]
        """Steps whose data an earlier run left whole without having committed it, and this start did."""
        self.removed: list[LeftOver]
        """What dead attempts of earlier runs left and this start removed."""
        try:
            self.recovered, self.removed = recover(self.root, group, leads=leads)
        except WriterLost:
            self._supervisor.close()
            raise
        finally:
            group.store.close()
        drains = None
        if leads and url is not None:
            drains = DrainQueue(self.root, url, self.config.durable_bytes_per_s, self.config.durable_options)
        self._supervisor.watch(drains)

    def _rendezvous(self, store: str | None, place: tuple[str, str | None, tuple[int, int] | None]) -> tuple[str, str]:
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
                self._hosted = HostedStore(*place)
                box = [self._hosted.address]
            dist.broadcast_object_list(box, src=0)
            store = str(box[0])
        elif store is None:
            self._hosted = HostedStore(*place)
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

        Without `keep_last` there is no end to what a root holds: then room for two more checkpoints is asked for.

        Raises:
            DiskError: it does not fit; says what is needed, held and left. LoadError: a rank did not call in time.
        """
        plan = self._plan(self._as_state(state, None))
        group = self._group(deadline_s)
        self._loads += 1
        try:
            told = [plan.nbytes, plan.staging_bytes, len(plan.items)]
            sizes = group.all_say(f"preflight/{self._loads}", told)
        finally:
            group.store.close()
        mates, config = self._mates(), self.config
        node_bytes, staging, num_items = (sum(sizes[r][i] for r in mates) for i in (0, 1, 2))
        # What is stated is never exceeded, so what surrounds the data counts, too.
        node_bytes += RECORD_BYTES * num_items + RANK_BYTES * len(mates) + INDEX_BYTES * sum(size[2] for size in sizes)
        need = check_need(
            self.root,
            config.retention,
            node_bytes=node_bytes,
            staging_bytes=staging if self._stager.staging is None else 0,
            disk_limit_bytes=config.disk_limit_bytes,
            drains=config.durable_url is not None,
            reserve=self.node == self.rank,
        )
        if need.filesystem.caution:
            log.warning("%s %s", self.root, need.filesystem.caution)
        self._supervisor.await_idle(-1)
        self._ensure_staging(plan)
        return need

    def register(
        self,
        name: str,
        *,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        shared: bool = False,
        reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
        optional: bool = False,
    ) -> None:
        """Have state of the user's own, a dataloader's for instance, saved and restored with the rest ("extra").

        Args:
            name: letters, digits and underscores; the same on every rank.
            save: gives the value, on the thread that calls `Checkpointer.save`. Plain data and tensors load as they
                are, other classes need `load(trusted=True)`.
            load: takes it back, after all ranks have loaded the same checkpoint.
            shared: the value is the same on every rank; rank 0's is saved, every rank gets it. Else each its own.
            reshard: (values of all ranks that saved, rank, world size) -> this rank's, for another number of ranks.
            optional: a checkpoint without it loads.

        Raises:
            ConfigError: the name is taken, or none.
        """
        self._extras.register(name, save=save, load=load, shared=shared, reshard=reshard, optional=optional)

    def save(
        self,
        step: int,
        state: State | dict[str, Any],
        *,
        contents: Collection[str] = CONTENTS,
        content_metadata: Any = None,
        retention: Retention | None = None,
    ) -> SaveHandle:
        """Stage a state and return; what follows happens elsewhere.

        Waits for the save before, if it has not ended: at most until that one's deadline.

        Args:
            step: number of the checkpoint; a committed one of the same number is replaced.
            state: a `State`, or a Megatron `sharded_state_dict` (ShardedTensor, ShardedObject, factories, ...).
            contents: which entries of a state dict are saved ("model", "optimizer", "rng", "extra"; see
                `checkpoint.contents`), the same on every rank; "extra" includes what was registered.
            content_metadata: kept in the common state, where Megatron-Core's loader looks for it.
            retention: what stays after this commit, if not what the config says; the same on every rank.

        Raises:
            ConfigError: no number of a step, or the state cannot be saved; DiskError: no memory to stage it.
            WriterLost: there is no writer (with `on_failure="raise"`; else the handle says so).
            SaveError: as `poll`.
        """
        began = time.monotonic()
        # Folders are found again by digits: another name would be committed, and never be seen by a load.
        if not isinstance(step, int) or step < 0:
            raise ConfigError(f"step is {step!r}; expected an int, 0 or more")
        self.poll()
        self._saves += 1
        attempt = f"{self._run_id}.{self._saves}"
        handle = SaveHandle(step=step, attempt=attempt, nbytes=0)
        self._supervisor.await_idle(step)
        handle.waited_s = time.monotonic() - began
        part = self._as_state(state, content_metadata, contents)
        plan = self._plan(part)
        handle.nbytes = plan.nbytes
        active = InFlight(
            handle=handle,
            plan=plan,
            common=digest_common(part.common),
            replicas=list(part.replicas),
            basis=part.basis,
            held=part.held,
            end=began + self.config.deadline_s,
            attempt=attempt,
            retention=retention or self.config.retention,
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

    def _as_state(
        self, state: State | dict[str, Any], content_metadata: Any, contents: Collection[str] = CONTENTS
    ) -> State:
        contents = check_contents(contents)
        if not isinstance(state, State):
            from checkpoint.megatron import state_from_sharded

            share = self._supervisor.share if self.config.spread_replicas else None
            part = state_from_sharded(select(state, contents), share)
        elif contents == CONTENTS:
            part = state
        else:
            raise ConfigError("contents choose among the entries of a state dict; a State holds what it holds")
        if "extra" in contents:
            objects, common = self._extras.take()
            part = dataclasses.replace(
                part, objects={**part.objects, **objects}, common={**part.common, **common} if common else part.common
            )
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
        contents: Collection[str] = CONTENTS,
        allow_unused: Callable[[str], bool] = lambda _: False,
        trusted: bool = False,
        deadline_s: float = 1800.0,
    ) -> LoadResult:
        """Load the newest whole checkpoint into a Megatron `sharded_state_dict`; every rank calls it.

        Args:
            step: only this one; None: the newest that is whole on all ranks.
            peers: roots of other nodes that can be read from here, where nodes have disks of their own.
            durable: further roots, tried after the local one for each step: folders (mounted storage) or URLs, which
                `drain` fills; if empty, the config's `durable_url`. From a URL only the ranges that are needed are
                read, after the files that hold them were digested.
            contents: which entries of the state dict are loaded; `("model",)` reads and proves only the files that
                hold weights.
            allow_unused: says of a key of these contents that no rank has to ask for it.
            trusted: unpickle objects for real instead of refusing those that are not plain data.
            deadline_s: for all ranks together.

        Raises:
            LoadError: none could be loaded, with the reason of each; or a rank was silent, which is named.
        """
        from checkpoint.megatron import load_sharded, read_object, requested_keys

        contents, extras = check_contents(contents), self._extras
        wanted = select(sharded_state_dict, contents)
        if not durable and self.config.durable_url is not None:
            durable = [self.config.durable_url]
        offered = candidates(self.root, peers, durable, self.config.durable_options)
        found = [c for c in offered if step is None or c.step == step]
        self._loads += 1
        group = self._group(deadline_s)
        mates = self._mates()
        share = (mates.index(self.rank), len(mates))

        def read(folder: TorchDistReader) -> tuple[dict[str, Any], dict[str, Any]]:
            loaded = load_sharded(wanted, folder, trusted=trusted)
            if "extra" not in contents:
                return select(loaded, contents), {}  # without what the common state says of the others
            return select(loaded, contents), extras.read(
                folder.index.objects, lambda k: read_object(k, folder, trusted), loaded
            )

        try:
            chosen, (state, mine), reasons = load_best(
                group,
                found,
                f"load/{self._loads}",
                share,
                read,
                lambda: requested_keys(wanted),
                lambda key: "extra" in contents and extras.owns(key),
                lambda key: section_of(key) not in contents or allow_unused(key),
            )
        finally:
            group.store.close()
        extras.give_back(mine)
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
