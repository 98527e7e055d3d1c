"""The weight-transfer engine that vLLM makes in every worker for the backend `weightsync`.

`leader` calls it through vLLM's own RPCs: `init_weight_transfer_engine` is a publish's preflight, a draft session with
nothing in it is the handshake that shows us the draft (vLLM hands a transfer engine only the target), and one target
session is a whole publish, drafts included. Nothing here raises across the RPC: after exceptions on two ranks vLLM's
replies are out of step. What happened stands in the publisher's store, where the leader reads it, too.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.engines.vllm.reload import ReloadReceiver, reload_runner
from weightsync.engines.vllm.rows import CASTS, MTP_METHODS
from weightsync.errors import AuthError, TransportError
from weightsync.protocol import Ack, Keys, Phase, PublishCall
from weightsync.store import connect_store

__all__ = ["WeightSyncEngine"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Init(WeightTransferInitInfo):  # type: ignore[misc]
    words: Mapping[str, Any]


@dataclasses.dataclass
class _Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    words: Mapping[str, Any]


class WeightSyncEngine(WeightTransferEngine):  # type: ignore[misc]
    """See the module. One per worker process; every method is called on the thread that owns the models."""

    init_info_cls = _Init
    update_info_cls = _Update
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._draft: tuple[torch.nn.Module, Any] | None = None
        self._receiver: ReloadReceiver | None = None

    @property
    def rank(self) -> int:
        pc = self.parallel_config
        return int(pc.data_parallel_index * pc.world_size + pc.rank)

    # -- the handshake -------------------------------------------------------------------------------------------------

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        """Called by a draft session: remember the draft, and load nothing."""
        self._draft = (model, model_config)

    def reset_weight_update_target(self) -> None:
        """Nothing was retargeted."""

    def start_weight_update(self) -> None:
        """A session opens; what loads, and whether, says the call that follows."""

    def finish_weight_update(self) -> None:
        """A session closes; the receiver has finished or aborted every runner already."""

    # -- a publish -----------------------------------------------------------------------------------------------------

    def parse_init_info(self, init_dict: dict[str, Any]) -> _Init:
        return _Init(words=init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> _Update:
        return _Update(words=update_dict)

    def init_transfer_engine(self, init_info: _Init) -> None:
        """Preflight. `words`: `call`, and `engine`, `instance`, `bind_host` of the whole engine."""
        call: PublishCall | None = None
        try:
            call = PublishCall.from_json(init_info.words["call"])
            with set_current_vllm_config(self.vllm_config):
                if self._receiver is None:
                    self._receiver = self._make_receiver(init_info.words)
                self._receiver.preflight(call)
        except Exception as e:  # noqa: BLE001 - see the module
            self._refuse(call, "preflight", e)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, load, verify, obey the decision: everything of one publish."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Update) -> None:
        call: PublishCall | None = None
        try:
            call = PublishCall.from_json(update_info.words["call"])
            self._ready().receive(call)
        except Exception as e:  # noqa: BLE001 - see the module
            self._refuse(call, "prepared", e)

    def _ready(self) -> ReloadReceiver:
        if self._receiver is None:
            raise AuthError("nothing passed preflight here: the publisher calls preflight first")
        return self._receiver

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _make_receiver(self, words: Mapping[str, Any]) -> ReloadReceiver:
        runners = [reload_runner("target", self.model, self.model_config, roles=("target",), casts=CASTS)]
        if self._draft is not None:
            model, model_config = self._draft
            method = self.vllm_config.speculative_config.method
            # A head inside the target's checkpoint also takes embedding and output layer from the target's tensors;
            # a drafter of its own must not: an EAGLE3 drafter has parameters of the same names.
            roles = ("draft", "target") if method in MTP_METHODS else ("draft",)
            runners.append(reload_runner("draft[0]", model, model_config, roles=roles, casts=CASTS))
        pc = self.parallel_config
        return ReloadReceiver(
            runners,
            engine=str(words["engine"]),
            rank=self.rank,
            world_size=int(pc.world_size * pc.data_parallel_size),
            device=self.device,
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
