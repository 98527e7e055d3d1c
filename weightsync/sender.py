"""The data side of one trainer rank: open its stage's group, stream its buckets, or stage them for later.

`Publisher` calls `connect` once per epoch and `send` once per attempt, on every rank; ranks that are no sender only
drive the source's gathers. What a sender did goes to the store, where the coordinator reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightsync import errors
from weightsync.config import PublishConfig
from weightsync.digest import Digests
from weightsync.engine.memory import PeakMemory
from weightsync.manifest import Manifest
from weightsync.plan import BucketPacker, DtypePolicy
from weightsync.protocol import Keys
from weightsync.store import put_json
from weightsync.timeline import Timeline
from weightsync.transports.base import GroupInfo, SenderEndpoint
from weightsync.transports.registry import get_transport

if TYPE_CHECKING:
    from weightsync.sources.base import Source

__all__ = ["StageSender", "Staged"]


@dataclasses.dataclass(slots=True)
class Staged:
    """The buckets of this rank's stage, copied out of the model, for `publish_async`."""

    buffers: list[torch.Tensor]
    digests: Digests
    timeline: Timeline


class StageSender:
    """Moves the weights of one rank's pipeline stage. One per publisher; keeps its group and buffers warm."""

    def __init__(
        self, source: Source, config: PublishConfig, policy: DtypePolicy, store: dist.Store, run_id: str
    ) -> None:
        self.source = source
        self.config = config
        self._store = store
        self._run_id = run_id
        self._transport = get_transport(config.transport)
        self._policy = policy
        self._epoch = 0
        self._endpoint: SenderEndpoint | None = None
        self._staging: list[torch.Tensor] = []

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        self._staging = []

    def _device(self) -> torch.device:
        if self.config.device is not None:
            return torch.device(self.config.device)
        if "cpu" in self._transport.caps.devices:
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise errors.ConfigError(
                f"transport {self.config.transport!r} moves {sorted(self._transport.caps.devices)} tensors and this "
                "process has no accelerator: choose gloo or shm"
            )
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def connect(
        self, manifest: Manifest, seq: int, *, epoch: int, group_size: int, peers: Sequence[str], deadline_s: float
    ) -> None:
        """Open this stage's data group if the epoch is new; says so in the store."""
        if not self.source.is_sender:
            return
        keys = Keys(self._run_id, epoch)
        stage = self.source.stage
        said: dict[str, Any] = {"ok": True, "stage": stage}
        assert self.config.num_buffers is not None
        try:
            if epoch != self._epoch or self._endpoint is None:
                self.drop()
                self._endpoint = self._transport.open_sender(
                    GroupInfo(
                        store=dist.PrefixStore(keys.data_group(stage), self._store),
                        name=f"run {self._run_id} epoch {epoch} stage {stage}",
                        rank=0,
                        size=group_size,
                        device=self._device(),
                        bucket_bytes=manifest.bucket_bytes,
                        num_buffers=self.config.num_buffers,
                        bind_host=self.config.data_host,
                        deadline_s=deadline_s,
                        peers=(f"trainer stage {stage}", *peers),
                    )
                )
                self._epoch = epoch
            elif not self._endpoint.connected:
                # Now, while every engine still serves: in mid-stream it would fence them.
                raise errors.PeerLost(
                    f"connections of epoch {epoch} stage {stage} broke since its last publish: publish again"
                )
        except errors.WeightSyncError as e:
            said = {"ok": False, "stage": stage, "error": f"trainer stage {stage}: {type(e).__name__}: {e}"}
            raise
        finally:
            put_json(self._store, keys.sender(seq, stage, "connected"), said)

    @property
    def connected(self) -> bool:
        """False once a connection of the open group is known to be gone."""
        return self._endpoint is None or self._endpoint.connected

    def drop(self) -> None:
        if self._endpoint is not None:
            self._endpoint.abort()
            self._endpoint = None

    def send(self, manifest: Manifest, seq: int, staged: Staged | None, deadline_s: float) -> None:
        """Stream this stage's buckets; what happened goes to the store, a transport failure is not raised here."""
        if staged is None and not self.source.is_sender:
            for _ in self.source.stream(manifest.roles, Timeline()):
                pass
            return
        if not self.source.is_sender:
            return
        assert self._endpoint is not None
        stage, endpoint = self.source.stage, self._endpoint
        timeline = Timeline(trace=self.config.trace)
        said: dict[str, Any] = {"ok": True, "stage": stage, "error": None, "digests": []}
        digests = Digests()
        sent_before = endpoint.bytes_sent
        sizes = [manifest.buckets[i].nbytes for i in manifest.stage_buckets(stage)]
        tensors = self.source.stream(manifest.roles, timeline) if staged is None else iter(())
        with PeakMemory() as memory:
            try:
                endpoint.start(sizes, deadline_s)
                if staged is None:
                    self._stream(manifest, stage, tensors, endpoint, timeline, digests)
                else:
                    digests, timeline = staged.digests, staged.timeline
                    self._replay(staged, sizes, endpoint, timeline)
                with timeline.span("wire"):
                    endpoint.finish()
                said["digests"] = digests.values()
            except errors.TransportError as e:
                said |= {"ok": False, "error": f"trainer stage {stage}: {type(e).__name__}: {e}"}
                # The other ranks of this stage are inside the same gathers: leaving now would hang them.
                for _ in tensors:
                    pass
            except BaseException as e:
                said |= {"ok": False, "error": f"trainer stage {stage}: {type(e).__name__}: {e}"}
                raise
            finally:
                said["bytes_sent"] = endpoint.bytes_sent - sent_before
                said["timeline"] = timeline.to_json()
                said["peak_extra_bytes"] = memory.peak_extra_bytes()
                keys = Keys(self._run_id, self._epoch)
                with contextlib.suppress(errors.TransportError) if not said["ok"] else contextlib.nullcontext():
                    put_json(self._store, keys.sender(seq, stage, "sent"), said)

    def _stream(
        self,
        manifest: Manifest,
        stage: int,
        tensors: Iterator[torch.Tensor],
        endpoint: SenderEndpoint,
        timeline: Timeline,
        digests: Digests,
    ) -> None:
        current: list[torch.Tensor] = []

        def acquire() -> torch.Tensor:
            with timeline.span("wire"):
                current[:] = [endpoint.acquire()]
            return current[0]

        def send(nbytes: int, bucket: int) -> None:
            with timeline.span("verify"):
                digests.add(current[0][:nbytes])
            endpoint.send(nbytes)

        BucketPacker(manifest, stage, self._policy).pack(tensors, acquire, send, timeline)

    def stage(self, manifest: Manifest) -> Staged:
        """Copy this stage's buckets to staging memory, which later calls reuse."""
        timeline = Timeline(trace=self.config.trace)
        if not self.source.is_sender:
            for _ in self.source.stream(manifest.roles, timeline):
                pass
            return Staged([], Digests(), timeline)
        sizes = [manifest.buckets[i].nbytes for i in manifest.stage_buckets(self.source.stage)]
        if [b.numel() for b in self._staging] != sizes:
            self._staging = [torch.empty(n, dtype=torch.uint8, device=self._device()) for n in sizes]
        free = iter(self._staging)
        digests = Digests()
        current: list[torch.Tensor] = []

        def acquire() -> torch.Tensor:
            current[:] = [next(free)]
            return current[0]

        def send(nbytes: int, bucket: int) -> None:
            digests.add(current[0][:nbytes])

        tensors = self.source.stream(manifest.roles, timeline)
        BucketPacker(manifest, self.source.stage, self._policy).pack(tensors, acquire, send, timeline)
        return Staged(self._staging, digests, timeline)

    @staticmethod
    def _replay(staged: Staged, sizes: Sequence[int], endpoint: SenderEndpoint, timeline: Timeline) -> None:
        for staged_bucket, nbytes in zip(staged.buffers, sizes, strict=True):
            with timeline.span("wire"):
                buffer = endpoint.acquire()
            with timeline.span("pack", nbytes):
                buffer[:nbytes].copy_(staged_bucket[:nbytes])
            endpoint.send(nbytes)
