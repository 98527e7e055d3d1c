"""Sources behind fsspec URLs (`s3://bucket/model`): paths that answer as local ones do, and reads of ranges.

`place` turns what a user names into a path: `converters.offline.places` and `converters.hf_folder` ask it for small
files, sizes and names, `RangedFiles` fetches the elements of tensors. Nothing is copied to the local disk. What a
filesystem needs to be told (endpoint, profile) comes from fsspec's configuration and its environment variables
(`FSSPEC_S3_ENDPOINT_URL`), secrets from those of its client.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from checkpoint.format.folder import Fetch
from checkpoint.storage import asking, is_url, opening
from converters.errors import FolderError

__all__ = ["RangedFiles", "fetch", "is_remote", "place", "version"]

BLOCK_BYTES = 1 << 20
"""Reads below this size come out of a block: rows of a slice, heads of records."""


def place(path: str | os.PathLike[str]) -> Path:
    """A path, or for a URL an object that has its methods.

    Raises:
        FolderError: a URL that fsspec has no filesystem for.
    """
    if not is_url(str(path)):
        return Path(path)
    with opening(path, FolderError):
        from upath import UPath

        remote: Any = UPath(str(path))
        remote.fs  # noqa: B018 - looks for the filesystem's package
    found: Path = remote
    return found


def is_remote(path: Path) -> bool:
    return not isinstance(path, Path)


def version(path: Path) -> str:
    """What changes when the file does. Raises OSError."""
    remote: Any = path
    return str(remote.fs.ukey(remote.path))


class RangedFiles:
    """Reads of the files below `root`, from several threads; a block of each is kept."""

    def __init__(self, root: Path) -> None:
        remote: Any = root
        self._root, self._fs = root, remote.fs
        self._blocks: dict[str, tuple[int, bytes]] = {}
        self._lock = threading.Lock()

    def read(self, file: str, pos: int, out: memoryview) -> None:
        """Fill `out` from `pos` on.

        Raises:
            FolderError: it cannot be read, or ends before.
        """
        data = self.range(file, pos, len(out))
        if len(data) < len(out):
            raise FolderError(f"{self._root / file} ends at {pos + len(data)}: it was cut since its header was read")
        out[:] = data

    def range(self, file: str, pos: int, size: int) -> bytes:
        """At most `size` bytes. Raises `FolderError`."""
        if size >= BLOCK_BYTES:
            return self._cat(file, pos, pos + size)
        with self._lock:
            start, block = self._blocks.get(file, (0, b""))
        if not start <= pos or pos + size > start + len(block):
            start, block = pos, self._cat(file, pos, pos + BLOCK_BYTES)
            with self._lock:
                self._blocks[file] = start, block
        return block[pos - start : pos - start + size]

    def whole(self, file: str) -> bytes:
        """Raises FileNotFoundError, `FolderError`."""
        return self._cat(file, 0, None)

    def _cat(self, file: str, pos: int, end: int | None) -> bytes:
        where: Any = self._root / file
        with asking(f"{where} cannot be read", FolderError, ours=FolderError):
            return bytes(self._fs.cat_file(where.path, start=pos, end=end))

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()


def fetch(files: RangedFiles) -> Fetch:
    """For `TorchDistReader`."""

    def of(file: str, pos: int, size: int | None) -> bytes:
        return files.whole(file) if size is None else files.range(file, pos, size)

    return of
