"""What a start makes of attempts that an earlier run could not end: checkpoints where they are whole, else nothing.

A job can die after its data was sealed and before the folder got its name: between verdict and rename, or because the
store went with rank 0. `recover` is called by every rank of a new run, before anything is loaded:

    offers      each node says which attempts lie whole in its root, prepared or committed
    finish      an attempt that all of its nodes have, newer than what is committed, gets its name
    clean up    `layout.clean_up`, which removes what is dead and useless

No verdict is asked for: an attempt that every rank sealed, and whose seals fit together, holds exactly the state of
its step. Its bytes are proved by digest when it is loaded, as those of any other. Attempts that a living process may
still write or discard are left alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from checkpoint.attempt import AttemptFolder
from checkpoint.errors import CheckpointError, LoadError, WriterLost
from checkpoint.layout import LeftOver, clean_up, committed_path, committed_steps, leftovers
from checkpoint.load import LoadGroup
from checkpoint.seals import CommitRecord, read_commit, read_seal

__all__ = ["recover"]

log = logging.getLogger("checkpoint")

RECENT = 3
"""Committed steps that are offered, too: another node may not have come as far with them."""


def recover(root: Path, group: LoadGroup, *, leads: bool) -> tuple[list[int], list[LeftOver]]:
    """(steps that were finished in this root, attempts that were removed from it); both empty unless `leads`.

    Returns on all ranks when all nodes are done, so that no load sees half of it.

    Raises:
        WriterLost: a rank said nothing within the deadline of `group`; names it.
    """
    finished: list[int] = []
    removed: list[LeftOver] = []
    own = _whole(root) if leads else {}
    try:
        offers = group.all_say("recover/offers", [[*_of_node(record)] for record, _ in own.values()])
        if leads:
            finished = _finish(root, own, {(attempt, node) for part in offers for attempt, node in part})
            removed = clean_up(root)
        group.all_say("recover/done", len(finished))
    except LoadError as e:
        raise WriterLost(f"the start of the Checkpointer: {e}") from e
    return finished, removed


def _of_node(record: CommitRecord) -> tuple[str, int]:
    return record.attempt, record.node


def _whole(root: Path) -> dict[Path, tuple[CommitRecord, int]]:
    """Folder -> (its record, its step), of attempts and of the newest committed steps."""
    found = {}
    steps = committed_steps(root)
    for left in leftovers(root):
        if left.alive or left.step <= max(steps, default=-1):
            continue
        try:
            if not left.prepared and left.complete:
                _prepare(root, left)
            if left.complete or left.prepared:
                found[left.path] = read_commit(left.path / "commit.json"), left.step
        except (CheckpointError, OSError) as e:
            log.warning("the attempt in %s is left as it is: %s", left.path, e)
    for step in steps[-RECENT:]:
        try:
            found[committed_path(root, step)] = read_commit(committed_path(root, step) / "commit.json"), step
        except (CheckpointError, OSError) as e:
            log.info("step %d of %s cannot vouch for another node's: %s", step, root, e)
    return found


def _prepare(root: Path, left: LeftOver) -> None:
    """Write the commit record of a folder that has all seals: the coordinator did not come to it."""
    seals = [read_seal(path) for path in sorted(left.path.glob("seal.*.json"))]
    node = seals[0].node
    common = (left.path / "common.pt").read_bytes()
    AttemptFolder(root, left.step, left.attempt, rank=node, node=node).prepare(seals, common)


def _finish(root: Path, own: dict[Path, tuple[CommitRecord, int]], offered: set[tuple[str, int]]) -> list[int]:
    agreed = {}
    for path, (record, step) in own.items():
        nodes = {seal.node for seal in record.seals}
        if path != committed_path(root, step) and all((record.attempt, node) in offered for node in nodes):
            agreed[step] = record
    if not agreed:
        return []
    # Older ones are superseded by the newest, and removed with what else is useless.
    step, record = max(agreed.items())
    AttemptFolder(root, step, record.attempt, rank=record.node, node=record.node).commit()
    log.warning("step %d was saved by an earlier run that could not commit it; it is a checkpoint now", step)
    return [step]
