"""Today's ways of moving the same bytes into the same engine-like destinations, for comparison in the same run.

What they share with real trainers and engines: buckets of 512 MiB (the default of SGLang and slime), memory allocated
per bucket, and one answer per bucket (an RPC reply there, a 4-byte all-reduce here). They do less than a publish: no
digest, no routing, no decision. The two rings are nobody's way today; they are the bare core of an overlapped transfer,
kept as a bar that a whole publish is held against.

`lanes` runs `VARIANTS`; which of them make sense is asked of `names`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weightsync.bench.lanes import Lane
from weightsync.manifest import TARGET, TensorSpec

__all__ = ["VARIANTS", "buckets", "draft_subset", "names"]

MIB = 1 << 20
BUCKET_BYTES = 512 * MIB


def buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Greedy, in order; a tensor larger than a bucket gets one of its own (no peer splits tensors)."""
    out: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not out or spec.nbytes > room:
            out.append([])
            room = bucket_bytes
        out[-1].append(spec)
        room -= spec.nbytes
    return out


def draft_subset(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """What a trainer that knows its engine sends in the draft's session: the draft, and the embedding it shares."""
    return [s for s in specs if s.role != TARGET or "embed_tokens" in s.name]


def _per_tensor(lane: Lane, specs: Sequence[TensorSpec]) -> None:
    """One broadcast per tensor into memory of its own, then the engine's load (SGLang and slime without flattening)."""
    for bucket in buckets(specs, BUCKET_BYTES):
        if lane.is_sender:
            tensors = [lane.source[s.key] for s in bucket]
        else:
            tensors = [torch.empty(s.shape, dtype=s.dtype, device=lane.device) for s in bucket]
        for work in [lane.broadcast(t) for t in tensors]:
            work.wait()
        if not lane.is_sender:
            for spec, tensor in zip(bucket, tensors, strict=True):
                lane.load(spec, tensor)
        lane.ack()


def _flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])


def _flattened_bucket(lane: Lane, specs: Sequence[TensorSpec]) -> None:
    """One concatenated buffer per bucket; the receiver concatenates empties to get one as large, as SGLang does."""
    for bucket in buckets(specs, BUCKET_BYTES):
        if lane.is_sender:
            lane.broadcast(_flatten(lane.source[s.key] for s in bucket)).wait()
        else:
            empties = [torch.empty(s.shape, dtype=s.dtype, device=lane.device) for s in bucket]
            flat = _flatten(empties)
            lane.broadcast(flat).wait()
            for spec, tensor in lane.split(flat, bucket):
                lane.load(spec, tensor)
            del empties, flat
        lane.ack()


def _two_pass_full(lane: Lane) -> None:
    """Target session, then a draft session with the whole checkpoint again, by a trainer that sends all to each."""
    _flattened_bucket(lane, lane.specs)
    _flattened_bucket(lane, lane.specs)


def _two_pass_subset(lane: Lane) -> None:
    """Target session with everything, then a draft session with the draft and the shared embedding only."""
    _flattened_bucket(lane, lane.specs)
    _flattened_bucket(lane, draft_subset(lane.specs))


def _chunk_bytes(lane: Lane, at_most: int) -> int:
    return min(at_most, lane.nbytes)


def _ring_broadcast(lane: Lane, chunk_bytes: int = 16 * MIB, depth: int = 4) -> None:
    """Pack into a ring of reused chunks; packing, wire and load overlap."""
    chunk_bytes = _chunk_bytes(lane, chunk_bytes)
    plan = lane.row_chunks(chunk_bytes)
    ring = lane.scratch(chunk_bytes * depth).split(chunk_bytes)
    works: list[Any] = [None] * depth
    sizes = [sum(rows.nbytes for rows in chunk) for chunk in plan]

    def post(i: int) -> None:
        works[i % depth] = lane.broadcast(ring[i % depth][: sizes[i]])

    if lane.is_sender:
        for i, chunk in enumerate(plan):
            if works[i % depth] is not None:
                works[i % depth].wait()
            lane.pack_rows(chunk, ring[i % depth])
            post(i)
        for work in works:
            if work is not None:
                work.wait()
    else:
        for i in range(min(depth, len(plan))):
            post(i)
        for i, chunk in enumerate(plan):
            works[i % depth].wait()
            lane.load_rows(chunk, ring[i % depth])
            if i + depth < len(plan):
                post(i + depth)
    lane.ack()


def _ring_shared(lane: Lane, chunk_bytes: int = 64 * MIB, depth: int = 4) -> None:
    """The same over a shared mapping: the sender waits for a free chunk, each receiver for a full one."""
    assert lane.mapping is not None
    chunk_bytes = _chunk_bytes(lane, chunk_bytes)
    plan = lane.row_chunks(chunk_bytes)
    if lane.mapping.numel() < chunk_bytes:
        raise AssertionError("the shared mapping is smaller than one chunk")
    depth = min(depth, lane.mapping.numel() // chunk_bytes)
    ring = lane.mapping[: depth * chunk_bytes].split(chunk_bytes)
    for i, chunk in enumerate(plan):
        if lane.is_sender:
            if i >= depth:
                lane.tokens.take_free()
            lane.pack_rows(chunk, ring[i % depth])
            lane.tokens.give_full()
        else:
            lane.wire_bytes += sum(rows.nbytes for rows in chunk)
            lane.tokens.take_full()
            lane.load_rows(chunk, ring[i % depth])
            lane.tokens.give_free()
    if lane.is_sender:
        for _ in range(min(depth, len(plan))):
            lane.tokens.take_free()
    lane.ack()


VARIANTS: dict[str, Callable[[Lane], None]] = {
    "per_tensor_broadcast": lambda lane: _per_tensor(lane, lane.specs),
    "flattened_bucket": lambda lane: _flattened_bucket(lane, lane.specs),
    "two_pass_full": _two_pass_full,
    "two_pass_subset": _two_pass_subset,
    "ring_16mib_x4": _ring_broadcast,
    "ring_shared_64mib_x4": _ring_shared,
}


def names(*, draft: bool, shared: bool) -> list[str]:
    """The ways to run: two passes only where there is a draft, the shared ring only where there is a shared mapping."""
    two_pass = {"two_pass_full", "two_pass_subset"}
    return [n for n in VARIANTS if (draft or n not in two_pass) and (shared or n != "ring_shared_64mib_x4")]
