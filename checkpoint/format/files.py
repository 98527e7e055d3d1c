"""Bytes on disk: files that are digested while they are written, and small files that appear whole or not at all.

`RecordFile` is one `.distcp` file: records of tensors and objects, one after the other. Its digest is computed from
the bytes as they are handed to the kernel, so what a disk, a network or a copy changes later is found by `file_digest`.
`put_file` is the only way in which small files are written: temporary name, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint.errors import ConfigError, FormatError
from checkpoint.format.saved import tensor_frame

__all__ = ["FileRecord", "RecordFile", "file_digest", "fsync_dir", "new_digest", "put_file"]

STEP_BYTES = 8 << 20
"""Digest and write alternate in pieces of this size, so that the second finds the bytes in the cache."""

SMALL_BYTES = 64 << 10
BLOCK_BYTES = 4096
"""Of this size or a divisor of it are the blocks of every disk."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)


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
    """A `.distcp` file that is being written; for one thread.

    Data is gathered in a buffer of `STEP_BYTES`, digested there while the cache has it, and written past the page cache
    where the filesystem allows that: the kernel then copies nothing, claims no memory, and there is nothing left to
    flush at the end.

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
        self._fd = _open_direct(path)
        # Anonymous memory: whole pages, as writing past the page cache demands.
        self._buffer = memoryview(mmap.mmap(-1, STEP_BYTES))
        self._filled = self._handed = 0

    def put_tensor(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Append a record of a CPU tensor; returns (position, bytes of the record)."""
        start = self.nbytes
        before, after = tensor_frame(tuple(tensor.shape), tensor.dtype)
        self.write(before)
        if tensor.numel():
            self.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        self.write(after)
        return start, self.nbytes - start

    def put_bytes(self, record: bytes | memoryview) -> tuple[int, int]:
        """Append a record as `dump_object` made it; returns (position, bytes)."""
        start = self.nbytes
        self.write(record)
        return start, self.nbytes - start

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B")
        self.nbytes += len(view)
        while view:
            room = min(STEP_BYTES - self._filled, len(view))
            target = self._buffer[self._filled : self._filled + room]
            if room < SMALL_BYTES:
                target[:] = view[:room]
            else:
                # numpy lets other threads run meanwhile; a memoryview's own copy does not.
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(view[:room], np.uint8))
            self._filled += room
            view = view[room:]
            if self._filled == STEP_BYTES:
                self._flush()

    def _flush(self) -> None:
        piece, self._filled = self._buffer[: self._filled], 0
        self._digest.update(piece)
        whole = len(piece) // BLOCK_BYTES * BLOCK_BYTES
        self._hand(piece[:whole])
        if whole < len(piece):  # the end of the file is no whole block
            _set_direct(self._fd, False)
            self._hand(piece[whole:])

    def _hand(self, piece: memoryview) -> None:
        nbytes = len(piece)
        while piece:
            try:
                done = write_some(self._fd, piece)
            except OSError as e:
                # Some filesystems take the flag when a file is opened and refuse the first write.
                if e.errno != errno.EINVAL or not _set_direct(self._fd, False):
                    raise
                continue
            piece = piece[done:]
            if done % BLOCK_BYTES and piece:
                _set_direct(self._fd, False)
        if nbytes and not _is_direct(self._fd):
            # Lets the disk begin now instead of at the sync, and keeps the file from pushing others out of the cache.
            os.posix_fadvise(self._fd, self._handed, nbytes, os.POSIX_FADV_DONTNEED)
        self._handed += nbytes
        self._progress(nbytes)

    def sync(self) -> None:
        """Wait until the disk has everything; nothing can be appended after it."""
        self._flush()
        os.fsync(self._fd)

    def close(self) -> FileRecord:
        """Close without waiting for the disk (see `sync`)."""
        self._flush()
        os.close(self._fd)
        self._fd = -1
        return FileRecord(name=self.path.name, nbytes=self.nbytes, xxh3=self._digest.hexdigest())

    def abandon(self) -> None:
        """Close and remove; nothing happens after `close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)


def _open_direct(path: str | Path) -> int:
    flags = os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | _O_DIRECT, 0o644)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
    # Refused, for instance by tmpfs on older kernels; the name may have been made all the same.
    Path(path).unlink(missing_ok=True)
    return os.open(path, flags, 0o644)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT)


def _set_direct(fd: int, on: bool) -> bool:
    """Whether that changed anything."""
    if _is_direct(fd) == on:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) ^ _O_DIRECT)
    return True


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
