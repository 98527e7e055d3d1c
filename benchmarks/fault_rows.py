"""The fault matrix of checkpoints as data: what is done to whom at which phase of a save, and what must come of it.

`benchmarks/fault_runner.py` runs a row: step 1 is saved in peace, the fault meets step 2, and the processes are gone
when a fresh one loads what is there. `python benchmarks/faults.py --checkpoint` runs all rows; the tests take a few.
"""

from __future__ import annotations

import dataclasses

__all__ = ["ROWS", "Row", "select"]

PHASES = ("stage", "write", "seal", "vote", "verdict", "commit")
SHARED_PHASE = {"verdict": (0, "decide"), "commit": (0, "publish")}
"""Phases through which only the coordinator's writer goes: (rank, its name for it)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One fault and what must come of it."""

    name: str
    do: object = None
    """As in tests/checkpoint/faulty_writer.py, or the name of a function of the runner (`disk`, `damage`)."""
    at: tuple[int, str] | None = None
    """Rank and phase in which it happens; "stage" is the trainer's, the others are its writer's."""
    hit: tuple[str, ...] = ()
    disk: str | None = None
    """Runs before step 2 on the small filesystem, and is undone before step 3."""
    damage: str | None = None
    """Happens to the committed step 2 after the job has ended."""
    nodes: bool = False
    """Each rank has a root of its own."""
    durable: bool = False
    external_store: bool = False
    verdicts: tuple[str, ...] = ("failed",)
    """What survivors may be told; () where nobody survives."""
    named: tuple[int, ...] | None = None
    """The ranks to blame; None where the text in `says` is what counts."""
    says: str = ""
    """Regular expression for the errors of the verdict, or for the reasons of the load."""
    loads: tuple[int | None, ...] = (1,)
    """Steps that may be loaded afterwards; None: none, which is an error that says why."""
    again: bool = True
    """Whether the next save of the same processes must be committed."""
    config: tuple[tuple[str, object], ...] = ()
    limit_s: float = 40.0
    """For the verdict of every survivor."""


def _at(rank, phase):
    return SHARED_PHASE.get(phase, (rank, phase))


def _writers():
    for do in ("kill", "stop"):
        for rank in (0, 1):
            for phase in PHASES:
                # A rank that has voted has done its part; the coordinator has not before the verdict.
                done = phase == "commit" or (phase == "verdict" and rank == 1)
                yield Row(
                    name=f"{do} writer {rank} {phase}",
                    do=do,
                    at=_at(rank, phase),
                    hit=(f"writer.{rank}",),
                    verdicts=("committed",) if done else ("failed",),
                    named=None if done else (rank,),
                    loads=(2,) if done else (1,),
                )


def _trainers():
    for do in ("kill", "stop"):
        for rank in (0, 1):
            for phase in PHASES:
                row = {
                    "name": f"{do} trainer {rank} {phase}",
                    "do": do,
                    "at": _at(rank, phase),
                    "hit": (f"trainer.{rank}",),
                }
                again = do == "stop"
                if rank == 1:
                    # Its writer goes on without it, except where it still waits for data.
                    lost = phase == "stage"
                    yield Row(
                        **row,
                        verdicts=("failed",) if lost else ("committed",),
                        named=(1,) if lost else None,
                        loads=(1,) if lost else (2,),
                        again=again,
                    )
                else:
                    # With it goes the store: nobody learns a verdict any more, but both writers seal, and what is
                    # sealed as a whole is a checkpoint at the next start.
                    known = phase == "commit"
                    yield Row(
                        **row,
                        verdicts=("committed",) if known else ("failed",),
                        named=None if known else (0,),
                        loads=(1,) if phase == "stage" else (2,),
                        again=again,
                    )


def _nodes():
    everybody = ("trainer.0", "trainer.1", "writer.0", "writer.1")
    for phase in PHASES:
        loads = {"vote": (1, 2), "verdict": (2,), "commit": (2,)}.get(phase, (1,))
        row = {"at": _at(0, phase), "hit": everybody}
        yield Row(name=f"kill node {phase}", do="kill", **row, verdicts=(), loads=loads, again=False)
    # Nodes with disks of their own, between verdict and rename.
    alone = {"do": "kill", "nodes": True, "again": False, "loads": (2,)}
    yield Row(name="kill nodes commit", at=(0, "publish"), hit=everybody, verdicts=(), **alone)
    half = ("trainer.1", "writer.1")
    yield Row(name="kill 2nd node commit", at=(1, "publish"), hit=half, verdicts=("committed",), **alone)
    # A machine that was suspended: everybody's clock says that nothing happened for seconds.
    yield Row(
        name="suspend node write",
        do="stop",
        at=(0, "write"),
        hit=everybody,
        verdicts=("failed", "committed"),
        loads=(1, 2),
    )


def _store():
    for do in ("kill", "stop"):
        for phase in ("write", "vote", "verdict", "commit"):
            known = phase == "commit"
            yield Row(
                name=f"{do} store {phase}",
                do=do,
                at=_at(0, phase),
                hit=("store",),
                external_store=True,
                verdicts=("failed", "committed") if known else ("failed",),
                says="" if known else "store at 127.0.0.1",
                loads=(2,),
                again=do == "stop",
            )


DISK = (
    Row(name="disk full", disk="fill", named=(0, 1), says="No space left|File too large"),
    Row(name="read-only", disk="read_only", named=(0, 1), says="Read-only file system"),
    Row(name="EIO write 1", do="EIO", at=(1, "write"), named=(1,), says="Input/output error"),
    Row(name="EIO fsync 0", do="fsync EIO", at=(0, "sync"), named=(0,), says="Input/output error"),
    Row(name="EIO seal 1", do="EIO", at=(1, "seal"), named=(1,), says="Input/output error"),
    Row(name="EDQUOT write 0", do="EDQUOT", at=(0, "write"), named=(0,), says="quota"),
    Row(name="ENOSPC metadata", do="ENOSPC", at=(0, "prepare"), named=(0,), says="No space left"),
    Row(name="torn write 1", do="torn", at=(1, "write"), named=(1,), says="SIGKILL"),
)
CLOCK = (
    Row(name="clock +1 day writer 0", do="clock+86400", at=(0, "write"), verdicts=("committed",), loads=(2,)),
    Row(name="clock -1 day writer 1", do="clock-86400", at=(1, "vote"), verdicts=("committed",), loads=(2,)),
    Row(name="clock +1 day trainer 0", do="clock+86400", at=(0, "stage"), verdicts=("committed",), loads=(2,)),
)
SLOW = (
    Row(
        name="writer 15 s late, patient",
        do=15,
        at=(1, "write"),
        config=(("deadline_s", 60.0), ("stall_s", 40.0)),
        verdicts=("committed",),
        loads=(2,),
    ),
    Row(name="writer 15 s late, deadline", do=15, at=(1, "write"), named=(1,), config=(("stall_s", 40.0),)),
    Row(name="writer 15 s late, stall", do=15, at=(1, "write"), named=(1,), config=(("deadline_s", 60.0),)),
)


def _damage(name, damage, **rest):
    rest = {"loads": (1,), "says": "step 2", **rest}
    return Row(name=name, damage=damage, verdicts=("committed",), **rest)


DAMAGE = (
    _damage("torn file", "zero_tail", says="changed after it was sealed"),
    _damage("bit flip data", "flip_data", says="changed after it was sealed"),
    _damage("bit flip .metadata", "flip_metadata", says="changed after it was sealed"),
    _damage("bit flip common.pt", "flip_common", says="changed after it was sealed"),
    _damage("bit flip commit.json", "flip_commit", says="commit"),
    _damage("truncated file", "truncate_data", says="truncated or overwritten"),
    _damage("truncated commit.json", "truncate_commit", says="commit"),
    _damage("missing file", "remove_data", says="missing"),
    _damage("missing commit.json", "remove_commit", says="commit"),
    _damage("tracker garbage", "garbage_tracker", loads=(2,), says=""),
    _damage("missing node", "remove_node", nodes=True, loads=(None,), says="rank 1 on .*: not there"),
    _damage("missing node, newest step", "remove_node_step", nodes=True, says="rank 1 on .*: not there"),
    _damage("missing node, durable copy", "remove_node", nodes=True, durable=True, loads=(2,), says="not there"),
)

ROWS = {row.name: row for row in (*_writers(), *_trainers(), *_nodes(), *_store(), *DISK, *CLOCK, *SLOW, *DAMAGE)}


def select(patterns):
    """Rows whose name begins with one of the patterns, or all. Raises ValueError: one fits no row."""
    if not patterns:
        return list(ROWS.values())
    for pattern in patterns:
        if not any(name.startswith(pattern) for name in ROWS):
            raise ValueError(f"no row begins with {pattern!r}; the rows are {sorted(ROWS)}")
    return [row for name, row in ROWS.items() if name.startswith(tuple(patterns))]
