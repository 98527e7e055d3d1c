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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint.durable import Durable
from checkpoint.errors import CheckpointError, CoverageError, DigestError, FormatError, LoadError, StorageError
from checkpoint.format.files import FileRecord, file_digest
from checkpoint.format.folder import Fetch, TorchDistReader
from checkpoint.layout import committed_path, committed_steps
from checkpoint.seals import CommitRecord, files_holding, read_commit
from checkpoint.storage import is_url
from checkpoint.store import Store

__all__ = ["Candidate", "LoadGroup", "candidates", "load_best", "open_assembled", "prove", "verify"]

log = logging.getLogger("checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A committed checkpoint that could be loaded. `tier` is "local" or the name of another source of folders."""

    step: int
    tier: str
    roots: tuple[str, ...]
    """Roots that hold its nodes' folders; the first is this rank's own."""
    durable: Durable | None = None
    """Where it is, if fsspec has to open that."""

    def __str__(self) -> str:
        return f"step {self.step} ({self.tier})"


def candidates(
    root: str | Path,
    peers: Sequence[str | Path] = (),
    durable: Sequence[str | Path] = (),
    options: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """Newest step first; of the same step the local one first, then those of `durable` roots, in their order.

    `peers` are roots of other nodes that can be read from here, for files that lie only there. A `durable` root is a
    folder or a URL, which fsspec opens with `options`; one that does not answer is logged and offers nothing.
    """
    found: list[tuple[int, int, Candidate]] = []
    for order, place in enumerate([root, *durable]):
        tier, roots = ("local", (str(root), *map(str, peers))) if order == 0 else (str(place), (str(place),))
        remote, steps = None, []
        if is_url(place):
            try:
                remote = Durable(str(place), options)
                steps = remote.steps()
            except StorageError as e:
                log.warning("durable storage is passed over: %s", e)
        elif os.path.isdir(place):
            steps = committed_steps(place)
        found += [(-step, order, Candidate(step=step, tier=tier, roots=roots, durable=remote)) for step in steps]
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


def verify(
    path: str | Path,
    *,
    share: tuple[int, int] = (0, 1),
    others: Sequence[Path] = (),
    threads: int = 4,
    needs: Callable[[str], bool] | None = None,
) -> int:
    """As `prove`, up to the first problem, which is raised; returns the bytes read."""
    total = 0
    for file, problem in prove(path, share=share, others=others, threads=threads, needs=needs):
        if problem is not None:
            raise problem
        total += file.nbytes
    return total


def prove(
    path: str | Path,
    *,
    share: tuple[int, int] = (0, 1),
    others: Sequence[Path] = (),
    threads: int = 4,
    needs: Callable[[str], bool] | None = None,
) -> Iterator[tuple[FileRecord, FormatError | None]]:
    """Digest the files of a committed folder and compare them with what was sealed: each with what is wrong with it.

    Args:
        path: a folder with `commit.json`.
        share: (i, n): only each n-th file, from the i-th; `metadata` files belong to everybody.
        others: folders of other nodes with the same step; without them only this node's files are expected here.
        needs: only files that hold a key (of an object: with its shard) of which this is true; None: all.

    Raises:
        FormatError: the commit record is missing or damaged, or belongs to another attempt than that of `others`.
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
    if needs is not None:
        holding = files_holding(record, needs)
        wanted = [file for file in wanted if file.name in holding]
    work = [*record.metadata, *wanted[share[0] :: share[1]]]
    folders = [path, *others]

    def check(expected: FileRecord) -> tuple[FileRecord, FormatError | None]:
        place = next((folder / expected.name for folder in folders if (folder / expected.name).exists()), None)
        if place is None:
            return expected, FormatError(f"{expected.name} of {path} is missing; looked in {[str(f) for f in folders]}")
        try:
            got = file_digest(place, expected)
        except FormatError as e:
            return expected, e
        except OSError as e:
            reason = e.strerror or errno.errorcode.get(e.errno or 0, str(e))
            return expected, FormatError(f"{place} cannot be read: {reason}")
        if got.xxh3 != expected.xxh3:
            return expected, DigestError(
                f"{place} was changed after it was sealed: xxh3 {got.xxh3}, expected {expected.xxh3}"
            )
        return expected, None

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield from pool.map(check, work)


def open_assembled(candidate: Candidate) -> TorchDistReader:
    """A reader of a candidate whose files may lie in the folders of several nodes, or behind a URL: only what is read
    is moved.

    Raises:
        FormatError: as `TorchDistReader`.
    """
    if candidate.durable is not None:
        return candidate.durable.open(candidate.step)
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
    reads_too: Callable[[str], bool],
    allow_unused: Callable[[str], bool],
) -> tuple[Candidate, Any, list[str]]:
    """Load the best candidate on all ranks: (which, what `read` returned, reasons why better ones were passed over).

    Only files are proved that hold a key which some rank has `requested`, or which `reads_too` is true of. Every other
    key must be one that `allow_unused`.

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
        reason = "not there" if mine is None else _proof(mine, share, group, lambda k: k in used or reads_too(k))
        votes = group.all_say(f"{prefix}/{number}/whole", reason)
        bad = {rank: vote for rank, vote in enumerate(votes) if vote}
        result = None
        if not bad and mine is not None:
            reason = ""
            try:
                with open_assembled(mine) as folder:
                    unused = sorted((folder.index.tensors.keys() | folder.index.objects.keys()) - used)
                    unused = [k for k in unused if not reads_too(k) and not allow_unused(k)]
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


def _proof(candidate: Candidate, share: tuple[int, int], group: LoadGroup, needs: Callable[[str], bool]) -> str:
    """Why it is not whole; empty if it is, as far as this rank's share goes."""
    try:
        if candidate.durable is not None:
            # Everybody sees the same storage: all ranks share one proof.
            candidate.durable.verify(candidate.step, share=(group.rank, group.world_size), needs=needs)
            return ""
        folders = _folders(candidate)
        own = folders.pop(candidate.roots[0], None)
        if own is None:
            return f"{candidate.roots[0]} has no commit record of it"
        verify(own, share=share, others=list(folders.values()), needs=needs)
    except CheckpointError as e:
        return f"{type(e).__name__}: {e}"
    return ""
