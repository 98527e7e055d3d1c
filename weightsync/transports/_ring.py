"""A ring of slots that one sender and the receivers of its host share, and the credits that say who may touch which.

`shm` and `ipc` subclass `RingSender` and `RingReceiver`; they add what the slots are made of and how a receiver gets to
map them. Everything else is here. The sender listens on an abstract unix socket; name and a random token are in the
group's store. Each receiver connects, shows the token, and is told how to map the memory (`offer`, `take`; the message
may carry descriptors, SCM_RIGHTS). From then on the socket carries the credits: the sender says which bucket is in its
slot, the receiver that it has loaded it. So every wait is a poll() with a deadline, a dead peer is an end of file at
once, and there is no file, name or semaphore that a killed process could leave behind.

Linux only. Processes forked from a member must not outlive it: they hold its sockets open.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import mmap
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from weightsync._sockets import machine
from weightsync.errors import PeerLost, TransferTimeout, TransportError, UnsupportedError
from weightsync.store import decide, put_json, translated, wait_key
from weightsync.transports._endpoint import Endpoint, peer_name
from weightsync.transports.base import GroupInfo

__all__ = ["RingMember", "RingReceiver", "RingSender", "joined"]

_CREDIT = struct.Struct("<cQQ")
"""What is said of one bucket: kind, its number since the group was opened, its bytes."""

_PRODUCED, _CONSUMED = b"P", b"C"
_READY, _GO = b"R", b"G"
"""Rendezvous: I have mapped the memory that was offered; everybody has."""
OFFER = b"M"
"""Followed by what the transport needs to map the memory."""
_FAILED = b"F"
"""Followed by JSON: why this side hangs up."""
MAX_MESSAGE = 4096
_VERDICT_S = 0.5
"""How long after its own deadline a receiver still waits for the sender, which alone knows who is missing."""
_PAGE = mmap.PAGESIZE


_E = TypeVar("_E", bound="RingMember")


def joined(endpoint: _E) -> _E:
    """Rendezvous; if that fails, tell the other members why, so that none of them waits for the deadline."""
    group = endpoint.group
    me = peer_name(group, group.rank)
    try:
        endpoint.join(time.monotonic() + group.deadline_s)
    except (TransportError, UnsupportedError, OSError) as e:
        reason = f"{me} gave up on {group.name}: {e}"
        with contextlib.suppress(TransportError):  # the coordinator may be what failed
            decide(group.store, "failed", reason)
        endpoint.hang_up(PeerLost, reason, me)
        if isinstance(e, TransportError | UnsupportedError):
            raise
        raise TransportError(f"{group.name}: transport {endpoint.transport!r}: {e}") from e
    return endpoint


class RingMember(Endpoint):
    """The common half of both sides: sockets to the other side, credits, and what happens after a failure."""

    transport = ""
    """Its name, for messages."""

    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self.stride = -(-group.bucket_bytes // _PAGE) * _PAGE
        self.links: dict[int, socket.socket] = {}
        self.credits: dict[int, int] = {}
        """Rank of the other side -> how many buckets since the group was opened it has produced or consumed."""
        self.announced: collections.deque[tuple[int, int]] = collections.deque()
        """Receiver: number and bytes of buckets that are in their slots and were not taken yet."""
        self.count = 0
        """Buckets since the group was opened that this side has produced or consumed."""
        self.gone: dict[int, dict[str, str] | None] = {}
        """Ranks of the other side that hung up -> what they said, if anything."""
        self.ring: torch.Tensor | None = None

    def join(self, end: float) -> None:
        raise NotImplementedError

    @property
    def ring_bytes(self) -> int:
        return self.stride * self.group.num_buffers

    def drop_ring(self) -> None:
        """Let go of this side's memory; views that are still held keep what they need of it."""
        self.ring = None

    def _given_up(self, end: float) -> str | None:
        """Why a member gave up on the rendezvous, if one did."""
        store = self.group.store
        with translated(store, f"joining {self.group.name}", end):
            return store.get("failed").decode(errors="replace") if store.check(["failed"]) else None

    def _slot(self, number: int, nbytes: int) -> torch.Tensor:
        assert self.ring is not None
        offset = number % self.group.num_buffers * self.stride
        return self.ring[offset : offset + nbytes]

    def _wait(self, target: int, what: str, credits: Mapping[int, int] | None = None) -> None:
        """Until every rank of the other side has a credit of `target`; sees lost peers even if there is no need."""
        counts = self.credits if credits is None else credits
        poller = select.poll()
        rank_of = {}
        for rank in self.links.keys() - self.gone.keys():
            poller.register(self.links[rank], select.POLLIN)
            rank_of[self.links[rank].fileno()] = rank
        timeout_ms = 0
        while True:
            for fd, _ in poller.poll(timeout_ms):
                self._read(rank_of[fd])
                if rank_of[fd] in self.gone:
                    poller.unregister(fd)
            behind = [rank for rank, credit in counts.items() if credit < target]
            # One that has all it needs may leave while others still load.
            for rank in self.gone if self.posted < len(self.sizes) else self.gone.keys() & set(behind):
                raise self._fail(*self._account(rank))
            if not behind:
                return
            left_s = self.left()
            if left_s <= 0:
                who = ", ".join(peer_name(self.group, rank) for rank in behind)
                raise self._fail(TransferTimeout, f"{who} {what} before the deadline", who)
            timeout_ms = math.ceil(1e3 * left_s)

    def _read(self, rank: int) -> None:
        """Take in everything that the other side has said so far."""
        who = peer_name(self.group, rank)
        while True:
            try:
                message = self.links[rank].recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left messages of ours unread; what it said before is still to come
                continue
            if not message or message[:1] == _FAILED:
                self.gone[rank] = json.loads(message[1:]) if message else None
                return
            if self.heard(rank, message):
                continue
            kind, number, nbytes = _CREDIT.unpack(message)
            if number != self.credits[rank] + 1:
                text = f"{who} said {kind!r} of bucket {number} after {self.credits[rank]}"
                raise self._fail(TransportError, text, who)
            self.credits[rank] = number
            if kind == _PRODUCED:
                self.announced.append((number, nbytes))

    def heard(self, rank: int, message: bytes) -> bool:
        """Whether `message` of `rank` was one that only this transport knows."""
        return False

    def _account(self, rank: int) -> tuple[type[TransportError], str, str]:
        """Kind, text and culprit of the loss of `rank`, which is in `gone`."""
        who, said = peer_name(self.group, rank), self.gone[rank]
        if said is None:
            return PeerLost, f"{who} is gone: its process exited or was killed", who
        if said["kind"] != TransferTimeout.__name__:
            return PeerLost, f"{who} says: {said['text']}", said["peer"]
        behind = [r for r, credit in self.credits.items() if credit < self.count and r not in self.gone]
        if behind:
            # It waited for us while we wait for others: they are the ones to name.
            names = ", ".join(peer_name(self.group, r) for r in behind)
            return TransferTimeout, f"{names} did not load a bucket before {who} gave up", names
        return TransferTimeout, f"{who} says: {said['text']}", said["peer"]

    def _tell(self, kind: bytes, number: int, nbytes: int) -> None:
        self.before_credit()
        for rank in list(self.links):
            self.say(rank, _CREDIT.pack(kind, number, nbytes))

    def before_credit(self) -> None:
        """A slot is about to change hands: whatever this side still does to it must be over."""

    def say(self, rank: int, message: bytes) -> None:
        try:
            self.links[rank].send(message)
        except OSError:
            # Gone, perhaps with a word why; or it has not read for hundreds of buckets, which cannot be.
            self._read(rank)
            self.gone.setdefault(rank, None)
            raise self._fail(*self._account(rank)) from None

    def _fail(self, kind: type[TransportError], text: str, peer: str) -> TransportError:
        self.hang_up(kind, text, peer)
        return self._failed(kind, text, peer)

    def hang_up(self, kind: type[TransportError], text: str, peer: str) -> None:
        """Tell the other side why, as far as it can hear it, and let go of sockets and memory."""
        said = {"kind": kind.__name__, "peer": peer, "text": text[: MAX_MESSAGE // 8]}
        for link in self.links.values():
            with contextlib.suppress(OSError):  # it is gone, or stopped and its queue is full
                link.setblocking(False)
                link.send(_FAILED + json.dumps(said).encode())
            link.close()
        self.links.clear()
        self.drop_ring()

    def close(self) -> None:
        self._leave("closed its side")

    def abort(self) -> None:
        self._leave("aborted the transfer")

    def _leave(self, why: str) -> None:
        if not self.closed:
            self.closed = True
            me = peer_name(self.group, self.group.rank)
            self.hang_up(PeerLost, f"{me} {why}", me)


class RingSender(RingMember):
    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self.bytes_sent = 0
        self._acquired = False

    def facts(self) -> dict[str, Any]:
        """What receivers must know before they connect, besides the socket."""
        return {}

    def make_ring(self) -> None:
        """Set `ring`. Raises `TransportError` or `UnsupportedError`."""
        raise NotImplementedError

    def offer(self, rank: int) -> tuple[bytes, list[int]]:
        """How the receiver `rank` maps the memory, and descriptors that go with it."""
        raise NotImplementedError

    def offered(self) -> None:
        """Every receiver has mapped the memory, or the rendezvous failed."""

    def join(self, end: float) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.make_ring()
            name, token = f"weightsync-{secrets.token_hex(16)}", secrets.token_hex(16)
            listener.bind(f"\0{name}")
            listener.listen(self.group.size)
            put_json(self.group.store, "socket", {**machine(), **self.facts(), "name": name, "token": token})
            self._accept(listener, token, end)
        finally:
            listener.close()
            self.offered()
        for link in self.links.values():
            link.send(_GO)
        self.credits = dict.fromkeys(self.links, 0)

    def _accept(self, listener: socket.socket, token: str, end: float) -> None:
        """Until every receiver has shown the token and mapped the memory."""
        group = self.group
        listener.setblocking(False)
        strangers: set[socket.socket] = set()
        missing = {rank: peer_name(group, rank) for rank in range(1, group.size)}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(listener, selectors.EVENT_READ)
                while missing:
                    # In slices, as a receiver that cannot come says so in the store.
                    self._check_rendezvous(missing, end)
                    for key, _ in selector.select(min(max(end - time.monotonic(), 0.0), 0.05)):
                        link = key.fileobj
                        assert isinstance(link, socket.socket)
                        if link is listener:
                            stranger, _ = listener.accept()
                            stranger.setblocking(False)
                            strangers.add(stranger)
                            selector.register(stranger, selectors.EVENT_READ)
                            continue
                        message = _receive(link)
                        if link in strangers:
                            strangers.remove(link)
                            rank = self._greet(link, message, token)
                            if rank is None:
                                selector.unregister(link)
                                link.close()
                            else:
                                self.links[rank] = link
                            continue
                        rank = next(r for r, known in self.links.items() if known is link)
                        if message != _READY:
                            self._check_rendezvous(missing, end)
                            raise PeerLost(f"{group.name}: {missing[rank]} left the rendezvous", peer=missing[rank])
                        selector.unregister(link)
                        del missing[rank]
        finally:
            for stranger in strangers:
                stranger.close()

    def _check_rendezvous(self, missing: dict[int, str], end: float) -> None:
        reason = self._given_up(end)
        if reason is not None:
            raise PeerLost(reason)
        if time.monotonic() >= end:
            raise TransferTimeout(
                f"{self.group.name}: rendezvous of the data group: no word from {', '.join(missing.values())} within "
                f"{self.group.deadline_s:g} s",
                peer=", ".join(missing.values()),
            )

    def _greet(self, link: socket.socket, hello: bytes, token: str) -> int | None:
        """Pass the memory to a receiver that may have it; returns its rank, or None after telling it why not."""
        _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        try:
            said = json.loads(hello)
            rank, shown = int(said["rank"]), str(said["token"])
        except (ValueError, KeyError, TypeError):
            refusal = "expected a greeting with rank and token"
        else:
            if uid not in (os.geteuid(), 0):
                refusal = f"user {uid} may not map the memory of user {os.geteuid()}: run both as one user"
            elif not secrets.compare_digest(shown.encode(), token.encode()):
                refusal = "wrong token"
            elif not 0 < rank < self.group.size or rank in self.links:
                refusal = f"rank {rank} is taken, or not one of 1..{self.group.size - 1}"
            else:
                message, fds = self.offer(rank)
                socket.send_fds(link, [OFFER + message], fds)
                return rank
        with contextlib.suppress(OSError):  # a stranger that doesn't listen
            link.send(refusal.encode())
        return None

    def start(self, sizes: Sequence[int], deadline_s: float) -> None:
        self._begin(sizes, deadline_s, reserve=1.0)
        self._wait(0, "")

    def acquire(self) -> torch.Tensor:
        self._check_usable()
        assert not self._acquired, "acquire: the last buffer was not sent"
        assert self.posted < len(self.sizes), "acquire: every bucket of this publish was sent"
        self._wait(self.count - self.group.num_buffers + 1, "did not load a bucket")
        self._acquired = True
        return self._slot(self.count, self.group.bucket_bytes)

    def send(self, nbytes: int) -> None:
        self._check_usable()
        assert self._acquired, "send without acquire"
        assert nbytes == self.sizes[self.posted], f"send: {nbytes} bytes, planned {self.sizes[self.posted]}"
        self._acquired = False
        self.count += 1
        self._tell(_PRODUCED, self.count, nbytes)
        self.posted += 1
        self.done += 1
        self.bytes_sent += nbytes

    def finish(self) -> None:
        self._check_usable()
        assert self.posted == len(self.sizes), f"finish: {self.posted} of {len(self.sizes)} buckets were sent"
        self._wait(self.count, "did not load the last buckets")


class RingReceiver(RingMember):
    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self.bytes_received = 0
        self._held = False

    def check(self, there: Mapping[str, Any]) -> None:
        """Raises `UnsupportedError` if the sender, whose facts these are, can't share its memory with this process."""

    def take(self, message: bytes, fds: list[int]) -> None:
        """Map what the sender's `offer` says; the descriptors are closed afterwards."""
        raise NotImplementedError

    def join(self, end: float) -> None:
        group, sender = self.group, peer_name(self.group, 0)
        found, value = wait_key(group.store, ["failed", "socket"], max(end - time.monotonic(), 0.0))
        if found != "socket":
            raise PeerLost(value.decode(errors="replace"))
        there, here = json.loads(value), machine()
        if there["boot"] != here["boot"]:
            raise UnsupportedError(
                f"{group.name}: transport {self.transport!r} needs one host: {sender} is on {there['host']}, "
                f"{peer_name(group, group.rank)} on {here['host']}; use gloo or nccl"
            )
        if there["net"] != here["net"]:
            raise UnsupportedError(
                f"{group.name}: transport {self.transport!r} needs one network namespace: {sender} and "
                f"{peer_name(group, group.rank)} are in different containers of {here['host']}; use gloo, or run them "
                "with the host's network"
            )
        self.check(there)
        link = self.links[0] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.settimeout(max(end - time.monotonic(), 0.001))
            link.connect(f"\0{there['name']}")
            link.send(json.dumps({"rank": group.rank, "token": there["token"]}).encode())
            message, fds, _, _ = socket.recv_fds(link, MAX_MESSAGE, 1)
            try:
                if message[:1] != OFFER:
                    raise PeerLost(f"{group.name}: {sender} refused: {message.decode(errors='replace') or 'it left'}")
                self.take(message[1:], fds)
            finally:
                for fd in fds:
                    os.close(fd)
            link.send(_READY)
            link.settimeout(max(end - time.monotonic(), 0.001) + _VERDICT_S)
            message = link.recv(MAX_MESSAGE)
        except TimeoutError as e:
            raise TransferTimeout(
                f"{group.name}: rendezvous of the data group: not complete within {group.deadline_s:g} s", peer=sender
            ) from e
        except OSError as e:
            reason = self._given_up(end)
            raise PeerLost(reason or f"{group.name}: {sender} is gone: {e}", peer=sender) from e
        link.setblocking(False)
        self.credits = {0: 0}
        if message[:1] == _FAILED:
            said = json.loads(message[1:])
            raise PeerLost(f"{group.name}: {sender} says: {said['text']}", peer=said["peer"])
        if message != _GO:
            raise PeerLost(f"{group.name}: {sender} left the rendezvous", peer=sender)

    def start(self, sizes: Sequence[int], deadline_s: float) -> None:
        self._begin(sizes, deadline_s, reserve=0.5)

    def receive(self) -> torch.Tensor:
        self._check_usable()
        assert not self._held, "receive: the last bucket was not released"
        assert self.done < len(self.sizes), "receive: every bucket of this publish was received"
        self._wait(self.count + 1, "sent no bucket")
        number, nbytes = self.announced.popleft()
        if (number, nbytes) != (self.count + 1, self.sizes[self.done]):
            sender = peer_name(self.group, 0)
            raise self._fail(
                TransportError,
                f"{sender} sent bucket {number} of {nbytes} bytes, expected bucket {self.count + 1} of "
                f"{self.sizes[self.done]}: both sides must use one plan",
                sender,
            )
        self._held = True
        self.bytes_received += nbytes
        return self._slot(self.count, nbytes)

    def release(self) -> None:
        self._check_usable()
        assert self._held, "release without receive"
        self._held = False
        self.count += 1
        self.done += 1
        self._tell(_CONSUMED, self.count, 0)

    def finish(self) -> None:
        self._check_usable()
        assert self.done == len(self.sizes), f"finish: {self.done} of {len(self.sizes)} buckets were released"


def _receive(link: socket.socket) -> bytes:
    """One message, or b"" if the other side is gone."""
    try:
        return link.recv(MAX_MESSAGE)
    except OSError:
        return b""
