"""The private group of the ranks of one engine: all-reduce, all-gather and agreement, with a timeout.

Built by `worker.py` straight from a store (never the default group), used by `layers.py` and `speculative.py`. A peer
that is gone or silent is an `EngineError` on the others, never a hang.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import EngineError

__all__ = ["SINGLE", "TpGroup"]


class TpGroup:
    """`size` ranks that hold shards of one model; with one rank every method returns its argument."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def connect(cls, store: dist.Store, rank: int, size: int, *, timeout_s: float, host: str = "127.0.0.1") -> TpGroup:
        """Join over `store`; every operation of the group fails after `timeout_s`."""
        if size == 1:
            return cls()
        gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's annotations
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        return cls(rank, size, gloo(store, rank, size, options))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self._group is not None:
            self._wait("all-reduce", self._group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' shards side by side along the last dimension."""
        if self._group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait("all-gather", self._group.allgather([parts], [x.contiguous()]))
        return torch.cat(parts, dim=-1)

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank, so that a last-bit difference never sends ranks different ways."""
        if self._group is not None:
            self._wait("broadcast", self._group.broadcast(x, 0))
        return x

    def close(self) -> None:
        self._group = None

    def _wait(self, what: str, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            raise EngineError(
                f"tensor-parallel {what} failed on rank {self.rank} of {self.size}: {str(e).splitlines()[0]}; "
                "the other rank is gone or stopped: restart the engine",
                rank=self.rank,
                phase=what,
            ) from e


SINGLE = TpGroup()
