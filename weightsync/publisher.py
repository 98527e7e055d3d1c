"""Publish a trainer's weights to every engine: one call, made by every trainer rank, one verdict for all of them.

Rank 0 coordinates (`weightsync.coordinator`), one sender per pipeline stage moves bytes, the other ranks take part in
the source's gathers and learn the verdict. A publish is one or more attempts (more only with
`on_engine_failure="drop"`); each attempt has a number, `seq`, that every rank counts alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weightsync import errors
from weightsync.acks import StepFailed
from weightsync.config import PublishConfig
from weightsync.coordinator import Coordinator
from weightsync.engine.base import check_controls
from weightsync.manifest import Manifest
from weightsync.plan import DtypePolicy
from weightsync.planner import Planner
from weightsync.protocol import Keys, TrainerKeys
from weightsync.report import PublishReport
from weightsync.request import Request, scope_of
from weightsync.sender import Staged, StageSender
from weightsync.store import HostedStore, connect_store, host_store, wait_key
from weightsync.timeline import Timeline
from weightsync.transports.registry import get_transport

if TYPE_CHECKING:
    from weightsync.engine.base import EngineControl
    from weightsync.sources.base import Source

__all__ = ["PublishConfig", "PublishHandle", "Publisher"]

MIB = 1 << 20


class PublishHandle:
    """A publish that goes on in the background; `result` returns its report or raises its error."""

    def __init__(self, thread: threading.Thread, outcome: list[PublishReport | BaseException]) -> None:
        self._thread = thread
        self._outcome = outcome

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait without raising; True once the verdict is known."""
        self._thread.join(timeout_s)
        return self.done()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> PublishReport:
        """Wait for the verdict.

        Raises:
            errors.TransferTimeout: it is not known after `timeout_s`; the publish goes on.
            errors.WeightSyncError: what `Publisher.publish` would have raised.
        """
        if not self.wait(timeout_s):
            raise errors.TransferTimeout(f"publish is still running after {timeout_s} s; call result again")
        outcome = self._outcome[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class Publisher:
    """Publishes `source` to `engines`. Every trainer rank builds one and makes the same calls in the same order.

    Args:
        source: this rank's `weightsync.sources` object.
        engines: engine control clients; read on rank 0 only.
        config: equal on every rank.
        store_address: (host, port) of the store that rank 0 hosts, if the default process group is not to be used to
            spread it; then `rank` and `world_size` are needed too.
        rank, world_size: of the trainer; default: those of torch.distributed if initialised, else 0 of 1.

    Building it uses the trainer's default process group once, for one small object broadcast. Use it as a context
    manager, or call `close`.

    Raises:
        errors.ConfigError, errors.TransportError: the store cannot be hosted or reached.
    """

    def __init__(
        self,
        source: Source,
        engines: Sequence[EngineControl] = (),
        config: PublishConfig | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        store_address: tuple[str, int] | None = None,
    ) -> None:
        self.source = source
        self.config = _resolved(config if config is not None else PublishConfig())
        initialized = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else (dist.get_rank() if initialized else 0)
        self.world_size = world_size if world_size is not None else (dist.get_world_size() if initialized else 1)
        policy = DtypePolicy(publish_dtype=self.config.publish_dtype, keep_fp32=tuple(self.config.keep_fp32))
        self._coordinator: Coordinator | None = None
        self._hosted: HostedStore | None = None
        failure: errors.WeightSyncError | None = None
        address: list[Any] = [None]
        if self.rank == 0:
            try:
                address = [self._host(engines, store_address)]
            except errors.WeightSyncError as e:
                failure = e
                address = [str(e)]
        if self.world_size > 1:
            # Rank 0 spreads its failure too: the others would wait in this broadcast until their group's timeout.
            address = self._spread(address, initialized, store_address)
        if failure is not None:
            raise failure
        if isinstance(address[0], str):
            raise errors.TransportError(f"Publisher: rank 0 could not start: {address[0]}")
        host, port, self.run_id = address[0]
        self._store: dist.Store = (
            self._hosted.store if self._hosted is not None else _join(host, port, self.config.deadline_s)
        )
        self._trainer_keys = TrainerKeys(self.run_id)
        self._seq = 0
        self._sender = StageSender(source, self.config, policy, self._store, self.run_id)
        assert self.config.bucket_bytes is not None
        self._planner = Planner(source, policy, self.config.bucket_bytes, self._store, self._trainer_keys)
        self._pending: PublishHandle | None = None
        self._closed = False

    def _host(self, engines: Sequence[EngineControl], store_address: tuple[str, int] | None) -> tuple[str, int, str]:
        if not engines:
            raise errors.ConfigError("Publisher: rank 0 needs at least one engine")
        check_controls(engines)
        run_id = self.config.run_id or f"run-{secrets.token_hex(6)}"
        port_range = self.config.port_range
        if store_address is not None:
            port_range = (store_address[1], store_address[1])
        self._hosted = host_store(
            bind_host=self.config.bind_host, advertise_host=self.config.advertise_host, port_range=port_range
        )
        self._coordinator = Coordinator(engines, self.config, self._hosted, run_id)
        return self._hosted.host, self._hosted.port, run_id

    def _spread(self, address: list[Any], initialized: bool, given: tuple[str, int] | None) -> list[Any]:
        if given is not None:
            if self.config.run_id is None:
                raise errors.ConfigError("Publisher: with store_address, set PublishConfig.run_id on every rank")
            return [(given[0], given[1], self.config.run_id)]
        if not initialized:
            raise errors.ConfigError(
                f"Publisher: world_size is {self.world_size} but torch.distributed is not initialised: initialise "
                "it, or pass store_address"
            )
        dist.broadcast_object_list(address, src=0)
        return address

    # -- what users call -------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[EngineControl]:
        """The engines of rank 0; assign to it to add, replace or remove some between publishes."""
        return self._coordinator.engines if self._coordinator is not None else []

    @engines.setter
    def engines(self, engines: Sequence[EngineControl]) -> None:
        check_controls(engines)
        if self._coordinator is not None:
            self._coordinator.engines = list(engines)

    def publish(
        self,
        version: int,
        scope: str = "both",
        *,
        deadline_s: float | None = None,
        force: bool = False,
        label: str | None = None,
    ) -> PublishReport:
        """Make every engine serve `version` of the source's weights; returns when they do.

        Args:
            version: increasing number. A no-op only if every runner in scope of every engine holds it already.
            scope: `target`, `draft` or `both`.
            deadline_s: for each phase; default `PublishConfig.deadline_s`.
            force: publish even if the engines hold this version, or a newer one.
            label: free text kept beside the version.

        Raises:
            errors.VersionError: an engine holds a newer version.
            errors.PreflightError: refused; every engine serves what it served before.
            errors.PublishAborted: failed after begin; `error.report` names the fenced engines. The next full publish
                heals them.
            errors.PeerLost: the coordinator is gone (other ranks only).
        """
        self._check_ready()
        request = self._request(version, scope, deadline_s, force, label)
        return self._run(request, None)

    def publish_async(
        self,
        version: int,
        scope: str = "both",
        *,
        deadline_s: float | None = None,
        force: bool = False,
        label: str | None = None,
    ) -> PublishHandle:
        """Like `publish`, in the background: the weights are copied to reused staging memory before this returns.

        Every gather of the source ends on the caller's thread, so training may go on at once; the sender of a stage
        holds one copy of its stage. One publish at a time.
        """
        self._check_ready()
        request = self._request(version, scope, deadline_s, force, label)
        manifest = self._planner.plan(request.scope, self._seq, request.deadline_s)
        staged = self._sender.stage(manifest)
        outcome: list[PublishReport | BaseException] = []

        def run() -> None:
            try:
                outcome.append(self._run(request, staged, planned=manifest))
            except BaseException as e:  # noqa: BLE001 - raised by PublishHandle.result
                outcome.append(e)

        thread = threading.Thread(target=run, name="weightsync-publish", daemon=True)
        self._pending = PublishHandle(thread, outcome)
        thread.start()
        return self._pending

    def measure_acceptance(self, report: PublishReport) -> PublishReport:
        """The report of the last publish with `speculation_after` filled in: what was accepted since, by the engines'
        own counters. Call it once the engines have generated; on trainer rank 0 (others get `report` back).
        """
        c = self._coordinator
        return report if c is None else c.acceptance.measure(report, c.engines, self.config.control_s)

    def close(self) -> None:
        """Close groups and the store, after a publish in the background. Engines keep serving what they hold."""
        if self._closed:
            return
        if self._pending is not None:
            self._pending.wait(self.config.deadline_s)
        self._closed = True
        self._sender.close()
        if self._hosted is not None:
            self._hosted.close()
        # A store serves until its last reference goes: a successor could not have its port.
        self._coordinator = None
        del self._sender, self._planner, self._store

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- one publish -------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._closed:
            raise errors.ConfigError("this publisher is closed: build a new one")
        if self._pending is not None and not self._pending.done():
            raise errors.ConfigError("a publish_async is still running: call its handle's result() first")
        self._pending = None

    def _request(self, version: int, scope: str, deadline_s: float | None, force: bool, label: str | None) -> Request:
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise errors.ConfigError(f"version is {version!r}; expected an int >= 0")
        if deadline_s is not None and not deadline_s > 0:
            raise errors.ConfigError(f"deadline_s is {deadline_s}; expected seconds > 0")
        return Request(
            version=version,
            label=label,
            scope=scope_of(scope),
            force=force,
            deadline_s=deadline_s if deadline_s is not None else self.config.deadline_s,
        )

    def _run(self, request: Request, staged: Staged | None, planned: Manifest | None = None) -> PublishReport:
        started = time.perf_counter()
        if self._coordinator is not None:
            self._coordinator.new_publish()
        for attempt in itertools.count(1):  # bounded: every retry leaves out at least one engine more
            seq = self._seq
            try:
                manifest = (
                    planned if planned is not None else self._planner.plan(request.scope, seq, request.deadline_s)
                )
            except errors.WeightSyncError as e:
                self._refuse(request, seq, e, started)
                raise
            finally:
                self._seq += 1
            planned = None if staged is None else manifest
            verdict = (
                self._lead(request, manifest, seq, staged, attempt, started)
                if self._coordinator is not None
                else self._follow(request, manifest, seq, staged)
            )
            if not verdict["retry"]:
                return self._conclude(verdict)
        raise AssertionError("unreachable")

    def _refuse(self, request: Request, seq: int, e: errors.WeightSyncError, started: float) -> None:
        """Tell the other ranks that rank 0 could not even plan; they would wait for its order."""
        if self._coordinator is not None:
            seconds = time.perf_counter() - started
            report = self._coordinator.report(request, "refused", seconds=seconds, error=str(e))
            self._post_verdict(seq, report, type(e).__name__)

    def _conclude(self, verdict: Mapping[str, Any]) -> PublishReport:
        report = PublishReport.from_json(verdict["report"])
        if report.outcome in ("committed", "noop") and verdict["raises"] is None:
            return report
        kind = getattr(errors, verdict["raises"])
        if issubclass(kind, errors.PublishError):
            raise kind(report.error, report=report)
        raise kind(report.error)

    # -- the coordinator's side --------------------------------------------------------------------------------------

    def _lead(
        self,
        request: Request,
        manifest: Manifest,
        seq: int,
        staged: Staged | None,
        attempt: int,
        started: float,
    ) -> Mapping[str, Any]:
        """One attempt on rank 0. Returns the verdict, which every other rank finds in the store."""
        c = self._coordinator
        assert c is not None
        timeline = Timeline(trace=self.config.trace)
        senders: list[dict[str, Any]] = []
        if not self._sender.connected:
            c.new_epoch()
        try:
            done = c.prepare(request, manifest, seq)
            if done is not None:
                return self._post_verdict(seq, done, None)
            c.allow_connect(seq)
            self._sender.connect(
                manifest, seq, epoch=c.epoch, group_size=c.group_size, peers=c.peers, deadline_s=request.deadline_s
            )
            c.connect(seq, manifest.num_stages, request.deadline_s)
            c.begin(request, seq)
            self._sender.send(manifest, seq, staged, request.deadline_s)
            with timeline.span("verify"):
                senders = c.verify(seq, manifest, request.deadline_s)
            commit_from = time.perf_counter()
            c.decide_commit(seq)
        except StepFailed as e:
            return self._failed(request, seq, e, attempt, started)
        except errors.WeightSyncError as e:
            return self._failed(request, seq, StepFailed(str(e), kind=type(e)), attempt, started)
        except BaseException as e:
            # The trainer's own fault (a source that raised): the engines must not stay paused or waiting.
            self._failed(request, seq, StepFailed(f"trainer rank 0: {type(e).__name__}: {e}"), attempt, started)
            raise
        lost = c.commit(request, seq)
        timeline.add("commit", commit_from, time.perf_counter())
        if lost:
            self._sender.drop()
        error = "; ".join(lost.values()) if lost else None
        report = c.report(
            request,
            "committed",
            seconds=time.perf_counter() - started,
            attempts=attempt,
            error=error,
            failed=lost,
            senders=senders,
            own=timeline.to_json(),
        )
        raises = "PublishAborted" if lost and self.config.on_engine_failure == "abort" else None
        return self._post_verdict(seq, report, raises)

    def _failed(self, request: Request, seq: int, e: StepFailed, attempt: int, started: float) -> Mapping[str, Any]:
        """Give the attempt up and post the verdict: another attempt without the culprits, or the error."""
        c = self._coordinator
        assert c is not None
        changed = c.engines_changed
        c.give_up(request, seq, str(e))
        self._sender.drop()
        survivors = len(c.engines) - len(c.excluded) - len(e.culprits)
        retry = self.config.on_engine_failure == "drop" and bool(e.culprits) and survivors > 0 and e.kind not in _OURS
        report = c.report(
            request,
            "aborted" if changed else "refused",
            seconds=time.perf_counter() - started,
            attempts=attempt,
            error=str(e),
            failed=e.culprits,
        )
        if e.kind in (errors.VersionError, errors.ConfigError):
            assert e.kind is not None
            raises = e.kind.__name__
        else:
            raises = "PublishAborted" if changed else "PreflightError"
        if retry:
            c.exclude(e.culprits)
        return self._post_verdict(seq, report, raises, retry=retry)

    def _post_verdict(
        self, seq: int, report: PublishReport, raises: str | None, *, retry: bool = False
    ) -> Mapping[str, Any]:
        """For every other rank: at the epoch's verdict key, or in the order itself where none was given yet."""
        assert self._coordinator is not None
        verdict = {"retry": retry, "report": report.to_json(), "raises": raises}
        order = self._trainer_keys.order(seq)
        if self._store.check([order]):
            self._store.set(Keys(self.run_id, self._coordinator.epoch).verdict(seq), json.dumps(verdict))
        else:
            self._store.set(order, json.dumps({"final": verdict}))
        self._coordinator.forget_old(seq, self.source.num_stages)
        return verdict

    # -- the other ranks' side ---------------------------------------------------------------------------------------

    def _follow(self, request: Request, manifest: Manifest, seq: int, staged: Staged | None) -> Mapping[str, Any]:
        """One attempt on every rank but 0."""
        patience_s = 4 * request.deadline_s + 30
        order = self._await(self._trainer_keys.order(seq), patience_s)
        if "final" in order:
            return dict(order["final"])
        keys = Keys(self.run_id, order["epoch"])
        if order["manifest"] != manifest.digest:
            raise errors.ManifestError(
                f"rank {self.rank} planned manifest {manifest.digest[:12]}, the coordinator {order['manifest'][:12]}: "
                "ranks were configured differently"
            )
        go = self._await(keys.connect(seq), patience_s)
        if go["ok"] and self.source.is_sender:
            try:
                self._sender.connect(
                    manifest,
                    seq,
                    epoch=order["epoch"],
                    group_size=order["group_size"],
                    peers=order["peers"],
                    deadline_s=request.deadline_s,
                )
            except errors.WeightSyncError:
                # Reported to the coordinator by the sender; the verdict tells what became of it.
                go = {"ok": False}
        if go["ok"]:
            go = self._await(keys.go(seq), patience_s)
        if go["ok"]:
            self._sender.send(manifest, seq, staged, request.deadline_s)
        verdict = self._await(keys.verdict(seq), patience_s)
        report = PublishReport.from_json(verdict["report"])
        if report.outcome != "committed" or report.error:
            self._sender.drop()
        return verdict

    def _await(self, key: str, deadline_s: float) -> dict[str, Any]:
        _, value = wait_key(self._store, key, deadline_s, poll_s=0.005)
        obj: dict[str, Any] = json.loads(value)
        return obj


def _resolved(config: PublishConfig) -> PublishConfig:
    """`config` with the transport's own bucket size and number of buffers where the user named none."""
    caps = get_transport(config.transport).caps
    return dataclasses.replace(
        config,
        bucket_bytes=config.bucket_bytes if config.bucket_bytes is not None else caps.bucket_bytes,
        num_buffers=config.num_buffers if config.num_buffers is not None else caps.num_buffers,
    )


def _join(host: str, port: int, deadline_s: float) -> dist.Store:
    """Connect to rank 0's store; with an address given by hand, rank 0 may start to listen later than we ask."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            return connect_store(host, port, deadline_s=max(end - time.monotonic(), 0.1))
        except errors.PeerLost:
            if time.monotonic() + 0.2 > end:
                raise
            time.sleep(0.2)


_OURS = (errors.VersionError, errors.ConfigError, errors.ManifestError)
"""Kinds that dropping an engine would only hide."""
