"""What a `torch_dist` checkpoint contains: keys, shapes, dtypes, and in which file each shard lies (`.metadata`).

`parse_metadata` reads the `.metadata` of any torch since 2.0 and of any Megatron-Core, from the names of fields alone;
`dump_metadata` writes one that stock torch and Megatron-Core read; `Index.check` proves that the shards of every tensor
cover it exactly once. An index is plain data: seals build it, the folder reader and the converters use it.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from checkpoint.errors import CoverageError, FormatError
from checkpoint.format.unpickle import Foreign, loads

__all__ = ["Chunk", "Index", "ObjectEntry", "TensorEntry", "dump_metadata", "parse_metadata"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One shard of a tensor: a box of it, stored as one record of a file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    """Relative to the checkpoint's folder."""
    pos: int
    nbytes: int
    """Of the record, which is a little larger than the tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectEntry:
    """A pickled object, stored as one record."""

    file: str
    pos: int
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """`tensors` by key; `objects` by key, for Megatron's ShardedObjects `key/shard_<offset>_<shape>`."""

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry]

    def files(self) -> list[str]:
        """Every file that is referred to, sorted."""
        names = {c.file for t in self.tensors.values() for c in t.chunks}
        return sorted(names | {o.file for o in self.objects.values()})

    def check(self) -> None:
        """Every element of every tensor is in exactly one chunk.

        Raises:
            CoverageError: names the first tensors that have holes or overlaps.
        """
        wrong = [f"{key} {problem}" for key, entry in self.tensors.items() if (problem := _coverage(entry))]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CoverageError(f"the shards do not make up whole tensors: {'; '.join(wrong[:3])}{more}")


def _coverage(entry: TensorEntry) -> str | None:
    volume = 0
    for chunk in entry.chunks:
        if len(chunk.offset) != len(entry.shape) or len(chunk.shape) != len(entry.shape):
            return f"{entry.shape} has a shard of another rank: {chunk.shape} at {chunk.offset}"
        if any(o < 0 or o + n > size for o, n, size in zip(chunk.offset, chunk.shape, entry.shape, strict=True)):
            return f"{entry.shape} has a shard outside of it: {chunk.shape} at {chunk.offset} in {chunk.file}"
        volume += math.prod(chunk.shape)
    overlap = _overlap([c for c in entry.chunks if math.prod(c.shape)])
    if overlap:
        places = " and ".join(f"{c.shape} at {c.offset} in {c.file}" for c in overlap)
        return f"{entry.shape} is stored twice: {places}"
    if volume != math.prod(entry.shape):
        return f"{entry.shape} has holes: {volume} of {math.prod(entry.shape)} elements in {len(entry.chunks)} shards"
    return None


def _overlap(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element. Swept along the dimension with the most different offsets."""
    if len(chunks) < 2:
        return None
    ndim = len(chunks[0].shape)
    if not ndim:
        return chunks[0], chunks[1]
    axis = max(range(ndim), key=lambda d: len({c.offset[d] for c in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offset[axis]):
        start = chunk.offset[axis]
        active = [c for c in active if c.offset[axis] + c.shape[axis] > start]
        for other in active:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(chunk.offset, chunk.shape, other.offset, other.shape, strict=True)
            ):
                return other, chunk
        active.append(chunk)
    return None


def parse_metadata(data: bytes, what: str = ".metadata") -> Index:
    """The index in a `.metadata` file. Nothing is executed.

    Raises:
        FormatError: damaged, or not the metadata of a distributed checkpoint.
    """
    root = loads(data, what=what)
    try:
        declared, storage = root.state_dict_metadata, root.storage_data
        where: dict[str, list[tuple[tuple[int, ...] | None, Any]]] = {}
        for index, info in storage.items():
            offset = getattr(index, "offset", None)  # objects have none
            where.setdefault(index.fqn, []).append((None if offset is None else tuple(offset), info))
        tensors, objects = {}, {}
        for key, entry in declared.items():
            places = where.get(key, [])
            if entry.path.endswith("BytesStorageMetadata"):
                if len(places) != 1:
                    raise FormatError(f"{what}: object {key} is stored {len(places)} times, expected once")
                info = places[0][1]
                objects[key] = ObjectEntry(file=info.relative_path, pos=info.offset, nbytes=info.length)
            else:
                tensors[key] = _tensor_entry(key, entry, dict(places), what)
    except AttributeError as e:
        raise FormatError(f"{what} is not the metadata of a distributed checkpoint: {e}") from e
    return Index(tensors=tensors, objects=objects)


def _tensor_entry(key: str, entry: Foreign, places: Mapping[Any, Any], what: str) -> TensorEntry:
    properties = entry.properties.__dict__["state"]
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    chunks = []
    for chunk in entry.chunks:
        offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        info = places.get(offset)
        if info is None:
            raise FormatError(f"{what}: the shard of {key} at {offset} is declared but stored nowhere")
        if getattr(info, "transform_descriptors", None):
            raise FormatError(f"{what}: {key} is stored transformed ({info.transform_descriptors}), which is not read")
        chunks.append(Chunk(offset=offset, shape=shape, file=info.relative_path, pos=info.offset, nbytes=info.length))
    return TensorEntry(dtype=dtype, shape=tuple(entry.size), chunks=tuple(chunks))


def dump_metadata(index: Index) -> bytes:
    """A `.metadata` file, for stock torch and Megatron-Core."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    declared: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key, entry in index.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in entry.chunks]
        declared[key] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
        for i, c in enumerate(entry.chunks):
            storage[MetadataIndex(key, torch.Size(c.offset), i)] = _StorageInfo(c.file, c.pos, c.nbytes)
    for key, o in index.objects.items():
        declared[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(o.file, o.pos, o.nbytes)
    return pickle.dumps(Metadata(state_dict_metadata=declared, planner_data=None, storage_data=storage))
