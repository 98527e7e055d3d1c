"""Model-free states whose content tells where it belongs, and ranks that save them."""

from __future__ import annotations

import torch

from checkpoint.plan import Shard, State

ROWS, COLUMNS = 64, 256


def value(key, step):
    """A whole global tensor of every rank's rows, different for each key and step."""
    return torch.arange(ROWS * 4 * COLUMNS, dtype=torch.float32).view(-1, COLUMNS) + 1000 * step + len(key)


def state(rank, world_size, step=1, keys=("weight", "exp_avg"), num_rows=ROWS):
    shards = [
        Shard(
            key=key,
            tensor=value(key, step)[rank * num_rows : (rank + 1) * num_rows].clone(),
            global_shape=(num_rows * world_size, COLUMNS),
            offset=(rank * num_rows, 0),
            shape=(num_rows, COLUMNS),
        )
        for key in keys
    ]
    return State(shards=shards, objects={f"rng/shard_{rank}_{world_size}": [{"rank": rank}]}, common={"step": step})
