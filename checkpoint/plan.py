"""What one rank saves (`State`) and how it is laid out in staging memory and in files (`Plan`).

A `State` is what any trainer can produce; `checkpoint.megatron` makes one from a Megatron `sharded_state_dict`.
Planning is local: nothing is exchanged with other ranks, the seals prove afterwards that all parts make up a whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from checkpoint.contents import section_of
from checkpoint.errors import ConfigError
from checkpoint.format.saved import dump_object

__all__ = ["Plan", "Shard", "State", "digest_common", "make_plan"]

RECORD_BYTES = 2048
"""More than the frame of a record and its entry in its rank's seal take on disk."""
INDEX_BYTES = 1024
"""More than a record of any rank takes in a node's `commit.json` and `.metadata`."""
RANK_BYTES = 64 << 10
"""More than a rank's files take beside their records, rounded up to pages."""
ALIGN = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A box of a global tensor that this rank saves; `tensor` has as many elements as `shape`."""

    key: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise ConfigError(f"{self.key}: {self.shape} at {self.offset} of {self.global_shape}: ranks differ")
        if math.prod(self.shape) != self.tensor.numel():
            raise ConfigError(f"{self.key}: a tensor of {tuple(self.tensor.shape)} cannot be the box {self.shape}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One rank's part of a checkpoint. Every box of every tensor and every object is on exactly one rank.

    `objects` are picklable values by key (Megatron: `<key>/shard_<offset>_<shape>`); `common` is the state that is the
    same on every rank; rank 0's is saved.
    """

    shards: Sequence[Shard]
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    common: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicas: Sequence[str] = ()
    """Names (`checkpoint.replicas.shard_id`) of boxes that this rank holds, too, and another one saves."""
    basis: str = ""
    """Attempt whose record decided that; empty: Megatron's main replicas."""
    held: str = ""
    """See `checkpoint.replicas.held_digest`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`items[i]` is saved from `sources[i]`. `batches` are lists of (item, offset in staging memory); of two
    neighbouring batches one is staged while the other is written."""

    items: list[dict[str, Any]]
    sources: list[torch.Tensor | bytes]
    batches: list[list[tuple[int, int]]]
    num_files: int
    nbytes: int
    staging_bytes: int

    @property
    def structure(self) -> tuple[Any, ...]:
        """Equal for plans that the writer cannot tell apart."""
        return self.items, self.batches, self.num_files


def make_plan(state: State, *, rank: int, num_files: int, staging_bytes: int | None) -> Plan:
    """Lay out a state.

    Args:
        num_files: largest number of files of weights, and of everything else; small states take one in all.
        staging_bytes: memory that there is (None: as much as needed); if the state is larger, it is staged in parts.

    Raises:
        ConfigError: `staging_bytes` is below twice the largest tensor of a state that does not fit as a whole.
    """
    items: list[dict[str, Any]] = []
    sources: list[torch.Tensor | bytes] = []
    for shard in state.shards:
        items.append(
            {
                "kind": "tensor",
                "key": shard.key,
                "dtype": str(shard.tensor.dtype).removeprefix("torch."),
                "global_shape": list(shard.global_shape),
                "offset": list(shard.offset),
                "shape": list(shard.shape),
                "nbytes": shard.tensor.numel() * shard.tensor.element_size(),
            }
        )
        sources.append(shard.tensor)
    records = [("object", key, dump_object(value)) for key, value in state.objects.items()]
    if rank == 0:
        records.append(("common", "common", dump_object(dict(state.common))))
    for kind, key, record in records:
        items.append({"kind": kind, "key": key, "nbytes": len(record)})
        sources.append(record)
    nbytes = sum(item["nbytes"] for item in items)
    num_files = _choose_files(items, num_files)
    needed = sum(_aligned(item["nbytes"]) for item in items)
    if staging_bytes is None or needed <= staging_bytes:
        batches, size = _fill(items, needed), needed
    else:
        half = staging_bytes // 2 // ALIGN * ALIGN
        largest = max(items, key=lambda item: item["nbytes"])
        if _aligned(largest["nbytes"]) > half:
            raise ConfigError(
                f"staging_bytes={staging_bytes} is too small to stream: it must hold {largest['key']!r} of rank {rank} "
                f"twice, {2 * _aligned(largest['nbytes'])} bytes"
            )
        batches, size = _fill(items, half), staging_bytes
        batches = [[(i, offset + half * (k % 2)) for i, offset in batch] for k, batch in enumerate(batches)]
    return Plan(items=items, sources=sources, batches=batches, num_files=num_files, nbytes=nbytes, staging_bytes=size)


def _choose_files(items: list[dict[str, Any]], num_files: int) -> int:
    """Give every item a file, and return how many there are.

    Weights lie in files of their own, so that loading only them proves and reads only these.
    """
    weights = [item for item in items if section_of(item["key"]) == "model" and item["kind"] != "common"]
    chosen = {id(item) for item in weights}
    rest = [item for item in items if id(item) not in chosen]
    groups = [weights, rest] if min(_total(weights), _total(rest)) >= 1 << 20 else [items]
    first = 0
    for group in groups:
        loads = [0] * max(1, min(num_files, _total(group) >> 20))
        for item in sorted(group, key=lambda item: -item["nbytes"]):
            number = loads.index(min(loads))
            item["file"] = first + number
            loads[number] += item["nbytes"]
        first += len(loads)
    return first


def _total(items: list[dict[str, Any]]) -> int:
    return sum(item["nbytes"] for item in items)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _fill(items: list[dict[str, Any]], capacity: int) -> list[list[tuple[int, int]]]:
    batches: list[list[tuple[int, int]]] = [[]]
    used = 0
    for i, item in enumerate(items):
        size = _aligned(item["nbytes"])
        if used + size > capacity and batches[-1]:
            batches.append([])
            used = 0
        batches[-1].append((i, used))
        used += size
    return batches


def digest_common(common: Any) -> dict[str, str]:
    """Short digests of the leaves of a nested state, by path: what differs between ranks can be named."""
    return {path: hashlib.blake2b(text, digest_size=6).hexdigest() for path, text in _leaves(common, "")}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield path + ".#", str(len(value)).encode()
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}.{i}")
    elif isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1)
        yield path, f"{value.dtype}{tuple(value.shape)}".encode() + data.view(torch.uint8).numpy().tobytes()
    else:
        # The address in a default repr differs on every rank and says nothing.
        yield path, re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode()
