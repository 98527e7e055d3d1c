"""AReaL's controller of PPO actors."""

from __future__ import annotations

from areal.infra.controller.train_controller import TrainController


class PPOActorController(TrainController):
    pass
