"""The calls of slime's Megatron actor, around a model that the test gives (`initialize_model_and_optimizer`)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray
from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed
from slime.ray.train_actor import TrainRayActor


def initialize_model_and_optimizer(args: Namespace, role: str) -> Any:
    return *args.built, 0


def save(*saved: Any) -> None:
    raise AssertionError("slime's own saver was asked")


class MegatronTrainRayActor(TrainRayActor):
    def init(
        self,
        args: Namespace,
        role: str,
        with_ref: bool = False,
        with_opd_teacher: bool = False,
    ) -> int | None:
        super().init(args, role, with_ref, with_opd_teacher)
        self.model, self.optimizer, self.opt_param_scheduler, loaded = initialize_model_and_optimizer(args, role)
        self.weight_updater: Any = UpdateWeightFromDistributed()
        return loaded + 1

    def train_actor(self) -> dict[str, float]:
        return self.weight_updater.pop_metrics()

    def sleep(self) -> None:
        self.weight_updater.disconnect_rollout_engines()

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        save(rollout_id, self.model, self.optimizer, self.opt_param_scheduler)

    def update_weights(self) -> None:
        told = ray.get(self.rollout_manager.get_updatable_engines_and_lock.remote())
        rollout_engines, rollout_engine_lock, num_new_engines = told[:3]
        engine_gpu_counts, engine_gpu_offsets, engine_parallel_configs = told[3:]
        if num_new_engines > 0:
            self.weight_updater.connect_rollout_engines(
                rollout_engines,
                rollout_engine_lock,
                engine_gpu_counts=engine_gpu_counts,
                engine_gpu_offsets=engine_gpu_offsets,
                engine_parallel_configs=engine_parallel_configs,
            )
        self.weight_updater.update_weights()
