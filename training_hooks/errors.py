"""Every error that `training_hooks` raises.

    TrainingHookError

Messages say what went wrong, where (rank, depth, sample), what was got and expected, and the next step.
"""

from __future__ import annotations

__all__ = ["TrainingHookError"]


class TrainingHookError(Exception):
    """Root of everything that `training_hooks` raises on purpose."""
