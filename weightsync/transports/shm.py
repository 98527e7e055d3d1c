"""Buckets through memory that one sender and the engine ranks of its host share: one copy in, one copy out per rank.

The sender makes a memfd, a ring of `num_buffers` slots of `bucket_bytes`, and passes its descriptor to each receiver
over the ring's socket (`weightsync.transports._ring`, which also moves the credits). The mapping lives as long as the
group.

Buffers are CPU memory: tensors of other devices are copied when packed, and views are copied by the loader to where
the parameters are. Linux only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

import torch

from weightsync.errors import TransportError, UnsupportedError
from weightsync.transports._endpoint import check_group, peer_name
from weightsync.transports._ring import RingReceiver, RingSender, joined
from weightsync.transports.base import GroupInfo, TransportCaps

__all__ = ["SharedMemoryTransport"]


class SharedMemoryTransport:
    """Same-host shared memory. See `weightsync.transports.base` for the protocol.

    Raises:
        UnsupportedError: not on Linux.
    """

    def __init__(self, name: str = "shm") -> None:
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(f"transport {name!r} needs Linux (memfd_create), this is {sys.platform}: use gloo")
        self._caps = TransportCaps(
            name=name, devices=frozenset({"cpu"}), same_host=True, tested=True, bucket_bytes=16 << 20, num_buffers=4
        )

    @property
    def caps(self) -> TransportCaps:
        return self._caps

    def open_sender(self, group: GroupInfo) -> _Sender:
        check_group(self._caps, group, sender=True)
        return joined(_Sender(group))

    def open_receiver(self, group: GroupInfo) -> _Receiver:
        check_group(self._caps, group, sender=False)
        return joined(_Receiver(group))


class _Sender(RingSender):
    transport = "shm"

    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self._fd = -1

    def make_ring(self) -> None:
        self._fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocates the pages: writing to a mapping that has none left ends the process with SIGBUS instead.
            os.posix_fallocate(self._fd, 0, self.ring_bytes)
        except OSError as e:
            raise _no_memory(self.group, self.ring_bytes, e) from e
        # Nobody can shrink it under the others' feet.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.ring = _map(self.group, self._fd, self.ring_bytes)

    def offer(self, rank: int) -> tuple[bytes, list[int]]:
        return b"", [self._fd]

    def offered(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Receiver(RingReceiver):
    transport = "shm"

    def take(self, message: bytes, fds: list[int]) -> None:
        if not fds:
            raise TransportError(f"{self.group.name}: {peer_name(self.group, 0)} passed no descriptor of its memory")
        self.ring = _map(self.group, fds[0], self.ring_bytes)


def _map(group: GroupInfo, fd: int, nbytes: int) -> torch.Tensor:
    """The memory behind `fd` as a uint8 tensor; unmapped when the last view of it is gone."""
    try:
        # Populated now: page faults in the middle of a publish cost more than the copies.
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as e:
        raise _no_memory(group, nbytes, e) from e
    return torch.frombuffer(memory, dtype=torch.uint8)


def _no_memory(group: GroupInfo, nbytes: int, e: OSError) -> TransportError:
    return TransportError(
        f"{group.name}: {peer_name(group, group.rank)} has no memory for a shared mapping of {nbytes} bytes "
        f"({group.num_buffers} buffers of {group.bucket_bytes} bytes): {e}; lower bucket_bytes or num_buffers, or "
        "raise the limit (ulimit -v, container memory)"
    )
