"""The store through which ranks vote: a TCPStore on a socket of its own, never waited on for ever.

The trainer of rank 0 hosts it (`HostedStore`); every writer process, and every trainer that has to report the death of
its writer, talks to it through `Store`. Torch's client blocks without any limit when the host is stopped, whatever
timeout it was given, so each `Store` keeps its client on a daemon thread of its own: when an answer does not come in
time, the caller raises `StoreLost` and shuts the connection down, which ends that thread: a host whose link is down
sends no word of its end. A plain TCPStore listens on every address; this one gets a socket that already listens on one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from checkpoint.errors import ConfigError, StoreLost

__all__ = ["HostedStore", "Store"]

REPLY_TIMEOUT_S = 10.0
_OWN_S = 60.0
"""How long a store that was just started may take to answer its own process: its thread may start late."""
_Requests: TypeAlias = "queue.SimpleQueue[tuple[Callable[[dist.TCPStore], Any], queue.SimpleQueue[Any]] | None]"
_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - recognised in order to refuse them
_connecting = threading.Lock()
"""One client connects at a time, so that the socket that appears meanwhile is its."""


class HostedStore:
    """Serves the store from this process. `address` is what the other ranks need.

    Args:
        bind_host: the only address that is listened on.
        advertise_host: what others connect to, where that is another name for it.
        port_range: first and last port to try, in order; None lets the kernel choose one.

    Raises:
        ConfigError: a wildcard without `advertise_host`, a bad range, or an address or range without a free port here.
    """

    def __init__(
        self,
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        port_range: tuple[int, int] | None = None,
    ) -> None:
        if bind_host in _WILDCARDS and advertise_host is None:
            raise ConfigError(f"bind_host {bind_host!r} means every address: say advertise_host as well")
        if port_range is not None and not 0 < port_range[0] <= port_range[1] < 65536:
            raise ConfigError(f"port_range must be (first, last) within 1..65535, got {port_range}")
        listener = _listen(bind_host, [0] if port_range is None else range(port_range[0], port_range[1] + 1))
        port = listener.getsockname()[1]
        self.address = f"{advertise_host or bind_host}:{port}"
        self._store: dist.TCPStore | None = dist.TCPStore(
            bind_host or "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=_OWN_S),
            master_listen_fd=listener.detach(),
        )
        self._store.set_timeout(datetime.timedelta(seconds=REPLY_TIMEOUT_S))

    def close(self) -> None:
        self._store = None


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    failure: OSError | None = None
    for port in ports:
        try:
            listener = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=1024,
                dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),  # every address, IPv4 ones too
            )
        except OSError as e:
            failure = e
            continue
        _keep_alive(listener)
        return listener
    where = "any port" if list(ports) == [0] else f"ports {ports[0]}..{ports[-1]}"
    raise ConfigError(
        f"the store cannot listen on {host!r}, {where} ({failure}): bind_host must be an address of this host, and "
        "port_range hold a free port"
    )


def _keep_alive(sock: socket.socket) -> None:
    """Find out within 90 s that the other host is gone; what a listening socket accepts inherits it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _connections(port: int) -> Iterator[tuple[int, socket.socket]]:
    """(inode, duplicate to be closed) of this process's TCP connections to a port, whoever opened them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since the listing
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
            try:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if inet and sock.getpeername()[1] == port:
                    yield status.st_ino, sock
            finally:
                sock.close()


class _Link:
    """The connection of one client, which torch keeps to itself: found, so that it can be ended."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._before = {inode for inode, _ in _connections(port)}
        self._inode: int | None = None

    def made(self) -> None:
        for inode, sock in _connections(self._port):
            if inode not in self._before:
                self._inode = inode
                _keep_alive(sock)

    def end(self) -> None:
        """Whoever waits on it fails at once; also while it is being made."""
        for inode, sock in _connections(self._port):
            if inode == self._inode or (self._inode is None and inode not in self._before):
                with contextlib.suppress(OSError):  # the other side was faster
                    sock.shutdown(socket.SHUT_RDWR)


class Store:
    """A client. Every method returns or raises StoreLost within `reply_timeout_s`; safe for several threads.

    Args:
        address: "host:port" of a `HostedStore`.
        prefix: put before every key.

    Raises:
        StoreLost: nobody answers there.
    """

    def __init__(self, address: str, prefix: str = "", reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"store address {address!r}: expected host:port")
        self.address, self._prefix, self.reply_timeout_s = address, prefix, reply_timeout_s
        self._host, self._port = host, int(port)
        self._hint = ""
        if self._host.startswith("127.") or self._host in ("localhost", "::1"):
            self._hint = f"; {self._host} is each host's own: for ranks on other hosts give rank 0's one bind_host"
        self._lost: str | None = None
        self._requests: _Requests = queue.SimpleQueue()
        self._links: list[_Link] = []
        self._connect()

    def _connect(self) -> None:
        self._links = []
        args = (self._host, self._port, self._requests, self._links)
        threading.Thread(target=self._serve, args=args, name="checkpoint-store", daemon=True).start()
        self._call("connecting", lambda _: None)

    def revive(self) -> None:
        """Connect again if the store was lost: its host may only have been stopped, or cut off, for a while.

        Raises:
            StoreLost: it still does not answer.
        """
        if self._lost is not None:
            self._requests, self._lost = queue.SimpleQueue(), None
            self._connect()

    def _serve(self, host: str, port: int, requests: _Requests, links: list[_Link]) -> None:
        client: dist.TCPStore | None = None
        failure: BaseException | None = None
        try:
            # A plain socket first: torch's client would repeat a refusal until its timeout.
            socket.create_connection((host, port), timeout=self.reply_timeout_s).close()
            timeout = datetime.timedelta(seconds=self.reply_timeout_s)
            with _connecting:
                links.append(_Link(port))
                client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
                links[0].made()
        except (OSError, RuntimeError) as e:
            failure = e.with_traceback(None)
        while (request := requests.get()) is not None:
            work, reply = request
            if failure is None:
                assert client is not None
                try:
                    reply.put((True, work(client)))
                    continue
                except (OSError, RuntimeError) as e:
                    # Without its frames, which hold the client, and that its connection.
                    failure = e.with_traceback(None)
                    client = None
            reply.put((False, failure))

    def _call(self, doing: str, work: Callable[[dist.TCPStore], Any]) -> Any:
        if self._lost is not None:
            raise StoreLost(self._lost)
        reply: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests = self._requests
        requests.put((work, reply))
        try:
            ok, value = reply.get(timeout=self.reply_timeout_s)
        except queue.Empty:
            self._lost = (
                f"the coordinator's store at {self.address} did not answer within {self.reply_timeout_s:g} s while "
                f"{doing}: its host (the trainer of rank 0, unless another was given) is stopped or unreachable"
            )
            # The thread waits in the kernel for an answer, perhaps for ever.
            for link in list(self._links):
                link.end()
            requests.put(None)
            raise StoreLost(self._lost) from None
        if not ok:
            # Another thread that waited longer knows better: it shut the connection down.
            first_line = str(value).split("\n", 1)[0]
            self._lost = self._lost or (
                f"the coordinator's store at {self.address} is gone while {doing} ({first_line}): its host (the "
                f"trainer of rank 0, unless another was given) exited or closed its Checkpointer{self._hint}"
            )
            requests.put(None)
            raise StoreLost(self._lost) from value
        return value

    def set(self, key: str, value: Any) -> None:
        """Set `key` to a JSON value."""
        text = json.dumps(value, separators=(",", ":"))
        self._call(f"setting {key}", lambda client: client.set(self._prefix + key, text))

    def get(self, key: str) -> Any:
        """The value of `key`, or None if it has none."""

        def work(client: dist.TCPStore) -> Any:
            full = self._prefix + key
            return json.loads(client.get(full)) if client.check([full]) else None

        return self._call(f"reading {key}", work)

    def has(self, key: str) -> bool:
        """Whether `key` has a value."""
        return bool(self._call(f"looking for {key}", lambda client: client.check([self._prefix + key])))

    def forget(self, keys: Sequence[str]) -> None:
        """Remove keys, so that seals of old attempts do not pile up in the host's memory."""

        def work(client: dist.TCPStore) -> None:
            for key in keys:
                client.delete_key(self._prefix + key)

        self._call(f"removing {len(keys)} keys", work)

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of several keys, all of which exist."""
        full = [self._prefix + key for key in keys]
        values = self._call(f"reading {len(keys)} keys", lambda client: client.multi_get(full))
        return [json.loads(value) for value in values]

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter and return it."""
        return int(self._call(f"counting {key}", lambda client: client.add(self._prefix + key, more)))

    def decide(self, key: str, value: Any) -> Any:
        """Set `key` unless it has a value; returns the value that it has now, the same for everybody who asks."""
        text = json.dumps(value, separators=(",", ":"))
        return json.loads(
            self._call(f"deciding {key}", lambda client: client.compare_set(self._prefix + key, "", text))
        )

    def wait(self, key: str, end: float, poll_s: float = 0.02) -> Any:
        """The value of `key` once it has one, or None at `end` (monotonic seconds)."""
        pause = 0.001
        while True:
            value = self.get(key)
            if value is not None or time.monotonic() >= end:
                return value
            time.sleep(min(pause, max(end - time.monotonic(), 0)))
            pause = min(2 * pause, poll_s)

    def close(self) -> None:
        """End the thread, if it still listens."""
        self._requests.put(None)
