"""Where AReaL's trainer is imported from."""

from __future__ import annotations

from areal.trainer.rl_trainer import PPOTrainer

__all__ = ["PPOTrainer"]
