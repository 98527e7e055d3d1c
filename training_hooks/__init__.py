"""Draft losses and hidden-state capture in a Megatron model. Planned: today there is only the root of its errors."""

from __future__ import annotations

from training_hooks.errors import TrainingHookError

__all__ = ["TrainingHookError"]
