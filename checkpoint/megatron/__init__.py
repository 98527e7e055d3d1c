"""All that touches Megatron-Core: states out of sharded state dicts and back, without any collective.

    state_from_sharded(sharded_state_dict)              what `Checkpointer.save` does with one
    optimizer_state(optimizer, model_state)             the fully reshardable optimizer format without its gather
    load_sharded(sharded_state_dict, folder)            fill a sharded state dict from a folder, each rank for itself

Written against Megatron-Core 0.16.1 (tested); `probe` says what is used of it, and what was read of its main branch.
"""

from __future__ import annotations

from checkpoint.megatron.load import load_sharded, read_object, requested_keys
from checkpoint.megatron.optimizer import boxes, optimizer_state
from checkpoint.megatron.state import state_from_sharded

__all__ = ["boxes", "load_sharded", "optimizer_state", "read_object", "requested_keys", "state_from_sharded"]
