"""The coordinator's store: hosted by trainer rank 0, joined by every sender and engine rank, never waited on for ever.

Order: rank 0 calls `host_store` when the publisher is built; everybody else `connect_store`s to the address that it
advertises. Then values are JSON (`put_json`, `get_json`), every wait is `wait_key` or `wait_all`, the one decision of a
publish is `decide`, and a `Heartbeat` of each process shows a `HeartbeatReader` that it is still scheduled.

What torch's TCPStore does not give, and this module adds:
- A plain TCPStore listens on every address of the host. Here it gets a socket that already listens on one address.
- A blocking `wait` holds the client's lock, so other threads of the process stand still: waits poll `check` instead.
- A client whose host is stopped (not dead) waits for ever, whatever timeout it was given. The connection gets a receive
  timeout from the kernel; after one it is shut down, as a late answer would be taken for that to the next question.
- Its exceptions are RuntimeErrors with C++ stacks: here `PeerLost` or `TransferTimeout`, naming the coordinator.

A store may be used by several threads. `set` has no answer: that it returned says nothing about the host.

long: hosting, joining and waiting share what keeps one client of a TCPStore from waiting for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from weightsync import _sockets
from weightsync.config import WILDCARDS
from weightsync.errors import ConfigError, PeerLost, TransferTimeout, TransportError

__all__ = [
    "Heartbeat",
    "HeartbeatReader",
    "HostedStore",
    "connect_store",
    "decide",
    "get_json",
    "host_store",
    "is_connected",
    "put_json",
    "translated",
    "wait_all",
    "wait_key",
]

REPLY_TIMEOUT_S = 10.0
"""A coordinator that answers nothing for so long is lost. Its server is a C++ thread: no GIL and no training step
delays it, only a stopped process or a dead network."""

_SLACK_S = 1.0
"""How much later than its deadline a call may end: the least time an answer is given, so that a loaded host that
answers the last question of a wait a little late does not lose the connection."""

_OWN_S = 60.0
"""How long a store that was just started may take to answer its own process: it has to start a thread first."""

_connecting = threading.Lock()
"""One connect at a time, so that the socket that appears meanwhile is ours."""


class _ClientStore(dist.TCPStore):
    """A TCPStore that knows its own connection."""

    weightsync_socket: socket.socket | None = None
    weightsync_address: str = ""
    weightsync_lost: str | None = None
    """Why the connection can't be used any more."""

    def __del__(self) -> None:
        # The duplicate goes with the client: a socket object that is merely collected warns that it was not closed.
        if self.weightsync_socket is not None:
            self.weightsync_socket.close()


@dataclasses.dataclass(kw_only=True, slots=True)
class HostedStore:
    """A store served by this process. `host` and `port` are what to advertise."""

    host: str
    port: int
    _store: dist.TCPStore | None

    @property
    def store(self) -> dist.TCPStore:
        """This process's own client of it."""
        if self._store is None:
            raise TransportError("the coordinator store is closed")
        return self._store

    def close(self) -> None:
        """Stop serving; clients see a closed connection. Whoever still holds `store` keeps it alive."""
        self._store = None

    def __enter__(self) -> HostedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(bind_host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(
        bind_host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Else the server would hold connections of hosts that are gone for as long as it runs.
        _sockets.keep_alive(sock)
        sock.bind(address)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock


def host_store(
    bind_host: str = "127.0.0.1",
    port_range: tuple[int, int] | None = None,
    advertise_host: str | None = None,
) -> HostedStore:
    """Serve a store on one address.

    Args:
        bind_host: the only address that is listened on.
        port_range: first and last port to try, in order; None lets the kernel choose one.
        advertise_host: what others connect to, where that differs from `bind_host` (needed for a wildcard).

    Raises:
        ConfigError: a wildcard without `advertise_host`, or a bad range.
        TransportError: no port of the range is free, or the address is not of this host.
    """
    if advertise_host is None and bind_host in WILDCARDS:
        raise ConfigError(f"bind_host {bind_host!r} means every address: say with advertise_host which one others use")
    if port_range is not None and not 0 < port_range[0] <= port_range[1] < 65536:
        raise ConfigError(f"port_range must be (first, last) within 1..65535, got {port_range}")
    failures: list[OSError] = []
    listener = None
    for port in [0] if port_range is None else range(port_range[0], port_range[1] + 1):
        try:
            listener = _listen(bind_host, port)
            break
        except OSError as e:
            failures.append(e)
            if e.errno not in (errno.EADDRINUSE, errno.EACCES):
                break  # the address: no other port helps, and a name that nobody knows may take seconds each time
    if listener is None:
        where = "any port" if port_range is None else f"ports {port_range[0]}..{port_range[1]}"
        raise TransportError(
            f"the coordinator store cannot listen on {bind_host}, {where}: {len(failures)} taken or refused "
            f"({failures[-1]}); widen port_range or correct bind_host"
        ) from failures[-1]
    port = listener.getsockname()[1]
    try:
        store = _ClientStore(
            host_name=bind_host or "127.0.0.1",
            port=port,
            is_master=True,
            timeout=datetime.timedelta(seconds=_OWN_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (dist.DistError, RuntimeError) as e:
        raise TransportError(
            f"the coordinator store listens on {bind_host}:{port}, but does not answer its own process: "
            f"{_first_line(e)}; does a firewall of this host drop what it sends to itself?"
        ) from e
    store.set_timeout(datetime.timedelta(seconds=REPLY_TIMEOUT_S))
    host = advertise_host if advertise_host is not None else bind_host
    store.weightsync_address = f"{host}:{port}"
    return HostedStore(host=host, port=port, _store=store)


def connect_store(host: str, port: int, deadline_s: float) -> dist.TCPStore:
    """Join the store that `host_store` serves at this address.

    Raises:
        PeerLost: nobody listens there, or the host closed the connection.
        TransferTimeout: it cannot be reached, or accepts and never answers, within `deadline_s`.
        TransportError: the name does not resolve, or the network refuses the route.
    """
    end = time.monotonic() + deadline_s
    where = f"coordinator {host}:{port}"
    if not _connecting.acquire(timeout=max(deadline_s, 0.0)):
        raise TransferTimeout(f"{where}: another thread was connecting to its store for {deadline_s:g} s", peer=where)
    try:
        # First with a plain socket: its errors are exact, and torch's client would retry a refusal until the deadline.
        remote = _probe(host, port, where, deadline_s)
        store = _handshake(remote, where, deadline_s, end)
    finally:
        _connecting.release()
    store.weightsync_address = f"{host}:{port}"
    return store


def _probe(host: str, port: int, where: str, deadline_s: float) -> _sockets.Address:
    """The numeric address that answers."""
    try:
        with socket.create_connection((host, port), timeout=max(deadline_s, 0.001)) as probe:
            return _sockets.address_of(probe.getpeername())
    except ConnectionRefusedError as e:
        raise PeerLost(f"{where} refused the connection: nothing listens there ({_why_not(host)})", peer=where) from e
    except TimeoutError as e:
        raise TransferTimeout(
            f"{where} cannot be reached: no answer within {deadline_s:g} s (firewall, or advertise_host is not an "
            "address of the trainer's rank 0 as seen from here)",
            peer=where,
        ) from e
    except OSError as e:
        raise TransportError(f"{where} cannot be reached: {e}; check advertise_host", peer=where) from e


def _why_not(host: str) -> str:
    if _sockets.is_loopback(host):
        return (
            f"{host} is each host's own: for engines on other hosts give the publisher bind_host, an address of its "
            "host that they reach, and advertise_host where they reach it under another; else: did the trainer's rank "
            "0 exit?"
        )
    return "did the trainer's rank 0 exit, or is advertise_host that of another host?"


def _handshake(remote: _sockets.Address, where: str, deadline_s: float, end: float) -> _ClientStore:
    def to_store(ends: _sockets.Endpoints) -> bool:
        return ends.remote == remote

    before = _sockets.find(to_store)
    # A stopped host: its kernel accepts, torch's handshake then waits without any timeout. Shut it down.
    fuse = threading.Timer(
        max(end - time.monotonic(), 0.001), lambda: _sockets.shut_down(_sockets.find(to_store) - before)
    )
    fuse.daemon = True
    fuse.start()
    try:
        store = _ClientStore(
            host_name=remote[0],
            port=remote[1],
            is_master=False,
            timeout=datetime.timedelta(seconds=max(end - time.monotonic(), 0.001)),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as e:
        if time.monotonic() >= end:
            raise TransferTimeout(
                f"{where} accepted the connection but did not answer within {deadline_s:g} s: is that process "
                "stopped, or is it no store?",
                peer=where,
            ) from e
        raise PeerLost(f"{where} closed the connection: {_first_line(e)}", peer=where) from e
    finally:
        fuse.cancel()
        fuse.join()
    for ends in _sockets.find(to_store) - before:
        sock = _sockets.take(ends)
        if sock is not None and store.weightsync_socket is None:
            store.weightsync_socket = sock
            _sockets.keep_alive(sock)
            _sockets.set_reply_timeout(sock, REPLY_TIMEOUT_S)
        elif sock is not None:  # of other code that connects to the same port at this moment
            sock.close()
    return store


def _first_line(e: BaseException) -> str:
    return str(e).split("\n", 1)[0]


def _root(store: dist.Store) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def is_connected(store: dist.Store) -> bool:
    """Whether its connection can still be used, as far as this host knows."""
    root = _root(store)
    if not isinstance(root, _ClientStore):
        return True
    sock = root.weightsync_socket
    return root.weightsync_lost is None and (sock is None or not _sockets.is_dead(sock))


@contextlib.contextmanager
def translated(store: dist.Store, doing: str, end: float | None = None) -> Iterator[None]:
    """Run store calls that must be over by `end` (monotonic seconds) or in `REPLY_TIMEOUT_S`.

    Raises:
        TransferTimeout: the coordinator did not answer; its connection is shut down then.
        PeerLost: it closed the connection.
    """
    root = _root(store)
    ours = root if isinstance(root, _ClientStore) else None
    peer = f"coordinator {ours.weightsync_address if ours is not None else getattr(root, 'host', '?')}"
    sock = ours.weightsync_socket if ours is not None else None
    if ours is not None and ours.weightsync_lost is not None:
        raise PeerLost(f"{peer} was lost before {doing}: {ours.weightsync_lost}", peer=peer)
    if sock is not None:
        left = REPLY_TIMEOUT_S if end is None else end - time.monotonic()
        _sockets.set_reply_timeout(sock, min(max(left, _SLACK_S), REPLY_TIMEOUT_S))
    try:
        yield
    except dist.DistStoreError as e:  # a wait of torch's own, for a key that nobody wrote: the connection is fine
        raise TransferTimeout(f"{peer}: {doing}: {_first_line(e)}", peer=peer) from e
    except (dist.DistError, RuntimeError) as e:
        silent = "timeout" in _first_line(e).lower()
        why = "it did not answer" if silent else f"it closed the connection ({_first_line(e)})"
        if ours is not None:
            ours.weightsync_lost = why
        if sock is not None:
            with contextlib.suppress(OSError):  # already closed by the other side
                sock.shutdown(socket.SHUT_RDWR)
        if silent:
            raise TransferTimeout(
                f"{peer} did not answer while {doing}: its process is stopped or its network is gone; publish again "
                "once the trainer runs",
                peer=peer,
            ) from e
        raise PeerLost(
            f"{peer} is gone while {doing}: {why}: the trainer's rank 0 exited; publish again with a new publisher",
            peer=peer,
        ) from e


def wait_key(
    store: dist.Store,
    keys: Sequence[str] | str,
    deadline_s: float,
    *,
    abort_keys: Sequence[str] = (),
    poll_s: float = 0.02,
) -> tuple[str, bytes]:
    """Wait for the first of `keys` or `abort_keys` to exist (looked at in this order); returns it and its value.

    Other threads of the process can use the store meanwhile. `poll_s` is the longest pause between two looks.

    Raises:
        TransferTimeout: no key by then, or no answer from the coordinator (at most a second later).
        PeerLost: the coordinator is gone.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    candidates = [*wanted, *abort_keys]
    end = time.monotonic() + deadline_s
    pause = min(0.001, poll_s)
    while True:
        with translated(store, f"waiting for {wanted}", end):
            for key in candidates:
                if store.check([key]):
                    return key, store.get(key)
        left = end - time.monotonic()
        if left <= 0:
            raise TransferTimeout(f"none of {wanted} appeared in the coordinator's store within {deadline_s:g} s")
        time.sleep(min(pause, left))
        pause = min(2 * pause, poll_s)


def wait_all(
    store: dist.Store,
    keys: Mapping[str, str],
    deadline_s: float,
    *,
    abort_keys: Sequence[str] = (),
    poll_s: float = 0.02,
) -> dict[str, bytes]:
    """Wait for every key of `keys` (key -> who writes it, for messages); returns their values.

    Raises:
        TransferTimeout: names everybody whose key is missing.
        PeerLost: the coordinator is gone, or one of `abort_keys` appeared (its text is in the message).
    """
    end = time.monotonic() + deadline_s
    missing = dict(keys)
    values: dict[str, bytes] = {}
    pause = min(0.001, poll_s)
    while True:
        with translated(store, f"waiting for {', '.join(missing.values())}", end):
            for key in list(missing):
                if not store.check([key]):
                    break  # one question per look and missing key at the front: not one per rank
                values[key] = store.get(key)
                del missing[key]
            reason = next((store.get(k) for k in abort_keys if store.check([k])), None)
        if not missing:
            return values
        if reason is not None:
            raise PeerLost(f"{reason.decode(errors='replace')} (seen while waiting for {', '.join(missing.values())})")
        left = end - time.monotonic()
        if left <= 0:
            with translated(store, "looking who is missing", end):
                silent = [who for key, who in missing.items() if not store.check([key])]
            raise TransferTimeout(
                f"no word from {', '.join(silent) or 'nobody: all came in at the last moment'} within {deadline_s:g} s",
                peer=silent[0] if len(silent) == 1 else None,
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, poll_s)


def decide(store: dist.Store, key: str, value: str) -> str:
    """Set `key` to `value` unless it has one; returns the value that it has now, the same for everybody who asks.

    Raises:
        TransferTimeout, PeerLost: the coordinator; whether the value was set is then unknown.
    """
    if not value:
        raise ConfigError(f"the decision {key} cannot be empty: an empty value reads as undecided")
    with translated(store, f"deciding {key}"):
        return bytes(store.compare_set(key, "", value)).decode()


def put_json(store: dist.Store, key: str, value: Any) -> None:
    """Raises `PeerLost` if the connection is known to be gone; a lost write is not noticed (see the module)."""
    with translated(store, f"writing {key}"):
        store.set(key, json.dumps(value, separators=(",", ":")))


def get_json(store: dist.Store, key: str, deadline_s: float, *, abort_keys: Sequence[str] = ()) -> Any:
    """The value of `key` as soon as it exists.

    Raises:
        TransferTimeout: not within `deadline_s`.
        PeerLost: the coordinator is gone, or one of `abort_keys` appeared first.
    """
    found, value = wait_key(store, key, deadline_s, abort_keys=abort_keys)
    if found != key:
        raise PeerLost(f"{value.decode(errors='replace')} (seen while waiting for {key})")
    return json.loads(value)


class Heartbeat:
    """Shows, from a daemon thread with a connection of its own, that this process is scheduled and its network works.

    Each beat is `{"n": counter, "time": time.time(), "host": name, "pid": n}`. The thread ends by itself when the
    coordinator is gone; `error` then says why.
    """

    def __init__(self, host: str, port: int, key: str, interval_s: float = 1.0, *, connect_s: float = 10.0) -> None:
        self.error: TransportError | None = None
        self._address = (host, port)
        self._key = key
        self._interval_s = interval_s
        self._connect_s = connect_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beat: dict[str, Any] = {"n": 0, "time": 0.0, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            store = connect_store(*self._address, self._connect_s)
            while not self._stop.is_set():
                beat["n"] += 1
                beat["time"] = time.time()
                put_json(store, self._key, beat)
                self._stop.wait(self._interval_s)
        except TransportError as e:
            self.error = e

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and its connection; returns when both are gone (at once, unless it is still connecting)."""
        self._stop.set()
        self._thread.join(self._connect_s + _SLACK_S)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class HeartbeatReader:
    """How long ago others gave a sign of life, by this reader's clock alone: clocks of other hosts are not trusted."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._seen: dict[str, tuple[int, float]] = {}

    def age(self, key: str) -> float | None:
        """Seconds since this reader first saw the newest beat of `key`; None if there was never one.

        The first look at a key counts as a beat, so look early and again later.
        """
        with translated(self._store, f"reading {key}"):
            if not self._store.check([key]):
                return None
            count = int(json.loads(self._store.get(key))["n"])
        now = time.monotonic()
        seen = self._seen.get(key)
        if seen is None or seen[0] != count:
            self._seen[key] = (count, now)
            return 0.0
        return now - seen[1]
