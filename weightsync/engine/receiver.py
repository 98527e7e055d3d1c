"""The engine side of a publish, one `Receiver` per engine rank: join, route, receive, load, prove, obey the decision.

The engine's control code calls `preflight`, then `receive`, each on the thread that owns the models and once per
publish. Neither raises: what happened is an `Ack`, returned and written to the publisher's store, since exceptions
across an engine's own RPC leave its ranks out of step. After a failure a rank still waits for the decision, so that all
ranks of all engines end a publish alike.

From the first write on, a rank is fenced until a publish of everything that it holds commits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weightsync.digest import Digests
from weightsync.engine.base import Runner
from weightsync.engine.coverage import Loading
from weightsync.engine.memory import PeakMemory
from weightsync.engine.routing import Routes, build_routes, check_union, runners_in_scope
from weightsync.engine.session import DecisionWatch, Session, store_key
from weightsync.errors import (
    AuthError,
    ConfigError,
    EngineError,
    EngineFenced,
    PublishAborted,
    RoutingError,
    TransportError,
)
from weightsync.manifest import Manifest
from weightsync.plan import segments_of
from weightsync.protocol import PROTOCOL_VERSION, Ack, Phase, PublishCall
from weightsync.store import wait_key
from weightsync.timeline import Timeline

__all__ = ["Receiver"]

MAX_ROUTES = 4
"""Routing tables kept: one per scope in use, and a manifest that was just replaced."""


@dataclasses.dataclass(slots=True)
class _Attempt:
    """One call of `preflight` or `receive`: what its acknowledgements say."""

    call: PublishCall
    phase: Phase
    session: Session | None = None
    doing: str = ""
    wire_bytes: int = 0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    interrupted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Ready:
    """A publish that passed preflight here."""

    call: PublishCall
    session: Session
    manifest: Manifest
    routes: Routes


class Receiver:
    """Receives publishes for the runners of one engine rank.

    Args:
        runners: of this rank, target first: memory shared between runners is loaded by the first one.
        engine: name of the engine, for messages.
        rank, world_size: of this process within the engine, over all its parallel dimensions.
        device: where buckets arrive: the runners' device, or the CPU for transports of host memory.
        bind_host: address of this host that the trainer and the other engines can reach.
        instance: tells this start of the engine from an earlier one; default random. Equal on all ranks.

    Raises:
        ConfigError: no runners, names or ranks that cannot be.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        *,
        engine: str,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        bind_host: str = "127.0.0.1",
        instance: str | None = None,
    ) -> None:
        names = [r.name for r in runners]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"receiver of engine {engine}: runners are {names}; expected at least one, names unique")
        if not 0 <= rank < world_size:
            raise ConfigError(f"receiver of engine {engine}: rank {rank} of world size {world_size}")
        self.runners = tuple(runners)
        self.engine, self.rank, self.world_size = engine, rank, world_size
        self.device, self.bind_host = torch.device(device), bind_host
        self.instance = instance if instance is not None else secrets.token_hex(8)
        self.label: str | None = None
        self._versions: dict[str, int | None] = dict.fromkeys(names)
        self._fenced: str | None = None
        self._session: Session | None = None
        self._ready: _Ready | None = None
        self._routes: dict[tuple[str, str], Routes] = {}
        self._busy = threading.Lock()

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def fenced(self) -> str | None:
        """Why this rank must not serve, or None."""
        return self._fenced

    @property
    def versions(self) -> dict[str, int | None]:
        """Runner -> version that it holds; None if it was never published to, or holds parts of several."""
        return dict(self._versions)

    @property
    def run_id(self) -> str | None:
        """Training run that this rank belongs to."""
        return self._session.run_id if self._session is not None else None

    @property
    def epoch(self) -> int:
        """Highest epoch seen of this run; 0 before the first."""
        return self._session.epoch if self._session is not None else 0

    @property
    def connected(self) -> bool:
        """False once a connection to the publisher is known to be gone; the next publish then takes a new epoch."""
        session = self._session
        return session is None or session.connected

    def status(self) -> dict[str, Any]:
        """JSON for the control channel; may be called from any thread."""
        return {
            "engine": self.engine,
            "instance": self.instance,
            "rank": self.rank,
            "world_size": self.world_size,
            "fenced": self.fenced,
            "versions": self.versions,
            "label": self.label,
            "run_id": self.run_id,
            "epoch": self.epoch,
            "torch": torch.__version__,
            "protocol": PROTOCOL_VERSION,
            "busy": self._busy.locked(),
            "connected": self.connected,
        }

    def close(self) -> None:
        """Close groups and connections; the models and the fence stay as they are."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self._ready = None
        self._routes = {}

    # -- one policy for everything that goes wrong -------------------------------------------------------------------

    def preflight(self, call: PublishCall) -> Ack:
        """Join the publisher's store, route its manifest, open the data groups; nothing is written. Never raises."""
        return self._guarded(_Attempt(call, "preflight"), self._preflight, self._preflight_failed)

    def receive(self, call: PublishCall) -> Ack:
        """Receive and load what `preflight` agreed to, then commit or abort as decided. Never raises."""
        return self._guarded(_Attempt(call, "prepared"), self._receive, self._receive_failed)

    def _guarded(
        self,
        attempt: _Attempt,
        steps: Callable[[_Attempt], Ack],
        failed: Callable[[_Attempt, str], None],
    ) -> Ack:
        if not self._busy.acquire(blocking=False):
            busy = EngineError("another publish is in progress here: wait for its decision or its deadline")
            return self._error_ack(attempt, busy)
        try:
            return steps(attempt)
        except (KeyboardInterrupt, SystemExit) as e:
            attempt.interrupted = True
            failed(attempt, type(e).__name__)
            raise
        except BaseException as e:  # noqa: BLE001 - loaders of engines raise anything; the publisher must hear of it
            ack = self._error_ack(attempt, e)
            self._post(attempt, ack)
            failed(attempt, str(ack.error))
            return ack
        finally:
            self._busy.release()

    def _error_ack(self, attempt: _Attempt, e: BaseException) -> Ack:
        where = f"engine {self.engine} rank {self.rank}, {attempt.phase}"
        doing = f", {attempt.doing}" if attempt.doing else ""
        got = attempt.facts.get("bytes_received", 0)
        done = f" ({got} of {attempt.wire_bytes} bytes received)" if attempt.wire_bytes else ""
        return self._ack(
            attempt,
            ok=False,
            error=f"{type(e).__name__}: {where}{doing}: {e}{done}",
            remote="".join(traceback.format_exception(e)),
        )

    def _ack(self, attempt: _Attempt, *, ok: bool = True, error: str | None = None, remote: str | None = None) -> Ack:
        return Ack(
            engine=self.engine,
            rank=self.rank,
            phase=attempt.phase,
            ok=ok,
            error=error,
            remote=remote,
            **attempt.facts,
        )

    def _post(self, attempt: _Attempt, ack: Ack) -> str | None:
        """Write an acknowledgement to the store; returns why that failed, if it did: the answer is returned anyway."""
        if attempt.session is None:
            return "not connected"
        try:
            attempt.session.post(attempt.call, ack)
        except TransportError as e:
            return f"{type(e).__name__}: {e}"
        return None

    # -- how this engine loads: overridden where modules are not loaded in place -------------------------------------

    def build_routes(self, manifest: Manifest, scope: str) -> Routes:
        """The routing table of this rank. Raises `RoutingError`."""
        return build_routes(manifest, self.runners, scope=scope, device=self.device)

    def start_loading(self, routes: Routes, timeline: Timeline) -> Loading:
        """What loads one publish by `routes`."""
        return Loading(routes, self.runners, timeline)

    # -- preflight ---------------------------------------------------------------------------------------------------

    def _preflight(self, attempt: _Attempt) -> Ack:
        call = attempt.call
        self._ready = None
        session = self._session
        if session is None or session.key != store_key(call) or not session.usable:
            attempt.doing = "joining the publisher's store"
            session = Session(call, self.rank)
        attempt.session = session
        attempt.doing = "checking the call"
        self._check_call(call, session)
        session.beat(call)
        manifest = session.manifest(call)
        attempt.doing = "routing"
        routes = self._route(manifest, call.scope)
        self._check_alone(manifest, routes)
        attempt.facts = {
            "num_tensors": len(manifest.tensors),
            "routes": routes.taken(),
            "partial": dict(routes.partial),
            "assembly_bytes": routes.assembly_bytes,
        }
        session.post(call, self._ack(attempt))
        attempt.phase = "connected"
        attempt.doing = "waiting for the other ranks"
        session.await_connect(call)
        attempt.doing = "opening the data groups"
        session.open_groups(call, manifest, self.device, self.bind_host, f"engine {self.engine} rank {self.rank}")
        if self._session is not session:
            if self._session is not None:
                self._session.close()
            self._session = session
        self._ready = _Ready(call, session, manifest, routes)
        ack = self._ack(attempt)
        session.post(call, ack)
        return ack

    def _check_call(self, call: PublishCall, session: Session) -> None:
        current = self._session
        session.authenticate(call)
        if current is not None and call.run_id != current.run_id and not call.takeover:
            raise AuthError(
                f"this engine belongs to run {current.run_id!r}, the call is of run {call.run_id!r}: stop that "
                "trainer, or publish with takeover=True"
            )
        if current is not None and call.run_id == current.run_id:
            if call.epoch < current.epoch:
                raise AuthError(
                    f"epoch {call.epoch} of run {call.run_id!r} is over, this engine is in epoch {current.epoch}: "
                    "another publisher has taken over; stop this one"
                )
            if call.epoch == current.epoch and current is not session:
                raise AuthError(
                    f"epoch {call.epoch} of run {call.run_id!r} has failed here or belongs to another publisher: "
                    "expected a higher epoch"
                )
        in_scope = runners_in_scope(self.runners, call.scope)
        if not in_scope:
            held = [f"{r.name} (role {r.roles[0]})" for r in self.runners]
            raise RoutingError(f"no runner here is in scope {call.scope!r}: there are {held}; publish another scope")
        covers_all = len(in_scope) == len(self.runners)
        if self._fenced is not None and not (call.full and covers_all):
            raise EngineFenced(
                f"fenced ({self._fenced}), and scope {call.scope!r} does not cover every runner: publish scope 'both'"
            )

    def _route(self, manifest: Manifest, scope: str) -> Routes:
        key = (manifest.digest, scope)
        routes = self._routes.pop(key, None)
        if routes is None or routes.moved(self.runners):
            routes = self.build_routes(manifest, scope)
        self._routes[key] = routes
        while len(self._routes) > MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        return routes

    def _check_alone(self, manifest: Manifest, routes: Routes) -> None:
        """A rank without others knows by itself what the publisher would find, and why."""
        if self.world_size > 1:
            return
        problems = check_union(manifest, {0: routes.taken()}, {0: routes.partial})
        if problems:
            why = [f"{manifest.tensors[i].name}: {text}" for i, text in list(routes.refusals.items())[:4]]
            raise RoutingError("; ".join([*problems, *why]))

    def _preflight_failed(self, attempt: _Attempt, why: str) -> None:
        """Whatever this preflight opened goes; what was there before stays."""
        self._ready = None
        if attempt.session is not None and attempt.session is not self._session:
            attempt.session.abort()
            attempt.session.close()

    # -- receive -----------------------------------------------------------------------------------------------------

    def _receive(self, attempt: _Attempt) -> Ack:
        call, ready = attempt.call, self._ready
        if ready is None or (ready.call.run_id, ready.call.epoch, ready.call.seq) != (
            call.run_id,
            call.epoch,
            call.seq,
        ):
            raise AuthError(
                f"publish {call.seq} of run {call.run_id!r} epoch {call.epoch} did not pass preflight here: the "
                "publisher calls preflight first"
            )
        if call.nonce != ready.session.nonce or call != ready.call:
            raise AuthError("the call differs from the one that passed preflight: another publisher?")
        attempt.session = ready.session
        attempt.wire_bytes = ready.manifest.wire_bytes
        self._ready = None
        timeline = Timeline(trace=call.trace)
        with PeakMemory() as memory:
            loading = self.start_loading(ready.routes, timeline)
            try:
                self._stream(attempt, ready, loading, timeline)
            finally:
                attempt.facts |= {
                    "loaded": loading.loaded,
                    "num_tensors": loading.num_tensors,
                    "timeline": timeline.to_json(),
                    "peak_extra_bytes": memory.peak_extra_bytes(),
                }
        ready.session.post(call, self._ack(attempt))
        attempt.phase = "committed"
        attempt.doing = "waiting for the decision"
        decision = self._decision(ready.session, call)
        attempt.doing = ""
        if decision != "commit":
            raise PublishAborted(f"decided by the coordinator: {decision}")
        with timeline.span("commit"):
            for j in ready.routes.in_scope:
                self._versions[self.runners[j].name] = call.version
            self.label = call.label
            self._fenced = None
        attempt.facts["timeline"] = timeline.to_json()
        ack = self._ack(attempt)
        # Committed, whether or not the coordinator still lives to hear it.
        undelivered = self._post(attempt, ack)
        return ack if undelivered is None else dataclasses.replace(ack, remote=f"not delivered: {undelivered}")

    def _stream(self, attempt: _Attempt, ready: _Ready, loading: Loading, timeline: Timeline) -> None:
        """From the first write to the proof that everything is loaded."""
        call, session, manifest = ready.call, ready.session, ready.manifest
        scope = [self.runners[j] for j in ready.routes.in_scope]
        end = time.monotonic() + call.deadline_s
        self._fenced = f"version {call.version} (run {call.run_id}, epoch {call.epoch}) is being loaded"
        for runner in scope:
            self._versions[runner.name] = None
        attempt.doing = "begin"
        loading.check_in_place()
        for runner in scope:
            runner.begin()
        digests = Digests()
        payload = 0
        with DecisionWatch(session, call, end, session.abort) as watch:
            try:
                for stage, endpoint in enumerate(list(session.endpoints)):
                    before, received = endpoint.bytes_received, attempt.facts.get("bytes_received", 0)
                    buckets = manifest.stage_buckets(stage)
                    attempt.doing = f"stage {stage}"
                    endpoint.start([manifest.buckets[i].nbytes for i in buckets], max(end - time.monotonic(), 0.001))
                    for i in buckets:
                        attempt.doing = f"bucket {i} of {len(manifest.buckets)}, stage {stage}"
                        with timeline.span("wire", manifest.buckets[i].nbytes, bucket=i):
                            bucket = endpoint.receive()
                        attempt.facts["bytes_received"] = received + endpoint.bytes_received - before
                        loading.take(segments_of(manifest, i, bucket))
                        with timeline.span("verify", manifest.buckets[i].nbytes, bucket=i):
                            digests.add(bucket)
                        endpoint.release()
                        payload += sum(s.nbytes for s in manifest.buckets[i].segments)
                    endpoint.finish()
                attempt.doing = "verify"
                with timeline.span("verify"):
                    loading.finish()
                    for runner in scope:
                        runner.finish()
                    loading.check_in_place()
                    # One wait for the device: also the end of every copy that loaders queued on it.
                    values = digests.values()
            except TransportError as e:
                if watch.reason is not None:
                    raise PublishAborted(f"decided by the coordinator: {watch.reason}") from e
                raise
        attempt.facts |= {"digests": tuple(values), "payload_bytes": payload}

    def _decision(self, session: Session, call: PublishCall) -> str:
        _, value = wait_key(session.store, session.keys.decision(call.seq), call.deadline_s)
        return value.decode()

    def _receive_failed(self, attempt: _Attempt, why: str) -> None:
        """Stay fenced, give the groups up, hear the decision out, tell the runners."""
        session, call = attempt.session, attempt.call
        if session is None:
            return  # not of this publish: nothing was touched
        self._fenced = (
            f"version {call.version} (run {call.run_id}, epoch {call.epoch}) was not loaded completely: {why}"
        )
        session.abort()
        if attempt.phase == "prepared" and not attempt.interrupted:
            # The publisher ends the publish for everybody at once; until then no rank of this engine goes on.
            with contextlib.suppress(TransportError):
                self._decision(session, call)
        for j in runners_in_scope(self.runners, call.scope):
            try:
                self.runners[j].abort()
            except Exception as e:  # noqa: BLE001 - the others must be told, too; the fence keeps the reason
                self._fenced += f"; runner {self.runners[j].name} could not abort: {type(e).__name__}: {e}"
