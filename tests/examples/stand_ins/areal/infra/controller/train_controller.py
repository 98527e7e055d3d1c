"""AReaL's controller of training engines: its calls go to the rank of this process, as copies of what was said."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.api import WeightUpdateMeta
    from areal.infra import RolloutController


@dataclasses.dataclass
class RolloutCallback:
    """All that ranks see of the rollout."""

    controller_addr: str


class TrainController:
    def __init__(self, train_engine: Any, config: Any, scheduler: Any) -> None:
        self.engine = train_engine(config=config)

    def _custom_function_call(self, method: str, *args, rpc_meta: dict[str, Any] | None = None, **kwargs):
        return getattr(self.engine, method)(*copy.deepcopy(args), **copy.deepcopy(kwargs))

    def create_process_group(self, parallel_strategy: Any = None) -> None:
        self._custom_function_call("create_process_group", parallel_strategy)

    def connect_engine(self, rollout: RolloutController, meta: WeightUpdateMeta):
        self.rollout = rollout
        engine = RolloutCallback(controller_addr=rollout.callback_addr)
        self._custom_function_call("connect_engine", engine=engine, meta=meta)

    def update_weights(self, meta: Any) -> None:
        self._custom_function_call("update_weights", meta=meta)

    def set_version(self, version: int) -> None:
        self._custom_function_call("set_version", version)
