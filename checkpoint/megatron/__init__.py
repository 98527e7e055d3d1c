"""All that touches Megatron-Core: states out of sharded state dicts and back, without any collective.

    state_from_sharded(sharded_state_dict)              what `Checkpointer.save` does with one
    optimizer_state(optimizer, model_state)             the fully reshardable optimizer format without its gather
    load_sharded(sharded_state_dict, folder)            fill a sharded state dict from a folder, each rank for itself

Written against Megatron-Core 0.16.1 (tested). Of the development branch only names that exist in both are used:
`mapping`, `dict_utils` and `state_dict_utils` of `megatron.core.dist_checkpointing`; nothing of `strategies` is.
"""

from __future__ import annotations

from checkpoint.megatron.load import load_sharded, requested_keys
from checkpoint.megatron.optimizer import boxes, optimizer_state
from checkpoint.megatron.state import state_from_sharded

__all__ = ["boxes", "load_sharded", "optimizer_state", "requested_keys", "state_from_sharded"]
