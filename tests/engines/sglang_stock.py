"""Rank 0 of SGLang's own update group, as its users build it: broadcasts the tensors of a file.

    python -m tests.engines.sglang_stock PORT GROUP FILE

For tests that pin what SGLang's own distributed update does, without us. A process of its own: a group stays registered
in torch until a process ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, rendezvous

TIMEOUT = timedelta(seconds=60)


def in_order(names: Iterable[str]) -> list[str]:
    """As trainers have them: the output layer comes last."""
    return sorted(names, key=lambda name: (name.startswith("lm_head"), name))


def join(port: str, group: str) -> Any:
    """Rank 0 of 2; returns once SGLang's rank is there."""
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=TIMEOUT))
    store = PrefixStore(group, store)
    pg, _ = _new_process_group_helper(
        size, rank, [], Backend("gloo"), store, group_name=group, backend_options=None, timeout=TIMEOUT
    )
    return pg


def main(port: str, group: str, file: str) -> None:
    pg = join(port, group)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    tensors = load_file(file)
    for name in in_order(tensors):
        pg.broadcast([tensors[name]], options).wait()
    # The other side leaves when it likes: this process holds the store.
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
