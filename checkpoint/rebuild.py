"""Make a checkpoint of a folder whose data is complete and whose metadata is not.

    rebuild(folder)                       from the seals: exact, every file is digested
    rebuild(folder, peers=[...])          likewise, where each node has a folder of its own: all become committed
    rebuild(folder, sibling=other)        without all seals: positions from a checkpoint of the same structure

A job that lost its coordinator, or a stock save that died before its metadata was written, leaves such folders. What
could not be proved is said in the report; what does not fit is refused and nothing is written.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from checkpoint.errors import CoverageError, DigestError, FormatError
from checkpoint.format.files import file_digest, fsync_dir, put_file
from checkpoint.format.folder import TorchDistReader, write_folder_metadata
from checkpoint.format.index import Index
from checkpoint.format.saved import load_object, locate_tensor
from checkpoint.layout import committed_path
from checkpoint.seals import CommitRecord, Seal, index_from_seals, read_seal

__all__ = ["RebuildReport", "rebuild"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RebuildReport:
    """`path` is a checkpoint now. `not_proved` says what rests on an assumption, in words; empty from seals."""

    path: Path
    num_tensors: int
    bytes_verified: int
    not_proved: tuple[str, ...]


def rebuild(
    folder: str | Path,
    *,
    sibling: str | Path | None = None,
    peers: Sequence[str | Path] = (),
    commit_as: int | None = None,
) -> RebuildReport:
    """Write what is missing of `common.pt`, `.metadata`, `metadata.json` and, from seals, `commit.json`.

    Args:
        folder: with the data of all ranks, or of one node's.
        sibling: a loadable checkpoint of the same model, optimizer and layout, for a folder without all seals; also
            gives `common.pt` where that is missing.
        peers: folders of the other nodes, of the same attempt. No data is moved: each node's folder gets its own
            commit record, as at a commit.
        commit_as: a step: then rename each folder to its root's committed name.

    Raises:
        FormatError: there is not all data, or it does not fit the sibling or the peers.
        DigestError: a file differs from its seal.
        CoverageError: the shards do not make up whole tensors.
    """
    folders = [Path(folder), *map(Path, peers)]
    own = {place: [read_seal(path) for path in sorted(place.glob("seal.*.json"))] for place in folders}
    seals = list({seal.rank: seal for found in own.values() for seal in found}.values())
    attempts = sorted({seal.attempt for seal in seals})
    if len(attempts) > 1:
        raise FormatError(f"{folder} holds seals of several attempts ({attempts}): which one is meant?")
    complete = bool(seals) and len(seals) == seals[0].world_size
    if peers and not (complete and all(own.values())):
        have = ", ".join(f"{place} {len(found)}" for place, found in own.items())
        raise FormatError(f"{_count(seals)} in all ({have}): give the folder of every node")
    for place in folders:
        if not own[place] and not any(place.glob("*.distcp")):
            raise FormatError(f"{place} has neither seals nor data (*.distcp): name the folder of one step of a root")
    common, from_sibling = _common(folders, sibling)
    doubts = ["common.pt comes from the sibling: counters and arguments may be older"] if from_sibling else []
    if complete:
        index, nbytes = index_from_seals(seals), _verify(folders, seals)
    elif sibling is not None:
        index, nbytes = _index_like(folders[0], sibling), 0
        doubts = [
            "no digests: only that each record is whole and of the right shape was verified, not its content",
            f"which record belongs to which key was taken from {sibling}",
            *doubts,
        ]
    else:
        raise FormatError(f"{folder} has {_count(seals)}: give a sibling checkpoint of the same structure")
    targets = [place if commit_as is None else committed_path(place.parent, commit_as) for place in folders]
    for place, target in zip(folders, targets, strict=True):
        if target != place and target.exists():
            raise FormatError(f"{target} is there already: move it away, or rebuild without `commit_as`")
    for place in folders:
        metadata = write_folder_metadata(place, index, common)
        if complete:
            # Alone, a folder holds the files of all nodes.
            parts = seals if peers else [dataclasses.replace(seal, node=0) for seal in seals]
            node = own[place][0].node if peers else 0
            record = CommitRecord(
                attempt=seals[0].attempt, step=seals[0].step, node=node, seals=tuple(parts), metadata=tuple(metadata)
            )
            put_file(place / "commit.json", record.dump())
    for place, target in zip(folders, targets, strict=True):
        if target != place:
            os.rename(place, target)
            fsync_dir(target.parent)
    return RebuildReport(
        path=targets[0], num_tensors=len(index.tensors), bytes_verified=nbytes, not_proved=tuple(doubts)
    )


def _count(seals: Sequence[Seal]) -> str:
    return f"{len(seals)} of {seals[0].world_size} seals" if seals else "no seals"


def _common(folders: Sequence[Path], sibling: str | Path | None) -> tuple[bytes, bool]:
    """(the record of `common.pt`, whether it is the sibling's)."""
    for folder in folders:
        path = folder / "common.pt"
        if path.exists():
            data = path.read_bytes()
            load_object(data, str(path))  # damaged: says so
            return data, False
    if sibling is None:
        raise FormatError(
            f"{folders[0]} has no common.pt (arguments, counters): give a sibling checkpoint to take it from"
        )
    return (Path(sibling) / "common.pt").read_bytes(), True


def _verify(folders: Sequence[Path], seals: Sequence[Seal]) -> int:
    total = 0
    for expected in (file for seal in seals for file in seal.files):
        place = next((folder / expected.name for folder in folders if (folder / expected.name).exists()), None)
        if place is None:
            raise FormatError(
                f"{folders[0]} lacks {expected.name}, which is sealed: is it on another node? Give that node's folder "
                "as a peer"
            )
        got = file_digest(place, expected)
        if got.xxh3 != expected.xxh3:
            raise DigestError(f"{place} was changed after it was sealed")
        total += got.nbytes
    return total


def _index_like(folder: Path, sibling: str | Path) -> Index:
    """The sibling's index, if the records of this folder lie at the same places and have the same shapes."""
    with TorchDistReader(sibling) as other:
        index = other.index
    index.check()
    ends: dict[str, int] = {}
    for key, entry in index.tensors.items():
        for chunk in entry.chunks:
            path = folder / chunk.file
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.pos + chunk.nbytes)
            try:
                with open(path, "rb", buffering=0) as file:

                    def read(pos: int, size: int, file: object = file, base: int = chunk.pos) -> bytes:
                        return os.pread(file.fileno(), size, base + pos)  # type: ignore[attr-defined]

                    place = locate_tensor(read, chunk.nbytes, f"{path} at {chunk.pos}")
            except FileNotFoundError as e:
                raise FormatError(f"{folder} lacks {chunk.file}, which {sibling} has") from e
            if (place.dtype, place.shape) != (entry.dtype, chunk.shape):
                raise CoverageError(
                    f"{path} at {chunk.pos} holds {place.dtype} {place.shape}; {sibling} has {key} there, "
                    f"{entry.dtype} {chunk.shape}: not of the same structure"
                )
    for key, record in index.objects.items():
        ends[record.file] = max(ends.get(record.file, 0), record.pos + record.nbytes)
        with open(folder / record.file, "rb") as data:
            data.seek(record.pos)
            load_object(data.read(record.nbytes), f"{folder / record.file} at {record.pos} ({key})")
    for name, end in ends.items():
        if (size := (folder / name).stat().st_size) != end:
            raise FormatError(f"{folder / name} has {size} bytes, its records end at {end}: not of the same structure")
    return index
