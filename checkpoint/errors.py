"""Every error that `checkpoint` raises.

    CheckpointError

Messages say what went wrong, where (step, rank, path), what was got and expected, and the next step.
"""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(Exception):
    """Root of everything that `checkpoint` raises on purpose."""
