"""Where a conversion reads: stored tensors by name, any run of their elements, from several threads.

    HfSource         a Hugging Face folder's safetensors
    TorchDistSource  a Megatron `torch_dist` folder
    ZarrSource       a legacy `zarr` folder of Megatron, through tensorstore

All three know from their headers what they hold. `read` fetches elements; nothing is kept in memory. What a stored
tensor means (which part of which weight) is not decided here: see `converters.offline.keys` for the Megatron side.
"""

from __future__ import annotations

import abc
import bisect
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoint.errors import CheckpointError
from checkpoint.format import Chunk, TorchDistReader
from checkpoint.legacy_zarr import LegacyZarrReader
from converters.errors import FolderError
from converters.hf_folder import HfFolder
from converters.offline.remote import RangedFiles, fetch, is_remote, version

__all__ = ["Header", "HfSource", "Source", "TorchDistSource", "ZarrSource"]

LARGE_BYTES = 1 << 20
AHEAD_BYTES = 32 << 20


class Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Source(abc.ABC):
    """`headers` by stored name; `identity` changes when the files do: no interrupted conversion may go on then."""

    headers: Mapping[str, Header]
    identity: list[Any]

    @abc.abstractmethod
    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a tensor's elements from `start`, row-major.

        Raises:
            FolderError: the file is gone, shorter than its header says, or cannot be read.
        """

    def close(self) -> None:  # noqa: B027 - a source without descriptors has nothing to do
        """Give back descriptors."""


class _Files:
    """Descriptors of the files of a folder, opened on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fds: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, file: str, pos: int, out: memoryview) -> None:
        try:
            with self._lock:
                fd = self._fds.get(file)
                if fd is None:
                    fd = self._fds[file] = os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC)
                if len(out) >= LARGE_BYTES and self._asked.get(file, 0) < pos + len(out) + AHEAD_BYTES // 2:
                    # What comes next is read while this is written. One row among many asks for nothing.
                    start = max(self._asked.get(file, 0), pos)
                    self._asked[file] = start + AHEAD_BYTES
                    os.posix_fadvise(fd, start, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            done = 0
            while done < len(out) and (got := os.preadv(fd, [out[done:]], pos + done)):
                done += got
        except OSError as e:
            raise FolderError(f"{self._root / file} cannot be read: {e.strerror}") from e
        if done < len(out):
            raise FolderError(f"{self._root / file} ends at {pos + done}: it was cut since its header was read")

    def close(self) -> None:
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])


def _files(root: Path) -> _Files | RangedFiles:
    return RangedFiles(root) if is_remote(root) else _Files(root)


def _identity(root: Path, files: Sequence[str]) -> list[Any]:
    there = [root / file for file in files if (root / file).exists()]
    if is_remote(root):
        return [[path.name, version(path)] for path in there]
    return [[str(path.relative_to(root)), s.st_size, s.st_mtime_ns] for path in there for s in (path.stat(),)]


class HfSource(Source):
    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        self.headers = {t.name: Header(t.shape, t.dtype) for t in folder.tensors.values()}
        self.identity = _identity(folder.path, folder.shards)
        self._files = _files(folder.path)

    def read(self, name: str, start: int, out: memoryview) -> None:
        tensor = self.folder.tensors[name]
        self._files.read(tensor.file, tensor.offset + start * tensor.dtype.itemsize, out)

    def close(self) -> None:
        self._files.close()


class TorchDistSource(Source):
    """`objects` are the keys of what is no tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _files(path)
        self.reader = TorchDistReader(path, fetch=fetch(self._files) if isinstance(self._files, RangedFiles) else None)
        reader = self.reader
        self.headers = {key: Header(entry.shape, entry.dtype) for key, entry in reader.index.tensors.items()}
        self.objects = tuple(reader.index.objects)
        self.identity = _identity(self.path, [*reader.index.files(), ".metadata"])
        self._runs: dict[str, tuple[list[int], list[Chunk]] | None] = {}

    def missing_files(self) -> list[str]:
        return [file for file in self.reader.index.files() if not (self.path / file).exists()]

    def truncated_files(self) -> list[str]:
        """Files that end before the last record that the metadata places in them."""
        ends: dict[str, int] = {}
        for entry in self.reader.index.tensors.values():
            for chunk in entry.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.pos + chunk.nbytes)
        return [f for f, end in ends.items() if (self.path / f).exists() and (self.path / f).stat().st_size < end]

    def read(self, name: str, start: int, out: memoryview) -> None:
        header = self.headers[name]
        item = header.dtype.itemsize
        if name not in self._runs:
            self._runs[name] = _runs(header.shape, self.reader.index.tensors[name].chunks)
        runs = self._runs[name]
        try:
            if runs is None:
                _read_boxes(self.reader.read, name, header, start, out)
                return
            starts, chunks = runs
            stop = start + len(out) // item
            at = bisect.bisect_right(starts, start) - 1
            first = start
            while first < stop:
                chunk = chunks[at]
                until = min(stop, starts[at] + math.prod(chunk.shape))
                pos = self.reader.locate(name, chunk) + (first - starts[at]) * item
                self._files.read(chunk.file, pos, out[(first - start) * item : (until - start) * item])
                first, at = until, at + 1
        except CheckpointError as e:
            raise FolderError(str(e)) from e

    def close(self) -> None:
        self._files.close()
        self.reader.close()


class ZarrSource(Source):
    def __init__(self, reader: LegacyZarrReader) -> None:
        self.reader = reader
        self.path = Path(reader.path)
        self.headers = {key: Header(reader.shapes[key], reader.dtypes[key]) for key in reader.shapes}
        self.objects: tuple[str, ...] = ()
        self.identity = _identity(self.path, [f"{key}/.zarray" for key in reader.shapes])

    def read(self, name: str, start: int, out: memoryview) -> None:
        try:
            _read_boxes(self.reader.read, name, self.headers[name], start, out)
        except CheckpointError as e:
            raise FolderError(str(e)) from e


def _runs(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[list[int], list[Chunk]] | None:
    """Shards in the order of their elements, with the first of each; None if a shard's elements do not lie together."""
    found = []
    for chunk in chunks:
        if not math.prod(chunk.shape):
            continue
        # All sizes 1, then one free dimension, then whole ones.
        cut = next((d for d, n in enumerate(chunk.shape) if n != 1), len(shape))
        if chunk.shape[cut + 1 :] != shape[cut + 1 :]:
            return None
        start = 0
        for offset, size in zip(chunk.offset, shape, strict=True):
            start = start * size + offset
        found.append((start, chunk))
    found.sort(key=lambda pair: pair[0])
    return [start for start, _ in found], [chunk for _, chunk in found]


def _read_boxes(read: Any, name: str, header: Header, start: int, out: memoryview) -> None:
    item = header.dtype.itemsize
    at = 0
    for offset, sizes in _boxes(header.shape, start, start + len(out) // item):
        tensor = read(name, offset, sizes).contiguous()
        nbytes = tensor.numel() * item
        out[at : at + nbytes] = tensor.reshape(-1).view(torch.uint8).numpy().data
        at += nbytes


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes that, one after the other, are the elements [start, stop) of a tensor of `shape`."""
    if not shape:
        if stop > start:
            yield (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, at = divmod(start, inner)
        if at == 0 and stop - start >= inner:
            rows = (stop - start) // inner
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        for offset, sizes in _boxes(shape[1:], at, at + end - start):
            yield (row, *offset), (1, *sizes)
        start = end
