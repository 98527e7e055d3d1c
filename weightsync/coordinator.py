"""The control plane of a publish, on trainer rank 0: engines asked, acknowledgements gathered, one decision taken.

`Publisher` calls one method per step, in this order; each raises `StepFailed` and leaves the engines as its docstring
says:

    prepare -> connect -> begin -> (senders stream) -> verify -> decide -> commit
                 any failure: give_up

Control calls run on daemon threads: an engine that never answers must not keep the trainer from exiting. What an engine
rank did is believed only from its own acknowledgement in the store.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from weightsync import errors
from weightsync.acceptance import AcceptanceMeter
from weightsync.acks import GRACE_S, AckBoard, Member, StepFailed, start_call
from weightsync.engine.routing import check_union
from weightsync.guarantees import check_required, missing
from weightsync.manifest import Manifest
from weightsync.protocol import PROTOCOL_VERSION, Keys, PublishCall, TrainerKeys
from weightsync.report import EngineOutcome, EngineReport, Measurements, Outcome, PublishReport
from weightsync.request import Request, Scope
from weightsync.store import decide

if TYPE_CHECKING:
    from weightsync.engine.base import EngineControl
    from weightsync.publisher import PublishConfig
    from weightsync.store import HostedStore

__all__ = ["Coordinator"]

KEPT_ATTEMPTS = 16
"""Whose acknowledgements, orders and verdicts the store keeps: no trainer rank lags so far behind the coordinator."""


class Coordinator:
    """Drives the engines of one run. State between publishes: the epoch, who is in it, what they were sent."""

    def __init__(
        self, engines: Sequence[EngineControl], config: PublishConfig, hosted: HostedStore, run_id: str
    ) -> None:
        self.engines = list(engines)
        self.config = config
        self.run_id = run_id
        self._hosted = hosted
        self._store = hosted.store
        self._epoch = 0
        self._identities: list[tuple[object, ...]] = []
        self._nonce = ""
        self._posted: set[str] = set()
        self._board = AckBoard(hosted.store, config.heartbeat_s)
        self._members: list[Member] = []
        self._excluded: dict[str, str] = {}
        self.acceptance = AcceptanceMeter()
        self._manifest: Manifest | None = None
        self._entered_receive = False
        self._paused = False
        self._attempts: collections.deque[list[str]] = collections.deque()

    # -- before anything changes ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def _keys(self) -> Keys:
        return Keys(self.run_id, self._epoch)

    @property
    def group_size(self) -> int:
        return 1 + sum(m.world_size for m in self._members)

    @property
    def peers(self) -> list[str]:
        """Names of the ranks of a data group, the sender left out."""
        return [f"{m.name} rank {r}" for m in self._members for r in range(m.world_size)]

    @property
    def engines_changed(self) -> bool:
        """True once engines were told to receive: a failure from here on fences them."""
        return self._entered_receive

    @property
    def excluded(self) -> Mapping[str, str]:
        return self._excluded

    def exclude(self, culprits: Mapping[str, str]) -> None:
        """Leave these engines (name -> why) out of further attempts of this publish."""
        self._excluded |= dict(culprits)

    def new_epoch(self) -> None:
        """The next attempt opens new groups: connections of the old ones are gone."""
        self._identities = []

    def new_publish(self) -> None:
        self._excluded = {}
        self.acceptance.new_publish()

    def prepare(self, request: Request, manifest: Manifest, seq: int) -> PublishReport | None:
        """Ask every engine, choose the epoch, start preflight on every rank, check routes; nothing is changed.

        Returns:
            A finished `noop` report if every engine holds the version already, else None.
        """
        self._members, self._manifest = [], manifest
        self._entered_receive = self._paused = False
        self._gather_statuses(request)
        if not request.force and all(self._holds(m, request) for m in self._members):
            return self.report(request, "noop", seconds=0.0)
        self._check_versions(request)
        self._choose_epoch(manifest)
        self._post(request, manifest, seq)
        for m in self._members:
            call = self._call(m, request, seq)
            m.reply = start_call(m.control.preflight, call, deadline_s=2 * request.deadline_s + 5)
        self._board.collect(self._members, self._keys, "preflight", seq, request.deadline_s)
        self._check_routes(manifest)
        return None

    def connect(self, seq: int, num_stages: int, deadline_s: float) -> None:
        """Every engine rank and every sender opens its data groups; call after the own endpoint is open or opening."""
        self._board.collect(self._members, self._keys, "connected", seq, deadline_s)
        self._board.collect_senders(self._keys, seq, num_stages, "connected", deadline_s)
        for m in self._members:
            self._result(m, "preflight", deadline_s)

    def allow_connect(self, seq: int) -> None:
        self._set(self._keys.connect(seq), {"ok": True})

    # -- from here on engines do not serve -------------------------------------------------------------------------

    def begin(self, request: Request, seq: int) -> None:
        """Pause every engine, then let each enter its one receive call."""
        self._paused = True
        pauses = [
            (m, start_call(m.control.pause, self.config.pause_mode, deadline_s=request.deadline_s))
            for m in self._members
        ]
        failed: dict[str, str] = {}
        for m, future in pauses:
            try:
                reply = future.result(request.deadline_s + 1)
                m.kept = tuple(reply.get("kept", ()))
            except (errors.WeightSyncError, concurrent.futures.TimeoutError) as e:
                failed[m.name] = str(e) or f"engine {m.name}: pause: no answer within {request.deadline_s:g} s"
        if failed:
            raise StepFailed("; ".join(failed.values()), culprits=failed)
        self._entered_receive = True
        for m in self._members:
            call = self._call(m, request, seq)
            m.reply = start_call(m.control.receive, call, deadline_s=3 * request.deadline_s + 5)
        self._set(self._keys.go(seq), {"ok": True})

    def verify(self, seq: int, manifest: Manifest, deadline_s: float) -> list[dict[str, Any]]:
        """Every rank received every byte, loaded every tensor, and digests agree. Returns what the senders said."""
        senders = self._board.collect_senders(
            self._keys, seq, manifest.num_stages, "sent", deadline_s, failures_final=False
        )
        self._board.collect(self._members, self._keys, "prepared", seq, deadline_s)
        bad_senders = [str(s["error"]) for s in senders if not s["ok"]]
        if bad_senders or len(senders) < manifest.num_stages:
            raise StepFailed("; ".join(bad_senders) or "a trainer stage did not finish sending")
        digests = [d for s in sorted(senders, key=lambda s: int(s["stage"])) for d in s["digests"]]
        wrong: dict[str, str] = {}
        for m in self._members:
            for rank, ack in sorted(m.acks["prepared"].items()):
                where = f"engine {m.name} rank {rank}"
                if ack.bytes_received != manifest.wire_bytes:
                    wrong[m.name] = f"{where}: received {ack.bytes_received} bytes, {manifest.wire_bytes} were sent"
                elif ack.num_tensors != len(manifest.tensors):
                    wrong[m.name] = f"{where}: took {ack.num_tensors} tensors of {len(manifest.tensors)}"
                elif list(ack.digests) != digests:
                    at = next((i for i, (a, b) in enumerate(zip(ack.digests, digests, strict=False)) if a != b), -1)
                    wrong[m.name] = (
                        f"{where}: bucket {at} of {len(digests)} has another digest than the sender's: "
                        f"its bytes changed on the way"
                    )
        if wrong:
            raise StepFailed("; ".join(wrong.values()), culprits=wrong)
        return senders

    def decide_commit(self, seq: int) -> None:
        """The point of no return: one compare-and-set key that every engine rank waits for."""
        decision = decide(self._store, self._keys.decision(seq), "commit")
        if decision != "commit":
            raise StepFailed(f"the decision was taken otherwise: {decision}")

    def commit(self, request: Request, seq: int) -> dict[str, str]:
        """After the decision: every rank switches, then each engine flushes, sets the version and serves again.

        Returns:
            Engines lost on the way, name -> why; they stay fenced (or dead) and rejoin with the next publish.
        """
        lost: dict[str, str] = {}
        try:
            self._board.collect(self._members, self._keys, "committed", seq, request.deadline_s)
        except StepFailed as e:
            lost |= e.culprits or {m.name: str(e) for m in self._members}
        alive = [m for m in self._members if m.name not in lost]
        for m in alive:
            try:
                self._result(m, "receive", request.deadline_s)
            except StepFailed as e:
                lost |= e.culprits
        calls = [
            (m, start_call(m.control.commit, self._call(m, request, seq), deadline_s=request.deadline_s))
            for m in alive
            if m.name not in lost
        ]
        for m, future in calls:
            try:
                reply = future.result(request.deadline_s + 1)
                m.kept = tuple(reply.get("spanning", m.kept))
                self.acceptance.committed(m.status, reply)
            except (errors.WeightSyncError, concurrent.futures.TimeoutError) as e:
                lost[m.name] = str(e) or f"engine {m.name}: commit: no answer within {request.deadline_s:g} s"
        if lost:
            self._identities = []
        return lost

    def give_up(self, request: Request, seq: int, reason: str) -> None:
        """End an attempt without a commit: say so to every rank, resume what was paused but not begun."""
        keys = self._keys
        if self._epoch:
            self._set(keys.connect(seq), {"ok": False, "error": reason})
            self._set(keys.go(seq), {"ok": False, "error": reason})
        if self._entered_receive:
            decide(self._store, keys.decision(seq), f"abort: {reason}")
        self._identities = []
        limit = time.monotonic() + GRACE_S
        for m in self._members:
            if m.reply is not None:
                concurrent.futures.wait([m.reply], timeout=max(0.0, limit - time.monotonic()))
        if self._paused and not self._entered_receive:
            resumes = [start_call(m.control.resume, deadline_s=request.deadline_s) for m in self._members]
            concurrent.futures.wait(resumes, timeout=min(request.deadline_s, 2 * GRACE_S))

    def forget_old(self, seq: int, num_stages: int) -> None:
        """Attempt `seq` is over: delete what the store holds of an old one, or it would grow with every publish."""
        sizes = {m.index: m.world_size for m in self._members}
        trainer_keys = TrainerKeys(self.run_id).attempt(seq, num_stages)
        self._attempts.append([*self._keys.attempt(seq, sizes, num_stages), *trainer_keys])
        if len(self._attempts) > KEPT_ATTEMPTS:
            for key in self._attempts.popleft():
                self._store.delete_key(key)

    # -- reports ---------------------------------------------------------------------------------------------------

    def report(
        self,
        request: Request,
        outcome: Outcome,
        *,
        seconds: float,
        attempts: int = 1,
        error: str | None = None,
        failed: Mapping[str, str] | None = None,
        senders: Sequence[Mapping[str, Any]] = (),
        own: Mapping[str, Any] | None = None,
    ) -> PublishReport:
        """The report of a finished publish; `failed` names the engines to blame, `senders` what each stage measured."""
        failed = failed or {}
        manifest = self._manifest
        measured = Measurements()
        for s in senders:
            measured.add(f"trainer stage {s['stage']}", s["timeline"], s["peak_extra_bytes"])
        if own is not None:
            measured.add("coordinator", own, None)
        engine_reports = []
        for m in self._members:
            acks = m.acks.get("committed") or m.acks.get("prepared") or {}
            prepared = m.acks.get("prepared") or {}
            for rank, ack in sorted(acks.items()):
                measured.add(f"{m.name} rank {rank}", ack.timeline, ack.peak_extra_bytes)
            engine_reports.append(
                EngineReport(
                    name=m.name,
                    outcome=self._outcome(m, outcome, failed),
                    error=failed.get(m.name),
                    bytes_received=tuple([a.bytes_received for _, a in sorted(prepared.items())]),
                    num_tensors=max((a.num_tensors for a in prepared.values()), default=0),
                    loaded=prepared[0].loaded if 0 in prepared else {},
                    spanning_requests=m.kept if outcome == "committed" else (),
                    missing_guarantees=missing(m.status),
                    speculation_before=self.acceptance.before(m.status, committed=outcome == "committed"),
                )
            )
        engine_reports.extend(
            EngineReport(name=name, outcome="dropped", error=why) for name, why in self._excluded.items()
        )
        known = {e.name for e in engine_reports}
        engine_reports.extend(
            EngineReport(name=name, outcome="untouched", error=why) for name, why in failed.items() if name not in known
        )
        return PublishReport(
            version=request.version,
            label=request.label,
            outcome=outcome,
            scope=request.scope,
            run_id=self.run_id,
            error=error,
            epoch=self._epoch,
            attempts=attempts,
            seconds=seconds,
            num_tensors=len(manifest.tensors) if manifest else 0,
            num_buckets=len(manifest.buckets) if manifest else 0,
            payload_bytes=manifest.payload_bytes if manifest else 0,
            wire_bytes=manifest.wire_bytes if manifest else 0,
            engines=tuple(engine_reports),
            phases=measured.phases,
            phase_bytes=measured.phase_bytes,
            peak_extra_bytes=measured.peaks,
            events=tuple(measured.events),
        )

    def _outcome(self, m: Member, outcome: Outcome, failed: Mapping[str, str]) -> EngineOutcome:
        match outcome:
            case "noop":
                return "noop"
            case "committed":
                return "lost" if m.name in failed else "committed"
            case _:
                return "fenced" if self._entered_receive or m.status.get("fenced") else "untouched"

    # -- steps of prepare --------------------------------------------------------------------------------------------

    def _gather_statuses(self, request: Request) -> None:
        wanted = [(i, e) for i, e in enumerate(self.engines) if e.name not in self._excluded]
        names = [e.name for e in self.engines]
        if len(set(names)) != len(names):
            raise StepFailed(f"engine names are not unique: {sorted(names)}", kind=errors.ConfigError)
        if not wanted:
            raise StepFailed(
                f"no engine is left to publish to; failed: {'; '.join(self._excluded.values()) or 'none given'}"
            )
        deadline_s = min(self.config.control_s, request.deadline_s)
        futures = [(i, e, start_call(e.status, deadline_s=deadline_s)) for i, e in wanted]
        failed: dict[str, str] = {}
        kinds: list[type[errors.WeightSyncError]] = []
        rank = 1
        for i, engine, future in futures:
            try:
                status = future.result(deadline_s + 1)
                self._check_status(engine.name, status)
            except (errors.WeightSyncError, concurrent.futures.TimeoutError) as e:
                failed[engine.name] = str(e) or f"engine {engine.name}: status: no answer within {deadline_s:g} s"
                kinds.append(type(e) if isinstance(e, errors.WeightSyncError) else errors.EngineError)
                continue
            member = Member(index=i, control=engine, status=status, first_rank=rank)
            rank += member.world_size
            self._members.append(member)
        if failed:
            kind = errors.AuthError if errors.AuthError in kinds else None
            raise StepFailed("; ".join(failed.values()), culprits=failed, kind=kind)

    def _check_status(self, name: str, status: Mapping[str, Any]) -> None:
        if status.get("protocol") != PROTOCOL_VERSION:
            raise errors.UnsupportedError(
                f"engine {name} speaks weightsync protocol {status.get('protocol')}, this trainer {PROTOCOL_VERSION}: "
                "install the same weightsync on both sides"
            )
        check_required(name, status, self.config.require)
        theirs, ours = Version(str(status["torch"])), Version(torch.__version__)
        if self.config.require_same_torch and theirs.release[:2] != ours.release[:2]:
            raise errors.UnsupportedError(
                f"engine {name} runs torch {theirs}, this trainer {ours}: process groups of different torch releases "
                "are not known to work together; align them, or set require_same_torch=False if you tested it"
            )
        other = status.get("run_id")
        if other is not None and other != self.run_id and not self.config.takeover:
            raise errors.AuthError(
                f"engine {name} belongs to run {other!r}, not to {self.run_id!r}: stop that trainer, or take the "
                "engine over with PublishConfig(takeover=True)"
            )

    def _runners_in_scope(self, m: Member, scope: Scope) -> list[str]:
        return [name for name in m.status["versions"] if scope == "both" or (name == "target") == (scope == "target")]

    def _holds(self, m: Member, request: Request) -> bool:
        """True if every runner in scope holds exactly this version of this run, and the engine serves."""
        runners = self._runners_in_scope(m, request.scope)
        versions = m.status["versions"]
        same_run = m.status.get("run_id") == self.run_id
        return same_run and not m.status["fenced"] and all(versions[r] == request.version for r in runners)

    def _check_versions(self, request: Request) -> None:
        for m in self._members:
            newer = {
                r: v
                for r in self._runners_in_scope(m, request.scope)
                if (v := m.status["versions"][r]) is not None and v > request.version
            }
            if newer and not request.force and m.status.get("run_id") == self.run_id:
                raise StepFailed(
                    f"engine {m.name} holds {newer}, newer than version {request.version}: publish a higher version, "
                    "or pass force=True to go back",
                    kind=errors.VersionError,
                )
            if m.status["fenced"] and not self._is_full(m, request):
                raise StepFailed(
                    f"engine {m.name} is fenced ({m.status['fenced']}) and scope {request.scope!r} does not cover all "
                    f"of its runners {sorted(m.status['versions'])}: publish with scope='both'"
                )

    def _is_full(self, m: Member, request: Request) -> bool:
        return set(self._runners_in_scope(m, request.scope)) == set(m.status["versions"])

    def _choose_epoch(self, manifest: Manifest) -> None:
        """Keep the epoch while the same processes use groups of the same layout; else take the next one."""
        identities: list[tuple[object, ...]] = [m.identity for m in self._members]
        identities.append(("layout", manifest.bucket_bytes, manifest.num_stages))
        in_epoch = all(m.is_in(self.run_id, self._epoch) for m in self._members)
        if identities == self._identities and in_epoch:
            return
        seen = [int(m.status["epoch"] or 0) for m in self._members if m.status.get("run_id") == self.run_id]
        self._epoch = max([self._epoch, *seen]) + 1
        self._identities = identities
        self._nonce = secrets.token_hex(16)
        self._posted = set()

    def _post(self, request: Request, manifest: Manifest, seq: int) -> None:
        keys = self._keys
        if not self._posted:
            self._store.set(keys.nonce, self._nonce)
        if manifest.digest not in self._posted:
            self._store.set(keys.manifest(manifest.digest), manifest.to_json())
            self._posted.add(manifest.digest)
        self._set(
            TrainerKeys(self.run_id).order(seq),
            {
                "epoch": self._epoch,
                "manifest": manifest.digest,
                "group_size": self.group_size,
                "peers": self.peers,
            },
        )

    def _call(self, m: Member, request: Request, seq: int) -> PublishCall:
        num_buffers = self.config.num_buffers
        assert self._manifest is not None
        assert num_buffers is not None, "Publisher resolves it"
        return PublishCall(
            run_id=self.run_id,
            epoch=self._epoch,
            seq=seq,
            nonce=self._nonce,
            version=request.version,
            label=request.label,
            scope=request.scope,
            full=self._is_full(m, request),
            manifest_digest=self._manifest.digest,
            store_host=self._hosted.host,
            store_port=self._hosted.port,
            engine_index=m.index,
            first_group_rank=m.first_rank,
            group_size=self.group_size,
            transport=self.config.transport,
            num_buffers=num_buffers,
            deadline_s=request.deadline_s,
            takeover=self.config.takeover,
            trace=self.config.trace,
        )

    def _check_routes(self, manifest: Manifest) -> None:
        problems: dict[str, str] = {}
        for m in self._members:
            acks = m.acks["preflight"]
            found = check_union(
                manifest, {r: a.routes for r, a in acks.items()}, {r: a.partial for r, a in acks.items()}
            )
            if found:
                problems[m.name] = f"engine {m.name}: " + "; ".join(found)
        if problems:
            raise StepFailed("; ".join(problems.values()), culprits=problems, kind=errors.RoutingError)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        self._store.set(key, json.dumps(value))

    def _result(self, m: Member, what: str, deadline_s: float) -> None:
        assert m.reply is not None
        try:
            m.reply.result(deadline_s)
        except (errors.WeightSyncError, concurrent.futures.TimeoutError) as e:
            text = str(e) or f"engine {m.name}: {what}: no answer within {deadline_s:g} s"
            raise StepFailed(text, culprits={m.name: text}) from e
