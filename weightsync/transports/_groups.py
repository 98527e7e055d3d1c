"""Private torch.distributed groups: built from a store with a deadline, waited on with a deadline, ended without one.

Building is a roll call over the group's store (so that a missing member is named and no C++ constructor waits for it),
then the backend's constructor, then a second roll call (so that nobody starts before everybody has the group). Nothing
here touches the default group, torch's registry of groups, or the current device.

What a stuck operation does was measured with torch 2.13: `ProcessGroupGloo.abort()` closes nothing, and its destructor
waits until the operations in flight time out. Shutting its sockets down ends both within milliseconds, here and at the
peers, and threads and descriptors are gone. One case stays: gloo's event thread takes an operation off its list when
the peer is ready for it, and forgets it if writing then fails, so nobody is told and the operation ends only at its own
timeout. So a connection that is gone counts as a failure, whatever the operation says; and one's own sockets are shut
down for reading first, which lets that thread write what it was asked for before it sees the end. Against a peer that
is killed nothing helps: a survivor learns of it at once, but a thread named `weightsync-retire` may keep the group's
threads and its listening socket until `_BEYOND_S` after the deadline of that publish. Nobody waits for it.
NCCL has a real abort, but its own watchdog ends the whole process: its timeout is set far beyond any of ours.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from weightsync import _sockets
from weightsync.config import WILDCARDS
from weightsync.errors import ConfigError, TransferTimeout, TransportError, UnsupportedError
from weightsync.store import decide, put_json, translated, wait_all
from weightsync.transports._endpoint import peer_name
from weightsync.transports.base import GroupInfo, TransportCaps

__all__ = ["DataGroup", "backend_caps", "open_group"]

_RETIRE_WAIT_S = 2.0
"""How long ending a group may keep its caller; what takes longer goes on in its thread."""

_NCCL_TIMEOUT = datetime.timedelta(days=7)

_BEYOND_S = 5.0
"""How much later than our deadline an operation of gloo gives up by itself, if the caller never comes back to it."""

_LOOK_S = 0.25
"""How often a waiting member of a gloo group looks whether its connections are still there; gone twice is gone."""

_DRAIN_S = 0.5
"""How long gloo's event thread gets to see the end of a connection that was shut down for reading."""

_one_device = threading.Lock()
"""One gloo device is made at a time, so that the listening socket that appears is its."""

_TESTED_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


def backend_caps(name: str) -> TransportCaps:
    """Raises `ConfigError` if nobody registered such a backend, `UnsupportedError` if this torch was built without."""
    if name not in dist.Backend.backend_list or name in ("undefined", "mpi"):
        known = sorted(set(dist.Backend.backend_list) - {"undefined", "mpi"})
        raise ConfigError(
            f"no torch.distributed backend {name!r}: this process knows {known}; one from a plug-in is known once its "
            "package is imported"
        )
    if name.upper() not in dist.Backend._plugins and _builtin(name) is None:
        raise UnsupportedError(f"torch {torch.__version__} was built without {name}: install a build that has it")
    if name in _TESTED_DEVICES:
        return TransportCaps(name=name, devices=frozenset({_TESTED_DEVICES[name]}), same_host=False, tested=True)
    devices = frozenset(dist.Backend.backend_capability.get(name, ["cpu"]))
    return TransportCaps(name=name, devices=devices, same_host=False, tested=False)


def open_group(backend: str, group: GroupInfo) -> DataGroup:
    """Returns when every member has the group.

    Raises:
        TransferTimeout: names the members that did not come within the group's deadline.
        PeerLost: a member gave up (its reason is in the message), or the coordinator is gone.
        TransportError: the backend failed.
    """
    kind: type[DataGroup] = {"gloo": _Gloo, "nccl": _Nccl}.get(backend, DataGroup)
    made = kind(backend, group)
    try:
        made.join(time.monotonic() + group.deadline_s)
    except Exception as e:
        # Whatever it is, the others must hear of it: they wait for this member.
        made.retire()
        reason = f"{peer_name(group, group.rank)} gave up on {group.name}: {str(e).splitlines()[0]}"
        with contextlib.suppress(TransportError):  # the coordinator may be what failed
            decide(group.store, "failed", reason)
        if isinstance(e, dist.DistError | RuntimeError | OSError) and not isinstance(e, TransportError):
            raise TransportError(f"{group.name}: {backend} cannot connect: {str(e).splitlines()[0]}") from e
        raise
    return made


class DataGroup:
    """One member's process group, of any backend; subclasses know more about theirs."""

    def __init__(self, backend: str, group: GroupInfo) -> None:
        self.backend = backend
        self.group = group
        self.farewell: str | None = None
        """Why this member leaves of its own will, told to the others when it retires."""
        self._pg: Any = None
        self._said = False
        self._lock = threading.Lock()

    # Rendezvous.

    def join(self, end: float) -> None:
        others = self._roll_call("here", self._announce(), end)
        self._pg = self._build(max(end - time.monotonic(), 0.001))
        self._roll_call("joined", self._connected(others, end), end)

    def _roll_call(self, what: str, fact: Any, end: float) -> dict[int, Any]:
        """Tell the others `fact`; returns theirs by rank (with one's own)."""
        group, store = self.group, self.group.store
        put_json(store, f"{what}/{group.rank}", fact)
        keys = {f"{what}/{rank}": peer_name(group, rank) for rank in range(group.size)}
        try:
            values = wait_all(store, keys, max(end - time.monotonic(), 0.001), abort_keys=["failed"])
        except TransferTimeout as e:
            raise TransferTimeout(f"{group.name}: rendezvous of the data group: {e}", peer=e.peer) from e
        return {rank: json.loads(values[f"{what}/{rank}"]) for rank in range(group.size)}

    def _announce(self) -> Any:
        return None

    def _build(self, left_s: float) -> Any:
        group, timeout = self.group, datetime.timedelta(seconds=left_s)
        plugin = dist.Backend._plugins.get(self.backend.upper())
        if plugin is None:
            builtin = _builtin(self.backend)
            assert builtin is not None
            return builtin(group.store, group.rank, group.size, timeout)
        if not plugin.extended_api:
            return plugin.creator_fn(group.store, group.rank, group.size, timeout)
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store = group.store
        options.group_rank = group.rank
        options.group_size = group.size
        options.timeout = timeout
        options.group_id = group.name
        options.global_ranks_in_group = list(range(group.size))
        return plugin.creator_fn(options, None)

    def _connected(self, others: dict[int, Any], end: float) -> Any:
        """Make the communicator now: backends that connect on first use would do so within a publish, unbounded."""
        probe = torch.zeros(1, dtype=torch.uint8, device=self.group.device)

        def first_use() -> None:
            if not self.wait(self.broadcast(probe, max(end - time.monotonic(), 0.001)), end):
                raise TransferTimeout(what)

        what = f"{self.group.name}: {self.backend} did not connect its members within {self.group.deadline_s:g} s"
        _in_thread(first_use, max(end - time.monotonic(), 0.001), what)
        return None

    # Transfer.

    def broadcast(self, tensor: torch.Tensor, left_s: float) -> dist.Work:
        """Start a broadcast from rank 0; `left_s` is for backends whose operations end by themselves."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        self._set_timeout(options, left_s)
        return self._pg.broadcast([tensor], options)  # type: ignore[no-any-return]

    def _set_timeout(self, options: Any, left_s: float) -> None:
        options.timeout = datetime.timedelta(seconds=left_s + _BEYOND_S)

    def wait(self, work: dist.Work, end: float) -> bool:
        """True once `work` is done, False if it isn't by `end` (monotonic). Raises what the operation raised."""
        pause = 20e-6
        while not work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        work.wait()
        return True

    # Failure and end.

    @property
    def connected(self) -> bool:
        """False once a connection is known to be gone."""
        return self._pg is not None

    def culprit(self, error: Exception) -> int | None:
        """The rank whose connection `error` is about, if it says so."""
        return None

    def say(self, saw: int | None, left: str | None) -> None:
        """Tell the others that this member is alive, whose loss it saw, or why it left. The first word counts."""
        if not self._said:
            self._said = True
            put_json(self.group.store, f"alive/{self.group.rank}", {"saw": saw, "left": left})

    def heard(self, ranks: Iterable[int], end: float) -> dict[int, dict[str, Any]]:
        """What those of `ranks` that spoke (see `say`) said."""
        store = self.group.store
        with translated(store, f"looking who is alive in {self.group.name}", end):
            return {rank: json.loads(store.get(key)) for rank in ranks if store.check([key := f"alive/{rank}"])}

    def retire(self) -> None:
        """End the group whatever it is doing; returns soon, the rest happens in a daemon thread. Idempotent."""
        with self._lock:
            holder, self._pg = [self._pg], None
        if holder[0] is None:
            return
        thread = threading.Thread(target=self._end, args=(holder,), name="weightsync-retire", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads any more
            self._end(holder)
            return
        thread.join(_RETIRE_WAIT_S)

    def _end(self, holder: list[Any]) -> None:
        if self.farewell is not None:
            with contextlib.suppress(TransportError):  # nobody is left to read it
                self.say(None, self.farewell)
        self._kill(holder[0])
        holder.clear()

    def _kill(self, pg: Any) -> None:
        if hasattr(pg, "abort"):
            pg.abort()


class _Gloo(DataGroup):
    """TCP between all pairs of members, connected by the constructor, on the one address `bind_host`."""

    def __init__(self, backend: str, group: GroupInfo) -> None:
        super().__init__(backend, group)
        self._device: Any = None
        self._listening: _sockets.Address | None = None
        self._pairs: set[_sockets.Endpoints] = set()
        self._owner: dict[_sockets.Address, int] = {}

    def _announce(self) -> tuple[str, int, dict[str, str]]:
        if self.group.bind_host in WILDCARDS:
            raise ConfigError(
                f"{self.group.name}: gloo tells the other members where it listens, so bind_host must be one address "
                f"of this host that they can reach, got {self.group.bind_host!r}"
            )
        with _one_device:
            for _ in range(5):
                before = _sockets.find(lambda ends: ends.listening)
                device = self._listen()
                new = _sockets.find(lambda ends: ends.listening) - before
                if len(new) == 1:  # else another thread of the program began to listen at this very moment
                    self._device = device
                    self._listening = new.pop().local
                    return *self._listening, _sockets.machine()
        raise UnsupportedError(
            f"{self.group.name}: gloo's listening socket on {self.group.bind_host} can't be told from others in "
            "/proc/self/fd, so that a stuck transfer could not be ended; is /proc mounted?"
        )

    def _listen(self) -> Any:
        try:
            return dist.ProcessGroupGloo.create_device(hostname=self.group.bind_host)
        except RuntimeError as e:
            raise ConfigError(
                f"{self.group.name}: gloo cannot listen on {self.group.bind_host!r}: {str(e).splitlines()[0]}; "
                f"bind_host of {peer_name(self.group, self.group.rank)} must be an address of its own host"
            ) from e

    def _roll_call(self, what: str, fact: Any, end: float) -> dict[int, Any]:
        facts = super()._roll_call(what, fact, end)
        if what == "here":
            self._check_reachable(facts)
        else:
            for rank in set(facts) - {self.group.rank}:
                for host, port in facts[rank]:
                    self._owner.setdefault((str(host), int(port)), rank)
        return facts

    def _check_reachable(self, facts: dict[int, Any]) -> None:
        """A loopback address means another host to each member: gloo would try it until the deadline."""
        hosts = {json.dumps(there, sort_keys=True): there["host"] for _, _, there in facts.values()}
        hidden = [rank for rank, (host, _, _) in sorted(facts.items()) if _sockets.is_loopback(host)]
        if hidden and len(hosts) > 1:
            who = ", ".join(f"{peer_name(self.group, r)} ({facts[r][0]} of {facts[r][2]['host']})" for r in hidden)
            raise ConfigError(
                f"{self.group.name}: members are on {len(hosts)} hosts, and these listen on a loopback address, which "
                f"the others do not reach: {who}; give each bind_host, an address of its host that the others reach"
            )

    def _build(self, left_s: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [self._device]
        options._timeout = datetime.timedelta(seconds=left_s)
        self._device = None
        return gloo(self.group.store, self.group.rank, self.group.size, options)

    def _connected(self, others: dict[int, Any], end: float) -> Any:
        listening = {(str(host), int(port)): r for r, (host, port, _) in others.items() if r != self.group.rank}
        # More than ours if another member lives in this process: it is of the same group, and ends with it.
        self._pairs = _sockets.find(
            lambda ends: ends.remote is not None and (ends.local == self._listening or ends.remote in listening)
        )
        if len(self._pairs) < self.group.size - 1:
            raise UnsupportedError(
                f"{self.group.name}: gloo has {len(self._pairs)} connections to {self.group.size - 1} members, so that "
                "a stuck transfer could not be ended; unset TORCH_GLOO_LAZY_INIT and GLOO_DEVICE_TRANSPORT"
            )
        self._owner = listening
        _sockets.probe_idle(self._pairs)
        return [ends.local for ends in self._pairs]

    def retire(self) -> None:
        self._device = None
        super().retire()

    def wait(self, work: dist.Work, end: float) -> bool:
        missed: set[_sockets.Endpoints] = set()
        while not work.is_completed():
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            # Never 0 ms: that means for ever.
            millis = max(1, math.ceil(1e3 * min(left_s, _LOOK_S)))
            with contextlib.suppress(RuntimeError):  # this wait timed out, or the operation failed: the last line tells
                work.wait(datetime.timedelta(milliseconds=millis))
            if work.is_completed():
                break
            gone = self._pairs - self._open_pairs()
            if lost := missed & gone:
                host, port = min(ends.remote for ends in lost if ends.remote is not None)
                raise dist.DistNetworkError(f"the connection to [{host}]:{port} is gone")
            missed = gone
        return bool(work.wait())

    @property
    def connected(self) -> bool:
        return super().connected and self._open_pairs() == self._pairs

    def _open_pairs(self) -> set[_sockets.Endpoints]:
        return _sockets.find(lambda ends: ends in self._pairs)

    def culprit(self, error: Exception) -> int | None:
        for host, text in re.findall(r"\[([0-9a-fA-F.:]+)\]:(\d+)", str(error)):
            port = int(text)
            # gloo prints the port in network byte order on some paths.
            for candidate in (port, (port & 0xFF) << 8 | port >> 8):
                rank = self._owner.get(_sockets.address_of((host, candidate)))
                if rank is not None:
                    return rank
        return None

    def _kill(self, pg: Any) -> None:
        _sockets.shut_down(self._pairs, socket.SHUT_RD)
        end = time.monotonic() + _DRAIN_S
        while self._open_pairs() and time.monotonic() < end:
            time.sleep(1e-3)
        _sockets.shut_down(self._pairs, socket.SHUT_RDWR)


class _Nccl(DataGroup):
    def _build(self, left_s: float) -> Any:
        nccl: Any = _builtin("nccl")
        options = nccl.Options()
        options._timeout = _NCCL_TIMEOUT
        return nccl(self.group.store, self.group.rank, self.group.size, options)

    def _set_timeout(self, options: Any, left_s: float) -> None:
        options.timeout = _NCCL_TIMEOUT


def _builtin(name: str) -> Any:
    """The process group class of a backend that torch was built with, else None."""
    return getattr(dist.distributed_c10d, {"gloo": "ProcessGroupGloo"}.get(name, f"ProcessGroup{name.upper()}"), None)


def _in_thread(work: Callable[[], None], left_s: float, what: str) -> None:
    """Run `work`, which no timeout can end, for at most `left_s`; the thread stays behind if it hangs."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - raised by the caller
            failure.append(e)

    thread = threading.Thread(target=run, name="weightsync-connect", daemon=True)
    thread.start()
    thread.join(left_s)
    if thread.is_alive():
        raise TransferTimeout(what)
    if failure:
        raise failure[0]
