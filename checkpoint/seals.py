"""What each rank promises about its part of a save (`Seal`), and what all seals together prove (`judge`).

A seal is written and synced next to the data before the rank votes. It carries everything that a checkpoint's metadata
needs, so `.metadata` is built from the seals of all ranks, at commit or at any time later. `commit.json` holds all of
them: any node that has it can put the checkpoint together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint.errors import ConfigError, CoverageError, FormatError
from checkpoint.format.files import FileRecord, new_digest
from checkpoint.format.index import Chunk, Index, ObjectEntry, TensorEntry

__all__ = [
    "CommitRecord",
    "Seal",
    "common_differences",
    "files_holding",
    "index_from_seals",
    "parse_commit",
    "read_commit",
    "read_seal",
]

SEAL_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """One rank's part of an attempt."""

    attempt: str
    step: int
    rank: int
    world_size: int
    host: str
    node: int
    """Lowest rank that shares this rank's root."""
    files: tuple[FileRecord, ...]
    tensors: tuple[tuple[Any, ...], ...]
    """(key, dtype name, global shape, offset, shape, number of the file, position, bytes)"""
    objects: tuple[tuple[Any, ...], ...]
    """(key, number of the file, position, bytes)"""
    common: Mapping[str, str]
    """Digest of every leaf of the state that should be the same on all ranks."""
    replicas: tuple[str, ...] = ()
    """Shards that this rank holds and another one writes, see `checkpoint.replicas`."""
    basis: str = ""
    """Attempt whose record said who writes what; empty: the main replicas."""
    write_s: float = 0.0
    """From the beginning of the attempt to the last byte, for the next distribution."""

    def to_json(self) -> dict[str, Any]:
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        value["files"] = [[f.name, f.nbytes, f.xxh3] for f in self.files]
        return {"format": SEAL_FORMAT, **value, "common": dict(self.common)}

    @classmethod
    def from_json(cls, value: Any, what: str) -> Seal:
        """Raises FormatError: not a seal of this version."""
        try:
            if value["format"] != SEAL_FORMAT:
                raise FormatError(f"{what} has the seal format {value['format']!r}, expected {SEAL_FORMAT}")
            files = tuple(FileRecord(name=n, nbytes=b, xxh3=x) for n, b, x in value["files"])
            rest = {f.name: value[f.name] for f in dataclasses.fields(cls) if f.name != "files" and f.name in value}
            rest["tensors"] = tuple(tuple(t) for t in rest["tensors"])
            rest["objects"] = tuple(tuple(o) for o in rest["objects"])
            rest["replicas"] = tuple(rest.get("replicas", ()))
            return cls(files=files, **rest)
        except (KeyError, TypeError, ValueError) as e:
            raise FormatError(f"{what} is not a seal ({type(e).__name__}: {e})") from e


def read_seal(path: Path) -> Seal:
    """Raises FormatError: damaged; OSError: unreadable."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as e:
        raise FormatError(f"{path} is damaged ({e})") from e
    return Seal.from_json(value, str(path))


def index_from_seals(seals: Sequence[Seal], *, prefix: Mapping[int, str] | None = None) -> Index:
    """The index of the whole checkpoint, checked: every element of every tensor sealed exactly once.

    `prefix` (node -> text) goes before the names of a node's files, where several folders make up one.

    Raises:
        CoverageError: names the key and the ranks that disagree, or the holes and overlaps.
    """
    parts: dict[str, tuple[str, tuple[int, ...], int, list[Chunk]]] = {}
    objects: dict[str, ObjectEntry] = {}
    first: dict[str, int] = {}
    for seal in seals:
        names = [(prefix or {}).get(seal.node, "") + file.name for file in seal.files]
        for key, dtype, size, offset, shape, file, pos, nbytes in seal.tensors:
            known = parts.setdefault(key, (dtype, tuple(size), seal.rank, []))
            if (dtype, tuple(size)) != known[:2]:
                raise CoverageError(
                    f"{key}: rank {seal.rank} sealed {dtype} {tuple(size)}, rank {known[2]} {known[0]} {known[1]}"
                )
            known[3].append(Chunk(offset=tuple(offset), shape=tuple(shape), file=names[file], pos=pos, nbytes=nbytes))
        for key, file, pos, nbytes in seal.objects:
            if key in objects:
                raise CoverageError(f"object {key} was sealed by rank {first[key]} and by rank {seal.rank}")
            objects[key], first[key] = ObjectEntry(file=names[file], pos=pos, nbytes=nbytes), seal.rank
    tensors = {
        key: TensorEntry(dtype=getattr(torch, dtype), shape=size, chunks=tuple(chunks))
        for key, (dtype, size, _, chunks) in parts.items()
    }
    if both := tensors.keys() & objects.keys():
        raise CoverageError(f"{sorted(both)[:3]} are a tensor on one rank and an object on another")
    index = Index(tensors=tensors, objects=objects)
    index.check()
    return index


def common_differences(seals: Sequence[Seal]) -> dict[int, list[str]]:
    """rank -> paths at which its common state differs from rank 0's (whose state is the one that is saved)."""
    base = min(seals, key=lambda s: s.rank)
    return {
        seal.rank: sorted(
            k for k in base.common.keys() | seal.common.keys() if base.common.get(k) != seal.common.get(k)
        )
        for seal in seals
        if seal.common != base.common
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """`commit.json`: one per node, the same on all of them but for `node`."""

    attempt: str
    step: int
    node: int
    seals: tuple[Seal, ...]
    metadata: tuple[FileRecord, ...]
    """`common.pt`, `.metadata` and `metadata.json` of this folder."""

    def own_files(self) -> list[FileRecord]:
        """The data files that lie in this folder."""
        return [file for seal in self.seals if seal.node == self.node for file in seal.files]

    def dump(self) -> bytes:
        body = {
            "attempt": self.attempt,
            "step": self.step,
            "node": self.node,
            "seals": [seal.to_json() for seal in self.seals],
            "metadata": [[f.name, f.nbytes, f.xxh3] for f in self.metadata],
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return json.dumps({"xxh3": _digest(text), "record": body}, sort_keys=True, separators=(",", ":")).encode()


def _digest(text: str) -> str:
    digest = new_digest()
    digest.update(text.encode())
    return str(digest.hexdigest())


def files_holding(record: CommitRecord, needs: Callable[[str], bool]) -> set[str]:
    """Names of the data files that hold a key (of an object: with its shard) of which `needs` is true."""
    names = set()
    for seal in record.seals:
        names |= {seal.files[tensor[5]].name for tensor in seal.tensors if needs(tensor[0])}
        names |= {seal.files[entry[1]].name for entry in seal.objects if needs(entry[0])}
    return names


def read_commit(path: Path) -> CommitRecord:
    """Raises FormatError: damaged; OSError: unreadable."""
    return parse_commit(path.read_bytes(), str(path))


def parse_commit(data: bytes, what: str) -> CommitRecord:
    """Raises FormatError: `what` is damaged."""
    try:
        value = json.loads(data)
        body = value["record"]
        if _digest(json.dumps(body, sort_keys=True, separators=(",", ":"))) != value["xxh3"]:
            raise FormatError(f"{what} was changed after it was written: its digest does not fit")
        return CommitRecord(
            attempt=body["attempt"],
            step=body["step"],
            node=body["node"],
            seals=tuple(Seal.from_json(seal, what) for seal in body["seals"]),
            metadata=tuple(FileRecord(name=n, nbytes=b, xxh3=x) for n, b, x in body["metadata"]),
        )
    except ConfigError:
        raise  # a package is missing here: that is no damage
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError(f"{what} is not a commit record ({type(e).__name__}: {e})") from e
