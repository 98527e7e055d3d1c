"""What the ranks of tests/checkpoint/test_save.py run: many saves in one group, because starting one takes seconds."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from checkpoint import process
from checkpoint.checkpointer import Checkpointer
from checkpoint.config import SaveConfig
from checkpoint.errors import DiskError, SaveError, StoreLost
from checkpoint.retention import Retention
from checkpoint.store import Store
from tests.checkpoint import faulty_writer
from tests.checkpoint.support import state


class Meeting:
    """Lets the ranks of a test start each case together."""

    def __init__(self, address, world_size, name):
        self.store, self.world_size, self.count = Store(address, f"meeting-{name}/"), world_size, 0

    def __call__(self, deadline_s=30.0):
        self.count += 1
        self.store.count(str(self.count), 1)
        end = time.monotonic() + deadline_s
        while self.store.count(str(self.count)) < self.world_size:
            assert time.monotonic() < end, f"a rank did not come to meeting {self.count}"
            time.sleep(0.005)


def listing(root):
    return sorted(os.listdir(root))


def outcome(checkpointer, handle, began):
    return {
        "state": handle.state,
        "error": handle.error,
        "blocked_s": handle.blocked_s,
        "took_s": time.monotonic() - began,
        "result": handle.result,
        "listing": listing(checkpointer.root),
    }


def late_rank(rank, world_size, address, root):
    """Rank 1 calls save after the others' deadline; then all save again."""
    meet = Meeting(address, world_size, "late_rank")
    config = SaveConfig(deadline_s=1.0, grace_s=1.0, stall_s=5)
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        meet()
        if rank == 1:
            time.sleep(2.5)
        began = time.monotonic()
        late = c.save(1, state(rank, world_size, 1))
        c.wait()
        first = outcome(c, late, began)
        meet()
        second = c.save(2, state(rank, world_size, 2))
        c.wait()
        return first, outcome(c, second, began)


def mismatch(rank, world_size, address, root):
    """States that do not fit together: another shape on rank 1, a part that nobody saves, a part saved twice."""
    meet = Meeting(address, world_size, "mismatch")
    results = []
    config = SaveConfig(deadline_s=20, max_consecutive_failures=9)
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        for step, states in enumerate(
            (
                (state(0, 2), state(1, 2, num_rows=32)),
                (state(0, 2), state(1, 2, keys=("weight",))),
                (state(0, 2), state(0, 2, keys=("weight", "exp_avg"))),
            ),
            1,
        ):
            meet()
            handle = c.save(step, states[rank])
            c.wait()
            results.append((handle.state, handle.error))
        meet()
        handle = c.save(9, state(rank, 2, 9))
        c.wait()
        results.append((handle.state, handle.error))
    return results


def retention(rank, world_size, address, root):
    """The largest number of folders seen while saving, and what is left."""
    config = SaveConfig(deadline_s=20, retention=Retention(keep_last=1, keep_every=2))
    most = 0
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        for step in range(1, 6):
            handle = c.save(step, state(rank, world_size, step))
            while not handle.done:
                most = max(most, len([n for n in listing(root) if n.startswith((".saving", "iter_"))]))
                time.sleep(0.002)
            assert handle.state == "committed", handle.error
            time.sleep(0.05)  # what the commit made superfluous is deleted after the word
    return most, listing(root)


def streaming(rank, world_size, address, root):
    """A state four times as large as the staging memory."""
    keys = [f"t{i}" for i in range(16)]
    one = 64 * 256 * 4
    config = SaveConfig(deadline_s=20, staging_bytes=4 * one, on_failure="raise")
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        handle = c.save(1, state(rank, world_size, 1, keys=keys))
        c.wait()
        return handle.state, handle.error, c._stager.staging.nbytes, handle.nbytes


def lost_store(rank, world_size, _address, root, ready, address):
    """The store ends while a save waits for its verdict; the parent ends it when `ready` files are there."""
    process.PROGRAM = faulty_writer.PROGRAM
    os.environ["CHECKPOINT_TEST_FAULTS"] = str(Path(root).parent)
    if rank == 1:
        (Path(root).parent / "fault.1.json").write_text(json.dumps({"phase": "write", "do": 3}))
    config = SaveConfig(deadline_s=8, grace_s=2, stall_s=20)
    c = Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config)
    began = time.monotonic()
    handle = c.save(1, state(rank, world_size, 1))
    Path(ready, str(rank)).touch()
    c.wait()
    result = outcome(c, handle, began)
    try:
        c.close()
    except (SaveError, StoreLost) as e:
        result["close"] = str(e)
    result["closed_s"] = time.monotonic() - began
    return result


def node_local(rank, world_size, address, root):
    """Each rank has a root that the other does not see."""
    config = SaveConfig(deadline_s=20)
    root = Path(root) / f"node{rank}" / "root"
    root.mkdir(parents=True)
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        began = time.monotonic()
        assert c.node == rank
        handle = c.save(1, state(rank, world_size, 1))
        c.wait()
        return outcome(c, handle, began)


def draining(rank, world_size, address, root, durable):
    """Every commit is drained in the background."""
    config = SaveConfig(deadline_s=20, retention=Retention(keep_last=1), durable_url=f"file://{durable}")
    events = []
    with Checkpointer(
        root, rank=rank, world_size=world_size, store=address, config=config, on_event=events.append
    ) as c:
        need = c.preflight(state(rank, world_size, 1))
        for step in (1, 2):
            c.save(step, state(rank, world_size, step))
            c.wait()
            assert c.wait_drained(40)
    return [(e.kind, e.step) for e in events], (need.node_bytes, need.disk_peak_bytes)


def replaced_while_idle(rank, world_size, address, root):
    """The writer dies between two saves."""
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=SaveConfig(deadline_s=30)) as c:
        c.save(1, state(rank, world_size, 1))
        c.wait()
        if rank == 1:
            os.kill(c.writer_pid, signal.SIGKILL)
            time.sleep(0.5)
        handle = c.save(2, state(rank, world_size, 2))
        c.wait()
        return handle.state, handle.error


def retry(rank, world_size, address, root):
    """An aborted save is tried again from what is staged, while the trainer goes on and changes its weights."""
    process.PROGRAM = faulty_writer.PROGRAM
    os.environ["CHECKPOINT_TEST_FAULTS"] = str(Path(root).parent)
    if rank == 1:
        (Path(root).parent / "fault.1.json").write_text(json.dumps({"phase": "write", "do": "EIO"}))
    config = SaveConfig(deadline_s=20, on_failure="retry", retries=2)
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        part = state(rank, world_size, 1)
        handle = c.save(1, part)
        for shard in part.shards:
            shard.tensor.zero_()
        c.wait()
        return handle.state, handle.error


def preflight(rank, world_size, address, root):
    """A limit that does not take what a save needs refuses before training."""
    config = SaveConfig(retention=Retention(keep_last=1), disk_limit_bytes=400_000)
    with Checkpointer(root, rank=rank, world_size=world_size, store=address, config=config) as c:
        try:
            c.preflight(state(rank, world_size, 1))
        except DiskError as e:
            return str(e)
    return ""


def several(rank, world_size, address, base, cases):
    """Cases (name -> further arguments) that need no processes of their own; each gets a root of its own."""
    found = {}
    for name, args in cases.items():
        root = Path(base) / name / "root"
        root.mkdir(parents=True, exist_ok=True)
        found[name] = globals()[name](rank, world_size, address, str(root), *args)
    return found
