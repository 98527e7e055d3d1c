"""An inference engine that needs nothing but torch: target and draft, decoding speculatively, for bench and tests.

`launch(EngineConfig(...))` starts one; `known_argmax` makes weights whose tokens and acceptance are known beforehand.
"""

from __future__ import annotations

from weightsync.embedded.config import SHAPES, ModelConfig, eagle3_config, resolve_config
from weightsync.embedded.engine import EngineConfig, EngineHandle, launch
from weightsync.embedded.known import known_argmax, known_next, write_hf_folder

__all__ = [
    "SHAPES",
    "EngineConfig",
    "EngineHandle",
    "ModelConfig",
    "eagle3_config",
    "known_argmax",
    "known_next",
    "launch",
    "resolve_config",
    "write_hf_folder",
]
