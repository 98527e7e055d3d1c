"""One engine rank: its models, its receiver, its scheduler, and the operations that all ranks perform in step.

`Rank.apply` is called on the main thread only, by `leader.Leader` on rank 0 and by the command loop of `worker.py` on
the others, with the same operations in the same order.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from weightsync.embedded.scheduler import Request, Result, Scheduler
from weightsync.embedded.speculative import Decoder
from weightsync.engine.base import Runner
from weightsync.errors import WeightSyncError
from weightsync.protocol import Ack, PublishCall, plain

__all__ = ["Rank", "ReceiverLike"]


class ReceiverLike(Protocol):
    """What a rank needs of `weightsync.engine.receiver.Receiver`."""

    @property
    def fenced(self) -> str | None: ...

    @property
    def versions(self) -> Mapping[str, int | None]: ...

    def preflight(self, call: PublishCall) -> Ack: ...

    def receive(self, call: PublishCall) -> Ack: ...

    def close(self) -> None: ...


class Rank:
    """`results` collects what requests produced; rank 0 takes them from there."""

    def __init__(
        self,
        rank: int,
        decoder: Decoder,
        runners: list[Runner],
        receiver: ReceiverLike,
        *,
        max_running: int,
        prefix_entries: int,
    ) -> None:
        self.rank = rank
        self.runners = runners
        self.receiver = receiver
        self.results: list[Result] = []
        self.scheduler = Scheduler(
            decoder, lambda: self.receiver.versions, max_running=max_running, prefix_entries=prefix_entries
        )
        self._ops: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "add": self._add,
            "cancel": self._cancel,
            "new_version": self._new_version,
            "pause": self._pause,
            "preflight": lambda op: self._publish(self.receiver.preflight, op),
            "receive": lambda op: self._publish(self.receiver.receive, op),
            "resume": self._resume,
            "step": self._step,
            "stop": lambda op: {},
            "weights": self._weights,
        }

    def apply(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """Perform one operation; an exception becomes the reply's `error`, so that the ranks stay in step."""
        try:
            return {"rank": self.rank, **self._ops[op["op"]](op)}
        except Exception as e:  # noqa: BLE001 - rank 0 raises it, naming this rank
            known = isinstance(e, WeightSyncError)
            text = str(e) if known else f"{type(e).__name__}: {e}"
            return {"rank": self.rank, "error": text, "remote": traceback.format_exc()}

    def _add(self, op: Mapping[str, Any]) -> dict[str, Any]:
        for request in op["requests"]:
            self.scheduler.add(Request(**request))
        return {}

    def _cancel(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self.scheduler.cancel(op["ids"])
        return {}

    def _step(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self.results += self.scheduler.step()
        return {}

    def _pause(self, op: Mapping[str, Any]) -> dict[str, Any]:
        aborted = self.scheduler.pause(op["mode"])
        self.results += aborted
        return {"aborted": [r.id for r in aborted], "kept": self.scheduler.held() if op["mode"] == "keep" else []}

    def _resume(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self.scheduler.resume()
        return {}

    def _new_version(self, op: Mapping[str, Any]) -> dict[str, Any]:
        spanning = self.scheduler.new_version()
        self.scheduler.resume()
        return {"spanning": spanning}

    def _publish(self, method: Callable[[PublishCall], Ack], op: Mapping[str, Any]) -> dict[str, Any]:
        ack = method(PublishCall.from_json(op["call"]))
        return {
            "ack": plain(ack),
            "fenced": self.receiver.fenced,
            "versions": dict(self.receiver.versions),
        }

    def _weights(self, op: Mapping[str, Any]) -> dict[str, Any]:
        return {"runners": {r.name: _describe(r.module) for r in self.runners}}


def _describe(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Every parameter and buffer: where it lies and a hash of its bytes, independent of the digests of a publish."""
    out = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
        out[name] = {
            "data_ptr": tensor.data_ptr(),
            "digest": hashlib.blake2b(data.data, digest_size=16).hexdigest(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
    return out
