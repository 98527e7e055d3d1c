"""The save in flight and the writer process that carries it: one lock, one watching thread, no wait for the writer.

`Supervisor` belongs to the `Checkpointer`, whose caller's thread hands it a save (`launch`), asks for its end, and
takes its events. Its own thread learns what becomes of the save: by the writer's exit code, by the words that it leaves
in staging memory, by its result. A writer that dies or stalls is named to the other ranks and replaced; the successor
carries out the verdict. Committed steps go on to the drains here, too.

    launch -> staged -> sealed -> committed | failed        (retried: launched again from what is staged)
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

from checkpoint.bar import Bar
from checkpoint.config import SaveConfig
from checkpoint.drain import DrainQueue
from checkpoint.errors import CheckpointError, SaveError, StoreLost, WriterLost
from checkpoint.events import SaveEvent, SaveHandle
from checkpoint.layout import committed_path
from checkpoint.plan import Plan
from checkpoint.process import WriterProcess
from checkpoint.replicas import Share
from checkpoint.retention import Retention
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
from checkpoint.store import REPLY_TIMEOUT_S, Store
from checkpoint.vote import Culprit, decide_abort, describe, read_verdict, report_failure

__all__ = ["InFlight", "Supervisor"]

log = logging.getLogger("checkpoint")

WATCH_EVERY_S = 0.02


@dataclasses.dataclass(kw_only=True, slots=True)
class InFlight:
    """A save between `launch` and its end."""

    handle: SaveHandle
    plan: Plan
    common: dict[str, str]
    replicas: list[str]
    basis: str
    held: str
    end: float
    attempt: str
    retention: Retention
    tries: int = 0
    sealed: bool = False
    lost: str | None = None
    """Why this rank's part is over, if its caller found that out."""
    share: Share = dataclasses.field(default_factory=Share)
    """What this rank writes of the next save, once this one is committed."""


class Supervisor:
    """Of one rank.

    Args:
        start: the first command of every writer of this rank, see `WriterProcess`.

    Raises:
        WriterLost: no writer came up, as `WriterProcess`.
    """

    def __init__(self, start: dict[str, Any], config: SaveConfig) -> None:
        self._start, self._config = start, config
        self._root, self._rank = Path(start["root"]), int(start["rank"])
        self.events: collections.deque[SaveEvent] = collections.deque()
        self._changed = threading.Condition()
        self._active: InFlight | None = None
        self._staging: Staging | None = None
        self._client: Store | None = None
        self._undrained: dict[int, SaveHandle] = {}
        self._drains: DrainQueue | None = None
        self.closing = False
        self.share = Share()
        """What this rank writes of the next save, of the shards that several hold."""
        self._bar = Bar(enabled=config.progress and self._rank == 0)
        self._writer: WriterProcess | None = WriterProcess(start)
        # Who shares which folder does not change; successors need not find it out again.
        self.places = {name: self._writer.ready[name] for name in ("nodes", "hosts")}
        self._start = {**start, **self.places}
        self._thread = threading.Thread(target=self._watch, name="checkpoint-watch", daemon=True)

    def watch(self, drains: DrainQueue | None) -> None:
        """Start the thread."""
        self._drains = drains
        self._thread.start()

    # For the caller's thread

    @property
    def writer_pid(self) -> int | None:
        writer = self._writer
        return writer.pid if writer is not None else None

    @property
    def _patience_s(self) -> float:
        """Longer than any save takes that is watched."""
        config = self._config
        return config.deadline_s * (1 + config.retries) + 4 * config.grace_s + 60

    def await_idle(self, step: int) -> None:
        """Wait until no save is in flight and there is a writer.

        Raises:
            SaveError: not within the deadline of the save in flight and what ending it takes; or closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.closing or (self._active is None and self._writer is not None), self._patience_s
            )
            if self.closing:
                raise SaveError("the Checkpointer is closed")
            if self._active is not None or self._writer is None:
                raise SaveError(f"step {step}: the save before it did not end within its own deadline")

    def use(self, staging: Staging) -> None:
        """From now on saves lie in this memory; nothing may be in flight."""
        with self._changed:
            self._staging = staging
            if self._writer is not None:
                try:
                    self._writer.send_staging(staging)
                except WriterLost as e:
                    log.info("the successor gets the staging memory: %s", e)

    def launch(self, active: InFlight) -> None:
        """Tell the writer of a save, whose parts it may write as soon as they are staged.

        Raises:
            WriterLost: there is none, or it takes no commands. The save is in flight all the same, and will fail.
        """
        with self._changed:
            try:
                self._command(active)
            finally:
                # Not before: the words in staging memory would still be those of the save before.
                self._active = active

    def is_over(self, active: InFlight) -> bool:
        """Whether nobody will take what is staged for it from now on."""
        return active.handle.done or self._active is not active or time.monotonic() > active.end

    def wait(self, deadline_s: float | None) -> SaveHandle | None:
        """Wait for the end of the save in flight, if there is one. Raises SaveError: it did not come."""
        with self._changed:
            active = self._active
            if active is None:
                return None
            patience = deadline_s or self._patience_s
            if not self._changed.wait_for(lambda: active.handle.done, patience):
                raise SaveError(f"step {active.handle.step} is in phase {self._phase()} after {patience:g} s")
            return active.handle

    def wait_drained(self, deadline_s: float) -> bool:
        """Wait until everything committed by this rank's node is durable; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._undrained, deadline_s)

    def close(self) -> None:
        """Stop the thread, the drains and the writer."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(10)
        if self._drains is not None:
            self._drains.stop()
        if self._writer is not None:
            self._writer.close(5)
            self._writer = None
        if self._client is not None:
            self._client.close()

    def _command(self, active: InFlight) -> None:
        """The caller holds the lock."""
        staging, writer, config, plan = self._staging, self._writer, self._config, active.plan
        assert staging is not None
        staging.begin()
        if writer is None:
            raise WriterLost(f"rank {self._rank} has no writer")
        layout = {"items": plan.items, "batches": plan.batches, "num_files": plan.num_files, "nbytes": plan.nbytes}
        writer.send(
            "save",
            attempt=active.attempt,
            step=active.handle.step,
            end=active.end,
            stall_s=config.stall_s,
            grace_s=config.grace_s,
            plan=None if writer.plan == plan.structure else layout,
            common=active.common,
            replicas=active.replicas,
            basis=active.basis,
            retention=dataclasses.asdict(active.retention),
            keep_aborted=config.keep_aborted,
            # Only the one that is being read: durable storage that is down must not fill the local disk.
            protect=[] if self._drains is None else self._drains.reading,
        )
        writer.plan = plan.structure

    # The watching thread

    def _watch(self) -> None:
        while not self.closing:
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
                self._show(active)
                if not active.sealed and self._phase() in PHASES[PHASES.index("vote") :]:
                    self._seal(active)
                if (reason := self._trouble(active, writer)) is not None:
                    self._give_up(active, writer, reason)
            elif writer.dead and not self.closing:
                log.warning("the idle writer of rank %d %s; it is replaced", self._rank, writer.fate())
                self._drop(writer)

    def _show(self, active: InFlight) -> None:
        assert self._staging is not None
        # The framing of the records is written, too, but it is not what the total counts.
        active.handle.bytes_done = min(int(self._staging.header[BYTES_DONE]), active.handle.nbytes)
        self._bar.show(active.handle)

    def _phase(self) -> str:
        return PHASES[self._staging.header[PHASE]] if self._staging is not None else "idle"

    def _seal(self, active: InFlight) -> None:
        active.sealed = True
        if active.handle.state == "staged":
            active.handle.state = "sealed"
            self.events.append(SaveEvent(kind="sealed", step=active.handle.step, handle=active.handle))

    def _trouble(self, active: InFlight, writer: WriterProcess) -> str | None:
        """Why this rank's writer has to be given up, or None."""
        if active.lost is not None:
            return active.lost
        if writer.dead:
            return f"its writer (pid {writer.pid}) {writer.fate()}"
        staging, now = self._staging, time.monotonic()
        assert staging is not None
        phase = self._phase()
        since_alive = now - staging.header[ALIVE_NS] / 1e9
        if since_alive > self._config.stall_s and phase != "finished":
            return f"its writer (pid {writer.pid}) has not been scheduled for {since_alive:.1f} s"
        staged = staging.header[BATCHES_STAGED] > staging.header[BATCHES_WRITTEN]
        since_progress = now - staging.header[PROGRESS_NS] / 1e9
        if phase == "write" and staged and since_progress > self._config.stall_s:
            return f"its writer (pid {writer.pid}) has written nothing for {since_progress:.1f} s"
        # It may itself be waiting for a store that does not answer, which is not its fault.
        if now > active.end + REPLY_TIMEOUT_S + 3 * self._config.grace_s:
            return f"its writer (pid {writer.pid}) did not end {now - active.end:.1f} s after the deadline"
        return None

    def _culprit(self, active: InFlight, error: str) -> Culprit:
        staging = self._staging
        assert staging is not None
        done = min(int(staging.header[BYTES_DONE]), active.plan.nbytes)
        now = time.monotonic()
        began = active.end - self._config.deadline_s
        return Culprit(
            rank=self._rank,
            host=socket.gethostname(),
            phase=self._phase(),
            error=error,
            bytes_done=done,
            bytes_total=active.plan.nbytes,
            rate_bytes_s=done / max(now - began, 1e-6),
            heartbeat_age_s=now - staging.header[ALIVE_NS] / 1e9,
        )

    def _conclude(self, active: InFlight, result: dict[str, Any]) -> None:
        told = ("event", "culprits", "outcome", "attempt", "share")
        active.handle.result = {k: v for k, v in result.items() if k not in told}
        if result["outcome"] == "committed":
            active.share = Share.from_json(result["share"])
            self._end(active, "committed", ())
            return
        self._failed(active, [Culprit(**c) for c in result["culprits"]], retry=result["outcome"] == "aborted")

    def _failed(self, active: InFlight, culprits: list[Culprit], *, retry: bool) -> None:
        log.warning("step %d was not committed: %s", active.handle.step, describe(culprits))
        again = retry and self._config.on_failure == "retry" and active.tries < self._config.retries
        if again and len(active.plan.batches) == 1 and not self.closing:
            active.tries += 1
            active.attempt = f"{active.handle.attempt}r{active.tries}"
            active.end = time.monotonic() + self._config.deadline_s
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

    def _end(self, active: InFlight, state: str, culprits: tuple[Culprit, ...]) -> None:
        if state == "committed":
            self._seal(active)
            active.handle.path = committed_path(self._root, active.handle.step)
            active.handle.bytes_done = active.handle.nbytes  # small saves end before they are looked at
        self._bar.end()
        with self._changed:
            active.handle.culprits = culprits
            # After a failure everybody begins anew with the main replicas.
            self.share = dataclasses.replace(active.share, held=active.held) if state == "committed" else Share()
            active.handle.state = state
            self.events.append(SaveEvent(kind=state, step=active.handle.step, handle=active.handle))
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
                    self.events.append(SaveEvent(kind="drained", step=step, handle=handle))
                self._changed.notify_all()

    def _give_up(self, active: InFlight, writer: WriterProcess, reason: str) -> None:
        """Name the writer's end to everybody, learn the verdict, and start another writer that carries it out."""
        culprit = self._culprit(active, reason)
        log.warning("rank %d gives its writer up: %s", self._rank, culprit)
        self._drop(writer)
        verdict: dict[str, Any] | None = None
        try:
            if self._client is None:
                prefix = self._start["run_id"] + "/"
                self._client = Store(self._start["store"], prefix, reply_timeout_s=self._config.grace_s)
            store = self._client
            report_failure(store, active.attempt, culprit)
            if self._rank != 0:
                verdict = store.wait(f"{active.attempt}/verdict", time.monotonic() + self._config.grace_s)
            if verdict is None:
                verdict = decide_abort(store, active.attempt, [culprit])
        except StoreLost as e:
            self._client = None
            store_lost = self._culprit(active, str(e))
            if self._start["rank_0_hosts"]:
                store_lost = dataclasses.replace(store_lost, rank=0, host=self.places["hosts"]["0"])
            self._failed(active, [culprit, store_lost], retry=False)
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

    def _replace(self, finish: InFlight | None = None) -> None:
        config = self._config
        try:
            writer = WriterProcess(self._start)
            if finish is not None:
                order = {"attempt": finish.attempt, "step": finish.handle.step, "keep_aborted": config.keep_aborted}
                writer.send("finish", grace_s=config.grace_s, **order)
                end = time.monotonic() + 2 * config.grace_s
                while time.monotonic() < end and not writer.dead:
                    said = [e for e in writer.events(end - time.monotonic()) if e["event"] == "finished"]
                    if said:
                        finish.share = Share.from_json(said[0]["share"]) if said[0]["share"] else Share()
                        break
            with self._changed:
                if self._staging is not None:
                    writer.send_staging(self._staging)
                self._writer = writer
                self._changed.notify_all()
        except CheckpointError as e:
            log.warning("rank %d could not start another writer, trying again: %s", self._rank, e)
            time.sleep(1.0)
