"""What an engine rank holds of one publisher epoch: the store connection, the heartbeat, the data groups.

`Receiver` makes one in the first preflight of an epoch, keeps it for all publishes of that epoch, and closes it when
another epoch has connected or after a failure. Everything here is network: no model, no routes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from weightsync.errors import (
    AuthError,
    ConfigError,
    ManifestError,
    PeerLost,
    PublishAborted,
    TransferTimeout,
)
from weightsync.manifest import Manifest
from weightsync.protocol import Ack, Keys, PublishCall
from weightsync.store import Heartbeat, connect_store, is_connected, translated, wait_key
from weightsync.transports.base import GroupInfo, ReceiverEndpoint
from weightsync.transports.registry import get_transport

__all__ = ["DecisionWatch", "Session"]

HEARTBEAT_S = 1.0
WATCH_S = 0.2


def store_key(call: PublishCall) -> tuple[str, int, str, int]:
    return (call.run_id, call.epoch, call.store_host, call.store_port)


class Session:
    """Connects when built.

    Raises:
        PeerLost, TransferTimeout, TransportError: the publisher's store cannot be joined.
    """

    def __init__(self, call: PublishCall, rank: int) -> None:
        self.run_id, self.epoch = call.run_id, call.epoch
        self.key = store_key(call)
        self.keys = Keys(call.run_id, call.epoch)
        self.store: dist.Store = connect_store(call.store_host, call.store_port, call.deadline_s)
        self.nonce: str | None = None
        self.endpoints: list[ReceiverEndpoint] = []
        self.usable = True
        """False once a publish of this epoch has failed here: its groups are gone."""
        self._rank = rank
        self._heartbeat: Heartbeat | None = None
        self._manifests: dict[str, Manifest] = {}
        self._layout: tuple[object, ...] = ()

    @property
    def connected(self) -> bool:
        """False once a connection of it is known to be gone: the next publish needs a new epoch."""
        return self.usable and is_connected(self.store) and all(e.connected for e in list(self.endpoints))

    def authenticate(self, call: PublishCall) -> None:
        """The call and the store belong together, and both to the publisher that opened this epoch.

        Raises:
            AuthError
        """
        if self._posted(self.keys.nonce) != call.nonce:
            raise AuthError(
                f"nonce of run {call.run_id!r} epoch {call.epoch}: the call's is not the one in the store at "
                f"{call.store_host}:{call.store_port}: call and store are of different publishers; is an old publisher "
                "still running?"
            )
        if self.nonce is not None and self.nonce != call.nonce:
            raise AuthError(
                f"epoch {call.epoch} of run {call.run_id!r} belongs to another publisher: two publishers use the same "
                "run id; stop one of them, the next publish then takes a higher epoch"
            )
        self.nonce = call.nonce

    def _posted(self, key: str) -> str | None:
        """What the publisher wrote before it called, or None."""
        with translated(self.store, f"reading {key}"):
            return self.store.get(key).decode() if self.store.check([key]) else None

    def beat(self, call: PublishCall) -> None:
        """Start the heartbeat, or start it again if its connection broke."""
        if self._heartbeat is None or not self._heartbeat.alive:
            key = self.keys.heartbeat(call.engine_index, self._rank)
            self._heartbeat = Heartbeat(call.store_host, call.store_port, key, HEARTBEAT_S)

    def manifest(self, call: PublishCall) -> Manifest:
        """The manifest of the call, fetched once.

        Raises:
            ManifestError: the store holds another one under its digest.
        """
        if call.manifest_digest not in self._manifests:
            text = self._posted(self.keys.manifest(call.manifest_digest))
            if text is None:
                raise ManifestError(f"the publisher's store has no manifest {call.manifest_digest[:12]}: publish again")
            manifest = Manifest.from_json(text)
            if manifest.digest != call.manifest_digest:
                raise ManifestError(
                    f"the manifest in the store has digest {manifest.digest[:12]}, the call asks for "
                    f"{call.manifest_digest[:12]}: trainer and engine run different weightsync versions"
                )
            self._manifests[call.manifest_digest] = manifest
        return self._manifests[call.manifest_digest]

    def await_connect(self, call: PublishCall) -> None:
        """Until every rank of every engine has passed preflight.

        Raises:
            PublishAborted: one did not.
        """
        _, value = wait_key(self.store, self.keys.connect(call.seq), call.deadline_s)
        word = json.loads(value)
        if not word["ok"]:
            raise PublishAborted(f"the coordinator gave up before connecting: {word['error']}")

    def open_groups(
        self, call: PublishCall, manifest: Manifest, device: torch.device, bind_host: str, name: str
    ) -> None:
        """Open the data group of every stage in order, unless the epoch has them already.

        Raises:
            ConfigError: the call differs from the one that opened the epoch's groups.
            TransportError: a group cannot be opened.
        """
        rank = call.first_group_rank + self._rank
        layout = (
            call.transport,
            call.num_buffers,
            manifest.bucket_bytes,
            manifest.num_stages,
            rank,
            call.group_size,
        )
        if self.endpoints:
            if layout != self._layout:
                raise ConfigError(
                    f"epoch {call.epoch} has groups of (transport, buffers, bucket bytes, stages, rank, size) "
                    f"{self._layout}, the call wants {layout}: publish in a new epoch"
                )
            if not self.connected:
                # Before anything is written: in mid-stream it would cost this engine its version.
                self.usable = False
                raise PeerLost(f"connections of epoch {call.epoch} broke since its last publish: publish again")
            return
        transport = get_transport(call.transport)
        if device.type not in (devices := transport.caps.devices) and "cpu" in devices:
            device = torch.device("cpu")  # loaders copy from there to their own device
        for stage in range(manifest.num_stages):
            peers = [f"rank {r} of the group" for r in range(call.group_size)]
            peers[0], peers[rank] = f"trainer stage {stage}", name
            group = GroupInfo(
                store=dist.PrefixStore(self.keys.data_group(stage), self.store),
                name=f"run {call.run_id} epoch {call.epoch} stage {stage}",
                rank=rank,
                size=call.group_size,
                device=device,
                bucket_bytes=manifest.bucket_bytes,
                num_buffers=call.num_buffers,
                bind_host=bind_host,
                deadline_s=call.deadline_s,
                peers=tuple(peers),
            )
            self.endpoints.append(transport.open_receiver(group))
        self._layout = layout

    def post(self, call: PublishCall, ack: Ack) -> None:
        """Raises `TransportError` if the store is gone."""
        with translated(self.store, f"acknowledging {ack.phase}"):
            self.store.set(self.keys.ack(call.seq, call.engine_index, ack.rank, ack.phase), ack.to_json())

    def abort(self) -> None:
        """Give the groups up; never blocks. The store stays connected, to report and to hear the decision."""
        self.usable = False
        for endpoint in self.endpoints:
            endpoint.abort()
        self.endpoints = []

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        self.endpoints = []
        self.usable = False
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


class DecisionWatch:
    """`with DecisionWatch(...)`: calls `on_end` from a helper thread once the publish is aborted or the store is lost.

    A rank that waits for bytes would otherwise notice neither before its deadline.
    """

    def __init__(self, session: Session, call: PublishCall, end: float, on_end: Callable[[], None]) -> None:
        self.reason: str | None = None
        self._session, self._call, self._end, self._on_end = session, call, end, on_end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-watch", daemon=True)

    def _run(self) -> None:
        key = self._session.keys.decision(self._call.seq)
        while not self._stop.wait(WATCH_S):
            try:
                # By the deadline: it holds the connection, which the rank then needs to tell of its own failure.
                with translated(self._session.store, "watching for the decision", self._end):
                    known = self._session.store.check([key])
                    text = self._session.store.get(key).decode() if known else ""
            except (PeerLost, TransferTimeout) as e:
                text = f"abort: {e}"
            if text.startswith("abort"):
                self.reason = text
                self._on_end()
                return

    def __enter__(self) -> DecisionWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
