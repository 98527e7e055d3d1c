"""Inside each SGLang scheduler process: one engine rank of a publish, and the gate in front of its requests.

Every tensor parallel rank gets the same control requests in the same order, so all call `answer` together; what they
found is gathered over SGLang's own CPU group before any of them answers, and they fence, flush and resume alike.
Nothing here raises into SGLang: an error is a JSON answer, and rank 0's is the one that reaches the client.

    status -> preflight -> pause -> drain... -> receive -> commit        (resume, if it failed before receive)

The gate replaces the scheduler's `process_input_requests`: while paused it keeps new requests back, while fenced it
refuses them (503) with the reason. The engine leaves a pause by itself once a publish is decided, since the trainer may
be dead by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import torch

from weightsync.engine.http import error_body
from weightsync.engine.receiver import Receiver
from weightsync.engine.runner import ModuleRunner
from weightsync.engines.sglang.acceptance import Counters
from weightsync.engines.sglang.rows import Internals
from weightsync.engines.sglang.runners import describe_speculation, find_runners, unsupported
from weightsync.errors import ConfigError, EngineError, EngineFenced, UnsupportedError
from weightsync.protocol import PublishCall

__all__ = ["Bridge", "answer"]

LEASE_TICKS = 8
"""Iterations of the scheduler's loop from one look at rank 0's clock to the next, while paused."""
PAUSE_MODES = ("abort", "wait", "keep")

_Reply = dict[str, Any]


def answer(scheduler: Any, row: Internals, text: str) -> str:
    """Perform the operation that `text` (JSON: `op`, and what it takes) names. Never raises."""
    try:
        body = json.loads(text)
        bridge = getattr(scheduler, "weightsync_bridge", None)
        if bridge is None:
            bridge = Bridge(scheduler, row)
            scheduler.weightsync_bridge = bridge
        reply = bridge.perform(body)
    except Exception as e:  # noqa: BLE001 - SGLang's scheduler dies of exceptions; the caller raises it instead
        reply = error_body(e)[1]
    return json.dumps({"weightsync": reply})


class Bridge:
    """The publish state of one scheduler process; made when the first publisher asks.

    Raises:
        UnsupportedError: the engine's speculative worker is not in the row.
    """

    def __init__(self, scheduler: Any, row: Internals) -> None:
        self.scheduler, self.row = scheduler, row
        owner = scheduler.weight_updater if hasattr(scheduler, "weight_updater") else scheduler
        self._cpu_group = group = owner.tp_cpu_group
        self.rank, self.world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self._problems = unsupported(scheduler, row)
        self.runners: list[ModuleRunner] = [] if self._problems else find_runners(scheduler, row)
        self._receiver: Receiver | None = None
        self._counters = Counters(scheduler)
        self._fence: str | None = None
        self._foreign: str | None = None
        self._hold = False
        self._mode: str | None = None
        self._held: list[Any] = []
        self._flush_due = False
        # Later releases give cached memory back, too (on a CPU they collect garbage): a publish leaves none to give.
        takes = inspect.signature(scheduler.flush_cache).parameters
        self._flush_options = {"empty_cache": False} if "empty_cache" in takes else {}
        self._lease_end: float | None = None
        self._ticks = 0
        self._committed: tuple[tuple[str, int, int], _Reply] | None = None
        self._process: Callable[[list[Any]], None] = scheduler.process_input_requests
        scheduler.process_input_requests = self._gate
        self._ops: Mapping[str, Callable[[_Reply], _Reply]] = {
            "commit": self._commit,
            "drain": self._drain,
            "pause": self._pause,
            "preflight": self._preflight,
            "receive": self._receive,
            "resume": self._resume,
            "status": self._status,
            "weights": self._weights,
        }

    # -- operations, on every rank together --------------------------------------------------------------------------

    def perform(self, body: _Reply) -> _Reply:
        op = self._ops.get(str(body.get("op")))
        if op is None:
            raise ConfigError(f"operation {body.get('op')!r}: expected one of {', '.join(sorted(self._ops))}")
        if self._receiver is None and not self._problems:
            self._receiver = self._new_receiver(str(body.get("engine") or "sglang"))
        reply, error = {}, None
        try:
            reply = op(body)
        except Exception as e:  # noqa: BLE001 - the other ranks wait in the gather below
            error = e
        mine = {"error": None if error is None else error_body(error)[1]["error"], "fenced": self._local_fence}
        found = self._gather(mine)
        if op == self._receive:
            reply |= self._received(body, error is None and reply["ok"], found)
        if error is not None:
            raise error
        for rank, other in enumerate(found):
            if other["error"] is not None:
                raise EngineError(
                    f"rank {rank}: {other['error']['message']}", rank=rank, remote=other["error"]["remote"]
                )
        return reply

    def _gather(self, mine: Any) -> list[Any]:
        if self.world_size == 1:
            return [mine]
        out: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(out, mine, group=self._cpu_group)
        return out

    def _new_receiver(self, engine: str) -> Receiver:
        device = torch.device(str(self.scheduler.tp_worker.model_runner.device))
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        return Receiver(
            self.runners,
            engine=engine,
            rank=self.rank,
            world_size=self.world_size,
            device=device,
            instance=self._gather(secrets.token_hex(8))[0],
        )

    @property
    def _local_fence(self) -> str | None:
        return self._receiver.fenced if self._receiver is not None else None

    @property
    def fenced(self) -> str | None:
        """Why this engine does not serve."""
        return self._local_fence or self._fence

    def _status(self, body: _Reply) -> _Reply:
        receiver = self._receiver
        if receiver is None:
            raise UnsupportedError("; ".join(self._problems))
        versions: dict[str, int | None] = dict(receiver.versions)
        if self._foreign is not None:
            versions = dict.fromkeys(versions)
        return {
            **receiver.status(),
            "fenced": self.fenced,
            "versions": versions,
            "changed_by": self._foreign,
            "state": "fenced" if self.fenced else "paused" if self._hold else "serving",
            "pause_mode": self._mode,
            "held": len(self._held),
            "running": len(self.scheduler.running_batch.reqs),
            "engine_kind": "sglang",
            "engine_version": _sglang_version(),
            "row": self.row.row.versions,
            "evidence": self.row.row.evidence,
            "worker": type(self.scheduler.draft_worker).__name__ if self.scheduler.draft_worker is not None else None,
            "speculation": describe_speculation(self.scheduler),
            "speculation_counts": self._counters.counts(),
        }

    def _need_receiver(self) -> Receiver:
        owner = self.scheduler if hasattr(self.scheduler, "offload_tags") else self.scheduler.weight_updater
        tags = owner.offload_tags
        problems = list(self._problems)
        if "weights" in tags:
            problems.append("its weights are released: call resume_memory_occupation first")
        if problems or self._receiver is None:
            raise UnsupportedError(f"this SGLang engine cannot take part: {'; '.join(problems)}")
        return self._receiver

    def _preflight(self, body: _Reply) -> _Reply:
        receiver, call = self._need_receiver(), PublishCall.from_json(body["call"])
        receiver.bind_host = _address_towards(call.store_host, call.store_port)
        with _ordinary_tensors():
            ack = receiver.preflight(call)
        if not ack.ok and "joining the publisher's store" in str(ack.error):
            raise EngineError(str(ack.error), remote=ack.remote)  # there is no store to tell it to
        return {"ok": ack.ok, "said": ack.error}

    def _pause(self, body: _Reply) -> _Reply:
        mode = str(body.get("mode"))
        if mode not in PAUSE_MODES:
            raise ConfigError(f"pause mode is {mode!r}; expected one of {', '.join(PAUSE_MODES)}")
        from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

        lease_s = body.get("lease_s")
        self._lease_end = None if lease_s is None else time.monotonic() + float(lease_s)
        self._hold, self._mode = True, mode
        if mode == "abort":
            self.scheduler.abort_request(AbortReq(abort_all=True))
        elif mode == "keep":
            # Takes the result of the forward in flight, gives its KV back, puts requests in the waiting queue.
            self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        return self._drain(body)

    def _drain(self, body: _Reply) -> _Reply:
        """Whether a pause has come to rest: nothing runs, and no forward is in flight."""
        kept = []
        if self._mode == "keep":
            kept = [{"id": r.rid, "tokens": len(r.output_ids)} for r in self.scheduler.waiting_queue if r.output_ids]
        return {"idle": self._idle, "kept": kept, "mode": self._mode}

    @property
    def _idle(self) -> bool:
        if self._mode != "keep":
            return bool(self.scheduler.is_fully_idle())
        waiting, self.scheduler.waiting_queue = self.scheduler.waiting_queue, []
        try:
            return bool(self.scheduler.is_fully_idle())
        finally:
            self.scheduler.waiting_queue = waiting

    def _receive(self, body: _Reply) -> _Reply:
        receiver, call = self._need_receiver(), PublishCall.from_json(body["call"])
        if not self._hold or not self._idle:
            raise EngineError("requests are still running: pause this engine and wait until it is idle, then receive")
        self._lease_end = None
        with _ordinary_tensors():
            ack = receiver.receive(call)
        return {"ok": ack.ok and ack.phase == "committed", "said": ack.error}

    def _received(self, body: _Reply, committed: bool, found: list[Any]) -> _Reply:
        """Every rank knows what every rank did: switch over together, or fence together."""
        reasons = [f"rank {rank}: {x['fenced']}" for rank, x in enumerate(found) if x["fenced"]]
        if reasons:
            self._fence = "; ".join(reasons)
            self._drop_waiting()
            self._leave_pause()
            return {"fenced": self._fence}
        if committed:
            call = PublishCall.from_json(body["call"])
            if call.full:
                self._fence, self._foreign = None, None
            spanning = self._drain({})["kept"]
            self._flush_due = not self._flush()
            reply = {
                "version": call.version,
                "versions": dict(self._need_receiver().versions),
                "spanning": spanning,
                "ranks": self.world_size,
            }
            self._committed = ((call.run_id, call.epoch, call.seq), reply)
        if not self._flush_due:
            self._leave_pause()
        return {}

    def _flush(self) -> bool:
        """The prefix cache, once. Requests that were kept hold no KV: the queue is set aside for SGLang to agree."""
        waiting, self.scheduler.waiting_queue = self.scheduler.waiting_queue, []
        try:
            return bool(self.scheduler.flush_cache(**self._flush_options))
        finally:
            self.scheduler.waiting_queue = waiting

    def _commit(self, body: _Reply) -> _Reply:
        call = PublishCall.from_json(body["call"])
        if self.fenced:
            raise EngineFenced(f"fenced, does not serve: {self.fenced}; a full publish heals it")
        if self._committed is None or self._committed[0] != (call.run_id, call.epoch, call.seq):
            raise EngineError(f"nothing was received for publish {call.seq} of epoch {call.epoch}: receive first")
        return {
            **self._committed[1],
            "flushed": not self._flush_due,
            "speculation_counts": self._counters.counts(),
        }

    def _resume(self, body: _Reply) -> _Reply:
        if self.fenced:
            raise EngineFenced(f"fenced, does not serve: {self.fenced}; a full publish heals it")
        self._leave_pause()
        return {}

    def _weights(self, body: _Reply) -> _Reply:
        """Where every parameter and buffer lies, and a hash of its bytes; of rank 0."""
        return {"runners": {r.name: _describe(r.module) for r in self.runners}}

    # -- the gate ----------------------------------------------------------------------------------------------------

    def _gate(self, recv_reqs: list[Any]) -> None:
        """Instead of the scheduler's `process_input_requests`, called once per iteration of its loop."""
        self._counters.sample()
        if self._flush_due and self._flush():
            self._flush_due = False
            self._leave_pause()
        if self._lease_end is not None and self._lease_expired():
            self._leave_pause()
        if self._held and not self._hold:
            recv_reqs, self._held = [*self._held, *recv_reqs], []
        self._process(self._admit(recv_reqs))

    def _lease_expired(self) -> bool:
        """Whoever paused for a publish never began it. By rank 0's clock, asked by all ranks in the same iteration."""
        assert self._lease_end is not None
        self._ticks += 1
        every = LEASE_TICKS if self.world_size > 1 else 1
        return self._ticks % every == 0 and bool(self._gather(time.monotonic() >= self._lease_end)[0])

    def _admit(self, recv_reqs: list[Any]) -> list[Any]:
        through = []
        for r in recv_reqs:
            kind = type(r).__name__
            if "Tokenized" in kind:
                if self.fenced:
                    self._refuse(r)
                elif self._hold:
                    self._held.append(r)
                else:
                    through.append(r)
                continue
            if kind == "AbortReq":
                self._abort_held(r)
            elif kind.startswith(("UpdateWeightFromDisk", "UpdateWeightsFrom")):
                self._foreign = f"SGLang's own {kind.removesuffix('ReqInput')}"
            elif kind.startswith("ReleaseMemoryOccupation") and self._loses_weights(r):
                self._foreign = "release_memory_occupation"
                self._fence = "its weights were released without a backup"
            through.append(r)
        return through

    def _loses_weights(self, r: Any) -> bool:
        args = self.scheduler.server_args
        backed = getattr(args, "enable_weights_cpu_backup", False)
        if self.scheduler.draft_worker is not None:
            backed = backed and getattr(args, "enable_draft_weights_cpu_backup", False)
        enabled = getattr(args, "enable_memory_saver", False)
        return bool(enabled) and not backed and (not r.tags or "weights" in r.tags)

    def _abort_held(self, abort: Any) -> None:
        keep = []
        for r in self._held:
            if abort.abort_all or any(str(x.rid).startswith(abort.rid) for x in getattr(r, "batch", [r])):
                self._refuse(r, "Aborted while the weights were being updated.", None)
            else:
                keep.append(r)
        self._held = keep

    def _refuse(
        self, request: Any, message: str | None = None, status: HTTPStatus | None = HTTPStatus.SERVICE_UNAVAILABLE
    ) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        text = message or f"This engine is fenced and does not serve: {self.fenced}; a full publish heals it."
        reason: dict[str, Any] = {"type": "abort", "message": text}
        if status is not None:
            reason["status_code"] = status
        send = getattr(self.scheduler, "send_abort_output", None)
        if send is None:
            channels = getattr(self.scheduler, "ipc_channels", self.scheduler)
            send = channels.send_to_tokenizer.send_output
        for one in getattr(request, "batch", [request]):
            send(AbortReq(rid=one.rid, finished_reason=reason), one)

    def _drop_waiting(self) -> None:
        """Fenced: requests that were kept can't go on, since there is no version to go on with."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(abort_all=True))

    def _leave_pause(self) -> None:
        if self._mode == "keep":
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput

            self.scheduler.continue_generation(ContinueGenerationReqInput())
        self._hold, self._mode, self._lease_end = False, None, None


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """The scheduler runs in inference mode: threads of transports could not write to buffers that are made there."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _sglang_version() -> str:
    import sglang

    return str(sglang.__version__)


def _address_towards(host: str, port: int) -> str:
    """The address of this host on the route to the publisher's store; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((host, port))
        return str(s.getsockname()[0])


def _describe(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    out = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        out[name] = {
            "data_ptr": tensor.data_ptr(),
            "digest": hashlib.blake2b(data.data, digest_size=16).hexdigest(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
    return out
