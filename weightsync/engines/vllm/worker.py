"""What a publish does in one vLLM worker process, however it is called: by vLLM's transfer engine, or by an extension.

`engine` (vLLM 0.28 on) and `extension` (before) own one `WorkerSide` each and pass the leader's words on. Nothing here
raises across vLLM's RPC: after exceptions on two ranks its replies are out of step. What happened stands in the
publisher's store, where the leader reads it, too.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from weightsync.engines.vllm.reload import ReloadReceiver, reload_runner
from weightsync.engines.vllm.rows import CASTS, MTP_METHODS
from weightsync.errors import AuthError, TransportError
from weightsync.protocol import Ack, Keys, Phase, PublishCall
from weightsync.store import connect_store

__all__ = ["WorkerSide"]

_log = logging.getLogger(__name__)

Draft = tuple[torch.nn.Module, Any]
"""The draft's module and its `ModelConfig`."""


class WorkerSide:
    """One per worker process; every method is called on the thread that owns the models.

    Args:
        vllm_config, device, model: the worker's.
        draft: asked once, when the first publish comes: what vLLM has loaded beside the target.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, model: torch.nn.Module, draft: Callable[[], Draft | None]
    ) -> None:
        self._vllm_config, self._device, self._model, self._draft = vllm_config, device, model, draft
        self._receiver: ReloadReceiver | None = None

    @property
    def rank(self) -> int:
        pc = self._vllm_config.parallel_config
        return int(getattr(pc, "data_parallel_index", 0) * pc.world_size + pc.rank)

    def preflight(self, words: Mapping[str, Any]) -> None:
        """`words`: `call`, and `engine`, `instance`, `bind_host` of the whole engine."""
        call: PublishCall | None = None
        try:
            call = PublishCall.from_json(words["call"])
            with set_current_vllm_config(self._vllm_config):
                if self._receiver is None:
                    self._receiver = self._make_receiver(words)
                self._receiver.preflight(call)
        except Exception as e:  # noqa: BLE001 - see the module
            self._refuse(call, "preflight", e)

    def receive(self, words: Mapping[str, Any]) -> None:
        """Receive, load, verify, obey the decision: everything of one publish. `words`: `call`."""
        call: PublishCall | None = None
        try:
            call = PublishCall.from_json(words["call"])
            with set_current_vllm_config(self._vllm_config):
                self._ready().receive(call)
        except Exception as e:  # noqa: BLE001 - see the module
            self._refuse(call, "prepared", e)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _ready(self) -> ReloadReceiver:
        if self._receiver is None:
            raise AuthError("nothing passed preflight here: the publisher calls preflight first")
        return self._receiver

    def _make_receiver(self, words: Mapping[str, Any]) -> ReloadReceiver:
        config = self._vllm_config
        runners = [reload_runner("target", self._model, config.model_config, roles=("target",), casts=CASTS)]
        draft = self._draft()
        if draft is not None:
            # A head inside the target's checkpoint also takes embedding and output layer from the target's tensors;
            # a drafter of its own must not: an EAGLE3 drafter has parameters of the same names.
            roles = ("draft", "target") if config.speculative_config.method in MTP_METHODS else ("draft",)
            runners.append(reload_runner("draft[0]", *draft, roles=roles, casts=CASTS))
        pc = config.parallel_config
        return ReloadReceiver(
            runners,
            engine=str(words["engine"]),
            rank=self.rank,
            world_size=int(pc.world_size * pc.data_parallel_size),
            device=self._device,
            bind_host=str(words["bind_host"]),
            instance=str(words["instance"]),
        )

    def _refuse(self, call: PublishCall | None, phase: Phase, e: Exception) -> None:
        """A failure before or beside the receiver, which reports its own."""
        _log.error("weightsync: rank %d, %s: %s", self.rank, phase, e, exc_info=e)
        if call is None:
            return
        ack = Ack(
            engine=f"vLLM rank {self.rank}",
            rank=self.rank,
            phase=phase,
            ok=False,
            error=f"{type(e).__name__}: {e}",
            remote="".join(traceback.format_exception(e)),
        )
        try:
            store = connect_store(call.store_host, call.store_port, call.deadline_s)
            store.set(Keys(call.run_id, call.epoch).ack(call.seq, call.engine_index, self.rank, phase), ack.to_json())
        except (TransportError, RuntimeError) as lost:
            _log.error("weightsync: rank %d could not report it: %s", self.rank, lost)
