"""Choose a checkpoint, prove that it is whole, and load it: local, then other roots, then durable, then older.

Each candidate is verified before anything is read from it: every rank digests its share of the files, all ranks vote,
and rank 0 decides for all, so that no two ranks load different checkpoints. A candidate that fails, in the proof or
while it is read, is passed over with its reason, and the next one is tried. Every wait has a deadline and names who
is missing. No process group is used.

`Checkpointer.load` calls this; `verify` and `candidates` also serve tools.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint.errors import CheckpointError, CoverageError, DigestError, FormatError, LoadError
from checkpoint.format.files import FileRecord, file_digest
from checkpoint.format.folder import Fetch, TorchDistReader
from checkpoint.layout import committed_path, committed_steps
from checkpoint.seals import CommitRecord, read_commit
from checkpoint.store import Store

__all__ = ["Candidate", "LoadGroup", "candidates", "load_best", "open_assembled", "verify"]

log = logging.getLogger("checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A committed checkpoint that could be loaded. `tier` is "local" or the name of another source of folders."""

    step: int
    tier: str
    roots: tuple[str, ...]
    """Roots that hold its nodes' folders; the first is this rank's own."""

    def __str__(self) -> str:
        return f"step {self.step} ({self.tier})"


def candidates(
    root: str | Path, peers: Sequence[str | Path] = (), durable: Sequence[str | Path] = ()
) -> list[Candidate]:
    """Newest step first; of the same step the local one first, then those of `durable` roots, in their order.

    `peers` are roots of other nodes that can be read from here, for files that lie only there.
    """
    found = []
    tiers = [("local", (str(root), *map(str, peers))), *((str(d), (str(d),)) for d in durable)]
    for order, (tier, roots) in enumerate(tiers):
        if os.path.isdir(roots[0]):
            found += [
                (-step, order, Candidate(step=step, tier=tier, roots=roots)) for step in committed_steps(roots[0])
            ]
    return [candidate for _, _, candidate in sorted(found, key=lambda f: f[:2])]


def _folders(candidate: Candidate) -> dict[str, Path]:
    """root -> its folder of that step, where there is one."""
    paths = {root: committed_path(root, candidate.step) for root in candidate.roots}
    return {root: path for root, path in paths.items() if (path / "commit.json").exists()}


def _find(record: CommitRecord, folders: Mapping[str, Path]) -> dict[str, Path]:
    """file name -> path, for the data files that can be reached."""
    names = [file.name for seal in record.seals for file in seal.files]
    found = {}
    for name in names:
        for path in folders.values():
            if (path / name).exists():
                found[name] = path / name
                break
    return found


def verify(path: str | Path, *, share: tuple[int, int] = (0, 1), others: Sequence[Path] = (), threads: int = 4) -> int:
    """Digest the files of a committed folder and compare them with what was sealed; returns the bytes read.

    Args:
        path: a folder with `commit.json`.
        share: (i, n): only each n-th file, from the i-th; `metadata` files belong to everybody.
        others: folders of other nodes with the same step; without them only this node's files are expected here.

    Raises:
        DigestError: bytes differ; FormatError: a file is missing, truncated, or the record is damaged.
    """
    path = Path(path)
    try:
        record = read_commit(path / "commit.json")
    except FileNotFoundError as e:
        raise FormatError(f"{path} has no commit.json: not committed by this package, its digests are unknown") from e
    for other in others:
        if (attempt := read_commit(other / "commit.json").attempt) != record.attempt:
            raise FormatError(f"{path} and {other} are of different attempts ({record.attempt}, {attempt})")
    wanted = record.own_files() if not others else [f for seal in record.seals for f in seal.files]
    work = [*record.metadata, *wanted[share[0] :: share[1]]]
    folders = [path, *others]

    def check(expected: FileRecord) -> int:
        place = next((folder / expected.name for folder in folders if (folder / expected.name).exists()), None)
        if place is None:
            raise FormatError(f"{expected.name} of {path} is missing; looked in {[str(f) for f in folders]}")
        try:
            got = file_digest(place, expected)
        except OSError as e:
            raise FormatError(f"{place} cannot be read: {e.strerror or errno.errorcode.get(e.errno or 0, e)}") from e
        if got.xxh3 != expected.xxh3:
            raise DigestError(f"{place} was changed after it was sealed: xxh3 {got.xxh3}, expected {expected.xxh3}")
        return got.nbytes

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(check, work))


def open_assembled(candidate: Candidate) -> TorchDistReader:
    """A reader of a candidate whose files may lie in the folders of several nodes; no data is moved.

    Raises:
        FormatError: as `TorchDistReader`.
    """
    folders = _folders(candidate)
    first = committed_path(candidate.roots[0], candidate.step)
    record = read_commit(first / "commit.json")
    return TorchDistReader(first, fetch=_assembled_fetch(first, _find(record, folders)))


def _assembled_fetch(first: Path, places: Mapping[str, Path]) -> Fetch:
    def fetch(name: str, pos: int, size: int | None) -> bytes:
        with open(places.get(name, first / name), "rb", buffering=0) as file:
            left = os.fstat(file.fileno()).st_size - pos if size is None else size
            file.seek(pos)
            parts = []
            while left > 0 and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

    return fetch


@dataclasses.dataclass(kw_only=True, slots=True)
class LoadGroup:
    """The ranks that load together."""

    store: Store
    rank: int
    world_size: int
    hosts: Mapping[int, str]
    end: float

    def all_say(self, key: str, value: Any) -> list[Any]:
        """Everybody's value of `key`. Raises LoadError at the deadline, naming the ranks without one."""
        self.store.set(f"{key}/{self.rank}", value)
        self.store.count(f"{key}/count", 1)
        while self.store.count(f"{key}/count") < self.world_size:
            if time.monotonic() >= self.end:
                silent = [r for r in range(self.world_size) if not self.store.has(f"{key}/{r}")]
                names = ", ".join(f"rank {r} on {self.hosts.get(r, '?')}" for r in silent)
                raise LoadError(f"no word from {names} within the deadline of the load ({key})")
            time.sleep(0.005)
        return list(self.store.get_all([f"{key}/{r}" for r in range(self.world_size)]))


def load_best(
    group: LoadGroup,
    found: Sequence[Candidate],
    prefix: str,
    share: tuple[int, int],
    read: Callable[[TorchDistReader], Any],
    requested: Callable[[], set[str]],
    allow_unused: Callable[[str], bool],
) -> tuple[Candidate, Any, list[str]]:
    """Load the best candidate on all ranks: (which, what `read` returned, reasons why better ones were passed over).

    Raises:
        LoadError: none is whole on all ranks; lists every one with its reason. Or a rank was silent.
    """
    own = {(c.step, c.tier): c for c in found}
    offered = group.all_say(f"{prefix}/offers", [[c.step, c.tier] for c in found])
    order = [tuple(o) for o in offered[0]]
    # Asked before any folder is opened: a rank that cannot open one must not leave the others waiting here.
    used = {k for part in group.all_say(f"{prefix}/keys", sorted(requested())) for k in part}
    reasons: list[str] = []
    for number, key in enumerate(order):
        mine = own.get((int(key[0]), str(key[1])))
        label = f"step {key[0]} ({key[1]})"
        reason = "not there" if mine is None else _prove(mine, share)
        votes = group.all_say(f"{prefix}/{number}/whole", reason)
        bad = {rank: vote for rank, vote in enumerate(votes) if vote}
        result = None
        if not bad and mine is not None:
            reason = ""
            try:
                with open_assembled(mine) as folder:
                    unused = sorted((folder.index.tensors.keys() | folder.index.objects.keys()) - used)
                    unused = [k for k in unused if not allow_unused(k)]
                    if unused:
                        raise CoverageError(
                            f"{len(unused)} keys of the checkpoint are asked for by no rank and would be dropped: "
                            f"{unused[:4]}; ask for them, or say `allow_unused`"
                        )
                    result = read(folder)
            except (CheckpointError, OSError) as e:
                reason = f"{type(e).__name__}: {e}"
            votes = group.all_say(f"{prefix}/{number}/read", reason)
            bad = {rank: vote for rank, vote in enumerate(votes) if vote}
        if not bad and mine is not None:
            return mine, result, reasons
        why = "; ".join(f"rank {rank} on {group.hosts.get(rank, '?')}: {vote}" for rank, vote in list(bad.items())[:4])
        reasons.append(f"{label}: {why}")
        log.warning("passed over %s", reasons[-1])
    text = "\n  ".join(reasons) or "no root has a committed checkpoint"
    raise LoadError(f"no checkpoint could be loaded:\n  {text}")


def _prove(candidate: Candidate, share: tuple[int, int]) -> str:
    try:
        folders = _folders(candidate)
        own = folders.pop(candidate.roots[0], None)
        if own is None:
            return f"{candidate.roots[0]} has no commit record of it"
        verify(own, share=share, others=list(folders.values()))
    except CheckpointError as e:
        return f"{type(e).__name__}: {e}"
    return ""
