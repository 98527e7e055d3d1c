"""Failures of stock Megatron-Core 0.16.1 that this package exists for, beside what ours does under the same conditions.

Marked baselines: when stock no longer fails like this, the test says so, and the comparison has to be written anew.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from checkpoint.layout import committed_path
from checkpoint.load import verify
from tests.checkpoint import faulty_writer
from tests.support import start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(240)]

GLOO_TIMEOUT_S = 8.0
SLOW_S = 14.0


def part(rank, world_size):
    from megatron.core.dist_checkpointing import ShardedTensor

    rows = torch.arange(1024.0 * world_size)[1024 * rank : 1024 * (rank + 1)].clone()
    return {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, world_size)), "step": 7}


def slow_disk(rank, world_size, root):
    """Rank 0's disk is slower than the process group is patient: ours first, then stock, which breaks the group."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from checkpoint import Checkpointer, SaveConfig, process
    from tests.checkpoint.megatron_ranks import megatron

    found = {}
    process.PROGRAM = faulty_writer.PROGRAM
    os.environ["CHECKPOINT_TEST_FAULTS"] = str(root)
    with megatron():
        config = SaveConfig(deadline_s=60, stall_s=40)
        with Checkpointer(Path(root) / "ours", rank=rank, world_size=world_size, config=config) as c:
            if rank == 0:
                (Path(root) / "fault.0.json").write_text(json.dumps({"phase": "write", "do": SLOW_S}))
            began = time.monotonic()
            handle = c.save(1, part(rank, world_size))
            found["blocked_s"] = time.monotonic() - began
            c.wait()
            found["took_s"] = time.monotonic() - began
            found["ours"] = (handle.state, handle.error)
            number = torch.ones(1)
            dist.all_reduce(number)
            found["group works"] = number.item() == world_size

        plain = filesystem_async._write_item

        def slow(*args, **kwargs):
            time.sleep(SLOW_S if rank == 0 else 0)
            return plain(*args, **kwargs)

        slow.__signature__ = __import__("inspect").signature(plain)
        filesystem_async._write_item = slow
        stock = Path(root) / "stock"
        stock.mkdir(exist_ok=True)
        try:
            dc.save(part(rank, world_size), str(stock))
            found["stock"] = "saved"
        except Exception as e:  # noqa: BLE001
            found["stock"] = f"{type(e).__name__}: {e}"
        found["stock files"] = sorted(os.listdir(stock))
    return found


def killed_writer(rank, world_size, root):
    """A writer is killed, as by the kernel when memory is short. Stock last: it never ends."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from checkpoint import Checkpointer, SaveConfig, process
    from tests.checkpoint.megatron_ranks import megatron

    found = {}
    process.PROGRAM = faulty_writer.PROGRAM
    os.environ["CHECKPOINT_TEST_FAULTS"] = str(root)
    with megatron():
        config = SaveConfig(deadline_s=30)
        with Checkpointer(Path(root) / "ours", rank=rank, world_size=world_size, config=config) as c:
            if rank == 1:
                (Path(root) / "fault.1.json").write_text(json.dumps({"phase": "write", "do": "kill"}))
            handle = c.save(1, part(rank, world_size))
            c.wait()
            found["ours"] = (handle.state, handle.error)
            again = c.save(2, part(rank, world_size))
            c.wait()
            found["ours again"] = again.state
        plain = filesystem_async._write_item

        def killed(*args, **kwargs):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        killed.__signature__ = __import__("inspect").signature(plain)
        filesystem_async._write_item = killed
        stock = Path(root) / "stock"
        stock.mkdir(exist_ok=True)
        queue = AsyncCallsQueue(persistent=False)
        queue.schedule_async_request(dc.save(part(rank, world_size), str(stock), async_sharded_save=True))
        found["stock finalized"] = []
        for _ in range(10):
            found["stock finalized"] += queue.maybe_finalize_async_calls(blocking=False)
            time.sleep(0.2)
        caller = queue.async_calls[0].async_caller
        found["stock believes it alive"] = bool(caller.process and caller.process.is_alive())
        if caller.process is not None:
            caller.process.kill()
        (Path(root) / f"result.{rank}.json").write_text(json.dumps(found))
        os._exit(0)  # stock's queue cannot be closed any more


def test_a_slow_disk_breaks_the_process_group_of_stock_and_not_ours(tmp_path):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    with start_ranks(slow_disk, 2, args=(str(tmp_path),), gloo=True, deadline_s=GLOO_TIMEOUT_S) as ranks:
        results = ranks.results(deadline_s=200)
    for found in results:
        assert found["ours"] == ("committed", "")
        assert found["took_s"] > SLOW_S > GLOO_TIMEOUT_S
        assert found["blocked_s"] < 2
        assert found["group works"]
    verify(committed_path(tmp_path / "ours", 1))
    assert "Timed out" in results[1]["stock"]
    # All data is there, and nothing can be loaded.
    assert any(name.endswith(".distcp") for name in results[0]["stock files"])
    assert ".metadata" not in results[0]["stock files"]


def test_a_killed_writer_is_never_noticed_by_stock_and_named_by_ours(tmp_path):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    with start_ranks(killed_writer, 2, args=(str(tmp_path),), gloo=True, deadline_s=120) as ranks:
        for process in ranks.processes:
            assert process.wait(200) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"result.{rank}.json").read_text())
        assert found["ours"][0] == "failed"
        assert "rank 1 on" in found["ours"][1]
        assert "killed by SIGKILL" in found["ours"][1]
        assert found["ours again"] == "committed"
        assert found["stock finalized"] == []
        if rank == 1:
            assert found["stock believes it alive"]
