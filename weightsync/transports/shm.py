"""Buckets through memory that one sender and the engine ranks of its host share: one copy in, one copy out per rank.

The sender makes a memfd, a ring of `num_buffers` slots of `bucket_bytes`, and listens on an abstract unix socket; name
and a random token are in the group's store. Each receiver connects, shows the token, and gets the memfd's descriptor
over the socket (SCM_RIGHTS). From then on the socket carries the credits: the sender says which bucket is in its
slot, the receiver that it has loaded it. So every wait is a poll() with a deadline, a dead peer is an end of file at
once, and there is no file, name or semaphore that a killed process could leave behind.

Buffers are CPU memory: tensors of other devices are copied when packed, and views are copied by the loader to where
the parameters are. Linux only. Processes forked from a member must not outlive it: they hold its sockets open.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import math
import mmap
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

import torch

from weightsync.errors import PeerLost, TransferTimeout, TransportError, UnsupportedError
from weightsync.store import decide, put_json, translated, wait_key
from weightsync.transports._endpoint import Endpoint, check_group, peer_name
from weightsync.transports.base import GroupInfo, TransportCaps

__all__ = ["SharedMemoryTransport"]

_CREDIT = struct.Struct("<cQQ")
"""What is said of one bucket: kind, its number since the group was opened, its bytes."""

_PRODUCED, _CONSUMED = b"P", b"C"
_READY, _GO = b"R", b"G"
"""Rendezvous: here is the memory / I have mapped it; everybody has."""
_FAILED = b"F"
"""Followed by JSON: why this side hangs up."""
_MAX_MESSAGE = 4096
_PAGE = mmap.PAGESIZE


_E = TypeVar("_E", bound="_Member")


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
        return _joined(_Sender(group))

    def open_receiver(self, group: GroupInfo) -> _Receiver:
        check_group(self._caps, group, sender=False)
        return _joined(_Receiver(group))


def _joined(endpoint: _E) -> _E:
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
        raise TransportError(f"{group.name}: shared memory transport: {e}") from e
    return endpoint


def _machine() -> dict[str, str]:
    """What two processes must have in common to reach each other's abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return {"boot": boot, "net": os.readlink("/proc/self/ns/net"), "host": socket.gethostname()}


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


class _Member(Endpoint):
    """The common half of both sides: sockets to the other side, credits, and what happens after a failure."""

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

    def _given_up(self, end: float) -> str | None:
        """Why a member gave up on the rendezvous, if one did."""
        store = self.group.store
        with translated(store, f"joining {self.group.name}", end):
            return store.get("failed").decode(errors="replace") if store.check(["failed"]) else None

    def _slot(self, number: int, nbytes: int) -> torch.Tensor:
        assert self.ring is not None
        offset = number % self.group.num_buffers * self.stride
        return self.ring[offset : offset + nbytes]

    def _wait(self, target: int, what: str) -> None:
        """Until every rank of the other side has a credit of `target`; sees lost peers even if there is no need."""
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
            behind = [rank for rank, credit in self.credits.items() if credit < target]
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
                message = self.links[rank].recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left messages of ours unread; what it said before is still to come
                continue
            if not message or message[:1] == _FAILED:
                self.gone[rank] = json.loads(message[1:]) if message else None
                return
            kind, number, nbytes = _CREDIT.unpack(message)
            if number != self.credits[rank] + 1:
                text = f"{who} said {kind!r} of bucket {number} after {self.credits[rank]}"
                raise self._fail(TransportError, text, who)
            self.credits[rank] = number
            if kind == _PRODUCED:
                self.announced.append((number, nbytes))

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
        for rank, link in self.links.items():
            try:
                link.send(_CREDIT.pack(kind, number, nbytes))
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
        said = {"kind": kind.__name__, "peer": peer, "text": text[: _MAX_MESSAGE // 8]}
        for link in self.links.values():
            with contextlib.suppress(OSError):  # it is gone, or stopped and its queue is full
                link.setblocking(False)
                link.send(_FAILED + json.dumps(said).encode())
            link.close()
        self.links.clear()
        self.ring = None

    def close(self) -> None:
        self._leave("closed its side")

    def abort(self) -> None:
        self._leave("aborted the transfer")

    def _leave(self, why: str) -> None:
        if not self.closed:
            self.closed = True
            me = peer_name(self.group, self.group.rank)
            self.hang_up(PeerLost, f"{me} {why}", me)


class _Sender(_Member):
    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self.bytes_sent = 0
        self._acquired = False

    def join(self, end: float) -> None:
        fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                # Allocates the pages: writing to a mapping that has none left ends the process with SIGBUS instead.
                os.posix_fallocate(fd, 0, self.ring_bytes)
            except OSError as e:
                raise _no_memory(self.group, self.ring_bytes, e) from e
            # Nobody can shrink it under the others' feet.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.ring = _map(self.group, fd, self.ring_bytes)
            name, token = f"weightsync-{secrets.token_hex(16)}", secrets.token_hex(16)
            listener.bind(f"\0{name}")
            listener.listen(self.group.size)
            put_json(self.group.store, "socket", {**_machine(), "name": name, "token": token})
            self._accept(listener, token, fd, end)
        finally:
            listener.close()
            os.close(fd)
        for link in self.links.values():
            link.send(_GO)
        self.credits = dict.fromkeys(self.links, 0)

    def _accept(self, listener: socket.socket, token: str, fd: int, end: float) -> None:
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
                            rank = self._greet(link, message, token, fd)
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

    def _greet(self, link: socket.socket, hello: bytes, token: str, fd: int) -> int | None:
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
                socket.send_fds(link, [_READY], [fd])
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


class _Receiver(_Member):
    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self.bytes_received = 0
        self._held = False

    def join(self, end: float) -> None:
        group, sender = self.group, peer_name(self.group, 0)
        found, value = wait_key(group.store, ["failed", "socket"], max(end - time.monotonic(), 0.0))
        if found != "socket":
            raise PeerLost(value.decode(errors="replace"))
        there, here = json.loads(value), _machine()
        if there["boot"] != here["boot"]:
            raise UnsupportedError(
                f"{group.name}: transport 'shm' needs one host: {sender} is on {there['host']}, "
                f"{peer_name(group, group.rank)} on {here['host']}; use gloo or nccl"
            )
        if there["net"] != here["net"]:
            raise UnsupportedError(
                f"{group.name}: transport 'shm' needs one network namespace: {sender} and "
                f"{peer_name(group, group.rank)} are in different containers of {here['host']}; use gloo, or run them "
                "with the host's network"
            )
        link = self.links[0] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.settimeout(max(end - time.monotonic(), 0.001))
            link.connect(f"\0{there['name']}")
            link.send(json.dumps({"rank": group.rank, "token": there["token"]}).encode())
            message, fds, _, _ = socket.recv_fds(link, _MAX_MESSAGE, 1)
            if not fds:
                raise PeerLost(f"{group.name}: {sender} refused: {message.decode(errors='replace') or 'it left'}")
            try:
                self.ring = _map(group, fds[0], self.ring_bytes)
            finally:
                os.close(fds[0])
            link.send(_READY)
            link.settimeout(max(end - time.monotonic(), 0.001))
            message = link.recv(_MAX_MESSAGE)
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
        return link.recv(_MAX_MESSAGE)
    except OSError:
        return b""
