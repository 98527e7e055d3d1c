"""Bytes on disk: files that are digested while they are written, and small files that appear whole or not at all.

`RecordFile` is one `.distcp` file: records of tensors and objects, one after the other. Its digest is computed from
the bytes as they are handed to the kernel, so what a disk, a network or a copy changes later is found by `file_digest`.
`put_file` is the only way in which small files are written: temporary name, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint.errors import ConfigError, FormatError
from checkpoint.format.saved import dump_tensor

__all__ = ["FileRecord", "RecordFile", "file_digest", "fsync_dir", "new_digest", "put_file"]

STEP_BYTES = 8 << 20
"""Digest and write alternate in pieces of this size, so that the second finds the bytes in the cache."""

SMALL_BYTES = 64 << 10
PUSH_BYTES = 8 << 20


def new_digest() -> Any:
    """A fresh xxh3-128 state (`update`, `hexdigest`): the fastest that still sees every bit.

    Raises:
        ConfigError: `xxhash` is not installed.
    """
    try:
        import xxhash
    except ImportError as e:
        raise ConfigError(
            "checkpoints are digested with xxh3, which needs the package `xxhash`: pip install 'weightsync[checkpoint]'"
        ) from e
    return xxhash.xxh3_128()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file of a checkpoint: name relative to its folder, bytes, hex xxh3-128 of them."""

    name: str
    nbytes: int
    xxh3: str


class RecordFile:
    """A `.distcp` file that is being written.

    Args:
        path: must not exist.
        progress: called with the number of bytes handed to the kernel since the last call.

    Raises:
        OSError: from the disk, as it is.
    """

    def __init__(self, path: str | Path, progress: Callable[[int], None] = lambda _: None) -> None:
        self.path = Path(path)
        self.nbytes = 0
        self._digest = new_digest()
        self._progress = progress
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._small = bytearray()
        self._handed = self._pushed = 0

    def put_tensor(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Append a record of a CPU tensor; returns (position, bytes of the record)."""
        start = self.nbytes
        dump_tensor(tensor, self)
        return start, self.nbytes - start

    def put_bytes(self, record: bytes | memoryview) -> tuple[int, int]:
        """Append a record as `dump_object` made it; returns (position, bytes)."""
        start = self.nbytes
        self.write(record)
        return start, self.nbytes - start

    def write(self, data: Any) -> int:
        """For torch.save."""
        view = memoryview(data).cast("B")
        self.nbytes += len(view)
        if len(view) < SMALL_BYTES:
            # A record is one large piece among dozens of a few bytes, each of which would be a system call.
            self._small += view
            if len(self._small) >= SMALL_BYTES:
                self._put_small()
            return len(view)
        self._put_small()
        self._put(view)
        return len(view)

    def _put_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._put(memoryview(small))

    def _put(self, view: memoryview) -> None:
        for at in range(0, len(view), STEP_BYTES):
            piece = view[at : at + STEP_BYTES]
            self._digest.update(piece)
            done = 0
            while done < len(piece):
                done += write_some(self._fd, piece[done:])
            self._progress(len(piece))
        self._handed += len(view)
        if self._handed - self._pushed >= PUSH_BYTES:
            # Lets the disk begin now instead of at the sync, and keeps the file from pushing others out of the cache.
            os.posix_fadvise(self._fd, self._pushed, self._handed - self._pushed, os.POSIX_FADV_DONTNEED)
            self._pushed = self._handed

    def flush(self) -> None:
        """For torch.save; small pieces wait for the next large one, for `sync` or for `close`."""

    def sync(self) -> None:
        """Wait until the disk has everything."""
        self._put_small()
        os.fsync(self._fd)

    def close(self) -> FileRecord:
        """Close without waiting for the disk (see `sync`)."""
        self._put_small()
        os.close(self._fd)
        self._fd = -1
        return FileRecord(name=self.path.name, nbytes=self.nbytes, xxh3=self._digest.hexdigest())

    def abandon(self) -> None:
        """Close and remove; nothing happens after `close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)


def write_some(fd: int, data: memoryview) -> int:
    """os.write; a name of its own so that faults can be injected where the bytes leave the process."""
    return os.write(fd, data)


def fsync_dir(path: str | Path) -> None:
    """Wait until the names in a folder are on disk: a rename alone may be undone by a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_file(path: str | Path, data: bytes | memoryview) -> FileRecord:
    """Write a small file so that it is there whole or not at all, also after a power cut."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    digest = new_digest()
    digest.update(data)
    view = memoryview(data).cast("B")
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            done = 0
            while done < len(view):
                done += write_some(fd, view[done:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)
    return FileRecord(name=path.name, nbytes=len(view), xxh3=digest.hexdigest())


def file_digest(path: str | Path, expected: FileRecord | None = None) -> FileRecord:
    """Read a file through and digest it.

    Raises:
        FormatError: with `expected`, its size is another (nothing was read then).
        OSError: it cannot be read.
    """
    digest = new_digest()
    buffer = bytearray(STEP_BYTES)
    view = memoryview(buffer)
    total = 0
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected.nbytes:
            raise FormatError(f"{path} has {size} bytes, {expected.nbytes} were sealed: truncated or overwritten")
        while got := file.readinto(view):
            digest.update(view[:got])
            total += got
    return FileRecord(name=Path(path).name, nbytes=total, xxh3=digest.hexdigest())
