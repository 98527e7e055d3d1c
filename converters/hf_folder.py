"""A Hugging Face folder by its headers alone: config, index and safetensors headers; no tensor data is read.

`read_folder` collects everything wrong with the files instead of stopping at the first, so that `ckpt inspect` can
show all of it and a converter can refuse before it writes a byte.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from converters.errors import FolderError

__all__ = ["HfFolder", "StoredTensor", "read_folder", "read_header"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # what safetensors itself accepts

DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch >= 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a shard; its bytes are `[offset, offset + nbytes)` of `file`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfFolder:
    """`tensors` in the order of shards and offsets. `problems` are one line each; with none the folder is sound.

    `unread` are the tensors that the index places in shards that could not be read.
    """

    path: Path
    config: dict[str, Any] | None
    shards: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    unread: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def read_folder(path: Path) -> HfFolder:
    """Reads the headers of a Hugging Face folder.

    Raises:
        FolderError: not a folder, or nothing in it that says safetensors.
    """
    if not path.is_dir():
        raise FolderError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
    if (path / ".metadata").exists():
        raise FolderError(f"{path}: a torch_dist checkpoint (.metadata), not a Hugging Face folder")
    problems: list[str] = []
    config = _read_json(path / "config.json", problems)
    weight_map: dict[str, Any] | None = None
    if (path / INDEX).exists():
        index = _read_json(path / INDEX, problems) or {}
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            problems.append(f"{INDEX} has no weight_map of tensor names to file names")
            weight_map = None
    if weight_map is not None:
        shards = sorted(set(weight_map.values()))
    elif (path / SINGLE).exists():
        shards = [SINGLE]
    else:
        shards = sorted(p.name for p in path.glob("*.safetensors"))
    if not shards and not (path / INDEX).exists():
        raise FolderError(f"{path}: no {SINGLE}, no {INDEX} and no *.safetensors: not a Hugging Face folder")

    tensors: dict[str, StoredTensor] = {}
    bad_shards: set[str] = set()
    for shard in shards:
        try:
            for tensor in read_header(_inside(path, shard)):
                if tensor.name in tensors:
                    problems.append(f"{tensor.name} is in both {tensors[tensor.name].file} and {shard}")
                elif weight_map is not None and tensor.name not in weight_map:
                    problems.append(f"{tensor.name} is in {shard} but not in {INDEX}")
                tensors.setdefault(tensor.name, tensor)
        except FolderError as e:
            bad_shards.add(shard)
            problems.append(str(e))
    for name, shard in (weight_map or {}).items():
        if shard not in bad_shards and (name not in tensors or tensors[name].file != shard):
            problems.append(f"{INDEX} names {name} in {shard}, which does not hold it")
    return HfFolder(
        path=path,
        config=config,
        shards=tuple(shards),
        tensors=tensors,
        unread=tuple(name for name, shard in (weight_map or {}).items() if shard in bad_shards and name not in tensors),
        problems=tuple(problems),
    )


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, by offset.

    Raises:
        FolderError: missing, truncated or not safetensors.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            text = file.read(length) if length <= min(size - 8, MAX_HEADER_BYTES) else b""
    except FileNotFoundError as e:
        raise FolderError(f"{path.name} is missing") from e
    except OSError as e:
        raise FolderError(f"{path.name} cannot be read: {e.strerror}") from e
    if len(head) < 8 or size - 8 < length <= MAX_HEADER_BYTES:
        raise FolderError(f"{path.name} is truncated: {size} bytes do not hold its header")
    if length > MAX_HEADER_BYTES:
        raise FolderError(f"{path.name} is not safetensors: its header would be {length} bytes")
    try:
        header = json.loads(text)
    except ValueError as e:
        raise FolderError(f"{path.name} is not safetensors: its header is not JSON") from e
    if not isinstance(header, dict):
        raise FolderError(f"{path.name} is not safetensors: its header is no JSON object")
    tensors = sorted(_entries(path.name, header, 8 + length), key=lambda t: t.offset)
    end = max((t.offset + t.nbytes for t in tensors), default=8 + length)
    if end > size:
        raise FolderError(f"{path.name} is truncated: {size} bytes, its header says {end}")
    return tensors


def _inside(folder: Path, shard: str) -> Path:
    # A shard named with a path would lead out of the folder.
    if Path(shard).name != shard:
        raise FolderError(f"{INDEX} names shard {shard!r}, which is not a plain file name")
    return folder / shard


def _entries(file: str, header: dict[str, Any], base: int) -> Iterator[StoredTensor]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            start, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            code = str(entry["dtype"])
        except (KeyError, TypeError, ValueError) as e:
            raise FolderError(f"{file} is not safetensors: bad header entry for {name}") from e
        if (dtype := DTYPES.get(code)) is None:
            raise FolderError(f"{file}: {name} has dtype {code}, known are {', '.join(DTYPES)}")
        if start < 0 or min(shape, default=0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
            raise FolderError(f"{file}: {name} has {end - start} bytes for {code} of shape {shape}")
        yield StoredTensor(name=name, shape=shape, dtype=dtype, file=file, offset=base + start, nbytes=end - start)


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as e:
        problems.append(f"{path.name} cannot be read: {e}")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name} is not a JSON object")
    return None
