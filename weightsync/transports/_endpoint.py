"""What every endpoint of every transport keeps: where it is in a publish, its deadline, its first error.

Transports subclass `Endpoint` for their senders and receivers; nobody outside `weightsync.transports` sees it. A call
out of order is our own bug and fails an `assert`; whatever the other side or the machine does is a `TransportError`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from weightsync.errors import TransportError, UnsupportedError
from weightsync.transports.base import GroupInfo, TransportCaps

__all__ = ["Endpoint", "check_group", "peer_name"]

RESERVE_S = 1.0
"""How long before the deadline a transfer gives up, at most: the rest is for finding out who is to blame."""


def check_group(caps: TransportCaps, group: GroupInfo, *, sender: bool) -> None:
    """Raises `UnsupportedError` for a device that the transport's buffers cannot be on."""
    assert (group.rank == 0) is sender, "rank 0 of a data group is its sender"
    assert group.size >= 2
    assert group.num_buffers >= 2
    if group.device.type not in caps.devices:
        raise UnsupportedError(
            f"{group.name}: transport {caps.name!r} keeps its buckets on {sorted(caps.devices)}, got {group.device}: "
            "open the group with one of these devices; tensors of others are copied when packed and loaded"
        )


def peer_name(group: GroupInfo, rank: int) -> str:
    return group.peers[rank] if rank < len(group.peers) else f"rank {rank}"


class Endpoint:
    """Buckets are numbered from 0 in each publish. `posted` of them were handed to the transport, `done` went through
    the caller's hands (sender: packed and sent; receiver: loaded and released)."""

    def __init__(self, group: GroupInfo) -> None:
        self.group = group
        self.sizes: tuple[int, ...] = ()
        self.posted = 0
        self.done = 0
        self.end = 0.0
        """When to give up, by `time.monotonic()`; `final` is the caller's deadline."""
        self.final = 0.0
        self._failure: tuple[type[TransportError], str, str | None, int] | None = None
        self.closed = False

    def _begin(self, sizes: Sequence[int], deadline_s: float, reserve: float) -> None:
        self._check_usable()
        assert self.done == len(self.sizes), (
            f"start: bucket {self.done} of {len(self.sizes)} of the last publish is open"
        )
        assert all(0 < n <= self.group.bucket_bytes for n in sizes), "start: a bucket does not fit a buffer"
        self.sizes = tuple(sizes)
        self.posted = self.done = 0
        self.final = time.monotonic() + deadline_s
        self.end = self.final - reserve * min(RESERVE_S, 0.2 * deadline_s)

    def _check_usable(self) -> None:
        if self._failure is not None:
            kind, message, peer, bytes_done = self._failure
            raise kind(f"{self.group.name} failed before: {message}", peer=peer, bytes_done=bytes_done)
        if self.closed:
            raise TransportError(f"{self.group.name} is closed; open a new group (new epoch)")

    def _failed(self, kind: type[TransportError], text: str, peer: str | None) -> TransportError:
        """The error to raise. Remembered in parts: a kept exception would keep frames, and with them views."""
        message = f"{self.progress}: {text}; the group is closed, publish again in a new epoch"
        self._failure = (kind, message, peer, self.bytes_done)
        return kind(message, peer=peer, bytes_done=self.bytes_done)

    @property
    def connected(self) -> bool:
        """False once a connection is known to be gone, or this side has failed or ended."""
        return not self.closed and self._failure is None

    def left(self) -> float:
        """Seconds until `end`, not below 0."""
        return max(self.end - time.monotonic(), 0.0)

    @property
    def bytes_done(self) -> int:
        """Bytes of this publish that went through the caller's hands."""
        return sum(self.sizes[: self.done])

    @property
    def progress(self) -> str:
        total = sum(self.sizes)
        return f"{self.group.name}, bucket {self.done} of {len(self.sizes)}, {self.bytes_done} of {total} bytes done"
