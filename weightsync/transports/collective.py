"""Buckets as broadcasts of a private torch.distributed group: gloo, nccl, and other backends by name.

The sender packs bucket i+1 while bucket i is on the wire; receivers post the broadcasts of the next buckets before they
load the current one. Buffers are allocated and touched once, when the group is opened: fresh memory costs several
copies. The process group is built straight from the group's store (`_groups`), so no default group is touched.

A failure is followed by a short inquest over the store, because a broadcast is a tree and cannot tell who is stuck:
every survivor says that it is alive, then closes its connections, so that the others hear of it and say so too. Who has
said nothing is to blame.
"""

from __future__ import annotations

import collections
import contextlib
import re
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import PeerLost, TransferTimeout, TransportError
from weightsync.transports._endpoint import Endpoint, check_group, peer_name
from weightsync.transports._groups import DataGroup, backend_caps, open_group
from weightsync.transports.base import GroupInfo, TransportCaps

__all__ = ["CollectiveTransport"]

_WORD_S = 0.5
"""How long a rank that closed a connection has to say that it is alive; it does so before it closes any."""


class CollectiveTransport:
    """torch.distributed broadcast by backend name. See `weightsync.transports.base` for the protocol.

    Raises:
        UnsupportedError: this torch does not have the backend.
    """

    def __init__(self, backend: str) -> None:
        self._caps = backend_caps(backend)

    @property
    def caps(self) -> TransportCaps:
        return self._caps

    def open_sender(self, group: GroupInfo) -> _Sender:
        check_group(self._caps, group, sender=True)
        return _Sender(group, self._caps.name)

    def open_receiver(self, group: GroupInfo) -> _Receiver:
        check_group(self._caps, group, sender=False)
        return _Receiver(group, self._caps.name)


class _Member(Endpoint):
    """The common half of both sides: the group, its buffers, waiting, and what happens after a failure."""

    def __init__(self, group: GroupInfo, backend: str) -> None:
        super().__init__(group)
        # Before the rendezvous: a member that has no memory must not leave the others with a group of the dead.
        self.buffers = [
            torch.empty(group.bucket_bytes, dtype=torch.uint8, device=group.device).zero_()
            for _ in range(group.num_buffers)
        ]
        self.pg: DataGroup = open_group(backend, group)
        self.works: collections.deque[dist.Work] = collections.deque()
        # Also when the endpoint is forgotten, or at exit: a group that dies with the interpreter crashes it.
        self._retire = weakref.finalize(self, self.pg.retire)

    def _broadcast(self, index: int) -> None:
        view = self.buffers[index % len(self.buffers)][: self.sizes[index]]
        try:
            self.works.append(self.pg.broadcast(view, self.left()))
        except (dist.DistError, RuntimeError) as e:
            raise self._fail(e) from e

    def _wait_oldest(self) -> None:
        try:
            done = self.pg.wait(self.works[0], self.end)
        except (dist.DistError, RuntimeError) as e:
            raise self._fail(e) from e
        if not done:
            raise self._fail(None)
        self.works.popleft()

    def _fail(self, cause: Exception | None) -> TransportError:
        """Close the connections, find out who is to blame, and remember the error; `cause` None is the deadline."""
        saw = None if cause is None else self.pg.culprit(cause)
        with contextlib.suppress(TransportError):  # the store's host may be what died
            self.pg.say(saw, None)
        self.works.clear()
        if cause is not None:
            # Its frames hold the failed operation, which holds gloo's sockets and threads.
            cause.__traceback__ = None
        self._retire()
        try:
            blamed, why = self._inquest(saw)
            who = ", ".join(peer_name(self.group, rank) for rank in blamed)
        except TransportError as e:
            # No store, no inquest: its host is lost for certain, and a member that closed its connection may have done
            # so because of that. The sender is the exception, as it mostly is the host.
            who, why = (peer_name(self.group, 0) if saw == 0 else e.peer or ""), f"; {e}"
        kind: type[TransportError]
        if cause is None:
            kind = TransferTimeout
            found = f"no sign of life from {who}{why}" if who else "every rank answers: the deadline is too short"
            text = f"no progress before the deadline; {found}"
        else:
            kind = PeerLost
            text = f"lost {who or 'a connection, though every rank answers'} ({_plain(cause)}){why}"
        return self._failed(kind, text, who or None)

    def _inquest(self, saw: int | None) -> tuple[list[int], str]:
        """The ranks to blame, and why, if they said so. Raises `TransportError` if the store is gone."""
        start = time.monotonic()
        # Within the deadline if there is time left, and long enough for a rank that is just loading a bucket.
        end = start + min(max(self.final - start - 0.05, 0.2), 1.0)
        others = [r for r in range(self.group.size) if r != self.group.rank]
        heard: dict[int, dict[str, Any]] = {}
        while len(heard) < len(others) and time.monotonic() < end:
            heard |= self.pg.heard([r for r in others if r not in heard], end)
            for rank, said in heard.items():
                if said["left"] is not None:
                    return [rank], f", which {said['left']}"
            if saw in heard:
                # It closed its connections because of somebody else: go by what it saw.
                saw = heard[saw]["saw"]
                saw = None if saw == self.group.rank else saw
            elif saw is not None and time.monotonic() > start + _WORD_S:
                break
            time.sleep(0.005)
        return [saw] if saw is not None and saw not in heard else [r for r in others if r not in heard], ""

    @property
    def connected(self) -> bool:
        return super().connected and self.pg.connected

    def close(self) -> None:
        self._end("closed its side")

    def abort(self) -> None:
        self._end("aborted the transfer")

    def _end(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        self.works.clear()
        self.pg.farewell = why
        self._retire()
        self.buffers = []


class _Sender(_Member):
    def __init__(self, group: GroupInfo, backend: str) -> None:
        super().__init__(group, backend)
        self.bytes_sent = 0
        self._acquired = False

    def start(self, sizes: Sequence[int], deadline_s: float) -> None:
        self._begin(sizes, deadline_s, reserve=1.0)

    def acquire(self) -> torch.Tensor:
        self._check_usable()
        assert not self._acquired, "acquire: the last buffer was not sent"
        assert self.posted < len(self.sizes), "acquire: every bucket of this publish was sent"
        if len(self.works) == len(self.buffers):
            self._wait_oldest()
        self._acquired = True
        return self.buffers[self.posted % len(self.buffers)]

    def send(self, nbytes: int) -> None:
        self._check_usable()
        assert self._acquired, "send without acquire"
        assert nbytes == self.sizes[self.posted], f"send: {nbytes} bytes, planned {self.sizes[self.posted]}"
        self._acquired = False
        self._broadcast(self.posted)
        self.posted += 1
        self.done += 1
        self.bytes_sent += nbytes

    def finish(self) -> None:
        self._check_usable()
        assert self.posted == len(self.sizes), f"finish: {self.posted} of {len(self.sizes)} buckets were sent"
        while self.works:
            self._wait_oldest()


class _Receiver(_Member):
    def __init__(self, group: GroupInfo, backend: str) -> None:
        super().__init__(group, backend)
        self.bytes_received = 0
        self._held = False

    def start(self, sizes: Sequence[int], deadline_s: float) -> None:
        self._begin(sizes, deadline_s, reserve=0.5)
        while self.posted < min(len(self.sizes), len(self.buffers)):
            self._broadcast(self.posted)
            self.posted += 1

    def receive(self) -> torch.Tensor:
        self._check_usable()
        assert not self._held, "receive: the last bucket was not released"
        assert self.done < len(self.sizes), "receive: every bucket of this publish was received"
        self._wait_oldest()
        self._held = True
        nbytes = self.sizes[self.done]
        self.bytes_received += nbytes
        return self.buffers[self.done % len(self.buffers)][:nbytes]

    def release(self) -> None:
        self._check_usable()
        assert self._held, "release without receive"
        self._held = False
        self.done += 1
        if self.posted < len(self.sizes):
            self._broadcast(self.posted)
            self.posted += 1

    def finish(self) -> None:
        self._check_usable()
        assert self.done == len(self.sizes), f"finish: {self.done} of {len(self.sizes)} buckets were released"


def _plain(error: Exception) -> str:
    """A backend's message without its source position and advice."""
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).splitlines()[0]).split(". This is", 1)[0]
