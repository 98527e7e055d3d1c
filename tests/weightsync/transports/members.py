"""Scenarios of one data group, played by forked processes; what every member saw is data for the tests to judge.

`play` runs in a process of `tests.support.forks`: it forks a host for the store and the members, one of which may be
the victim of the scenario, and returns what the others report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import multiprocessing
import os
import resource
import signal
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forks import Fork, holdings, settle
from tests.weightsync.transports.hostgpu import HostGpu
from weightsync.errors import WeightSyncError
from weightsync.store import connect_store, host_store, wait_key
from weightsync.transports import _groups, _ring
from weightsync.transports.base import GroupInfo
from weightsync.transports.ipc import CudaIpcTransport
from weightsync.transports.registry import get_transport

BUCKET_BYTES = 64 * 1024
NUM_BUFFERS = 3
ODD_SIZES = (BUCKET_BYTES, 1, BUCKET_BYTES - 3, 17, 4096, BUCKET_BYTES // 2 + 1) * 4
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """One group, and what befalls the rank `victim` before it handles the bucket `at` (publish, bucket)."""

    size: int = 3
    sizes: tuple[int, ...] = ODD_SIZES
    bucket_bytes: int = BUCKET_BYTES
    publishes: int = 2
    deadline_s: float = 30.0
    open_s: float = 30.0
    tensors: str = "cpu"
    """Device of what is packed and loaded; the buckets are where the transport has them."""
    gpus: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By rank, what is special about its `HostGpu` (transport `hostgpu`: ipc on host memory)."""
    victim: int | None = None
    fate: str = ""
    """kill, stop, abort, slow, late, never, elsewhere, poor, stranger, orphan (the store's host is killed), doomed (the
    store's host is stopped and the victim killed)"""
    at: tuple[int, int] = (1, 5)


def peer(rank: int) -> str:
    return "trainer stage 0" if rank == 0 else f"engine {rank - 1} rank 0"


def play(transport: str, scenario: Scenario) -> dict[int, dict[str, Any]]:
    """Reports by rank; a victim that cannot report has none."""
    progress = mmap.mmap(-1, 4096)
    here, there = multiprocessing.Pipe()
    silent = {scenario.victim} if scenario.fate in ("kill", "stop", "never", "doomed") else set()
    with contextlib.closing(here), contextlib.closing(there), contextlib.ExitStack() as forks:
        host = forks.enter_context(Fork(_serve, there))
        port = here.recv()
        members = {
            rank: forks.enter_context(Fork(_member, transport, scenario, rank, port, progress, host.pid))
            for rank in range(scenario.size)
        }
        return {rank: member.result(60.0) for rank, member in members.items() if rank not in silent}


def _serve(pipe: Any) -> None:
    hosted = host_store()
    pipe.send(hosted.port)
    time.sleep(120)


def _pattern(nbytes: int, publish: int, bucket: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 7 + 13 * bucket + 101 * publish).remainder(251).to(torch.uint8)


def _member(transport: str, scenario: Scenario, rank: int, port: int, progress: mmap.mmap, host_pid: int) -> Any:
    torch.set_num_threads(1)
    fate = scenario.fate if rank == scenario.victim else ""
    store = connect_store("127.0.0.1", port, 20.0)
    gpu = HostGpu(**scenario.gpus.get(rank, {})) if transport == "hostgpu" else None
    opener = get_transport(transport) if gpu is None else CudaIpcTransport(driver=gpu)
    device = torch.device("cpu")
    if opener.caps.devices == {"cuda"}:
        device = torch.device("cuda", 0 if transport == "ipc" else rank)
    group = GroupInfo(
        store=dist.PrefixStore("group", store),
        name="epoch 1 stage 0",
        rank=rank,
        size=scenario.size,
        device=device,
        bucket_bytes=scenario.bucket_bytes,
        num_buffers=NUM_BUFFERS,
        bind_host="127.0.0.1",
        deadline_s=scenario.open_s,
        peers=[peer(r) for r in range(scenario.size)],
    )
    if device.type == "cpu":  # a CUDA driver that was asked for its devices may have threads
        settle()
    before = holdings()
    report: dict[str, Any] = {"error": None, "buffers": set(), "lead": 0}
    endpoint = None
    start = time.monotonic()
    try:
        _before_open(fate, group, report)
        endpoint = opener.open_sender(group) if rank == 0 else opener.open_receiver(group)
        report["open_s"] = time.monotonic() - start
        for publish in range(scenario.publishes):
            start = time.monotonic()
            _publish(scenario, publish, fate, endpoint, group, progress, host_pid, report)
            if transport == "ipc":
                report["allocated"] = [*report.get("allocated", []), torch.cuda.memory_allocated()]
            if gpu is not None:
                report["between"] = {"memfds": n} if (n := holdings()["memfds"] - before["memfds"]) else {}
    except WeightSyncError as e:
        report["seconds"] = time.monotonic() - start
        report["error"] = (type(e).__name__, str(e), getattr(e, "peer", None), getattr(e, "bytes_done", None))
        if endpoint is not None and not endpoint.closed:
            try:
                endpoint.start((1,), 1.0)
            except WeightSyncError as again:
                report["again"] = str(again)
        # The traceback holds the views of the frames below.
        del e
    if endpoint is not None:
        report["bytes"] = endpoint.bytes_sent if rank == 0 else endpoint.bytes_received
        start = time.monotonic()
        endpoint.close() if report["error"] is None else endpoint.abort()
        endpoint.abort()
        report["end_s"] = time.monotonic() - start
    del endpoint
    # An operation that gloo forgot keeps its thread until its own timeout (see `_groups`): rare, and so is the wait.
    end = time.monotonic() + 3.0 + (scenario.deadline_s + _groups._BEYOND_S if transport == "gloo" else 0.0)
    while (now := holdings()) != before and time.monotonic() < end:
        time.sleep(0.01)
    if gpu is not None:
        end = time.monotonic() + 3.0
        while (report_held := gpu.held()) and time.monotonic() < end:
            time.sleep(0.01)
        report["held"] = report_held
        report["collected"] = gpu.collected
    report["left"] = {kind: n - before[kind] for kind, n in now.items() if n != before[kind]}
    return report


def _publish(scenario, publish, fate, endpoint, group, progress, host_pid, report) -> None:
    sender = group.rank == 0
    endpoint.start(scenario.sizes, scenario.deadline_s)
    for bucket, nbytes in enumerate(scenario.sizes):
        if (publish, bucket) == scenario.at:
            _befall(fate, endpoint, host_pid)
        if sender:
            buffer = endpoint.acquire()
            report["buffers"].add(buffer.data_ptr())
            behind = publish * len(scenario.sizes) + bucket - min(progress[1 : group.size])
            report["lead"] = max(report["lead"], behind)
            buffer[:nbytes].copy_(_pattern(nbytes, publish, bucket).to(scenario.tensors))
            del buffer
            endpoint.send(nbytes)
        else:
            if fate == "slow":
                time.sleep(0.005)
            view = endpoint.receive()
            report["buffers"].add(view.data_ptr())
            assert view.numel() == nbytes
            loaded = torch.empty(nbytes, dtype=torch.uint8, device=scenario.tensors).copy_(view)
            assert torch.equal(loaded.cpu(), _pattern(nbytes, publish, bucket)), f"wrong bytes in {publish}, {bucket}"
            del view
            progress[group.rank] += 1
            endpoint.release()
    endpoint.finish()


def _befall(fate: str, endpoint: Any, host_pid: int) -> None:
    if fate == "orphan":
        os.kill(host_pid, signal.SIGKILL)
    elif fate == "doomed":
        os.kill(host_pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fate == "abort":
        endpoint.abort()


def _before_open(fate: str, group: GroupInfo, report: dict[str, Any]) -> None:
    if fate == "never":
        time.sleep(60)
    elif fate == "late":
        time.sleep(0.5)
    elif fate == "elsewhere":
        _ring.machine = lambda: {"boot": "another", "net": "net:[1]", "host": "far"}
    elif fate == "poor":
        with open("/proc/self/statm") as f:
            mapped = int(f.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (mapped + group.bucket_bytes,) * 2)
    elif fate == "stranger":
        name = json.loads(wait_key(group.store, "socket", 20.0)[1])["name"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(20.0)
            link.connect(f"\0{name}")
            link.send(json.dumps({"rank": group.rank, "token": "guess"}).encode())
            message, fds, _, _ = socket.recv_fds(link, 4096, 1)
            report["stranger"] = (message.decode(), len(fds), link.recv(1))
