"""Node-local, asynchronous Megatron distributed checkpoints in which no collective waits on storage.

    Checkpointer(root, rank=, world_size=)    .save(step, state), .poll(), .load(...), .close()
    SaveConfig, Retention                     deadlines, failure policy, what stays on disk
    State, Shard                              what is saved, where it is no Megatron state dict
    checkpoint.format                         the files: readers and writers without Megatron
    checkpoint.megatron                       states out of Megatron-Core and back, without collectives

Importing this needs torch alone; saving needs the package `xxhash` (extra `checkpoint`).
"""

from __future__ import annotations

from checkpoint.checkpointer import Checkpointer
from checkpoint.config import SaveConfig
from checkpoint.errors import CheckpointError
from checkpoint.events import LoadResult, SaveEvent, SaveHandle
from checkpoint.plan import Shard, State
from checkpoint.retention import Retention
from checkpoint.store import HostedStore

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "HostedStore",
    "LoadResult",
    "Retention",
    "SaveConfig",
    "SaveEvent",
    "SaveHandle",
    "Shard",
    "State",
]
