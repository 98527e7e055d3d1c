"""The weight-transfer engine that vLLM makes in every worker for the backend `weightsync`.

`leader` calls it through vLLM's own RPCs: `init_weight_transfer_engine` is a publish's preflight, a draft session with
nothing in it is the handshake that shows us the draft (vLLM hands a transfer engine only the target), and one target
session is a whole publish, drafts included. What it does is in `worker`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.engines.vllm.worker import Draft, WorkerSide

__all__ = ["WeightSyncEngine"]


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
        self._draft: Draft | None = None
        self._side = WorkerSide(vllm_config, device, model, lambda: self._draft)

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
        """Preflight."""
        self._side.preflight(init_info.words)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Update) -> None:
        self._side.receive(update_info.words)

    def shutdown(self) -> None:
        self._side.close()
