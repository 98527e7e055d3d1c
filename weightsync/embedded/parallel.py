"""The private group of the ranks of one engine: all-reduce, all-gather and agreement, with a timeout.

Built by `worker.py` straight from a store (never the default group), used by `layers.py` and `speculative.py`. A peer
that is gone or silent is an `EngineError` on the others, never a hang.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, EngineError

__all__ = ["SINGLE", "TpGroup", "rank_device"]


def rank_device(text: str, rank: int, tp: int) -> torch.device:
    """Device of one rank of an engine whose `device` is `text`.

    `cpu`; `cuda`: device r for rank r; `cuda:N`: device N + r; or one per rank, `cuda:0,cuda:0` (which NCCL refuses to
    join, and IPC does not).

    Raises:
        ConfigError: no device, or another number of them than ranks.
    """
    words = text.split(",")
    try:
        devices = [torch.device(word.strip()) for word in words]
    except RuntimeError as e:
        raise ConfigError(f"device {text!r}: {str(e).splitlines()[0]}") from e
    if len(devices) not in (1, tp):
        raise ConfigError(f"device {text!r}: {len(devices)} devices for {tp} ranks; expected one, or one per rank")
    if len(devices) > 1 or devices[0].type == "cpu":
        return devices[rank % len(devices)]
    return torch.device(devices[0].type, (devices[0].index or 0) + rank)


class TpGroup:
    """`size` ranks that hold shards of one model; with one rank every method returns its argument.

    Over gloo, through host memory: ranks may share a GPU, and their messages are a token's activations.
    """

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
            host = x.cpu()
            self._wait("all-reduce", self._group.allreduce([host]))
            x = _onto(x, host)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' shards side by side along the last dimension."""
        if self._group is None:
            return x
        host = x.cpu().contiguous()
        parts = [torch.empty_like(host) for _ in range(self.size)]
        self._wait("all-gather", self._group.allgather([parts], [host]))
        return torch.cat(parts, dim=-1).to(x.device)

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank, so that a last-bit difference never sends ranks different ways."""
        if self._group is not None:
            host = x.cpu()
            self._wait("broadcast", self._group.broadcast(host, 0))
            x = _onto(x, host)
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


def _onto(x: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """`x` with the values of `host`, which is `x` itself on the CPU."""
    return x if host is x else x.copy_(host)


SINGLE = TpGroup()
