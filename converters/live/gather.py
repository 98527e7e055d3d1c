"""Tensor-parallel gathers in buckets: shards of many tensors travel to the sender in one operation.

`plan_buckets` is pure. `BucketGather` owns two buffers per side and keeps one bucket in flight while the one before
is being used. Per bucket one message goes to the sender, and only the sender has room for the result, so no rank ever
holds more than `gather_bytes` (or the largest tensor) per buffer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from converters.errors import MappingError

__all__ = ["BucketGather", "GatherBucket", "Piece", "Scratch", "assemble", "plan_buckets"]

ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One Megatron tensor: `shape` of the shard on each of `parts` ranks, cut along `dim` (None: replicated).

    `blocks` are sizes along dimension 0 of parts that are sharded one by one (gate and up): a shard holds a slice of
    each.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    parts: int = 1
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.is_sharded:
            return
        assert self.dim is not None
        if self.dim >= len(self.shape):
            raise MappingError(f"{self.name}: a shard of shape {self.shape} cannot be cut along dimension {self.dim}")
        if self.dim == 0 and self.blocks and any(size % self.parts for size in self.blocks):
            raise MappingError(f"{self.name}: parts of {self.blocks} rows do not divide by {self.parts} ranks")

    @property
    def is_sharded(self) -> bool:
        return self.dim is not None and self.parts > 1

    @property
    def nbytes(self) -> int:
        """Of one shard."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(n * self.parts if self.is_sharded and d == self.dim else n for d, n in enumerate(self.shape))

    @property
    def full_nbytes(self) -> int:
        return math.prod(self.full_shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatherBucket:
    """`units` (numbers of what was given to `plan_buckets`) whose shards travel together.

    `offsets` are bytes into a rank's message, by tensor name, of the sharded ones; `nbytes` is the message's size
    (0: nothing to gather).
    """

    units: tuple[int, ...]
    offsets: Mapping[str, int]
    nbytes: int


def plan_buckets(units: Sequence[Sequence[Piece]], gather_bytes: int) -> list[GatherBucket]:
    """Consecutive `units` (pieces that are used together) in buckets of at most `gather_bytes` over all ranks.

    A unit that is larger has a bucket of its own.
    """
    buckets: list[GatherBucket] = []
    numbers: list[int] = []
    members: list[Piece] = []
    for number, pieces in enumerate(units):
        sharded = [p for p in pieces if p.is_sharded]
        size = sum(_aligned(p.nbytes) * p.parts for p in [*members, *sharded])
        if members and sharded and size > gather_bytes:
            buckets.append(_bucket(numbers, members))
            numbers, members = [], []
        numbers.append(number)
        members += sharded
    if numbers:
        buckets.append(_bucket(numbers, members))
    return buckets


def _bucket(numbers: Sequence[int], members: Sequence[Piece]) -> GatherBucket:
    starts = list(itertools.accumulate((_aligned(p.nbytes) for p in members), initial=0))
    # A tensor that travels alone is not padded, so that it can be sent from where it lies.
    nbytes = members[0].nbytes if len(members) == 1 else starts[-1]
    offsets = {p.name: start for p, start in zip(members, starts, strict=False)}
    return GatherBucket(units=tuple(numbers), offsets=offsets, nbytes=nbytes)


class BucketGather:
    """Moves buckets to rank 0 of `group`. After `begin`: `start(k + 1)` while bucket k is used, `finish`, and so on.

    Every rank of the group makes the same calls. The buffers stay for the next export.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._root = 0 if group is None else dist.get_global_rank(group, 0)
        # gloo's gather goes through a fresh copy of the whole result; messages arrive in place, at twice the speed.
        self._point_to_point = self._size > 1 and dist.get_backend(group) == "gloo"
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._slot = 0
        self._pending: tuple[torch.Tensor, list[Any]] | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes that this rank holds for gathers."""
        return sum(b.numel() for b in self._buffers)

    def begin(self) -> None:
        """Before the first bucket of an export: the same bucket then meets the same buffer in every export."""
        self._slot, self._pending = 0, None

    def start(self, bucket: GatherBucket, shards: Mapping[str, torch.Tensor]) -> None:
        """Send this rank's `shards` of `bucket`; `finish` ends it. The result of the bucket before stays valid."""
        assert self._pending is None
        if bucket.nbytes == 0 or self._size == 1:
            self._pending = (self._buffers[self._slot][:0].view(1, 0), [])
        elif self._rank and len(bucket.offsets) == 1:
            (name,) = bucket.offsets
            message = shards[name].contiguous().view(-1).view(torch.uint8).unsqueeze(0)
            self._pending = (message, self._send(message))
        else:
            buffer = self._buffer(self._size if self._rank == 0 else 1, bucket.nbytes)
            for name, offset in bucket.offsets.items():
                shard = shards[name]
                into = buffer[0, offset : offset + shard.numel() * shard.element_size()].view(shard.dtype)
                into.view(shard.shape).copy_(shard)
            self._pending = (buffer, self._send(buffer))
            self._slot = 1 - self._slot

    def finish(self) -> torch.Tensor:
        """Wait for the bucket that was started; bytes [ranks, nbytes] on rank 0, valid until the next but one start."""
        assert self._pending is not None
        (buffer, works), self._pending = self._pending, None
        for work in works:
            work.wait()
        return buffer

    def _buffer(self, rows: int, nbytes: int) -> torch.Tensor:
        if self._buffers[self._slot].numel() < rows * nbytes:
            # Released first: the old and the new one together would break the bound on memory.
            self._buffers[self._slot] = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._buffers[self._slot] = torch.empty(rows * nbytes, dtype=torch.uint8, device=self._device)
        return self._buffers[self._slot][: rows * nbytes].view(rows, nbytes)

    def _send(self, buffer: torch.Tensor) -> list[Any]:
        if not self._point_to_point:
            # The first row of the sender is both its message and where that belongs.
            rows = list(buffer) if self._rank == 0 else None
            return [dist.gather(buffer[0], rows, dst=self._root, group=self._group, async_op=True)]
        if self._rank:
            return [dist.isend(buffer[0], dst=self._root, group=self._group)]
        peers = range(1, self._size)
        return [dist.irecv(buffer[r], src=dist.get_global_rank(self._group, r), group=self._group) for r in peers]


class Scratch:
    """Room for tensors put together from shards; reused from one `reset` to the next."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._end = 0

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def reset(self) -> None:
        self._end = 0

    def take(self, nbytes: int) -> torch.Tensor:
        start = self._end
        if start + nbytes > self._buffer.numel():
            # What was taken before keeps the old buffer alive until it is dropped.
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._buffer.device)
            start = 0
        self._end = start + _aligned(nbytes)
        return self._buffer[start : start + nbytes]


def assemble(piece: Piece, rows: torch.Tensor, offset: int, scratch: Scratch) -> torch.Tensor:
    """The full tensor of `piece` from `rows` [parts, bytes]: a view of them where they lie right, else in `scratch`."""
    shards: torch.Tensor = rows[:, offset : offset + piece.nbytes].view(piece.dtype).unflatten(1, piece.shape)
    dim, parts = piece.dim, piece.parts
    if parts == 1:
        return shards[0]
    assert dim is not None
    blocks = piece.blocks if dim == 0 and piece.blocks else (piece.full_shape[dim],)
    if dim == 0 and len(blocks) == 1 and shards.is_contiguous():
        return shards.flatten(0, 1)
    full = scratch.take(piece.full_nbytes).view(piece.dtype).view(piece.full_shape)
    start = 0
    for size in blocks:
        into = full.narrow(dim, start, size).unflatten(dim, (parts, size // parts))
        into.copy_(shards.narrow(dim + 1, start // parts, size // parts).movedim(0, dim))
        start += size
    return full


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
