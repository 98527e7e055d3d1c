"""Make a checkpoint of a folder whose data is complete and whose metadata is not.

    rebuild(folder)                       from the seals: exact, every file is digested
    rebuild(folder, sibling=other)        without all seals: positions from a checkpoint of the same structure

A job that lost its coordinator, or a stock save that died before its metadata was written, leaves such folders. What
could not be proved is said in the report; what does not fit is refused and nothing is written.
"""

from __future__ import annotations

import dataclasses
import os
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
    folder: str | Path, *, sibling: str | Path | None = None, commit_as: tuple[str | Path, int] | None = None
) -> RebuildReport:
    """Write what is missing of `common.pt`, `.metadata`, `metadata.json` and, from seals, `commit.json`.

    Args:
        folder: with the data of all ranks (put the files of several nodes together first).
        sibling: a loadable checkpoint of the same model, optimizer and layout, for a folder without all seals; also
            gives `common.pt` where that is missing.
        commit_as: (root, step): then rename it to that root's committed name.

    Raises:
        FormatError: the folder has not all data, or does not fit the sibling.
        DigestError: a file differs from its seal.
        CoverageError: the shards do not make up whole tensors.
    """
    folder = Path(folder)
    seals = [read_seal(path) for path in sorted(folder.glob("seal.*.json"))]
    attempts = sorted({seal.attempt for seal in seals})
    if len(attempts) > 1:
        raise FormatError(f"{folder} holds seals of several attempts ({attempts}): which one is meant?")
    complete = bool(seals) and len(seals) == seals[0].world_size
    common = _common(folder, sibling)
    if complete:
        index, nbytes = index_from_seals(seals), _verify(folder, seals)
        doubts = [] if common is None else ["common.pt comes from the sibling: counters and arguments may be older"]
    elif sibling is not None:
        index, nbytes = _index_like(folder, sibling), 0
        doubts = [
            "no digests: only that each record is whole and of the right shape was verified, not its content",
            f"which record belongs to which key was taken from {sibling}",
        ]
        if common is not None:
            doubts.append("common.pt comes from the sibling: counters and arguments may be older")
    else:
        have = f"{len(seals)} of {seals[0].world_size} seals" if seals else "no seals"
        raise FormatError(f"{folder} has {have}: give a sibling checkpoint of the same structure")
    metadata = write_folder_metadata(folder, index, common)
    if complete:
        if common is None:
            metadata = [file_digest(folder / "common.pt"), *metadata]
        alone = tuple(dataclasses.replace(seal, node=0) for seal in seals)
        record = CommitRecord(
            attempt=seals[0].attempt, step=seals[0].step, node=0, seals=alone, metadata=tuple(metadata)
        )
        put_file(folder / "commit.json", record.dump())
    if commit_as is not None:
        target = committed_path(*commit_as)
        if target.exists():
            raise FormatError(f"{target} is there already: move it away, or rebuild without `commit_as`")
        os.rename(folder, target)
        fsync_dir(target.parent)
        folder = target
    return RebuildReport(path=folder, num_tensors=len(index.tensors), bytes_verified=nbytes, not_proved=tuple(doubts))


def _common(folder: Path, sibling: str | Path | None) -> bytes | None:
    """A record for `common.pt` where the folder has none that can be read; None where it has."""
    path = folder / "common.pt"
    if path.exists():
        load_object(path.read_bytes(), str(path))  # damaged: says so
        return None
    if sibling is None:
        raise FormatError(f"{folder} has no common.pt (arguments, counters): give a sibling checkpoint to take it from")
    return (Path(sibling) / "common.pt").read_bytes()


def _verify(folder: Path, seals: list[Seal]) -> int:
    total = 0
    for expected in (file for seal in seals for file in seal.files):
        try:
            got = file_digest(folder / expected.name, expected)
        except FileNotFoundError as e:
            raise FormatError(f"{folder} lacks {expected.name}, which is sealed: is it on another node?") from e
        if got.xxh3 != expected.xxh3:
            raise DigestError(f"{folder / expected.name} was changed after it was sealed")
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
