"""Rank 0 of an engine: the loop that owns its model, and the control API that talks to it.

HTTP threads turn a request into a `_Job` and wait for it with a deadline; the main thread takes jobs between generation
steps, has every rank perform the operation, and answers. A rank that dies ends every wait at once, one that is stopped
ends each at its own deadline, and the error names it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.embedded.links import Follower, RankLost
from weightsync.embedded.rank import Rank
from weightsync.embedded.scheduler import PAUSE_MODES, Request, Result
from weightsync.engine.http import Handler
from weightsync.errors import ConfigError, EngineError, EngineFenced
from weightsync.protocol import PROTOCOL_VERSION, PublishCall

__all__ = ["Leader"]

_Reply = dict[str, Any]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Job:
    op: _Reply
    future: concurrent.futures.Future[_Reply] = dataclasses.field(default_factory=concurrent.futures.Future)


def _settle(future: concurrent.futures.Future[Any], reply: Any = None, *, error: BaseException | None = None) -> None:
    """Answer, unless somebody was faster: the caller's deadline, or the loss of a rank."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(reply)


class Leader:
    """Drives `rank` and the other ranks of engine `name`.

    `command_deadline_s` bounds every command whose body does not name a `deadline_s` of its own.
    """

    def __init__(
        self,
        name: str,
        rank: Rank,
        *,
        pid: int,
        command_deadline_s: float,
        num_draft: int,
        instance: str,
    ) -> None:
        self.name = name
        self.rank = rank
        self.instance = instance
        self.followers: list[Follower] = []
        self._pid = pid
        self._command_deadline_s = command_deadline_s
        self._num_draft = num_draft
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._requests: dict[str, concurrent.futures.Future[Result]] = {}
        self._draining: list[_Job] = []
        self._broken: EngineError | None = None
        self._fences: dict[int, str | None] = {}
        self._committed: tuple[tuple[str, int, int], _Reply] | None = None
        self._doing: tuple[str, float] | None = None
        self._stopping = False
        self._lease_end: float | None = None

    # -- the main thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped. Called on the main thread, which owns the model."""
        while not self._stopping:
            job = self._next_job()
            self._expire_lease()
            if job is not None and not job.future.done():
                try:
                    self._perform(job)
                except Exception as e:  # noqa: BLE001 - whoever waits for this job gets it; the loop goes on
                    _settle(job.future, error=e)
                    if isinstance(e, RankLost):
                        self.lost(e)
            if self._can_step:
                self._step()
            if self._draining and (self.rank.scheduler.num_running == 0 or self._broken):
                self._drained()

    def stop(self) -> None:
        """Leave `run` after what it is doing; from any thread."""
        self._jobs.put(_Job(op={"op": "stop"}))

    def lost(self, error: EngineError) -> None:
        """This engine cannot go on: answer everybody who waits. From any thread."""
        with self._lock:
            if self._broken is None:
                self._broken = EngineError(
                    f"engine {self.name}: {error}", engine=self.name, rank=error.rank, phase=error.phase
                )
            waiting = [*self._pending, *self._requests.values()]
            self._requests.clear()
        for future in waiting:
            _settle(future, error=self._broken)

    @property
    def fenced(self) -> str | None:
        """Why this engine does not serve: the reason of its first rank that holds no complete version."""
        if self.rank.receiver.fenced is not None:
            return self.rank.receiver.fenced
        for rank, reason in sorted(self._fences.items()):
            if reason is not None:
                return f"rank {rank}: {reason}"
        return None

    @property
    def _can_step(self) -> bool:
        return self._broken is None and self.rank.scheduler.has_work and self.fenced is None

    def _next_job(self) -> _Job | None:
        timeout = None if self._lease_end is None else max(0.0, self._lease_end - time.monotonic())
        try:
            return self._jobs.get(block=not self._can_step, timeout=timeout)
        except queue.Empty:
            return None

    def _expire_lease(self) -> None:
        """Serve again if whoever paused for a publish never began it: a trainer that died must not silence us."""
        if self._lease_end is None or time.monotonic() < self._lease_end:
            return
        self._lease_end = None
        if self._broken is None and self.fenced is None:
            self._everyone({"op": "resume"})

    def _perform(self, job: _Job) -> None:
        op = job.op
        if op["op"] == "stop":
            self._stopping = True
            if self._broken is None:
                self._everyone(op)
            _settle(job.future, {})
            return
        if self._broken is not None:
            raise self._broken
        if op["op"] == "add":
            # Checked here first: a request that one rank refuses must not reach the others.
            for request in op["requests"]:
                self.rank.scheduler.check(Request(**request))
        if op["op"] == "resume" and self.fenced is not None:
            raise self._fenced_error()
        if op["op"] == "commit":
            _settle(job.future, self._commit(op["key"]))
            return
        if op["op"] in ("pause", "receive", "resume"):
            self._lease_end = None
        replies = self._everyone(op)
        self._deliver()
        if op["op"] == "pause" and op["lease_s"] is not None:
            self._lease_end = time.monotonic() + op["lease_s"]
        if op["op"] in ("preflight", "receive"):
            self._fences = {r["rank"]: r["fenced"] for r in replies}
        if op["op"] == "receive":
            self._received(op, replies)
        if op["op"] == "pause" and op["mode"] == "wait" and self.rank.scheduler.num_running:
            self._draining.append(job)
            return
        _settle(job.future, {"replies": replies})

    def _everyone(self, op: Mapping[str, Any]) -> list[_Reply]:
        """Every rank performs `op`; their replies by rank.

        Raises:
            RankLost: a rank is gone.
            EngineError: a rank failed; `rank` says which.
        """
        self._doing = (op["op"], time.monotonic())
        try:
            for follower in self.followers:
                follower.command(op)
            replies = [self.rank.apply(op), *(f.reply() for f in self.followers)]
        finally:
            self._doing = None
        for reply in replies:
            if "error" in reply:
                raise EngineError(
                    f"engine {self.name} rank {reply['rank']}: {op['op']}: {reply['error']}",
                    engine=self.name,
                    rank=reply["rank"],
                    phase=op["op"],
                    remote=reply["remote"],
                )
        return replies

    def _step(self) -> None:
        try:
            self._everyone({"op": "step"})
        except EngineError as e:
            # The ranks' collectives no longer meet: nothing that they would compute now can be trusted.
            self.lost(e)
        else:
            self._deliver()

    def _deliver(self) -> None:
        results, self.rank.results = self.rank.results, []
        for result in results:
            with self._lock:
                future = self._requests.pop(result.id, None)
            if future is not None:
                _settle(future, result)

    def _drained(self) -> None:
        jobs, self._draining = self._draining, []
        for job in jobs:
            _settle(job.future, {"replies": [{"rank": 0, "aborted": [], "kept": []}]})

    def _received(self, op: Mapping[str, Any], replies: Sequence[_Reply]) -> None:
        """Switch over if every rank committed; otherwise say so to those who wait for tokens."""
        acks = [r["ack"] for r in replies]
        if self.fenced is None and all(a["ok"] and a["phase"] == "committed" for a in acks):
            # At once, not when the coordinator says commit: it may be dead, and the decision is final.
            call = PublishCall.from_json(op["call"])
            key = (call.run_id, call.epoch, call.seq)
            self._committed = (key, self._switch(call))
        elif self.fenced is None:
            # Failed before anything was written: the version served until now is intact.
            self._everyone({"op": "resume"})
        else:
            held = {h["id"] for h in self.rank.scheduler.held()}
            with self._lock:
                queued = {i: f for i, f in self._requests.items() if i not in held}
                for i in queued:
                    del self._requests[i]
            self._everyone({"op": "cancel", "ids": sorted(queued)})
            for future in queued.values():
                _settle(future, error=self._fenced_error())

    def _switch(self, call: PublishCall) -> _Reply:
        replies = self._everyone({"op": "new_version"})
        return {
            "version": call.version,
            "versions": dict(self.rank.receiver.versions),
            "spanning": replies[0]["spanning"],
            "ranks": len(replies),
        }

    def _commit(self, key: tuple[str, int, int]) -> _Reply:
        if self._committed is not None and self._committed[0] == key:
            return self._committed[1]
        if self.fenced is not None:
            raise self._fenced_error()
        raise EngineError(
            f"engine {self.name}: commit: nothing was received for publish {key[2]} of epoch {key[1]} of run {key[0]}: "
            "receive first",
            engine=self.name,
            phase="commit",
        )

    def _fenced_error(self) -> EngineFenced:
        return EngineFenced(
            f"engine {self.name} is fenced and does not serve: {self.fenced}; a full publish heals it",
            engine=self.name,
        )

    # -- HTTP threads --------------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Handler]:
        """For `weightsync.engine.http.ControlServer`."""
        return {
            "commit": self._http_commit,
            "generate": self._http_generate,
            "pause": self._http_pause,
            "preflight": lambda body: self._http_publish("preflight", body),
            "receive": lambda body: self._http_publish("receive", body),
            "resume": lambda body: self._command({"op": "resume"}, body),
            "status": self._http_status,
            "stop": self._http_stop,
            "weights": lambda body: self._command({"op": "weights"}, body),
        }

    def _command(
        self, op: _Reply, body: Mapping[str, Any], *, deadline_s: float | None = None, what: str | None = None
    ) -> _Reply:
        """Have the main thread perform `op`, and wait for that; `what` names it in messages.

        Raises:
            EngineError: not within the deadline; names the ranks that owe an answer.
        """
        limit_s = float(body.get("deadline_s") or deadline_s or self._command_deadline_s)
        job = _Job(op=op)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._pending.add(job.future)
        self._jobs.put(job)
        try:
            return job.future.result(limit_s)
        except concurrent.futures.TimeoutError:
            job.future.cancel()
            raise self._late(what or op["op"], limit_s) from None
        finally:
            with self._lock:
                self._pending.discard(job.future)

    def _late(self, what: str, limit_s: float) -> EngineError:
        doing = self._doing
        late = [f.rank for f in self.followers if f.owes_reply]
        rank = late[0] if late else 0
        since = f", {time.monotonic() - doing[1]:.1f} s in {doing[0]}" if doing else ""
        return EngineError(
            f"engine {self.name} rank {rank}: no answer to {what} within {limit_s:g} s{since}: stopped, stuck or busy",
            engine=self.name,
            rank=rank,
            phase=what,
        )

    def _http_publish(self, what: str, body: _Reply) -> _Reply:
        call = PublishCall.from_json(body)
        # Each phase that a call goes through on an engine rank has `deadline_s`; the caller waits a little longer.
        phases = {"preflight": 2, "receive": 3}[what]
        reply = self._command({"op": what, "call": body}, {}, deadline_s=phases * call.deadline_s + 3)
        acks = [r["ack"] for r in reply["replies"]]
        return {"ok": all(a["ok"] for a in acks), "acks": acks}

    def _http_commit(self, body: _Reply) -> _Reply:
        call = PublishCall.from_json(body)
        key = (call.run_id, call.epoch, call.seq)
        return self._command({"op": "commit", "key": key}, {}, deadline_s=call.deadline_s)

    def _http_pause(self, body: _Reply) -> _Reply:
        mode = str(body.get("mode"))
        if mode not in PAUSE_MODES:
            raise ConfigError(f"pause mode is {mode!r}; expected one of {', '.join(PAUSE_MODES)}")
        lease_s = body.get("lease_s")
        if lease_s is not None and not (isinstance(lease_s, int | float) and lease_s > 0):
            raise ConfigError(f"pause: lease_s is {lease_s!r}; expected seconds > 0, or none to pause until resume")
        reply = self._command({"op": "pause", "mode": mode, "lease_s": lease_s}, body)["replies"][0]
        return {"mode": mode, "kept": reply["kept"], "aborted": reply["aborted"]}

    def _http_status(self, body: _Reply) -> _Reply:
        """Answered by the HTTP thread itself: it must work while the main thread receives."""
        scheduler = self.rank.scheduler
        fenced = self.fenced
        state = "paused" if scheduler.paused else "serving"
        receiver: Any = self.rank.receiver
        return {
            "engine": self.name,
            "instance": self.instance,
            "world_size": 1 + len(self.followers),
            "fenced": fenced,
            "broken": None if self._broken is None else str(self._broken),
            "state": "broken" if self._broken else "fenced" if fenced else state,
            "pause_mode": scheduler.paused,
            "versions": dict(receiver.versions),
            "run_id": receiver.run_id,
            "epoch": receiver.epoch,
            "connected": receiver.connected,
            "torch": torch.__version__,
            "protocol": PROTOCOL_VERSION,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "prefix_entries": len(scheduler.prefix),
            "prefix_hits": scheduler.prefix.hits,
            "flushes": scheduler.prefix.flushes,
            "ranks": [
                {"rank": 0, "pid": self._pid, "alive": True},
                *({"rank": f.rank, "pid": f.pid, "alive": f.lost is None} for f in self.followers),
            ],
        }

    def _http_stop(self, body: _Reply) -> _Reply:
        self.stop()
        return {}

    def _http_generate(self, body: _Reply) -> _Reply:
        """`prompts` (token lists), `max_tokens`, `speculate` (draft tokens per step) -> tokens and acceptance."""
        if self.fenced is not None:
            raise self._fenced_error()
        prompts = body.get("prompts")
        if not isinstance(prompts, list) or not all(isinstance(p, list) for p in prompts):
            raise ConfigError("generate: prompts must be a list of lists of token ids")
        speculate = body.get("speculate")
        requests = [
            {
                "id": uuid.uuid4().hex,
                "prompt": prompt,
                "max_tokens": int(body.get("max_tokens", 16)),
                "num_draft": self._num_draft if speculate is None else int(speculate),
            }
            for prompt in prompts
        ]
        ids = [str(r["id"]) for r in requests]
        futures: list[concurrent.futures.Future[Result]] = [concurrent.futures.Future() for _ in ids]
        limit_s = float(body.get("deadline_s") or self._command_deadline_s)
        end = time.monotonic() + limit_s
        with self._lock:
            self._requests |= dict(zip(ids, futures, strict=True))
        try:
            self._command({"op": "add", "requests": requests}, {}, deadline_s=limit_s, what="generate")
            results = [future.result(max(0.0, end - time.monotonic())) for future in futures]
        except concurrent.futures.TimeoutError:
            self._jobs.put(_Job(op={"op": "cancel", "ids": ids}))
            if self.fenced is not None:
                raise self._fenced_error() from None
            raise self._late("generate", limit_s) from None
        finally:
            with self._lock:
                for i in ids:
                    self._requests.pop(i, None)
        proposed, accepted = sum(r.proposed for r in results), sum(r.accepted for r in results)
        return {
            "outputs": [r.to_json() for r in results],
            "tokens": [r.tokens for r in results],
            "proposed": proposed,
            "accepted": accepted,
            "acceptance": accepted / proposed if proposed else None,
            "versions": dict(self.rank.receiver.versions),
        }
