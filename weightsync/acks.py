"""Waiting for what engine ranks and senders say in the store, and telling who is to blame if they do not.

Used by `weightsync.coordinator` only, on trainer rank 0.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weightsync import errors
from weightsync.protocol import Ack, Keys, Phase
from weightsync.store import HeartbeatReader

if TYPE_CHECKING:
    from weightsync.engine.base import EngineControl

__all__ = ["GRACE_S", "AckBoard", "Member", "StepFailed", "start_call"]

GRACE_S = 2.0
"""After the first bad news of a phase: how long the others may still report, to tell the culprit from its victims."""
POLL_S = 0.002


class StepFailed(Exception):
    """A step failed. `culprits` are the engines to blame (empty: not an engine's fault); `kind` the error to raise."""

    def __init__(
        self,
        message: str,
        *,
        culprits: Mapping[str, str] | None = None,
        kind: type[errors.WeightSyncError] | None = None,
    ) -> None:
        super().__init__(message)
        self.culprits = dict(culprits or {})
        self.kind = kind


@dataclasses.dataclass(kw_only=True, slots=True)
class Member:
    """One engine in the current attempt."""

    index: int
    control: EngineControl
    status: Mapping[str, Any]
    first_rank: int = 0
    reply: concurrent.futures.Future[Mapping[str, Any]] | None = None
    kept: tuple[Mapping[str, Any], ...] = ()
    acks: dict[Phase, dict[int, Ack]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.control.name

    @property
    def place(self) -> str:
        """Where it runs, for messages that nobody there can write any more; "" if its control client does not know."""
        known = getattr(self.control, "place", "")
        return f" ({known})" if known else ""

    @property
    def world_size(self) -> int:
        return int(self.status["world_size"])

    @property
    def identity(self) -> tuple[str, str, int]:
        return (self.name, str(self.status["instance"]), self.world_size)

    def is_in(self, run_id: str, epoch: int) -> bool:
        """Whether it has the groups of this epoch, and as far as it knows with all their connections."""
        s = self.status
        return s.get("run_id") == run_id and s.get("epoch") == epoch and bool(s.get("connected", True))


def start_call(
    fn: Callable[..., Mapping[str, Any]], *args: Any, **kwargs: Any
) -> concurrent.futures.Future[Mapping[str, Any]]:
    """Run a control call on a daemon thread: one that never answers must not keep the trainer from exiting."""
    future: concurrent.futures.Future[Mapping[str, Any]] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as e:  # noqa: BLE001 - it is raised where the future's result is taken
            future.set_exception(e)

    threading.Thread(target=run, name="weightsync-call", daemon=True).start()
    return future


class AckBoard:
    """Reads acknowledgements and heartbeats out of one store."""

    def __init__(self, store: dist.Store, heartbeat_s: float) -> None:
        self._store = store
        self._heartbeat_s = heartbeat_s
        self._heartbeats = HeartbeatReader(store)

    def collect(self, members: Sequence[Member], keys: Keys, phase: Phase, seq: int, deadline_s: float) -> None:
        """Wait until every rank of every engine has acknowledged `phase`; blame whoever is late, silent or unhappy."""
        missing = {(m.name, r): (m, keys.ack(seq, m.index, r, phase)) for m in members for r in range(m.world_size)}
        for m in members:
            m.acks[phase] = {}
        bad: dict[str, list[tuple[int, Ack]]] = {}
        dead: dict[str, str] = {}
        started = time.monotonic()
        # Ranks use the same deadline and then say what they were waiting for: listen a little longer than they do.
        limit = started + deadline_s + GRACE_S / 2
        while missing and (now := time.monotonic()) < limit:
            progress = False
            for (name, rank), (m, key) in list(missing.items()):
                if self._store.check([key]):
                    ack = Ack.from_json(self._store.get(key).decode())
                elif (failed := _failed_ack(m, rank)) is not None:
                    ack = failed
                else:
                    continue
                del missing[name, rank]
                m.acks[phase][rank] = ack
                progress = True
                if not ack.ok:
                    bad.setdefault(name, []).append((rank, ack))
            for m in members:
                if m.name not in dead and (why := self._dead(m, keys, phase, [r for n, r in missing if n == m.name])):
                    dead[m.name] = why
            if bad or dead:
                limit = min(limit, now + GRACE_S)
                if all(name in dead for name, _ in missing):
                    break
            if not progress:
                time.sleep(POLL_S)
        if not missing and not bad:
            return
        raise _blame(phase, bad, dead, sorted(missing), time.monotonic() - started)

    def _dead(self, m: Member, keys: Keys, phase: Phase, ranks: Sequence[int]) -> str | None:
        """Why ranks that have not acknowledged never will: the control call failed, or a heartbeat stopped."""
        if not ranks:
            return None
        if m.reply is not None and m.reply.done():
            error = m.reply.exception()
            if error is not None:
                return f"engine {m.name}: {phase}: {error}"
        for r in ranks:
            age = self._heartbeats.age(keys.heartbeat(m.index, r))
            if age is not None and age > self._heartbeat_s:
                return (
                    f"engine {m.name} rank {r}{m.place}: {phase}: no heartbeat for {age:.1f} s: the process is "
                    "stopped, stuck or gone, or its host out of reach"
                )
        return None

    def collect_senders(
        self, keys: Keys, seq: int, num_stages: int, phase: str, deadline_s: float, *, failures_final: bool = True
    ) -> list[dict[str, Any]]:
        """What the sender of every stage says of `phase`; a stage that says nothing in time is named."""
        said: dict[int, dict[str, Any]] = {}
        limit = time.monotonic() + deadline_s
        while len(said) < num_stages and time.monotonic() < limit:
            for stage in range(num_stages):
                key = keys.sender(seq, stage, phase)
                if stage not in said and self._store.check([key]):
                    said[stage] = json.loads(self._store.get(key))
                    if not said[stage]["ok"]:
                        limit = min(limit, time.monotonic() + GRACE_S)
            if len(said) < num_stages:
                time.sleep(POLL_S)
        silent = [s for s in range(num_stages) if s not in said]
        if failures_final and (silent or not all(s["ok"] for s in said.values())):
            bad = [str(s["error"]) for s in said.values() if not s["ok"]]
            raise StepFailed(
                "; ".join(bad) or f"trainer stages {silent} did not answer ({phase}) within {deadline_s:g} s"
            )
        for stage in silent:
            error = f"trainer stage {stage}: did not finish ({phase}) within {deadline_s:g} s: dead, stopped or stuck"
            said[stage] = {"ok": False, "stage": stage, "error": error, "timeline": {}, "peak_extra_bytes": None}
        return [said[s] for s in sorted(said)]


def _failed_ack(m: Member, rank: int) -> Ack | None:
    """What a rank that cannot reach the store says of its failure: its own words in the reply of the control call.

    Only failures are believed from there; a success is one only in the store, where the rank wrote it itself.
    """
    if m.reply is None or not m.reply.done() or m.reply.exception() is not None:
        return None
    for obj in m.reply.result().get("acks", ()):
        if obj.get("rank") == rank and not obj.get("ok"):
            return Ack.from_json(json.dumps(obj))
    return None


def _blame(
    phase: Phase,
    bad: Mapping[str, Sequence[tuple[int, Ack]]],
    dead: Mapping[str, str],
    missing: Sequence[tuple[str, int]],
    waited_s: float,
) -> StepFailed:
    """Tell culprits from victims: a rank that only lost its peers is a victim of whoever is dead or broken."""
    culprits = dict(dead)
    victims: dict[str, str] = {}
    kind: type[errors.WeightSyncError] | None = None
    for name, acks in bad.items():
        for rank, ack in acks:
            text = f"engine {name} rank {rank}: {phase}: {ack.error}"
            error_name = (ack.error or "").split(":", 1)[0]
            if error_name in ("PeerLost", "TransferTimeout", "TransportError"):
                victims.setdefault(name, text)
            else:
                culprits.setdefault(name, text)
                found = getattr(errors, error_name, None)
                if isinstance(found, type) and issubclass(found, errors.WeightSyncError):
                    kind = found
    for name, rank in missing:
        if name not in culprits and name not in victims:
            culprits[name] = f"engine {name} rank {rank}: {phase}: no acknowledgement within {waited_s:.1f} s"
    texts = list(culprits.values()) or list(victims.values())
    return StepFailed("; ".join(texts), culprits=culprits, kind=kind)
