"""Node-local, asynchronous Megatron distributed checkpoints. Planned: today it holds the root of its errors only."""

from __future__ import annotations

from checkpoint.errors import CheckpointError

__all__ = ["CheckpointError"]
