"""Ranks that save with stock Megatron-Core 0.16.1 or with ours while something goes wrong; see test_baselines.py.

One process imports Megatron-Core and forks the ranks of all scenarios, which then mostly wait, so they run side by
side. A rank that hangs is asked where: its stack is the evidence. Ours gets one group, in which every fault of the
stock scenarios happens to one Checkpointer after the other.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import inspect
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from tests.checkpoint import faulty_writer
from tests.support.forks import Fork

GLOO_TIMEOUT_S = 8.0
SLOW_S = 30.0
HANG_S = 34.0
"""Four times what the process group is patient for: who has not returned by then hangs."""
PATIENT_S = 60.0
NO_PSUTIL = "import sys; sys.modules['psutil'] = None; "


def part(rank, world_size=2, fill=1.0):
    from megatron.core.dist_checkpointing import ShardedTensor

    rows = (fill * torch.arange(1024.0 * world_size))[1024 * rank : 1024 * (rank + 1)].clone()
    return {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, world_size)), "step": 7}


def join(rank, folder, world_size=2, timeout_s=GLOO_TIMEOUT_S):
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    timeout = datetime.timedelta(seconds=timeout_s)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size, timeout=timeout)
    # The first collective builds the connections, for which a busy machine may need longer than the timeout.
    dist.barrier()


# Stock


def save_sync(rank, folder):
    from megatron.core import dist_checkpointing as dc

    dc.save(part(rank), str(folder))
    return "saved"


def without_psutil(rank, folder):
    """T1: what `pip install megatron-core` gives, which does not ask for psutil."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.HAVE_PSUTIL = False
    return save_sync(rank, folder)


def without_shim(rank, folder):
    """T2: on a machine without CUDA, as it is."""
    return save_sync(rank, folder)


def with_write(replacement):
    """A save whose writers run `replacement(rank, plain, *args)` for each item."""

    def run(rank, folder, save=save_sync):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        plain = filesystem_async._write_item

        @functools.wraps(plain)
        def item(*args, **kwargs):
            replacement(rank)
            return plain(*args, **kwargs)

        item.__signature__ = inspect.signature(plain)
        filesystem_async._write_item = item
        return save(rank, folder)

    return run


def _slow(rank):
    time.sleep(SLOW_S if rank == 0 else 0)


def _killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _full(rank):
    if rank == 1:
        raise OSError(28, "No space left on device")


def save_async(rank, folder):
    """Polls for three seconds; what was finalised, and whether the process that writes is believed to live."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue(persistent=False)
    queue.schedule_async_request(dc.save(part(rank), str(folder), async_sharded_save=True))
    done = []
    for _ in range(15):
        done += queue.maybe_finalize_async_calls(blocking=False)
        time.sleep(0.2)
    process = queue.async_calls[0].async_caller.process
    alive = process is not None and process.is_alive()
    if process is not None:
        process.kill()
    return {"finalized": done, "alive": alive}


def persistent_worker(rank, folder):
    """T7: the worker dies when it starts, here because there is no CUDA device to take."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(dc.save(part(rank), str(folder), async_sharded_save=True))
    return "scheduled"


def own_folders(rank, folder):
    """T9: each node has a disk of its own."""
    from megatron.core import dist_checkpointing as dc

    own = folder / f"node{rank}"
    own.mkdir()
    dc.save(part(rank), str(own))
    files = sorted(os.listdir(own))
    try:
        dc.load(part(rank, fill=0.0), str(own))
        loaded = "loaded"
    except Exception as e:  # noqa: BLE001 - what it raises is what is looked at
        loaded = f"{type(e).__name__}: {e}"
    return {"files": files, "load": loaded}


def flipped(rank, folder):
    """T10: a bit of the payload changes on disk."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing as dc

    save_sync(rank, folder)
    dist.barrier()
    if rank == 0:
        path = folder / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[data.find(part(1)["w"].data.numpy().tobytes()) + 43] ^= 0x40
        path.write_bytes(data)
    dist.barrier()
    got = dc.load(part(rank, fill=0.0), str(folder))["w"]
    return {"right": torch.equal(got, part(rank)["w"].data)}


STOCK = {
    "T1 no psutil": without_psutil,
    "T2 no CUDA": without_shim,
    "T4 slow disk": with_write(_slow),
    "T5 killed, sync": with_write(_killed),
    "T6 killed, async": functools.partial(with_write(_killed), save=save_async),
    "T7 persistent worker": persistent_worker,
    "T8 disk full": with_write(_full),
    "T9 own folders": own_folders,
    "T10 bit flip": flipped,
}

BY_TIMEOUT = ("T4 slow disk", "T5 killed, sync", "T9 own folders")
"""Where the patience of the process group decides."""
FOR_EVER = {("T1 no psutil", 0), ("T1 no psutil", 1), ("T5 killed, sync", 1)}
FOR_EVER |= {("T7 persistent worker", 0), ("T7 persistent worker", 1)}
"""Ranks that are known to hang, and need not be waited for longer than HANG_S."""


def stock_rank(name, rank, folder):
    from weightsync.bench.megatron import cpu_runtime

    stacks = open(folder.parent / f"{folder.name}.stack.{rank}", "w")  # noqa: SIM115 - open until this process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    timeout_s = GLOO_TIMEOUT_S if name in BY_TIMEOUT else PATIENT_S
    join(rank, folder.parent / f"{folder.name}.group", timeout_s=timeout_s)
    with contextlib.nullcontext() if name.startswith("T2") else cpu_runtime():
        try:
            found = STOCK[name](rank, folder)
        except BaseException as e:  # noqa: BLE001 - torch's CheckpointException is no Exception
            found = f"{type(e).__name__}: {e}"
    (folder.parent / f"{folder.name}.found.{rank}").write_text(json.dumps(found))
    # Another rank may hang with our connections open; and stock's children and queues keep an interpreter alive.
    time.sleep(2 * PATIENT_S)


# Ours


def ours_rank(rank, folder):
    """The same faults, one after the other, in a process without psutil and CUDA: {case: what it came to}."""
    import torch.distributed as dist

    from checkpoint import Checkpointer, SaveConfig, process
    from checkpoint.errors import WriterLost

    sys.modules["psutil"] = None
    process.PROGRAM = NO_PSUTIL + faulty_writer.PROGRAM
    os.environ["CHECKPOINT_TEST_FAULTS"] = str(folder)
    join(rank, folder)
    found = {}
    config = SaveConfig(deadline_s=40, stall_s=30, max_consecutive_failures=9)
    with Checkpointer(folder / "root", rank=rank, world_size=2, config=config) as c:
        cases = (
            ("T1 T2 plain", None, None),
            ("T4 slow disk", 0, {"phase": "write", "do": SLOW_S}),
            ("T5 T6 killed", 1, {"phase": "write", "do": "kill"}),
            ("T8 disk full", 1, {"phase": "write", "do": "ENOSPC"}),
            ("after", None, None),
        )
        for step, (name, faulty, fault) in enumerate(cases, 1):
            if faulty == rank:
                (folder / f"fault.{rank}.json").write_text(json.dumps(fault))
            dist.barrier()
            began = time.monotonic()
            handle = c.save(step, part(rank))
            blocked = time.monotonic() - began
            c.wait()
            took = time.monotonic() - began
            number = torch.ones(1)
            dist.all_reduce(number)
            found[name] = {
                "state": handle.state,
                "error": handle.error,
                "blocked_s": blocked,
                "took_s": took,
                "group": number.item() == 2,
            }
        damage = folder / "root/iter_0000005/__1_0.distcp"
        if rank == 0:
            data = bytearray(damage.read_bytes())
            data[900] ^= 16
            damage.write_bytes(data)
        dist.barrier()
        got = c.load(part(rank, fill=0.0))
        right = torch.equal(got.state["w"], part(rank)["w"].data)
        found["T10 bit flip"] = {"step": got.step, "right": right, "why": list(got.passed_over)}
        found["listing"] = sorted(os.listdir(folder / "root"))
    # T7: the writer of rank 1 dies when it starts.
    if rank == 1:
        process.PROGRAM = "raise SystemExit(3)"
    began = time.monotonic()
    try:
        Checkpointer(folder / "root", rank=rank, world_size=2, config=SaveConfig(start_deadline_s=4))
        found["T7 writer dies"] = {"error": ""}
    except WriterLost as e:
        found["T7 writer dies"] = {"error": str(e), "took_s": time.monotonic() - began}
    end = time.monotonic() + 30
    while len(list(folder.glob("met.*"))) < 2 and time.monotonic() < end:  # the group's patience is shorter
        (folder / f"met.{rank}").touch()
        time.sleep(0.01)
    number = torch.ones(1)
    dist.all_reduce(number)
    found["T7 writer dies"]["group"] = number.item() == 2
    return found


# All of it


def observe_all(_rank, _world_size, base):
    """{"stock": {scenario: [what each rank came to, or where it hangs]}, "ours": [...]}"""
    faulthandler.cancel_dump_traceback_later()
    import megatron.core.dist_checkpointing  # before the forks, which then need not
    import megatron.core.optimizer  # noqa: F401

    base = Path(base)
    with contextlib.ExitStack() as stack:
        (base / "ours").mkdir()
        ours = [stack.enter_context(Fork(ours_rank, rank, base / "ours")) for rank in range(2)]
        running = {}
        for name in STOCK:
            folder = base / name.split()[0]
            folder.mkdir()
            (base / f"{folder.name}.group").mkdir()
            running[name] = folder, [stack.enter_context(Fork(_group_leader, name, r, folder)) for r in range(2)]
        began = time.monotonic()
        waiting = {(name, rank) for name in STOCK for rank in range(2)} - FOR_EVER
        while time.monotonic() < began + (PATIENT_S if waiting else HANG_S):
            for name, rank in sorted(waiting):
                if _found(running[name][0], rank) is not None:
                    waiting.discard((name, rank))
            time.sleep(0.05)
        stock = {}
        for name, (folder, ranks) in running.items():
            stock[name] = [_found(folder, rank) or _hangs(folder, ranks[rank], rank) for rank in range(2)]
            stock[name].append(sorted(os.listdir(folder)))
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
        return {"stock": stock, "ours": [rank.result(150) for rank in ours]}


def _group_leader(name, rank, folder):
    os.setpgid(0, 0)  # its children of stock go with it
    stock_rank(name, rank, folder)


def _found(folder, rank):
    path = folder.parent / f"{folder.name}.found.{rank}"
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None  # not there, or half written


def _hangs(folder, fork, rank):
    os.kill(fork.pid, signal.SIGUSR1)
    time.sleep(0.3)
    return "hangs in\n" + (folder.parent / f"{folder.name}.stack.{rank}").read_text()
