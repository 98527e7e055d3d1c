"""The calls of AReaL's Megatron actor, around a model that the test gives."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from areal.engine.megatron_utils.checkpointer import MegatronCheckpointManager

if TYPE_CHECKING:
    from areal.api import InferenceEngine, SaveLoadMeta, Scheduler, WeightUpdateMeta
    from areal.api.cli_args import PPOActorConfig


class MegatronEngine:
    def __init__(self, config: Any) -> None:
        self.config, self.rollout_engine, self._version = config, None, 0

    def create_process_group(self, parallel_strategy: Any = None) -> None:
        self.model, self.optimizer, self.lr_scheduler = self.config.built
        self.checkpointer = MegatronCheckpointManager(self.model, self.optimizer, self.lr_scheduler)

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        self.rollout_engine = engine
        if meta.type == "xccl":
            self._init_weight_update_from_distributed(meta)

    def _init_weight_update_from_distributed(self, meta: Any) -> None:
        raise AssertionError("AReaL's own process group was opened")

    def _check_rollout_engine_connected(self) -> None:
        assert self.rollout_engine is not None

    @contextlib.contextmanager
    def _offload_aware_context(self):
        yield

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        raise AssertionError("AReaL's own update was asked")

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def save(self, meta: SaveLoadMeta) -> None:
        self.checkpointer.save_checkpoint(meta.path, with_optimizer=meta.with_optim)

    def load(self, meta: SaveLoadMeta) -> None:
        raise AssertionError("AReaL's own loader was asked")

    def destroy(self) -> None:
        self.model = None


class MegatronPPOActor(MegatronEngine):
    def __init__(self, config: PPOActorConfig) -> None:
        super().__init__(config)

    @classmethod
    def as_controller(cls, config: PPOActorConfig, scheduler: Scheduler) -> Any:
        raise AssertionError("AReaL's own controller was built")
