"""A root of checkpoints behind any URL that fsspec opens: list, prove, read by ranges, put objects.

    Durable("s3://bucket/run")    .steps(), .record(step), .verify(step), .open(step), .put(...), .send(...)

`checkpoint.drain` fills it, the load ladder and `ckpt` read it. A step counts when its `metadata.json` is there, which
is put last; nothing is renamed, because object stores copy to rename. Every failure of the storage but a missing object
becomes one `StorageError`, whatever its client raised.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoint.errors import CheckpointError, ConfigError, DigestError, FormatError, StorageError
from checkpoint.format.files import STEP_BYTES, FileRecord, new_digest
from checkpoint.format.folder import Fetch, TorchDistReader
from checkpoint.layout import committed_path, step_of
from checkpoint.seals import CommitRecord, files_holding, parse_commit
from checkpoint.storage import asking, opening

__all__ = ["Durable"]

BLOCK_BYTES = 128 << 10
SMALL_BYTES = 16 << 10
"""Reads up to this size come out of whole blocks: the head and the end of a record are a dozen of them."""
NUM_BLOCKS = 64

Moved = Callable[[int], None]
"""Told of every piece that went over the wire."""


class Durable:
    """Args:
        url: the root, "s3://bucket/run", "file:///mnt/durable", "memory://...".
        options: for fsspec's filesystem (endpoint, profile, ...). Secrets belong into the client's own configuration.

    Raises:
        ConfigError: fsspec, or the package of that protocol, is not installed; or the URL is none.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        with opening(url, ConfigError):
            import fsspec

            self._fs, base = fsspec.core.url_to_fs(url, **(options or {}))
        self.url, self._base = url.rstrip("/"), str(base).rstrip("/")

    def __str__(self) -> str:
        return self.url

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._base}/{committed_path('', step).name}" + (f"/{name}" if name else "")

    def place(self, step: int, name: str = "") -> str:
        """What to call it in messages."""
        return f"{self.url}/{committed_path('', step).name}" + (f"/{name}" if name else "")

    def _asking(self, what: str) -> contextlib.AbstractContextManager[None]:
        return asking(what, StorageError, ours=CheckpointError)

    # Reading

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints there, ascending."""
        return [step for step, complete in self.listing().items() if complete]

    def listing(self) -> dict[int, bool]:
        """Every step of which there is anything, ascending, and whether it is complete."""
        with self._asking(self.url):
            self._fs.invalidate_cache()
            try:
                names = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._base, detail=False)]
            except FileNotFoundError:
                return {}
            found = sorted({step for name in names if (step := step_of(name)) is not None})
            return {step: bool(self._fs.exists(self._path(step, "metadata.json"))) for step in found}

    def sizes(self, step: int) -> dict[str, int]:
        """Objects of a step and their bytes; empty if there is nothing."""
        with self._asking(self.place(step)):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._path(step), detail=True)
            except FileNotFoundError:
                return {}
            return {str(e["name"]).rpartition("/")[2]: int(e["size"]) for e in entries if e["type"] == "file"}

    def size(self, step: int, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        with self._asking(self.place(step, name)):
            try:
                return int(self._fs.size(self._path(step, name)))
            except FileNotFoundError:
                return None

    def get(self, step: int, name: str) -> bytes:
        """A small object. Raises FileNotFoundError, StorageError."""
        with self._asking(self.place(step, name)):
            return bytes(self._fs.cat_file(self._path(step, name)))

    def record(self, step: int) -> CommitRecord:
        """Raises FormatError: no commit record there, or a damaged one."""
        try:
            data = self.get(step, "commit.json")
        except FileNotFoundError as e:
            raise FormatError(f"{self.place(step)} has no commit.json: not drained to its end") from e
        return parse_commit(data, self.place(step, "commit.json"))

    def digest(self, step: int, name: str, moved: Moved = lambda _: None) -> FileRecord:
        """Read an object through. Raises FileNotFoundError, StorageError."""
        digest, total = new_digest(), 0
        with self._asking(self.place(step, name)), self._fs.open(self._path(step, name), "rb") as file:
            while piece := file.read(STEP_BYTES):
                digest.update(piece)
                total += len(piece)
                moved(len(piece))
        return FileRecord(name=name, nbytes=total, xxh3=digest.hexdigest())

    def verify(
        self,
        step: int,
        *,
        share: tuple[int, int] = (0, 1),
        needs: Callable[[str], bool] | None = None,
        threads: int = 4,
    ) -> int:
        """As `prove`, up to the first problem, which is raised; returns the bytes that were digested."""
        total = 0
        for nbytes, problem in self.prove(step, share=share, needs=needs, threads=threads):
            if problem is not None:
                raise problem
            total += nbytes
        return total

    def prove(
        self,
        step: int,
        *,
        share: tuple[int, int] = (0, 1),
        needs: Callable[[str], bool] | None = None,
        threads: int = 4,
    ) -> Iterator[tuple[int, FormatError | None]]:
        """Compare the objects of a drained step with its seals: of each the bytes digested, and what is wrong with it.

        Args:
            share: (i, n): only each n-th data file, from the i-th.
            needs: digest only files that hold a key (of an object: with its shard) of which this is true, for whoever
                will read no others: to digest means to fetch. Of the rest the sizes are compared. None: all.

        Raises:
            FormatError: no commit record, or a damaged one. StorageError.
        """
        record = self.record(step)
        sizes = self.sizes(step)
        needed = None if needs is None else files_holding(record, needs)

        def check(expected: FileRecord, digest: bool) -> tuple[int, FormatError | None]:
            where, size = self.place(step, expected.name), sizes.get(expected.name)
            if size is None:
                return 0, FormatError(f"{where} is missing")
            if size != expected.nbytes:
                return 0, FormatError(f"{where} has {size} bytes, {expected.nbytes} were sealed")
            if not digest:
                return 0, None
            try:
                got = self.digest(step, expected.name)
            except FileNotFoundError:
                return 0, FormatError(f"{where} is missing")
            if got.xxh3 != expected.xxh3:
                text = f"{where} differs from what was sealed: xxh3 {got.xxh3}, expected {expected.xxh3}"
                return got.nbytes, DigestError(text)
            return got.nbytes, None

        files = [file for seal in record.seals for file in seal.files]
        mine = [file for file in files if needed is None or file.name in needed][share[0] :: share[1]]
        work = [*((file, True) for file in (*record.metadata, *mine)), *((f, False) for f in files if f not in mine)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            yield from pool.map(check, *zip(*work, strict=True))

    def open(self, step: int) -> TorchDistReader:
        """A reader that fetches only the ranges that are asked for. Raises FormatError: no complete checkpoint."""
        return TorchDistReader(self.place(step), fetch=self.fetch(step))

    def fetch(self, step: int) -> Fetch:
        """Ranged reads of a step's objects; from several threads, too."""
        blocks: collections.OrderedDict[tuple[str, int], bytes] = collections.OrderedDict()
        lock = threading.Lock()

        def cat(name: str, pos: int, end: int | None) -> bytes:
            with self._asking(self.place(step, name)):
                return bytes(self._fs.cat_file(self._path(step, name), start=pos, end=end))

        def block(name: str, number: int) -> bytes:
            with lock:
                if (name, number) in blocks:
                    blocks.move_to_end((name, number))
                    return blocks[name, number]
            data = cat(name, number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
            with lock:
                blocks[name, number] = data
                if len(blocks) > NUM_BLOCKS:
                    blocks.popitem(last=False)
            return data

        def fetch(name: str, pos: int, size: int | None) -> bytes:
            if size is None:
                return cat(name, pos, None)
            if not size:
                return b""
            if size > SMALL_BYTES:
                return cat(name, pos, pos + size)
            first, last = pos // BLOCK_BYTES, (pos + size - 1) // BLOCK_BYTES
            joined = b"".join(block(name, number) for number in range(first, last + 1))
            return joined[pos - first * BLOCK_BYTES :][:size]

        return fetch

    # Writing

    def prepare(self, step: int) -> None:
        """Make the folder, where the storage has folders."""
        with self._asking(self.place(step)):
            self._fs.makedirs(self._path(step), exist_ok=True)

    def put(self, step: int, name: str, data: bytes) -> None:
        """A small object, whole or not at all as far as the storage does that."""
        try:
            with self._asking(self.place(step, name)):
                self._fs.pipe_file(self._path(step, name), data)
        except FileNotFoundError as e:
            raise StorageError(f"{self.place(step, name)} cannot be written: {e}") from e

    def remove(self, step: int, name: str) -> None:
        """An object that may be gone already."""
        with self._asking(self.place(step, name)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(step, name))

    def send(self, step: int, source: Path, expected: FileRecord, piece_bytes: int, moved: Moved) -> None:
        """Upload a local file, digested on the way: damage is not made durable.

        Raises:
            DigestError: it differs from `expected`; the object is gone again then. OSError: it cannot be read.
        """
        digest, total = new_digest(), 0
        try:
            with (
                open(source, "rb", buffering=0) as file,
                self._asking(self.place(step, expected.name)),
                self._fs.open(self._path(step, expected.name), "wb", block_size=STEP_BYTES) as out,
            ):
                while piece := file.read(piece_bytes):
                    digest.update(piece)
                    total += len(piece)
                    out.write(piece)
                    moved(len(piece))
        except FileNotFoundError as e:
            if not source.exists():
                raise FormatError(f"{source} is gone: was it pruned while it was drained?") from e
            raise StorageError(f"{self.place(step, expected.name)} cannot be written: {e}") from e
        if (total, digest.hexdigest()) != (expected.nbytes, expected.xxh3):
            self.remove(step, expected.name)
            raise DigestError(f"{source} was changed after it was sealed: it is not made durable")
