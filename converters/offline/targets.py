"""What is written: files as sequences of bytes and of element ranges, before a byte of data is read.

`hf_files` and `mcore_files` lay out the big files; every position is known beforehand, so pieces can be written in any
order and by several threads. `OutFile`s are moved by `converters.offline.move`. What makes a folder look finished
(index, `.metadata`, `metadata.json`) is in `last`, as (name, bytes when called), and is written in that order, last.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from checkpoint.format import Chunk, Index, ObjectEntry, TensorEntry, dump_metadata
from checkpoint.format.folder import CONFIG
from checkpoint.format.saved import dump_object, tensor_frame
from converters.errors import MappingError
from converters.hf_folder import DTYPES, INDEX, SINGLE
from converters.offline.keys import Layers, Place, Spec, Spelling
from converters.offline.layout import Layout
from converters.offline.mapping import Mapped, Output

__all__ = ["Files", "OutFile", "Segment", "hf_files", "mcore_files"]

RECORD_BYTES = 256 << 20
"""A larger tensor becomes several shards: whoever loads one needs memory for it."""
SHARE_BYTES = 64 << 20
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a file from `pos`: `literal`, or the elements of `layout` in `dtype`."""

    pos: int
    nbytes: int
    literal: bytes = b""
    layout: Layout | None = None
    dtype: torch.dtype = torch.uint8


@dataclasses.dataclass(frozen=True, slots=True)
class OutFile:
    name: str
    nbytes: int
    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    big: tuple[OutFile, ...]
    last: tuple[tuple[str, Callable[[], bytes]], ...]

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.big)


def hf_files(mapped: Mapped, *, shard_bytes: int | None) -> Files:
    """Safetensors files of at most `shard_bytes` (or one tensor), and their index if there are several.

    By default eight, of 0.5 to 5 GB: workers in one file wait for each other.

    Raises:
        MappingError: a dtype that safetensors does not have.
    """
    shard_bytes = shard_bytes or min(max(mapped.nbytes // 8, 5 * 10**8), 5 * 10**9)
    shards = list(_grouped(mapped.tensors.items(), lambda o: o.layout.numel() * o.dtype.itemsize, shard_bytes))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    files = [_safetensors(name, shard) for name, shard in zip(names, shards, strict=True)]
    if len(files) == 1:
        return Files(tuple(files), ())
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard}
    index = {"metadata": {"total_size": mapped.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    return Files(tuple(files), ((INDEX, lambda: (json.dumps(index, indent=2) + "\n").encode()),))


def _safetensors(name: str, tensors: Sequence[tuple[str, Output]]) -> OutFile:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The reader wants every tensor aligned to its item size.
    ordered = sorted(tensors, key=lambda item: -item[1].dtype.itemsize)
    for key, out in ordered:
        if out.dtype not in CODES:
            raise MappingError(f"{key} is {out.dtype}, which safetensors does not have")
        nbytes = out.layout.numel() * out.dtype.itemsize
        header[key] = {
            "dtype": CODES[out.dtype],
            "shape": list(out.layout.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    segments = [Segment(0, len(head), head)]
    for key, out in ordered:
        start, stop = header[key]["data_offsets"]
        if stop > start:
            segments.append(Segment(len(head) + start, stop - start, b"", out.layout, out.dtype))
    return OutFile(name, len(head) + end, tuple(segments))


def mcore_files(
    mapped: Mapped,
    *,
    layers: Layers,
    spec: Spec,
    extra_state: str,
    shard_bytes: int,
    common: Mapping[str, Any],
) -> Files:
    """`.distcp` files with one record per shard of a tensor, and the metadata that makes them a checkpoint."""
    weights = {n: o for n, o in mapped.tensors.items() if n not in mapped.carried}
    spelling = Spelling(weights, layers, spec)
    records = [
        (key, shape, offset, layout, out.dtype)
        for name, out in mapped.tensors.items()
        for key, shape, offset, layout in _shards(name, out, None if name in mapped.carried else spelling)
    ]
    total = sum(r[3].numel() * r[4].itemsize for r in records)
    # Several files even of a small checkpoint: two workers in one file wait for each other's writes.
    count = max(-(-total // shard_bytes), min(4, -(-total // SHARE_BYTES)), 1)
    groups = list(_grouped(((r, r) for r in records), lambda r: r[3].numel() * r[4].itemsize, -(-total // count)))
    big: list[OutFile] = []
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, list[Chunk]]] = {}
    for group in groups:
        file = f"__0_{len(big)}.distcp"
        segments: list[Segment] = []
        pos = 0
        for (key, shape, offset, layout, dtype), _ in group:
            own = (*(1 for _ in range(len(shape) - layout.dim())), *layout.shape)
            before, after = tensor_frame(own, dtype)
            nbytes = layout.numel() * dtype.itemsize
            segments.append(Segment(pos, len(before), before))
            if nbytes:
                segments.append(Segment(pos + len(before), nbytes, b"", layout, dtype))
            if after:
                segments.append(Segment(pos + len(before) + nbytes, len(after), after))
            length = len(before) + nbytes + len(after)
            entry = tensors.setdefault(key, (shape, dtype, []))
            if entry[1] != dtype:
                raise MappingError(f"{key} would hold {entry[1]} and {dtype}: choose --layout per-layer")
            entry[2].append(Chunk(offset=offset, shape=own, file=file, pos=pos, nbytes=length))
            pos += length
        big.append(OutFile(file, pos, tuple(segments)))
    objects, last_file = _extra_states(spelling.extra_states(extra_state), len(big))
    index = Index(
        tensors={k: TensorEntry(dtype=d, shape=s, chunks=tuple(c)) for k, (s, d, c) in tensors.items()},
        objects=objects,
    )
    index.check()
    return Files(
        (*big, *last_file),
        (
            ("common.pt", lambda: dump_object(dict(common))),
            (".metadata", lambda: dump_metadata(index)),
            ("metadata.json", lambda: json.dumps(CONFIG).encode()),
        ),
    )


def _shards(
    name: str, out: Output, spelling: Spelling | None
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Layout]]:
    """(key, shape of the whole, offset, elements) of each record."""
    layout = out.layout
    shape = tuple(layout.shape)
    if spelling is None:
        places = [Place(name, shape, (0,) * len(shape), 0, shape[0] if shape else 1)]
    else:
        places = spelling.places(name, shape, out.blocks)
    row = math.prod(shape[1:]) * out.dtype.itemsize
    step = max(RECORD_BYTES // row, 1) if row else max(*shape[:1], 1)
    for key, whole, offset, first, stop in places:
        if not shape:
            yield key, whole, offset, layout
            continue
        lead = len(offset) - len(shape)
        for at in range(first, max(stop, first + 1), step):
            until = min(at + step, stop)
            where = (*offset[:lead], offset[lead] + at - first, *offset[lead + 1 :])
            yield key, whole, where, layout.rows(at, until)


def _extra_states(keys: Sequence[str], number: int) -> tuple[dict[str, ObjectEntry], tuple[OutFile, ...]]:
    if not keys:
        return {}, ()
    # What Megatron saves of a module without such state. All entries share one record: a large model has 30,000.
    record = dump_object([None])
    file = OutFile(f"__0_{number}.distcp", len(record), (Segment(0, len(record), record),))
    return {key: ObjectEntry(file=file.name, pos=0, nbytes=len(record)) for key in keys}, (file,)


def _grouped(items: Iterable[tuple[Any, Any]], size: Any, limit: int) -> Iterator[list[tuple[Any, Any]]]:
    group: list[tuple[Any, Any]] = []
    held = 0
    for item in items:
        nbytes = size(item[1])
        if group and held + nbytes > limit:
            yield group
            group, held = [], 0
        group.append(item)
        held += nbytes
    if group:
        yield group
