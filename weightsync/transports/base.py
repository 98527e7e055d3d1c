"""The seam between planning and moving: flat byte buckets from one sender to many receivers.

Life of a group, on both sides: `open_*` (a rendezvous over the store, in preflight), then per publish `start`, then one
`acquire`/`send` (sender) or `receive`/`release` (receiver) per bucket, then `finish`; `close` at the end, `abort` after
a failure (never blocks, the group cannot be used again). A group outlives a publish: buffers stay warm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["GroupInfo", "ReceiverEndpoint", "SenderEndpoint", "Transport", "TransportCaps"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportCaps:
    """What the planner and preflight may rely on; data, so that no caller asks for a type.

    `devices` are device types whose tensors it moves without a copy of its own. `same_host`: sender and receivers must
    share a kernel. `tested` is False for backends that only their name supports (they may work). `bucket_bytes` and
    `num_buffers` are what a publisher takes if its user does not say: measured with `weightsync bench` where tested.
    """

    name: str
    devices: frozenset[str]
    same_host: bool
    tested: bool
    bucket_bytes: int = 32 << 20
    num_buffers: int = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupInfo:
    """One data group: the sender (rank 0) of one pipeline stage and every engine rank (1..size-1)."""

    store: dist.Store
    """A prefix store that belongs to this group alone."""
    name: str
    """For messages, e.g. `epoch 3 stage 0`."""
    rank: int
    size: int
    device: torch.device
    bucket_bytes: int
    num_buffers: int
    """Buckets in flight per side, at least 2."""
    bind_host: str
    """Address of this side that the others can reach; loopback unless told otherwise."""
    deadline_s: float
    """For the rendezvous."""
    peers: Sequence[str] = ()
    """Names of the ranks for messages, e.g. `trainer stage 0`, `engine 1 rank 0`."""


class SenderEndpoint(Protocol):
    @property
    def connected(self) -> bool:
        """False once a connection is known to be gone; asked before a publish."""
        ...

    bytes_sent: int
    """Bytes handed to `send` since the group was opened, counted here and not by the caller."""

    def start(self, sizes: Sequence[int], deadline_s: float) -> None:
        """A publish begins: the bucket sizes to come, in bytes, and the time they may take in all."""
        ...

    def acquire(self) -> torch.Tensor:
        """A reused uint8 buffer of `bucket_bytes` to pack the next bucket into; blocks while all are in flight.

        Raises:
            TransferTimeout, PeerLost
        """
        ...

    def send(self, nbytes: int) -> None:
        """Hand over the first `nbytes` of the buffer that `acquire` gave; returns at once."""
        ...

    def finish(self) -> None:
        """Return when every bucket has left this side's buffers."""
        ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class ReceiverEndpoint(Protocol):
    @property
    def connected(self) -> bool: ...

    bytes_received: int
    """Bytes that arrived since the group was opened, counted where they arrive."""

    def start(self, sizes: Sequence[int], deadline_s: float) -> None: ...

    def receive(self) -> torch.Tensor:
        """The next bucket, a uint8 view of its exact size, valid until `release`.

        Raises:
            TransferTimeout, PeerLost
        """
        ...

    def release(self) -> None:
        """The bucket that `receive` gave has been loaded; its buffer may be reused."""
        ...

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Transport(Protocol):
    @property
    def caps(self) -> TransportCaps: ...

    def open_sender(self, group: GroupInfo) -> SenderEndpoint: ...

    def open_receiver(self, group: GroupInfo) -> ReceiverEndpoint: ...
