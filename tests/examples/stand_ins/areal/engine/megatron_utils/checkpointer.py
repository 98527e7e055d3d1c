"""AReaL's state of a Megatron model: what it saves and asks for, with real Megatron-Core."""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedObject


class MegatronCheckpointManager:
    def __init__(self, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler

    def generate_state_dict(
        self, with_model: bool = True, with_optimizer: bool = True, with_rng: bool = True
    ) -> dict[str, Any]:
        assert with_model
        assert not with_optimizer
        assert with_rng
        (chunk,) = self.model
        state = {"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state()}
        rng = ShardedObject(
            "rng_state",
            [state],
            (1, parallel_state.get_tensor_model_parallel_world_size()),
            (0, parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        return {"model": chunk.module.sharded_state_dict(), "rng_state": rng}

    def load_rng_states(self, rng_states, data_parallel_random_init=False) -> None:
        torch.set_rng_state(rng_states[0]["torch_rng_state"])
        random.setstate(rng_states[0]["random_rng_state"])
