"""Runs a row of the fault matrix: two ranks with real Checkpointers and writers, one fault, and a fresh start after it.

    with RunningRow(row, folder) as running:
        outcome = running.outcome()

The caller has one thread and Megatron-Core imported: the processes of a row are forked from it, which takes
milliseconds. Rank 0 hosts the store, as in production, and the ranks share a gloo group, which must work afterwards if
both live. A small tmpfs in a mount namespace of the row's own stands for a full or read-only disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.fault_damage import DISK, damage, small_disk
from checkpoint import Checkpointer, SaveConfig, process
from checkpoint.disk import folder_bytes
from checkpoint.errors import CheckpointError, LoadError
from checkpoint.layout import committed_path, committed_steps
from checkpoint.store import HostedStore
from tests.checkpoint import faulty_writer
from tests.support.forks import Fork

__all__ = ["Outcome", "RunningRow"]

ROWS_PER_RANK, COLUMNS = 1536, 512  # 3 MiB: two data files per rank
BLOCKED_LIMIT_S = 2.0
CONFIG = {"deadline_s": 4.0, "stall_s": 1.5, "grace_s": 2.0, "start_deadline_s": 90.0, "max_consecutive_failures": 9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a row; `wrong` lists what should have been otherwise."""

    name: str
    blocked_s: float | None = None
    """Longest that a surviving trainer was held: in `save`, or between two polls."""
    verdict: str = "?"
    verdict_s: float | None = None
    named: list[int] = dataclasses.field(default_factory=list)
    error: str = ""
    committed: list[int] = dataclasses.field(default_factory=list)
    """Steps that the job left as committed."""
    loaded: int | None = None
    """Step that a fresh start loaded, with the right values; None: an error that says why."""
    why: list[str] = dataclasses.field(default_factory=list)
    left_bytes: int = 0
    """Beside committed steps, when the job had ended."""
    left_after_bytes: int = 0
    """Likewise after the fresh start."""
    how: str = ""
    took_s: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)


def state(rank, world_size, step):
    """A Megatron sharded state dict whose values tell step and place."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    total = 2 * ROWS_PER_RANK
    rows = total // world_size
    whole = torch.arange(total * COLUMNS, dtype=torch.float32).view(total, COLUMNS) + 0.5 * step
    own = whole[rank * rows : (rank + 1) * rows].clone()
    return {
        "w": ShardedTensor.from_rank_offsets("w", own, (0, rank, world_size)),
        "scale": ShardedTensor.from_rank_offsets("scale", torch.full((8,), float(step)), replica_id=rank),
        "note": ShardedObject("note", {"step": step}, (1,), (0,), replica_id=rank),
        "step": step,
    }


def blank(rank, world_size):
    empty = state(rank, world_size, 0)
    for key in ("w", "scale"):
        empty[key].data.fill_(-1)
    return empty


class Pulse:
    """Lets something happen in the middle of staging: at the first copy of a save."""

    def __init__(self):
        self.action, plain = None, torch.Tensor.copy_

        def copy_(tensor, *args, **kwargs):
            if self.action is not None:
                action, self.action = self.action, None
                action()
            return plain(tensor, *args, **kwargs)

        torch.Tensor.copy_ = copy_


def roots(row, folder):
    return [folder / f"node{r}" / "root" if row.nodes else folder / "disk" / "root" for r in range(2)]


def config(row, folder):
    durable = {"durable_url": f"file://{folder}/durable"} if row.durable else {}
    return SaveConfig(**{**CONFIG, **dict(row.config), **durable})


def rank_main(rank, row, folder, address):
    """A trainer: saves step 1, meets the fault in step 2, and saves step 3 if it can."""
    logging.getLogger("checkpoint").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    process.PROGRAM = faulty_writer.PROGRAM
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    faulty_writer.note_pid(f"trainer.{rank}")
    pulse = Pulse()
    found = {"rank": rank}
    c = Checkpointer(roots(row, folder)[rank], rank=rank, world_size=2, config=config(row, folder), store=address)
    c.save(1, state(rank, 2, 1))
    assert c.wait().state == "committed"
    if row.durable:
        assert c.wait_drained(30)
    dist.barrier()
    if row.at is not None and row.at[0] == rank:
        arm(row, folder, pulse, c)
    if row.disk and rank == 0:
        DISK[row.disk](folder, True)
    dist.barrier()
    began = time.monotonic()
    handle = c.save(2, state(rank, 2, 2))
    longest = handle.blocked_s
    while not handle.done and time.monotonic() < began + row.limit_s:
        polled = time.monotonic()
        c.poll()
        longest = max(longest, time.monotonic() - polled)
        time.sleep(0.002)
    found |= {
        "state": handle.state,
        "took_s": time.monotonic() - began,
        "blocked_s": longest,
        "named": [culprit.rank for culprit in handle.culprits],
        "error": handle.error,
    }
    (folder / f"verdict.{rank}").write_text(handle.state)
    if row.durable:
        assert c.wait_drained(30)
    both = row.do != "kill" or not {"trainer.0", "trainer.1"} & set(row.hit)
    if both:
        number = torch.ones(1)
        dist.all_reduce(number)
        found["group"] = number.item() == 2
        if row.disk and rank == 0:
            DISK[row.disk](folder, False)
        dist.barrier()
    if row.again and not row.damage:
        again = c.save(3, state(rank, 2, 3))
        c.wait(60)
        found["again"] = again.state, again.error
    with contextlib.suppress(CheckpointError):
        c.close()
    return found


def arm(row, folder, pulse, checkpointer):
    rank, phase = row.at
    if phase != "stage":
        fault = {"phase": phase, "do": row.do, "hit": list(row.hit)}
        (folder / f"fault.{rank}.json").write_text(json.dumps(fault))
        return

    def act():
        if str(row.do).startswith("clock"):
            faulty_writer.jump_wall_clock(float(row.do.removeprefix("clock")))
        else:
            faulty_writer.hit(row.hit, row.do)

    pulse.action = act


def store_main(folder):
    hosted = HostedStore()
    faulty_writer.note_pid("store")
    (folder / "address").write_text(hosted.address)
    while True:
        time.sleep(1)


def load_main(rank, world_size, row, folder):
    """A fresh start: (newest step that can be loaded, all that can be have the right values, reasons)."""
    logging.getLogger("checkpoint").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous.2", rank=rank, world_size=world_size)
    options = {"deadline_s": 30.0, "start_deadline_s": 90.0, "grace_s": 2.0}
    with Checkpointer(roots(row, folder)[rank], rank=rank, world_size=world_size, config=SaveConfig(**options)) as c:
        durable = [folder / "durable"] if row.durable else []
        peers = [path for path in dict.fromkeys(roots(row, folder)) if path != c.root]

        def load(step=None):
            got = c.load(blank(rank, world_size), step=step, peers=peers, durable=durable, deadline_s=30)
            want = state(rank, world_size, got.step)
            same = all(torch.equal(got.state[key], want[key].data) for key in ("w", "scale"))
            return got, same and got.state["step"] == got.step and got.state["note"] == {"step": got.step}

        try:
            got, same = load()
        except CheckpointError as e:
            return None, True, str(e).splitlines()
        if not row.damage:
            for step in range(1, got.step):
                with contextlib.suppress(LoadError):  # not there: on all ranks alike
                    same &= load(step)[1]
        return got.step, same, list(got.passed_over)


# A row


class RunningRow:
    """A row in processes of its own; `outcome` waits for it, and leaving the `with` block ends them all."""

    def __init__(self, row, folder):
        self.row, folder = row, Path(folder)
        (folder / "disk").mkdir(parents=True)
        self._director = Fork(_direct, row, folder)

    def outcome(self):
        try:
            return self._director.result(self.row.limit_s + 300)
        except AssertionError as e:
            empty = {
                "blocked_s": None,
                "verdict_s": None,
                "named": [],
                "error": "",
                "committed": [],
                "loaded": None,
                "why": [],
            }
            rest = {"left_bytes": 0, "left_after_bytes": 0, "how": "", "took_s": 0.0}
            return Outcome(name=self.row.name, verdict="?", **empty, **rest, wrong=[str(e)])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Writers and ranks are of the director's group, whatever became of it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._director.pid, signal.SIGKILL)
        self._director.__exit__()


def _direct(row, folder):
    began = time.monotonic()
    os.setpgid(0, 0)
    os.environ["CHECKPOINT_TEST_FAULTS"] = str(folder)
    how = ""
    if row.disk:
        how = small_disk(folder)
        if not how.startswith("tmpfs"):
            how = _without_mounts(row, how)
    for path in roots(row, folder):
        path.mkdir(parents=True, exist_ok=True)
    wrong = []
    with contextlib.ExitStack() as stack:
        address = None
        if row.external_store:
            stack.enter_context(Fork(store_main, folder))
            _await(lambda: (folder / "address").exists(), 20)
            address = (folder / "address").read_text()
        ranks = [stack.enter_context(Fork(rank_main, rank, row, folder, address)) for rank in range(2)]
        dead = {int(name[-1]) for name in row.hit if name.startswith("trainer") and row.do == "kill"}
        if row.do == "stop":
            _resume(row, folder)
        found = []
        for rank in sorted({0, 1} - dead):
            try:
                found.append(ranks[rank].result(row.limit_s + 120))
            except AssertionError as e:
                wrong.append(f"rank {rank}: {e}")
        if not _await(lambda: all(_gone(ranks[r].pid) for r in dead), 30 + row.limit_s):
            wrong.append("the fault did not happen")
    # Writers of dead trainers end by themselves, within what they may still have to wait for.
    pids = {path.name: int(path.read_text()) for path in folder.glob("pid.writer.*")}
    if not _await(lambda: all(_gone(pid) for pid in pids.values()), 30):
        wrong.append(f"still running: {sorted(name for name, pid in pids.items() if not _gone(pid))}")
    left = _left(row, folder)
    committed = sorted({step for root in roots(row, folder) for step in committed_steps(root)})
    if row.damage:
        damage(row.damage, [committed_path(root, 2) for root in roots(row, folder)])
    loads = _fresh_start(row, folder, wrong)
    step = loads[0][0] if loads else None
    outcome = Outcome(
        name=row.name,
        blocked_s=max((f["blocked_s"] for f in found if f"trainer.{f['rank']}" not in row.hit), default=None),
        verdict="/".join(sorted({f["state"] for f in found})) or "none",
        verdict_s=max((f["took_s"] for f in found), default=None),
        named=sorted({rank for f in found for rank in f["named"]}),
        error=next((f["error"] for f in found if f["error"]), ""),
        committed=committed,
        loaded=step,
        why=loads[0][2] if loads else [],
        left_bytes=left,
        left_after_bytes=_left(row, folder),
        how=how,
        took_s=time.monotonic() - began,
        wrong=wrong,
    )
    wrong += judge(row, outcome, found, loads)
    return outcome


def _without_mounts(row, reason):
    if row.disk != "fill":
        raise AssertionError(f"cannot be run here: {reason}")
    # Not the errno of a full disk, but a write that fails in the same place.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return f"file size limit instead of a full disk: {reason}"


def _resume(row, folder):
    """Let stopped trainers and stores go on when the others have their verdict, or after a while if all are stopped."""
    others = [rank for rank in range(2) if f"trainer.{rank}" not in row.hit]
    names = [name for name in row.hit if not name.startswith("writer") or not others]
    if not names:
        return
    pid = folder / f"pid.{names[-1]}"
    _await(lambda: pid.exists() and _stopped(int(pid.read_text())), 60)
    if others:
        _await(lambda: all((folder / f"verdict.{rank}").exists() for rank in others), row.limit_s)
    else:
        time.sleep(3.0)
    for name in names:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / f"pid.{name}").read_text()), signal.SIGCONT)


def _fresh_start(row, folder, wrong):
    world_size = 2 if row.nodes else 1
    for path in roots(row, folder):
        path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Fork(load_main, r, world_size, row, folder)) for r in range(world_size)]
        try:
            return [rank.result(150) for rank in ranks]
        except AssertionError as e:
            wrong.append(f"the fresh start failed: {e}")
            return []


def judge(row, outcome, found, loads):
    """What is wrong with an outcome, in words."""
    wrong = []
    states = {f["state"] for f in found}
    if states - set(row.verdicts):
        wrong.append(f"verdict {sorted(states)}, expected {row.verdicts}: {outcome.error}")
    if row.verdicts and not found:
        wrong.append("no rank had a verdict")
    if row.named is not None and not set(outcome.named) & set(row.named):
        wrong.append(f"named ranks {outcome.named}, expected one of {row.named}: {outcome.error}")
    if row.named is not None and set(outcome.named) - set(row.named):
        wrong.append(f"named innocent ranks {sorted(set(outcome.named) - set(row.named))}: {outcome.error}")
    said = "\n".join(outcome.why) if row.damage else outcome.error
    if row.says and not re.search(row.says, said):
        wrong.append(f"said {said!r}, expected {row.says!r}")
    if outcome.blocked_s is not None and outcome.blocked_s > BLOCKED_LIMIT_S:
        wrong.append(f"training was held for {outcome.blocked_s:.1f} s")
    if any(f["took_s"] >= row.limit_s for f in found):
        wrong.append(f"no verdict within {row.limit_s:g} s")
    if outcome.loaded not in row.loads and not (row.again and outcome.loaded == 3):
        wrong.append(f"loaded {outcome.loaded}, expected {row.loads}: {outcome.why}")
    if 2 in outcome.committed and 2 not in row.loads and not row.damage:
        wrong.append("step 2 was committed all the same")
    if any(not same for _, same, _ in loads):
        wrong.append("WRONG VALUES were loaded")
    if len({load[0] for load in loads}) > 1:
        wrong.append(f"ranks loaded different steps: {loads}")
    if "committed" in states and 2 not in outcome.committed:
        wrong.append("a committed step was lost")
    for f in found:
        if f.get("group") is False:
            wrong.append("the process group does not work any more")
        if f.get("again", ("committed",))[0] != "committed":
            wrong.append(f"rank {f['rank']}: the next save was not committed: {f['again'][1]}")
    if outcome.left_after_bytes:
        wrong.append(f"{outcome.left_after_bytes} bytes were still left after a fresh start")
    return wrong


def _left(row, folder):
    total = 0
    for root in dict.fromkeys(roots(row, folder)):
        if root.exists():
            kept = sum(folder_bytes(committed_path(root, step)) for step in committed_steps(root))
            total += folder_bytes(root) - kept
            tracker = root / "latest_checkpointed_iteration.txt"
            total -= tracker.stat().st_size if tracker.exists() else 0
    return total


def _await(condition, deadline_s):
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


def _status(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _gone(pid):
    return _status(pid) in ("gone", "Z", "X")


def _stopped(pid):
    return _status(pid) == "T"
