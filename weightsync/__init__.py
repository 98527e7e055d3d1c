"""Publish one weight version of an RL trainer to every inference engine: target and drafts from one receive.

Trainer side: a source, `Publisher(source, engines, PublishConfig(...)).publish(version)`. Engine side: a `Receiver`
over `ModuleRunner`s. Importing this needs torch and nothing of any engine or trainer.
"""

from __future__ import annotations

from weightsync.config import PublishConfig
from weightsync.engine.control import HttpControl
from weightsync.engine.receiver import Receiver
from weightsync.engine.runner import ModuleRunner
from weightsync.errors import WeightSyncError
from weightsync.publisher import Publisher, PublishHandle
from weightsync.report import EngineReport, PublishReport
from weightsync.sources.iterator import IteratorSource
from weightsync.sources.megatron import MegatronSource
from weightsync.sources.safetensors import SafetensorsSource
from weightsync.sources.state_dict import StateDictSource

__all__ = [
    "EngineReport",
    "HttpControl",
    "IteratorSource",
    "MegatronSource",
    "ModuleRunner",
    "PublishConfig",
    "PublishHandle",
    "PublishReport",
    "Publisher",
    "Receiver",
    "SafetensorsSource",
    "StateDictSource",
    "WeightSyncError",
]
