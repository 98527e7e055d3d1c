"""A `torch_dist` folder: read it shard by shard, or write one without Megatron-Core and without a process group.

    with TorchDistReader(path) as folder:           folder.index, folder.common(), folder.content_metadata()
        folder.read("embedding.word_embeddings.weight", offset=(0, 0), shape=(10, 64))

    with TorchDistWriter(path) as writer:           one process; `commit` makes it a checkpoint
        writer.declare(key, shape, dtype); writer.put(key, offset, tensor); writer.put_object(key, value)
        writer.commit(common)

Only what a read needs is fetched: of a shard the rows asked for. `fetch` replaces the local disk, for folders behind a
URL. The files are `__<rank>_<n>.distcp`, `.metadata` (index), `common.pt` (values that are the same on every rank) and
`metadata.json`, whose presence is what tells Megatron-Core that the folder is a checkpoint: it comes last.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from checkpoint.errors import ConfigError, CoverageError, FormatError
from checkpoint.format.files import FileRecord, RecordFile, put_file
from checkpoint.format.index import Chunk, Index, ObjectEntry, TensorEntry, dump_metadata, parse_metadata
from checkpoint.format.saved import Payload, dump_object, load_object, locate_tensor

__all__ = ["CONFIG", "Fetch", "TorchDistReader", "TorchDistWriter", "write_folder_metadata"]

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
CONFIG["common_backend_version"] = 1

Fetch = Callable[[str, int, int | None], bytes]
"""(file relative to the folder, position, bytes or None for the rest) -> bytes.

Raises FileNotFoundError for a file that is not there."""

_OTHER_BACKENDS = {"zarr": "read it with checkpoint.legacy_zarr", "fsdp_dtensor": "load it with Megatron-FSDP"}


class _LocalFetch:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, file: str, pos: int, size: int | None) -> bytes:
        with self._lock:
            fd = self._fds.get(file)
            if fd is None:
                fd = self._fds[file] = os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC)
        left = os.fstat(fd).st_size - pos if size is None else size
        parts = []
        while left > 0:  # one pread returns at most 2 GiB
            part = os.pread(fd, left, pos)
            if not part:
                break
            parts.append(part)
            pos += len(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class TorchDistReader:
    """A checkpoint folder that Megatron-Core or `checkpoint` wrote. Several threads may read, until one closes it.

    Raises:
        FormatError: no checkpoint, of another backend, or its metadata is damaged or missing.
    """

    def __init__(self, path: str | Path, *, fetch: Fetch | None = None) -> None:
        self.path = path
        self._local = None if fetch else _LocalFetch(Path(path))
        self._fetch: Fetch = fetch or self._local  # type: ignore[assignment]
        self._payloads: dict[tuple[str, int], Payload] = {}
        try:
            self.config = self._read_config()
            self.index = parse_metadata(self._whole(".metadata", "see `rebuild`"), f"{path}/.metadata")
        except BaseException:
            self.close()
            raise

    def _whole(self, name: str, hint: str) -> bytes:
        try:
            return self._fetch(name, 0, None)
        except FileNotFoundError as e:
            raise FormatError(f"{self.path} has no {name}: not a complete torch_dist checkpoint ({hint})") from e

    def _read_config(self) -> dict[str, Any]:
        text = self._whole("metadata.json", "it is written last: the save did not finish, or this is another folder")
        try:
            config: dict[str, Any] = json.loads(text)
            backend = config["sharded_backend"]
        except (ValueError, KeyError, TypeError) as e:
            raise FormatError(f"{self.path}/metadata.json is damaged ({e})") from e
        if backend != "torch_dist":
            hint = _OTHER_BACKENDS.get(str(backend), "no reader for it here")
            raise FormatError(f"{self.path} was saved as {backend!r}, expected 'torch_dist': {hint}")
        return config

    def common(self) -> dict[str, Any]:
        """The state that is the same on every rank (`common.pt`); classes that are not plain data as `Foreign`."""
        value = load_object(self.read_common_record(), f"{self.path}/common.pt")
        if not isinstance(value, dict):
            raise FormatError(f"{self.path}/common.pt holds {type(value).__name__}, expected a dict")
        return value

    def read_common_record(self) -> bytes:
        """`common.pt` as torch.save wrote it, for whoever trusts the file enough to unpickle it."""
        return self._whole("common.pt", "it holds arguments and counters")

    def content_metadata(self) -> Any:
        """What the saver said about the content (optimizer format and the like), or None."""
        return self.common().get("content_metadata")

    def read(self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor, or the box of it at `offset` with `shape`; reads only the rows that the box needs.

        Raises:
            CoverageError: no such key, a box outside of it, or a hole.
            FormatError: a file is damaged or truncated.
        """
        entry = self.index.tensors.get(key)
        if entry is None:
            raise CoverageError(f"{self.path} has no tensor {key!r}: see index.tensors for those that it has")
        offset = (0,) * len(entry.shape) if offset is None else tuple(offset)
        shape = tuple(n - o for n, o in zip(entry.shape, offset, strict=True)) if shape is None else tuple(shape)
        if len(offset) != len(entry.shape) or any(
            o < 0 or n < 0 or o + n > size for o, n, size in zip(offset, shape, entry.shape, strict=True)
        ):
            raise CoverageError(f"{key} has the shape {entry.shape}: no box {shape} at {offset}")
        out = torch.empty(shape, dtype=entry.dtype)
        filled = 0
        for chunk in entry.chunks:
            low = [max(o, c) for o, c in zip(offset, chunk.offset, strict=True)]
            high = [min(o + n, c + m) for o, n, c, m in zip(offset, shape, chunk.offset, chunk.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            target = out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
            target.copy_(self._part(key, entry, chunk, low, high))
            filled += target.numel()
        if filled != math.prod(shape):
            raise CoverageError(f"{key}: {filled} of {math.prod(shape)} elements of the box {shape} at {offset} stored")
        return out

    def locate(self, key: str, chunk: Chunk) -> int:
        """Position of a shard's first byte in its file; its elements follow one another, row-major.

        Raises:
            FormatError: the file is missing, truncated, or holds something else than the metadata says.
        """
        place = self._payloads.get((chunk.file, chunk.pos))
        if place is None:
            entry = self.index.tensors[key]
            what = f"{self.path}/{chunk.file} at {chunk.pos} ({key})"
            try:
                place = locate_tensor(
                    lambda pos, size: self._fetch(chunk.file, chunk.pos + pos, min(size, chunk.nbytes - pos)),
                    chunk.nbytes,
                    what,
                )
            except FileNotFoundError as e:
                raise FormatError(f"{what}: the file is missing; is it on another node?") from e
            if place.dtype != entry.dtype or place.shape != chunk.shape:
                raise FormatError(
                    f"{what} holds {place.dtype} {place.shape}, the metadata says {entry.dtype} {chunk.shape}"
                )
            self._payloads[chunk.file, chunk.pos] = place
        return chunk.pos + place.pos

    def _part(self, key: str, entry: TensorEntry, chunk: Chunk, low: list[int], high: list[int]) -> torch.Tensor:
        what = f"{self.path}/{chunk.file} at {chunk.pos} ({key})"
        start = self.locate(key, chunk)
        # Rows of the first dimension lie one after the other; the other dimensions are cut in memory.
        row = math.prod(chunk.shape[1:]) * entry.dtype.itemsize
        rows = (low[0] - chunk.offset[0], high[0] - chunk.offset[0]) if chunk.shape else (0, 1)
        data = self._fetch(chunk.file, start + rows[0] * row, (rows[1] - rows[0]) * row)
        if len(data) != (rows[1] - rows[0]) * row:
            raise FormatError(f"{what} ends after {len(data)} of {(rows[1] - rows[0]) * row} bytes: truncated")
        tensor = torch.frombuffer(bytearray(data), dtype=entry.dtype)
        if not chunk.shape:
            return tensor.view(())
        tensor = tensor.view(rows[1] - rows[0], *chunk.shape[1:])
        box = [slice(None)]
        box += [slice(a - c, b - c) for a, b, c in zip(low[1:], high[1:], chunk.offset[1:], strict=True)]
        return tensor[tuple(box)]

    def read_object(self, key: str) -> Any:
        """A stored object; classes that are not plain data as `Foreign`.

        Raises:
            CoverageError: no such key.
            FormatError: damaged.
        """
        return load_object(self.read_record(key), f"{self.path} object {key!r}")

    def read_record(self, key: str) -> bytes:
        """A stored object as the bytes that torch.save wrote, for whoever trusts the file enough to unpickle it."""
        entry = self.index.objects.get(key)
        if entry is None:
            raise CoverageError(f"{self.path} has no object {key!r}: see index.objects for those that it has")
        try:
            data = self._fetch(entry.file, entry.pos, entry.nbytes)
        except FileNotFoundError as e:
            raise FormatError(f"{self.path}/{entry.file} ({key}) is missing; is it on another node?") from e
        if len(data) != entry.nbytes:
            raise FormatError(f"{self.path}/{entry.file} ({key}) ends after {len(data)} of {entry.nbytes} bytes")
        return data

    def close(self) -> None:
        if self._local is not None:
            self._local.close()

    def __enter__(self) -> TorchDistReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_folder_metadata(path: str | Path, index: Index, common: bytes | None) -> list[FileRecord]:
    """Make a folder of `.distcp` files a checkpoint: `common.pt`, `.metadata`, then `metadata.json`, each one synced.

    `common` is a record of a dict (`dump_object`); None where the file is already there.
    """
    path = Path(path)
    records = [] if common is None else [put_file(path / "common.pt", common)]
    records.append(put_file(path / ".metadata", dump_metadata(index)))
    records.append(put_file(path / "metadata.json", json.dumps(CONFIG).encode()))
    return records


class TorchDistWriter:
    """Writes a folder from one process, tensor by tensor, with memory for one shard.

    Args:
        path: created; must be empty.
        max_file_bytes: a new `.distcp` file is begun after so many bytes.

    Leaving the `with` block without `commit` removes what was written.
    """

    def __init__(self, path: str | Path, *, max_file_bytes: int = 4 << 30) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.iterdir()):
            raise ConfigError(f"{path} is not empty: a checkpoint is written into a folder of its own")
        self._max = max_file_bytes
        self._file: RecordFile | None = None
        self._files: list[FileRecord] = []
        self._declared: dict[str, tuple[tuple[int, ...], torch.dtype, list[Chunk]]] = {}
        self._objects: dict[str, ObjectEntry] = {}
        self._committed = False

    def declare(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Announce a tensor before its shards."""
        if key in self._declared or key in self._objects:
            raise ConfigError(f"{key!r} was declared before")
        self._declared[key] = (tuple(shape), dtype, [])

    def put(self, key: str, offset: Sequence[int], tensor: torch.Tensor) -> None:
        """Write the shard of a declared tensor at `offset`; `tensor` is on the CPU and has as many dimensions.

        Raises:
            ConfigError: not declared, or another dtype.
        """
        if key not in self._declared:
            raise ConfigError(f"{key!r} has to be declared before its shards are put")
        shape, dtype, chunks = self._declared[key]
        if tensor.dtype != dtype or tensor.dim() != len(shape):
            raise ConfigError(
                f"{key!r} was declared as {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)} at {tuple(offset)}"
            )
        file = self._open_file()
        pos, nbytes = file.put_tensor(tensor)
        chunks.append(
            Chunk(offset=tuple(offset), shape=tuple(tensor.shape), file=file.path.name, pos=pos, nbytes=nbytes)
        )

    def put_object(self, key: str, value: Any) -> None:
        """Write a picklable object. For Megatron's ShardedObjects the key is `<key>/shard_<offset>_<shape>`."""
        if key in self._declared or key in self._objects:
            raise ConfigError(f"{key!r} was put before")
        file = self._open_file()
        pos, nbytes = file.put_bytes(dump_object(value))
        self._objects[key] = ObjectEntry(file=file.path.name, pos=pos, nbytes=nbytes)

    def _open_file(self) -> RecordFile:
        if self._file is not None and self._file.nbytes >= self._max:
            self._finish_file()
        if self._file is None:
            self._file = RecordFile(self.path / f"__0_{len(self._files)}.distcp")
        return self._file

    def _finish_file(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._files.append(self._file.close())
            self._file = None

    def commit(self, common: dict[str, Any]) -> list[FileRecord]:
        """Check that every declared tensor is complete and write the metadata; returns every file with its digest.

        Raises:
            CoverageError: a tensor has holes or overlaps; the folder does not become a checkpoint.
        """
        index = Index(
            tensors={
                key: TensorEntry(dtype=dtype, shape=shape, chunks=tuple(chunks))
                for key, (shape, dtype, chunks) in self._declared.items()
            },
            objects=dict(self._objects),
        )
        index.check()
        self._finish_file()
        records = [*self._files, *write_folder_metadata(self.path, index, dump_object(common))]
        self._committed = True
        return records

    def __enter__(self) -> TorchDistWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._committed:
            return
        if self._file is not None:
            self._file.abandon()
        for record in self._files:
            (self.path / record.name).unlink(missing_ok=True)


def replace_files(index: Index, rename: Callable[[str], str]) -> Index:
    """The same index with other file names, for folders that are put together from several."""
    return Index(
        tensors={
            key: dataclasses.replace(
                entry, chunks=tuple(dataclasses.replace(c, file=rename(c.file)) for c in entry.chunks)
            )
            for key, entry in index.tensors.items()
        },
        objects={key: dataclasses.replace(o, file=rename(o.file)) for key, o in index.objects.items()},
    )
