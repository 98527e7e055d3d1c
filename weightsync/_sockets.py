"""Find the TCP sockets that C++ libraries of this process opened and never hand out.

torch's TCPStore client and gloo keep their descriptors to themselves, and both can wait in the kernel for a peer that
is stopped (SIGSTOP: its kernel still answers, so no keepalive ends the wait). A socket found by its addresses can be
given a receive timeout, or be shut down so that whoever waits on it fails at once. Used by `weightsync.store` and
`weightsync.transports.collective`; Linux only (reads /proc/self/fd). Beside them, what two processes must share to
reach each other's loopback addresses (`machine`, `is_loopback`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator

__all__ = [
    "Address",
    "Endpoints",
    "address_of",
    "find",
    "is_dead",
    "is_loopback",
    "keep_alive",
    "machine",
    "probe_idle",
    "set_reply_timeout",
    "shut_down",
    "take",
]

IDLE_S, PROBE_EVERY_S, MAX_PROBES = 30, 10, 6
"""A connection that is silent for `IDLE_S` is probed; after `MAX_PROBES` without an answer it is gone. A host that lost
its link sends no word of it, and a firewall forgets connections that are silent for longer."""

Address = tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoints:
    """The two ends of a TCP socket as (address, port); `remote` is None for one that listens or isn't connected."""

    local: Address
    remote: Address | None
    listening: bool


def machine() -> dict[str, str]:
    """What two processes have in common that reach each other's loopback addresses and abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return {"boot": boot, "net": os.readlink("/proc/self/ns/net"), "host": socket.gethostname()}


def is_loopback(host: str) -> bool:
    """Whether this address, or name, means another machine to each."""
    return host.startswith("127.") or host in ("localhost", "::1")


@contextlib.contextmanager
def _borrow(fd: int) -> Iterator[socket.socket | None]:
    """A socket object on a descriptor that somebody else owns: nothing is closed, its blocking mode stays."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            yield None
            return
        blocking = os.get_blocking(fd)
        borrowed = socket.socket(fileno=fd)
    except OSError:  # closed by its owner since the listing
        yield None
        return
    try:
        # socket.setdefaulttimeout() of the program makes Python switch every new socket object to non-blocking.
        if os.get_blocking(fd) != blocking:
            os.set_blocking(fd, blocking)
        yield borrowed
    finally:
        borrowed.detach()


def address_of(name: tuple[object, ...]) -> Address:
    """(address, port) of what getsockname() or getpeername() gave; IPv4 in IPv6 clothes (::ffff:a.b.c.d) as IPv4."""
    host, port = str(name[0]), name[1]
    assert isinstance(port, int)
    return host.removeprefix("::ffff:") if "." in host else host, port


def _endpoints(sock: socket.socket) -> Endpoints | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    local = address_of(sock.getsockname())
    listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    try:
        remote = address_of(sock.getpeername())
    except OSError:
        remote = None
    return Endpoints(local=local, remote=remote, listening=listening)


def _each() -> Iterator[tuple[int, socket.socket, Endpoints]]:
    for name in os.listdir("/proc/self/fd"):
        with _borrow(int(name)) as sock:
            if sock is None:
                continue
            try:
                ends = _endpoints(sock)
            except OSError:  # closed by its owner since the listing
                continue
            if ends is not None:
                yield int(name), sock, ends


def find(wanted: Callable[[Endpoints], bool] = lambda _: True) -> set[Endpoints]:
    """The TCP sockets of this process for which `wanted` holds."""
    return {ends for _, _, ends in _each() if wanted(ends)}


def take(ends: Endpoints) -> socket.socket | None:
    """A duplicate of that socket, or None if it is gone; keeps the connection open until it is closed, too."""
    for _, sock, found in _each():
        if found == ends:
            return sock.dup()
    return None


def shut_down(ends: set[Endpoints], how: int = socket.SHUT_RDWR) -> int:
    """Shut these sockets down, whoever owns them (`how` as in `socket.shutdown`); returns how many were still there."""
    count = 0
    for _, sock, found in _each():
        if found in ends:
            with contextlib.suppress(OSError):  # the peer was faster
                sock.shutdown(how)
            count += 1
    return count


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out that the other host is gone (see `IDLE_S`); what a socket accepts inherits it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_PROBES)


def probe_idle(ends: set[Endpoints]) -> None:
    """`keep_alive` for these sockets, whoever owns them."""
    for _, sock, found in _each():
        if found in ends:
            keep_alive(sock)


def is_dead(sock: socket.socket) -> bool:
    """Whether the kernel knows that nothing will come from the other side any more; reads nothing."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def set_reply_timeout(sock: socket.socket, seconds: float) -> None:
    """Let the kernel end a blocking read or write of this socket after `seconds` with EAGAIN."""
    micros = max(1, math.ceil(seconds * 1e6))
    value = struct.pack("ll", micros // 1_000_000, micros % 1_000_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
