"""Captured rows in memory that another process of the same node reads: what `Exchange(rows="memory")` moves them by.

    with offered(tensors) as address:          # the rank that has the rows; address is JSON
        ...                                    # tell the collector, wait until it has read
    with opened(address) as parts: ...         # the collector: the same bytes, mapped

The memory is a Linux memfd: it has no name in any file system, so there is nothing to unlink, nor to be left behind or
found by another job, even if a process is killed in between; it is gone with the last descriptor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from training_hooks.errors import CaptureError

__all__ = ["offered", "opened"]

_HEAD = 64
"""Bytes before the rows: the nonce. A multiple of every dtype's size, so that the rows are aligned."""


@contextlib.contextmanager
def offered(tensors: Sequence[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """The address of a memory that holds the bytes of `tensors`, one behind the other, as long as the block lasts.

    Raises:
        OSError: not enough memory, or no Linux.
    """
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    sizes = [r.numel() for r in raw]
    nonce = secrets.token_bytes(_HEAD)
    fd = os.memfd_create("captured-rows", os.MFD_CLOEXEC)
    try:
        # Reserved first: memory that runs out later would be a signal, not an error.
        os.posix_fallocate(fd, 0, _HEAD + sum(_padded(n) for n in sizes))
        os.pwrite(fd, nonce, 0)
        with _mapped(fd, writable=True) as memory:
            start = _HEAD
            for part, size in zip(raw, sizes, strict=True):
                memory[start : start + size] = part
                start += _padded(size)
        yield {"pid": os.getpid(), "fd": fd, "nonce": nonce.hex(), "sizes": sizes}
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(address: Mapping[str, Any]) -> Iterator[list[torch.Tensor]]:
    """uint8 views of what another process of this node offers; they must not be used after the block.

    Raises:
        CaptureError: the memory cannot be reached from here, or is another one.
    """
    where = f"/proc/{address['pid']}/fd/{address['fd']}"
    try:
        fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CaptureError(f"cannot open {where} ({error.strerror}): {_ADVICE}") from error
    try:
        # A process of another node or container may have the same number: only the nonce tells.
        if os.pread(fd, _HEAD, 0).hex() != address["nonce"]:
            raise CaptureError(f"{where} is not the memory that was offered: {_ADVICE}")
        with _mapped(fd, writable=False) as memory:
            views, start = [], _HEAD
            for size in address["sizes"]:
                views.append(memory[start : start + size])
                start += _padded(size)
            try:
                yield views
            finally:
                views.clear()
    finally:
        os.close(fd)


_ADVICE = "are all ranks of the replica on one node, in one PID namespace, of one user? Else use Exchange(rows='gloo')"


def _padded(size: int) -> int:
    return -(-size // _HEAD) * _HEAD


@contextlib.contextmanager
def _mapped(fd: int, *, writable: bool) -> Iterator[torch.Tensor]:
    # Privately where only read: torch refuses memory that it may not write to.
    kind = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
    memory = mmap.mmap(fd, 0, flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # Views keep the mapping alive; it goes with the last of them.
    yield torch.frombuffer(memory, dtype=torch.uint8)
