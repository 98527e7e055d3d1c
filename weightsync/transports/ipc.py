"""Buckets in GPU memory that a trainer rank shares with the engine ranks of its machine (CUDA IPC).

For colocated engines: NCCL refuses two ranks on one GPU, and gloo or shm would take the weights through the host. The
sender allocates a ring of `num_buffers` slots when a publish starts; every receiver maps it, loads from it, and
unmaps it when its last bucket is loaded; then the sender frees it, before the publish is committed: nothing stays
mapped, and the memory is torch's to use again (`torch.cuda.empty_cache()` gives it to other processes, if the trainer
wants). Slots, credits and rendezvous are those of `weightsync.transports._ring`. In preflight the same is done once
with a random word in the first slot: a mapping that fails, or leads to other memory, is found while the old version
still serves.

How memory is named to another process: the fields of torch's own `UntypedStorage._share_cuda_`, as JSON with base64,
over the ring's socket, and `_new_shared_cuda` on the other side: the pair behind `torch.multiprocessing`, without its
pickles. It knows how a tensor lies within an allocator's segment and counts references, so memory that a slow receiver
still maps is not given to anybody else. The alternative, cudaIpcGetMemHandle through ctypes on memory of our own, knows
neither and wants a libcudart of the right version. Whoever got a handle and did not map it returns its count; for a
receiver that was killed the sender does. Torch's allocator exports whole segments: the other process can technically
reach what else lies in the ring's segment. Both run as one user and trust each other.

A slot changes hands only when the device has finished with it: whoever gives the credit records an event and waits for
it on the host, with the deadline. An event of another process in our stream (IPC events) would save that wait and
could never be given up: no deadline ends a stream that waits for a process that died.

Refused, each with what to do: expandable segments and other allocators than torch's native one (their memory has no
such handle), a sender's GPU that this process cannot see (compared by UUID: CUDA_VISIBLE_DEVICES renumbers), GPUs
without peer access, both ends in one process. A receiver on another GPU than the sender's copies each bucket to its own
first. What was done to GPU memory here is tested with host memory in its place; on a GPU by the tests marked `gpu`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weightsync.errors import TransferTimeout, TransportError, UnsupportedError
from weightsync.transports._endpoint import check_group, peer_name
from weightsync.transports._ring import MAX_MESSAGE, OFFER, RingMember, RingReceiver, RingSender, joined
from weightsync.transports.base import GroupInfo, TransportCaps

__all__ = ["CudaDriver", "CudaIpcTransport", "Handle", "allocator_refusal"]

_RETURNED = b"U"
"""The receiver has unmapped the memory of this publish."""
_WORD_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """One storage in GPU memory, for one other process; the fields are those of `UntypedStorage._share_cuda_`."""

    memory: bytes
    """Of the allocator's segment."""
    nbytes: int
    offset: int
    """Of the storage within its segment."""
    counter: bytes
    """Of the file with the reference counts, and which of them is this one's."""
    counter_offset: int
    word: bytes = b""
    """In preflight: what the first slot begins with."""

    def encode(self) -> bytes:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        text = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in fields.items()}
        return json.dumps(text).encode()

    @classmethod
    def decode(cls, message: bytes) -> Handle:
        """Raises `ValueError` for anything that `encode` did not make."""
        said = json.loads(message)
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(said, dict) or said.keys() != names:
            raise ValueError(f"fields {sorted(said) if isinstance(said, dict) else said!r}, expected {sorted(names)}")
        values: dict[str, Any] = {}
        for name in names:
            value = said[name]
            if name in ("memory", "counter", "word"):
                try:
                    values[name] = base64.b64decode(value, validate=True)
                except (TypeError, binascii.Error) as e:
                    raise ValueError(f"{name} is not base64: {e}") from e
            elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}, expected an int >= 0")
            else:
                values[name] = value
        return cls(**values)


def allocator_refusal(backend: str, address: int, segments: Sequence[Mapping[str, Any]], settings: str) -> str | None:
    """Why memory at `address` has no IPC handle, from `torch.cuda.memory_snapshot()`; None if it has one.

    `settings`, torch's own view of PYTORCH_CUDA_ALLOC_CONF, decide only where the snapshot does not know the segment.
    """
    if backend != "native":
        return f"torch's allocator backend is {backend!r}: its memory has no IPC handle; use the native one"
    expandable = "expandable_segments:true" in settings.replace(" ", "").lower()
    for segment in segments:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            expandable = bool(segment.get("is_expandable", expandable))
    if expandable:
        return (
            "torch's allocator uses expandable segments, which have no handle that every torch can open: start this "
            "process without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
        )
    return None


class CudaDriver:
    """Everything that touches a GPU, so that tests can put host memory in its place."""

    device_type = "cuda"

    def check(self, name: str) -> None:
        """Raises `UnsupportedError` without CUDA."""
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"transport {name!r} needs a CUDA device, and torch {torch.__version__} finds none in this process: "
                "use shm, or look at CUDA_VISIBLE_DEVICES"
            )

    def uuid(self, device: torch.device) -> str:
        """Of the physical GPU, the same in every process."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def visible(self) -> dict[str, torch.device]:
        """UUID -> the device by which this process knows it."""
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        return {self.uuid(device): device for device in devices}

    def can_reach(self, device: torch.device, other: torch.device) -> bool:
        return device == other or bool(torch.cuda.can_device_access_peer(device, other))

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Raises `RuntimeError` (torch.OutOfMemoryError is one) if there is no memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def refusal(self, memory: torch.Tensor) -> str | None:
        settings = str(getattr(torch._C, "_accelerator_getAllocatorSettings", str)())
        return allocator_refusal(
            torch.cuda.get_allocator_backend(), memory.data_ptr(), torch.cuda.memory_snapshot(), settings
        )

    def share(self, memory: torch.Tensor) -> Handle:
        """For one other process; each needs a handle of its own, as each is counted."""
        storage: Any = memory.untyped_storage()
        _, handle, nbytes, offset, counter, counter_offset, _, _ = storage._share_cuda_()
        return Handle(memory=handle, nbytes=nbytes, offset=offset, counter=counter, counter_offset=counter_offset)

    def open(self, handle: Handle, device: torch.device) -> torch.Tensor:
        """The memory as flat uint8 on `device`, unmapped when the last view of it is gone. Raises `RuntimeError`."""
        torch.cuda.init()
        make: Any = torch.UntypedStorage._new_shared_cuda
        # No event: the sender waited for its device before it told of the memory.
        storage = make(
            device.index, handle.memory, handle.nbytes, handle.offset, handle.counter, handle.counter_offset, b"", False
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def disown(self, handle: Handle) -> None:
        """Return the count of a process that died."""
        release: Any = torch.UntypedStorage._release_ipc_counter_cuda
        release(handle.counter, handle.counter_offset)

    def collect(self) -> None:
        """Free memory that was waiting for another process to unmap it."""
        torch.cuda.ipc_collect()

    def fence(self, device: torch.device) -> Callable[[], bool]:
        """Tells whether everything that is queued on the current stream by now is done."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.query


class CudaIpcTransport:
    """CUDA IPC on one machine. See `weightsync.transports.base` for the protocol.

    Raises:
        UnsupportedError: no CUDA device.
    """

    def __init__(self, name: str = "ipc", *, driver: CudaDriver | None = None) -> None:
        self._driver = driver or CudaDriver()
        self._driver.check(name)
        self._caps = TransportCaps(
            name=name, devices=frozenset({self._driver.device_type}), same_host=True, tested=False
        )

    @property
    def caps(self) -> TransportCaps:
        return self._caps

    def open_sender(self, group: GroupInfo) -> _Sender:
        check_group(self._caps, group, sender=True)
        return joined(_Sender(group, self._driver))

    def open_receiver(self, group: GroupInfo) -> _Receiver:
        check_group(self._caps, group, sender=False)
        return joined(_Receiver(group, self._driver))


def _process() -> list[Any]:
    return [os.readlink("/proc/self/ns/pid"), os.getpid()]


class _Member(RingMember):
    transport = "ipc"
    driver: CudaDriver

    def before_credit(self) -> None:
        """Raises `TransferTimeout` naming this side: its device is what did not finish."""
        if not self.device_done(self.end):
            me = peer_name(self.group, self.group.rank)
            text = f"{me}: its device did not finish with a bucket before the deadline"
            raise self._fail(TransferTimeout, text, me)

    def device_done(self, end: float) -> bool:
        """Wait for what is queued on this rank's device; False if it is not done by `end`."""
        done, pause = self.driver.fence(self.group.device), 10e-6
        while not done():
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return True


class _Sender(_Member, RingSender):
    def __init__(self, group: GroupInfo, driver: CudaDriver) -> None:
        super().__init__(group)
        self.driver = driver
        self._lent: dict[int, Handle] = {}
        self._offers = 0
        self._returned: dict[int, int] = {}
        """Rank -> how many offers it has unmapped."""
        self._word = secrets.token_bytes(_WORD_BYTES)

    def facts(self) -> dict[str, Any]:
        return {"gpu": self.driver.uuid(self.group.device), "process": _process()}

    def make_ring(self) -> None:
        self._allocate()
        assert self.ring is not None
        self.ring[:_WORD_BYTES].copy_(torch.frombuffer(bytearray(self._word), dtype=torch.uint8))
        if not self.device_done(time.monotonic() + self.group.deadline_s):
            me = peer_name(self.group, 0)
            raise TransferTimeout(
                f"{self.group.name}: {me}: its device is busy for {self.group.deadline_s:g} s", peer=me
            )

    def offer(self, rank: int) -> tuple[bytes, list[int]]:
        handle = self._lent[rank] = self._share(self._word)
        return handle.encode(), []

    def offered(self) -> None:
        self._returned = dict.fromkeys(self.links, 0)
        self._lent.clear()  # each was mapped and unmapped
        self.drop_ring()

    def start(self, sizes: Sequence[int], deadline_s: float) -> None:
        super().start(sizes, deadline_s)
        if not sizes:
            return
        try:
            self._allocate()
            handles = {rank: self._share() for rank in self.links}
        except (TransportError, UnsupportedError) as e:
            raise self._fail(TransportError, str(e), peer_name(self.group, 0)) from e
        self._offers += 1
        unsent = dict(handles)
        try:
            for rank, handle in handles.items():
                self.say(rank, OFFER + handle.encode())
                self._lent[rank] = unsent.pop(rank)
        finally:
            for handle in unsent.values():
                self.driver.disown(handle)
                self.driver.collect()

    def finish(self) -> None:
        super().finish()
        self._wait(self._offers, "did not give the shared memory back", self._returned)
        self.drop_ring()

    def heard(self, rank: int, message: bytes) -> bool:
        if message != _RETURNED:
            return False
        self._lent.pop(rank, None)
        self._returned[rank] += 1
        return True

    def drop_ring(self) -> None:
        for rank, handle in self._lent.items():
            if self.gone.get(rank, {}) is None:  # killed: what it mapped is unmapped, and nobody counted
                self.driver.disown(handle)
        self._lent.clear()
        if self.ring is not None:
            self.ring = None
            self.driver.collect()

    def _allocate(self) -> None:
        group = self.group
        try:
            memory = self.driver.allocate(self.ring_bytes, group.device)
        except RuntimeError as e:
            raise TransportError(
                f"{group.name}: {peer_name(group, 0)} has no memory on {group.device} for {self.ring_bytes} bytes "
                f"({group.num_buffers} buffers of {group.bucket_bytes} bytes): {str(e).splitlines()[0]}; lower "
                "bucket_bytes or num_buffers, or let the engine release memory first"
            ) from e
        if (why := self.driver.refusal(memory)) is not None:
            raise UnsupportedError(f"{group.name}: transport 'ipc': {peer_name(group, 0)}: {why}; or use shm")
        self.ring = memory

    def _share(self, word: bytes = b"") -> Handle:
        assert self.ring is not None
        try:
            return dataclasses.replace(self.driver.share(self.ring), word=word)
        except RuntimeError as e:
            raise UnsupportedError(
                f"{self.group.name}: transport 'ipc': {peer_name(self.group, 0)} cannot share memory on "
                f"{self.group.device}: {str(e).splitlines()[0]}; use shm"
            ) from e


class _Receiver(_Member, RingReceiver):
    def __init__(self, group: GroupInfo, driver: CudaDriver) -> None:
        super().__init__(group)
        self.driver = driver
        self._device = group.device
        """The sender's, as this process knows it."""
        self._offer = b""
        self._copy: torch.Tensor | None = None
        """The bucket on this rank's own GPU, where the sender's is another."""

    def check(self, there: Mapping[str, Any]) -> None:
        group = self.group
        me, sender = peer_name(group, group.rank), peer_name(group, 0)
        if there["process"] == _process():
            raise UnsupportedError(
                f"{group.name}: transport 'ipc' maps memory of another process, and {me} runs in the process of "
                f"{sender}: use shm"
            )
        visible = self.driver.visible()
        if there["gpu"] not in visible:
            raise UnsupportedError(
                f"{group.name}: transport 'ipc': {sender} has its buckets on GPU {there['gpu']}, {me} sees "
                f"{sorted(visible)}: start both with that GPU in CUDA_VISIBLE_DEVICES, or use nccl between GPUs"
            )
        self._device = visible[there["gpu"]]
        if not self.driver.can_reach(group.device, self._device):
            raise UnsupportedError(
                f"{group.name}: transport 'ipc': {me} on {group.device} has no peer access to the GPU of {sender} "
                f"({self._device} here): use nccl or shm"
            )

    def take(self, message: bytes, fds: list[int]) -> None:
        """Map, look for the sender's word, unmap."""
        word = bytes(self._map(message)[:_WORD_BYTES].tolist())
        expected = Handle.decode(message).word
        if word != expected:
            raise UnsupportedError(
                f"{self.group.name}: transport 'ipc': {peer_name(self.group, self.group.rank)} mapped other memory "
                f"than {peer_name(self.group, 0)} shared (read {word.hex()}, expected {expected.hex()}): use shm"
            )

    def _map(self, message: bytes) -> torch.Tensor:
        group, sender = self.group, peer_name(self.group, 0)
        try:
            handle = Handle.decode(message)
        except ValueError as e:
            raise TransportError(f"{group.name}: {sender} sent no handle of its memory: {e}", peer=sender) from e
        try:
            memory = self.driver.open(handle, self._device)
        except RuntimeError as e:
            self.driver.disown(handle)
            raise UnsupportedError(
                f"{group.name}: transport 'ipc': {peer_name(group, group.rank)} cannot map the memory of {sender}: "
                f"{str(e).splitlines()[0]}; containers need one IPC namespace and /dev/shm (--ipc=host), or use shm"
            ) from e
        if memory.numel() < self.ring_bytes:
            raise TransportError(
                f"{group.name}: {sender} shares {memory.numel()} bytes, expected {self.ring_bytes}", peer=sender
            )
        return memory

    def heard(self, rank: int, message: bytes) -> bool:
        if message[:1] != OFFER:
            return False
        self._offer = message[1:]
        return True

    def hang_up(self, kind: type[TransportError], text: str, peer: str) -> None:
        # An offer that nobody will map any more, heard or still in the socket: its count goes back.
        unheard = []
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.setblocking(False)
                while message := link.recv(MAX_MESSAGE):
                    unheard += [message[1:]] * (message[:1] == OFFER)
        offers, self._offer = [self._offer, *unheard], b""
        super().hang_up(kind, text, peer)
        for offer in filter(None, offers):
            with contextlib.suppress(ValueError, RuntimeError):
                self.driver.disown(Handle.decode(offer))

    def receive(self) -> torch.Tensor:
        view = super().receive()
        if self._device == self.group.device:
            return view
        if self._copy is None:
            self._copy = self.driver.allocate(self.group.bucket_bytes, self.group.device)
        return self._copy[: view.numel()].copy_(view)

    def _slot(self, number: int, nbytes: int) -> torch.Tensor:
        if self.ring is None:
            try:
                offer, self._offer = self._offer, b""
                self.ring = self._map(offer)
            except (TransportError, UnsupportedError) as e:
                raise self._fail(TransportError, str(e), peer_name(self.group, 0)) from e
        return super()._slot(number, nbytes)

    def finish(self) -> None:
        super().finish()
        if self.ring is not None:
            self.drop_ring()
            self.say(0, _RETURNED)

    def drop_ring(self) -> None:
        super().drop_ring()
        self._copy = None
