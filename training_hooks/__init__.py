"""Draft losses and hidden-state capture inside a Megatron model. Planned: today it holds the root of its errors only."""

from __future__ import annotations

from training_hooks.errors import TrainingHookError

__all__ = ["TrainingHookError"]
