"""Lanes: processes that move the same bytes in other ways, between the publishes of one bench run.

`compare` starts one sender and as many receivers as there are engine ranks, each running `main` below. They are
separate from the trainer and the engines so that what the bench measures there (peak memory, warm buffers, open
sockets) is the publish's own; between commands they sleep in a read, so they cost the publishes nothing but memory.
Everything is interleaved round by round and thereby meets the same state of the machine. Maths threads: one.

`compare` drives them; `limit` and `peers` hold what they run.
"""

from __future__ import annotations

import dataclasses
import datetime
import mmap
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightsync import _sockets
from weightsync.bench.children import serve
from weightsync.bench.destinations import Destinations, Rows
from weightsync.errors import ConfigError
from weightsync.manifest import TensorSpec
from weightsync.store import HostedStore, host_store

__all__ = ["Lane", "LaneConfig", "Tokens", "main", "make"]

_START_DELAY_S = 0.005
"""Longer than a small all-reduce takes among processes that share cores."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaneConfig:
    """What a lane is told at its start. `rank` 0 sends, the others receive; receiver r is TP rank (r-1) % tp_size.

    `host` is the address of the lane's machine, which its broadcasts use."""

    rank: int
    size: int
    host: str
    tp_size: int
    backend: str
    shared: bool
    """Whether a shared mapping of all bytes is wanted (the limit of a shared-memory transport)."""
    specs: tuple[TensorSpec, ...]
    deadline_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "specs": [s.to_json() for s in self.specs],
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> LaneConfig:
        return cls(**{**obj, "specs": tuple(TensorSpec.from_json(s) for s in obj["specs"])})


class Tokens:
    """Bytes in named pipes: how the lanes of one shared ring wait for each other without spinning."""

    def __init__(self, folder: str, rank: int, size: int) -> None:
        receivers = range(1, size) if rank == 0 else [rank]
        self._full = [os.open(f"{folder}/full{r}", os.O_RDWR) for r in receivers]
        self._free = [os.open(f"{folder}/free{r}", os.O_RDWR) for r in receivers]

    @staticmethod
    def make(folder: str, size: int) -> None:
        for r in range(1, size):
            os.mkfifo(f"{folder}/full{r}")
            os.mkfifo(f"{folder}/free{r}")

    def give_full(self) -> None:
        for fd in self._full:
            os.write(fd, b"x")

    def take_full(self) -> None:
        for fd in self._full:
            os.read(fd, 1)

    def give_free(self) -> None:
        for fd in self._free:
            os.write(fd, b"x")

    def take_free(self) -> None:
        for fd in self._free:
            os.read(fd, 1)


class Lane:
    """One sender or receiver. `flat` holds all bytes back to back; on the sender `source` views its tensors.

    `wire_bytes` counts what broadcasts carried, and what a ring was read of, since the caller last set it to 0.
    """

    def __init__(self, config: LaneConfig, store: dist.Store, *, one_clock: bool) -> None:
        self.config = config
        self.one_clock = one_clock
        self.specs = config.specs
        self.is_sender = config.rank == 0
        self.wire_bytes = 0
        self.device = torch.device("cuda", config.rank) if config.backend == "nccl" else torch.device("cpu")
        self.nbytes = sum(s.nbytes for s in config.specs)
        self.flat = torch.ones(self.nbytes, dtype=torch.uint8, device=self.device)
        self.destinations: Destinations | None = None
        if not self.is_sender:
            self.destinations = Destinations(
                config.specs, tp_rank=(config.rank - 1) % config.tp_size, tp_size=config.tp_size, device=self.device
            )
        self.source = {spec.key: tensor for spec, tensor in self.split(self.flat, self.specs)} if self.is_sender else {}
        self.mapping: torch.Tensor | None = None
        self._tokens: Tokens | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._row_chunks: dict[int, list[list[Rows]]] = {}
        self._store = store
        self._group = self._make_group(store)
        self._one = torch.zeros(1, device=self.device)

    def _make_group(self, store: dist.Store) -> Any:
        timeout = datetime.timedelta(seconds=self.config.deadline_s)
        prefix = dist.PrefixStore("lanes", store)
        rank, size = self.config.rank, self.config.size
        if self.config.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(prefix, rank, size, options)
        if self.config.backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's stubs
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self.config.host)]
            options._timeout = timeout
            return gloo(prefix, rank, size, options)
        raise ConfigError(f"the limit cannot be measured over backend {self.config.backend!r}: gloo or nccl expected")

    # -- what variants are made of -------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start one broadcast from the sender; the caller waits on what it returns."""
        self.wire_bytes += tensor.nbytes
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([tensor], options)

    def ack(self) -> None:
        """One answer of 4 bytes per receiver: the reply to an engine's RPC."""
        self._group.allreduce([self._one]).wait()

    def start_together(self) -> float:
        """Return on all lanes at one moment (returned, of `time.monotonic()`): a barrier alone lets go one by one.

        Lanes of several machines have no common clock: there it is a barrier, and each starts when it is let go.
        """
        if not self.one_clock:
            self.ack()
            return time.monotonic()
        moment = torch.tensor([time.monotonic() + _START_DELAY_S], dtype=torch.float64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([moment], options).wait()
        start = float(moment)
        time.sleep(max(0.0, start - time.monotonic()))
        return start

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def split(self, flat: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Views of `specs` lying back to back in `flat`; a view that would be misaligned for its dtype is a copy."""
        at = 0
        for spec in specs:
            raw = flat[at : at + spec.nbytes]
            at += spec.nbytes
            if raw.storage_offset() % spec.dtype.itemsize:
                raw = raw.clone()
            yield spec, raw.view(spec.dtype).view(spec.shape)

    def load(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        assert self.destinations is not None
        self.destinations.load(spec, tensor)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Reused memory of a ring."""
        if self._scratch.numel() < nbytes:
            self._scratch = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        return self._scratch[:nbytes]

    def row_chunks(self, chunk_bytes: int) -> list[list[Rows]]:
        """All tensors as chunks of whole rows, in order; planned once per chunk size."""
        if chunk_bytes not in self._row_chunks:
            chunks: list[list[Rows]] = [[]]
            room = chunk_bytes
            for spec in self.specs:
                first, count = 0, spec.shape[0] if spec.shape else 1
                row_bytes = spec.nbytes // count if count else 0
                while first < count:
                    rows = min(count - first, room // row_bytes) if row_bytes else count
                    if rows:
                        chunks[-1].append(Rows(spec=spec, first=first, last=first + rows))
                        first += rows
                        room -= rows * row_bytes
                    elif room == chunk_bytes:
                        raise ConfigError(
                            f"one row of {spec.name} ({row_bytes} bytes) exceeds a chunk of {chunk_bytes}"
                        )
                    else:
                        chunks.append([])
                        room = chunk_bytes
            self._row_chunks[chunk_bytes] = chunks
        return self._row_chunks[chunk_bytes]

    def pack_rows(self, chunk: Sequence[Rows], buffer: torch.Tensor) -> None:
        at = 0
        for rows in chunk:
            source = self.source[rows.spec.key]
            raw = (source[rows.first : rows.last] if rows.spec.shape else source).reshape(-1).view(torch.uint8)
            buffer[at : at + rows.nbytes].copy_(raw)
            at += rows.nbytes

    def load_rows(self, chunk: Sequence[Rows], buffer: torch.Tensor) -> None:
        assert self.destinations is not None
        at = 0
        for rows in chunk:
            raw = buffer[at : at + rows.nbytes]
            at += rows.nbytes
            if raw.storage_offset() % rows.spec.dtype.itemsize:
                raw = raw.clone()
            self.destinations.load_rows(rows.spec, rows.first, raw.view(rows.spec.dtype).view(rows.shape))

    @property
    def tokens(self) -> Tokens:
        assert self._tokens is not None
        return self._tokens

    def copy_loaded_bytes(self, source: torch.Tensor) -> None:
        """Receivers: one memcpy of as many bytes as this rank's runners load."""
        assert self.destinations is not None
        count = self.destinations.nbytes
        self.destinations.storage[:count].copy_(source[:count])

    def map_shared(self, sender_pid: int, sender_fd: int, folder: str) -> None:
        """Map the sender's memfd and touch every page once, so that no timed copy meets a page fault."""
        fd = sender_fd if self.is_sender else os.open(f"/proc/{sender_pid}/fd/{sender_fd}", os.O_RDWR)
        self.mapping = torch.frombuffer(mmap.mmap(fd, self.nbytes), dtype=torch.uint8)
        if self.is_sender:
            self.mapping.fill_(1)
        else:
            os.close(fd)
            self.mapping.max()
        self._tokens = Tokens(folder, self.config.rank, self.config.size)


class _Server:
    """Answers the commands of `compare.LaneGroup`."""

    def __init__(self) -> None:
        self.config: LaneConfig | None = None
        self.hosted: HostedStore | None = None
        self.lane: Lane | None = None

    def __call__(self, message: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self, "do_" + message.pop("cmd"))(**message)
        return answer

    def do_configure(self, config: dict[str, Any]) -> dict[str, Any]:
        self.config = LaneConfig.from_json(config)
        torch.set_num_threads(1)
        # The kernel that runs it: its monotonic clock is that of every lane with the same one.
        machine = _sockets.machine()["boot"]
        if self.config.rank:
            return {"machine": machine}
        self.hosted = host_store(self.config.host)
        return {"port": self.hosted.port, "machine": machine}

    def do_join(self, host: str, port: int, one_clock: bool) -> dict[str, Any]:
        """`host` and `port`: of the sender's store; `one_clock`: all lanes are on one machine."""
        assert self.config is not None
        timeout = datetime.timedelta(seconds=self.config.deadline_s)
        # A plain client: the rendezvous of a process group waits longer than `connect_store` lets an answer take.
        store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        self.lane = Lane(self.config, store, one_clock=one_clock)
        self.lane.ack()
        loaded = self.lane.destinations.nbytes if self.lane.destinations else 0
        if self.config.shared and self.lane.is_sender:
            fd = os.memfd_create("weightsync-bench-limit")
            os.ftruncate(fd, self.lane.nbytes)
            return {"loaded_bytes": loaded, "pid": os.getpid(), "fd": fd}
        return {"loaded_bytes": loaded}

    def do_map(self, pid: int, fd: int, folder: str) -> dict[str, Any]:
        assert self.lane is not None
        self.lane.map_shared(pid, fd, folder)
        return {}

    def do_fill(self, value: int) -> dict[str, Any]:
        """Give every byte of the source one value, so that `check` can tell what the next run wrote."""
        assert self.lane is not None
        if self.lane.is_sender:
            self.lane.flat.fill_(value)
        return {}

    def do_check(self, value: int) -> dict[str, Any]:
        assert self.lane is not None
        if self.lane.destinations is None:
            return {"wrong": []}
        return {"wrong": self.lane.destinations.mismatches(value)}

    def do_run(self, name: str) -> dict[str, Any]:
        from weightsync.bench import limit, peers

        assert self.lane is not None
        lane = self.lane
        variant = {**limit.VARIANTS, **peers.VARIANTS}[name]
        lane.synchronize()
        lane.wire_bytes = 0
        start = lane.start_together()
        variant(lane)
        lane.synchronize()
        return {"start_s": start, "end_s": time.monotonic(), "wire_bytes": lane.wire_bytes}

    def close(self) -> None:
        """Nothing of a lane outlives its process."""


make = _Server


def main() -> None:
    """`python -m weightsync.bench.lanes FD`: serve on an inherited socket until it closes."""
    serve(int(sys.argv[1]), make())


if __name__ == "__main__":
    main()
