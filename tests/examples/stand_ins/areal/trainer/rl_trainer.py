"""The calls of AReaL's PPO trainer that reach the actor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.api.alloc_mode import ModelAllocation
    from areal.api.cli_args import PPOActorConfig


class PPOTrainer:
    def __init__(self, config: Any, rollout: Any, weight_update_meta: Any, scheduler: Any = None) -> None:
        self.config = config
        self.scheduler = scheduler
        self.actor_alloc = config.alloc
        self.actor = self._create_train_engine(config.actor, self.actor_alloc)
        self.rollout, self.weight_update_meta = rollout, weight_update_meta
        self.actor.connect_engine(self.rollout, self.weight_update_meta)

    def _create_train_engine(self, actor_config: PPOActorConfig, alloc: ModelAllocation) -> Any:
        raise AssertionError("AReaL's own engine was built")

    def train(self, global_step: int) -> None:
        new_version = global_step + 1
        versioned_meta = self.weight_update_meta.with_version(new_version)
        self.actor.update_weights(versioned_meta)
        self.actor.set_version(new_version)
