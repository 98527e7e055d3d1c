"""Ranks that save with stock Megatron-Core 0.16.1 or with ours while something goes wrong; see test_baselines.py.

One process imports Megatron-Core and forks the ranks of all scenarios, which then mostly wait, so they run side by
side. A rank that hangs is asked where: its stack is the evidence. Ours gets one group, in which every fault of the
stock scenarios happens to one Checkpointer after the other.

Nothing here depends on how busy the machine is: a process group is patient until the moment that is looked at (`wait`),
a slow disk is one that takes longer than the other rank waits, and who hangs has been seen in the same call for HANG_S.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

from tests.checkpoint import faulty_writer
from tests.support.forks import Fork

GLOO_TIMEOUT_S = 4.0
SLOW_S = 3 * GLOO_TIMEOUT_S
HANG_S = 3 * GLOO_TIMEOUT_S
PATIENT_S = 100.0
"""For what is not looked at: more than it can take."""
NO_PSUTIL = "import sys; sys.modules['psutil'] = None; "


def part(rank, world_size=2, fill=1.0):
    from megatron.core.dist_checkpointing import ShardedTensor

    rows = (fill * torch.arange(1024.0 * world_size))[1024 * rank : 1024 * (rank + 1)].clone()
    return {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, world_size)), "step": 7}


def enter_group(rank, folder, world_size=2):
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    timeout = datetime.timedelta(seconds=PATIENT_S)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()


def wait(seconds):
    """How long the process group waits for its other ranks from now on."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)


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


def with_write(replacement, then_wait_s=PATIENT_S):
    """A save whose writers run `replacement(rank, folder)` for each item; when they have returned, the group waits."""

    def run(rank, folder, save=save_sync):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        plain = filesystem_async._write_item
        plain_write = filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc

        @functools.wraps(plain)
        def item(*args, **kwargs):
            replacement(rank, folder)
            return plain(*args, **kwargs)

        @functools.wraps(plain_write)
        def write_preloaded_data_multiproc(*args, **kwargs):
            plain_write(*args, **kwargs)
            wait(then_wait_s)

        item.__signature__ = inspect.signature(plain)
        filesystem_async._write_item = item
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(
            write_preloaded_data_multiproc
        )
        return save(rank, folder)

    return run


def _slow(rank, folder):
    end = time.monotonic() + PATIENT_S
    while rank == 0 and _found(folder, 1) is None and time.monotonic() < end:
        time.sleep(0.05)


def _killed(rank, _folder):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _full(rank, _folder):
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
    wait(GLOO_TIMEOUT_S)
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
    "T4 slow disk": with_write(_slow, GLOO_TIMEOUT_S),
    "T5 killed, sync": with_write(_killed, GLOO_TIMEOUT_S),
    "T6 killed, async": functools.partial(with_write(_killed), save=save_async),
    "T7 persistent worker": persistent_worker,
    "T8 disk full": with_write(_full),
    "T9 own folders": own_folders,
    "T10 bit flip": flipped,
}

FOR_EVER = {
    ("T1 no psutil", 0): "write_preloaded_data_multiproc",
    ("T1 no psutil", 1): "write_preloaded_data_multiproc",
    ("T5 killed, sync", 1): "write_preloaded_data_multiproc",
    ("T7 persistent worker", 0): "async_utils.py",
    ("T7 persistent worker", 1): "async_utils.py",
}
"""Ranks that are known to hang, and what of stock is then on their stack."""


def stock_rank(name, rank, folder):
    from weightsync.bench.megatron import cpu_runtime

    path = folder.parent / f"{folder.name}.stack.{rank}"
    stacks = open(f"{path}.new", "w")  # noqa: SIM115 - open until this process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.rename(f"{path}.new", path)  # from here on the signal does not kill
    enter_group(rank, folder.parent / f"{folder.name}.group")
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
    enter_group(rank, folder)
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
            wait(GLOO_TIMEOUT_S)
            began = time.monotonic()
            handle = c.save(step, part(rank))
            blocked = time.monotonic() - began
            c.wait()
            took = time.monotonic() - began
            wait(PATIENT_S)
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
    number = torch.ones(1)
    dist.all_reduce(number)
    found["T7 writer dies"]["group"] = number.item() == 2
    return found


# All of it


def observe_all(_rank, _world_size, base):
    """{"stock": {scenario: [what each rank came to, or where it hangs]}, "ours": [...], "resiliency": {...}}"""
    faulthandler.cancel_dump_traceback_later()
    import megatron.core.dist_checkpointing  # before the forks, which then need not
    import megatron.core.optimizer  # noqa: F401

    base = Path(base)
    with contextlib.ExitStack() as stack:
        (base / "ours").mkdir()
        ours = [stack.enter_context(Fork(ours_rank, rank, base / "ours")) for rank in range(2)]
        extension = None
        if importlib.util.find_spec("nvidia_resiliency_ext"):
            (base / "resiliency").mkdir()
            extension = stack.enter_context(Fork(_resiliency, base / "resiliency"))
        running = {}
        for name in STOCK:
            folder = base / name.split()[0]
            folder.mkdir()
            (base / f"{folder.name}.group").mkdir()
            running[name] = folder, [stack.enter_context(Fork(_group_leader, name, r, folder)) for r in range(2)]
        end = time.monotonic() + PATIENT_S
        waiting = {(name, rank) for name in STOCK for rank in range(2)}
        since, stacks = {}, {}
        while waiting and time.monotonic() < end:
            time.sleep(0.5)
            for name, rank in sorted(waiting):
                folder, ranks = running[name]
                if _found(folder, rank) is not None:
                    waiting.discard((name, rank))
                elif frame := FOR_EVER.get((name, rank)):
                    stacks[name, rank] = where = _stack(folder, ranks[rank], rank)
                    if frame not in where:
                        since.pop((name, rank), None)
                    elif since.setdefault((name, rank), time.monotonic()) < time.monotonic() - HANG_S:
                        waiting.discard((name, rank))
        stock = {}
        for name, (folder, ranks) in running.items():
            stock[name] = [_found(folder, r) or f"hangs in\n{stacks.get((name, r))}" for r in range(2)]
            stock[name].append(sorted(os.listdir(folder)))
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
        return {
            "stock": stock,
            "ours": [rank.result(150) for rank in ours],
            "resiliency": extension and extension.result(150),
        }


def _resiliency(folder):
    from tests.checkpoint.resiliency_ranks import torn_and_stale

    try:
        return torn_and_stale(folder)
    except Exception:  # noqa: BLE001 - the test that looks at it fails with this text
        return traceback.format_exc()


def _group_leader(name, rank, folder):
    os.setpgid(0, 0)  # its children of stock go with it
    stock_rank(name, rank, folder)


def _found(folder, rank):
    path = folder.parent / f"{folder.name}.found.{rank}"
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None  # not there, or half written


def _stack(folder, fork, rank):
    """Where it is now; empty if it does not say so."""
    path = folder.parent / f"{folder.name}.stack.{rank}"
    if not path.exists():
        return ""
    size = seen = path.stat().st_size
    os.kill(fork.pid, signal.SIGUSR1)
    end = time.monotonic() + 3.0
    while time.monotonic() < end:  # until it has written, and writes no more
        time.sleep(0.1)
        before, seen = seen, path.stat().st_size
        if before == seen > size:
            break
    return path.read_text()[size:]
