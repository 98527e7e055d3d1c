"""`Relay`: publish to an engine in which nothing of ours runs, by its own means, from the coordinator's process.

To the publisher a relay is an engine of one rank: it joins the data group, digests every bucket, and passes it on
through a `StockEngine` before it acknowledges. So every source, layout and pause mode works as with other engines,
also beside them; what the stock way cannot promise stands in `status()["missing_guarantees"]`, and in every report.

The engine's fence is a pause: it stays paused until a full publish succeeds, but whoever may, can resume it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from weightsync import errors
from weightsync.engine.calls import one_call
from weightsync.engine.coverage import Loading
from weightsync.engine.dryrun import DryLoad
from weightsync.engine.receiver import Receiver
from weightsync.engine.routing import Action, Route, Routes, describe, runners_in_scope
from weightsync.engine.runner import ModuleRunner
from weightsync.engine.writes import Places
from weightsync.manifest import TARGET, Manifest
from weightsync.plan import SegmentView
from weightsync.protocol import PublishCall
from weightsync.timeline import Timeline

__all__ = ["Relay", "StockEngine", "StockFacts"]

Pairs = Sequence[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StockFacts:
    """What an engine says of itself."""

    kind: str
    version: str
    runners: tuple[str, ...]
    """`target`, and `draft[0]` if there is a draft that its own way can reach."""
    speculation: str | None
    weight_version: str | None
    """The engine's own label; it tells whether anybody else has changed the weights, or restarted the engine."""
    world_size: int
    missing: Mapping[str, str]
    row: str
    evidence: str
    how: str


class StockEngine(Protocol):
    """An engine's own way to take weights. Every method raises `WeightSyncError`s and ends by its deadline."""

    @property
    def name(self) -> str: ...

    def describe(self, deadline_s: float) -> StockFacts: ...

    def counts(self, deadline_s: float) -> Mapping[str, float]:
        """Totals of speculation: `drafts`, `draft_tokens`, `accepted_tokens`; empty without any."""
        ...

    def connect(self, deadline_s: float) -> None:
        """Open the engine's own data group, if it is not open."""
        ...

    def pause(self, mode: str, deadline_s: float) -> None: ...

    def resume(self, deadline_s: float) -> None: ...

    def begin(self, runner: str, deadline_s: float) -> None: ...

    def load(self, pairs: Pairs, deadline_s: float) -> None:
        """The tensors may be overwritten once this returns."""
        ...

    def finish(self, runner: str, deadline_s: float) -> None: ...

    def abort(self) -> None:
        """Give up what was begun, and the data group; never raises, never blocks."""
        ...

    def commit(self, weight_version: str, mode: str, deadline_s: float) -> None:
        """Flush the prefix cache, set the version, resume."""
        ...

    def close(self) -> None: ...


class Relay:
    """An `EngineControl` for one stock engine.

    Args:
        stock: the engine.
        bind_host: address of this host that the senders of other trainer hosts reach.
    """

    def __init__(self, stock: StockEngine, *, bind_host: str = "127.0.0.1") -> None:
        self._stock, self._bind_host = stock, bind_host
        self._receiver: _RelayReceiver | None = None
        self._weight_version: str | None = None
        self._unfinished: str | None = None
        """Why it holds all of a version, but does not serve it."""
        self._mode = "wait"
        self._committed: tuple[PublishCall, dict[str, Any]] | None = None
        self._busy = threading.Lock()

    @property
    def name(self) -> str:
        return self._stock.name

    def status(self, *, deadline_s: float) -> Mapping[str, Any]:
        """Raises `EngineError` (it does not answer), `UnsupportedError` (its own way cannot be used), `AuthError`."""
        facts = self._stock.describe(deadline_s)
        receiver = self._receiver
        if receiver is None or receiver.names != facts.runners or self._changed(receiver, facts):
            if receiver is not None:
                receiver.close()
                self._stock.abort()
            receiver = self._receiver = _RelayReceiver(facts.runners, self._stock, self._bind_host)
            self._weight_version = self._unfinished = None
        fenced = receiver.fenced or self._unfinished
        return {
            **receiver.status(),
            "fenced": fenced,
            "versions": dict.fromkeys(facts.runners) if fenced else receiver.versions,
            "engine": self.name,
            "engine_kind": facts.kind,
            "engine_version": facts.version,
            "engine_ranks": facts.world_size,
            "speculation": facts.speculation,
            "missing_guarantees": dict(facts.missing),
            "row": facts.row,
            "evidence": facts.evidence,
            "how": facts.how,
            "speculation_counts": dict(self._stock.counts(deadline_s)),
        }

    def _changed(self, receiver: Receiver, facts: StockFacts) -> bool:
        """Somebody else has set other weights, or the engine was restarted."""
        return self._weight_version is not None and facts.weight_version != self._weight_version

    def preflight(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        with self._one("preflight"):
            receiver = self._ready()
            self._stock.connect(call.deadline_s)
            return {"acks": [dataclasses.asdict(receiver.preflight(call))]}

    def pause(self, mode: str, *, deadline_s: float) -> Mapping[str, Any]:
        with self._one("pause"):
            self._mode = mode
            self._stock.pause(mode, deadline_s)
            return {"mode": mode, "kept": []}

    def receive(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        with self._one("receive"):
            receiver = self._ready()
            self._committed = None
            receiver.deadline_s = call.deadline_s
            ack = receiver.receive(call)
            if ack.ok and ack.phase == "committed":
                label = call.label if call.label is not None else str(call.version)
                # At once, not when the coordinator says commit: the decision is final.
                self._unfinished = f"version {call.version} is loaded, but the engine did not switch to it"
                self._stock.commit(label, self._mode, call.deadline_s)
                self._weight_version, self._unfinished = label, None
                reply = {"version": call.version, "versions": receiver.versions}
                self._committed = (call, reply | {"speculation_counts": dict(self._stock.counts(call.deadline_s))})
            return {"acks": [dataclasses.asdict(dataclasses.replace(ack, timeline={}))]}

    def commit(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        if self._committed is None or self._committed[0] != call:
            raise errors.EngineError(
                f"engine {self.name}: commit: this publish was not loaded; it stays paused until a full publish",
                engine=self.name,
                phase="commit",
            )
        return self._committed[1]

    def resume(self, *, deadline_s: float) -> Mapping[str, Any]:
        with self._one("resume"):
            fenced = self._unfinished or (self._receiver.fenced if self._receiver is not None else None)
            if fenced is not None:
                raise errors.EngineFenced(
                    f"engine {self.name} holds no complete version ({fenced}); a full publish heals it",
                    engine=self.name,
                )
            self._stock.resume(deadline_s)
            return {}

    def close(self) -> None:
        """Leave the engine's data group; the engine serves what it holds."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._stock.close()

    def _ready(self) -> _RelayReceiver:
        if self._receiver is None:
            raise errors.EngineError(f"engine {self.name}: nobody has asked its status: publish through a Publisher")
        return self._receiver

    def _one(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return one_call(self._busy, self.name, phase)


class _RelayReceiver(Receiver):
    """Takes every tensor by its role alone: a stock engine does not show its modules."""

    def __init__(self, names: Sequence[str], stock: StockEngine, bind_host: str) -> None:
        self.stock, self.names = stock, tuple(names)
        self.deadline_s = 0.0
        runners = [
            ModuleRunner(
                name,
                torch.nn.Module(),
                roles=(TARGET,) if name == TARGET else ("draft",),
                load=lambda pairs: self.stock.load(list(pairs), self.deadline_s),
                on_abort=self.stock.abort,
            )
            for name in names
        ]
        super().__init__(
            runners, engine=stock.name, rank=0, world_size=1, bind_host=bind_host, instance=secrets.token_hex(8)
        )

    def build_routes(self, manifest: Manifest, scope: str) -> Routes:
        in_scope = runners_in_scope(self.runners, scope)
        by_kind = {self.runners[j].roles[0] == TARGET: j for j in in_scope}
        actions: dict[int, tuple[Action, ...]] = {}
        for i, spec in enumerate(manifest.tensors):
            j = by_kind.get(spec.role == TARGET)
            if j is None:
                raise errors.RoutingError(
                    f"tensor {describe(spec)}: {self.engine} has no runner for its role that its own way reaches; "
                    f"there are {', '.join(self.names)}: leave the role out of the source, or use weightsync's adapter"
                )
            actions[i] = (Action(i, j, DryLoad(spec.name)),)
        return Routes(
            manifest=manifest,
            scope=scope,
            runners=self.names,
            in_scope=in_scope,
            places=Places(self.runners),
            actions=actions,
            table=tuple([Route((self.names[actions[i][0].runner],), (), ()) for i in range(len(manifest.tensors))]),
            refusals={},
            partial={},
            assembly_bytes=max((t.nbytes for t in manifest.tensors), default=0),
        )

    def start_loading(self, routes: Routes, timeline: Timeline) -> Loading:
        return _RelayLoading(routes, self, timeline)


class _RelayLoading(Loading):
    """One session of the engine per runner, one after the other; what comes early for a later one is kept."""

    def __init__(self, routes: Routes, receiver: _RelayReceiver, timeline: Timeline) -> None:
        super().__init__(routes, receiver.runners, timeline)
        self._stock, self._deadline_s = receiver.stock, receiver.deadline_s
        self._todo = list(routes.in_scope)
        self._open: int | None = None
        self._kept: dict[int, list[tuple[Action, torch.Tensor]]] = {}

    def take(self, views: Sequence[SegmentView]) -> None:
        now: list[tuple[Action, torch.Tensor]] = []
        for view in views:
            self._seen[view.tensor] += view.view.numel()
            whole = view.view if view.whole else self._assemble(view)
            if whole is None:
                continue
            (a,) = self._routes.actions[view.tensor]
            if a.runner == self._todo[0]:
                now.append((a, whole))
            else:
                self._kept.setdefault(a.runner, []).append((a, whole.clone() if view.whole else whole))
        self._pass_on(now)

    def finish(self) -> None:
        while self._todo:
            self._pass_on(self._kept.pop(self._todo[0], []))
            if self._open is not None:
                self._stock.finish(self._runners[self._open].name, self._deadline_s)
                self._open = None
            del self._todo[0]
        self.check_complete()

    def _pass_on(self, loads: Sequence[tuple[Action, torch.Tensor]]) -> None:
        if not loads:
            return
        j = self._todo[0]
        if self._open is None:
            self._stock.begin(self._runners[j].name, self._deadline_s)
            self._open = j
        with self._timeline.span(self._phase(j), sum(t.nbytes for _, t in loads), tensors=len(loads)):
            self._runners[j].load([(a.load.name, t) for a, t in loads])
        for a, _ in loads:
            self._done[a.tensor, j] += 1
