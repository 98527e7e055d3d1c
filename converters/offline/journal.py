"""The folder of a conversion that is not finished, and what in it is.

A conversion works in `.<name>.converting` beside its target and gives it the target's name last, by one rename: what
has the name is complete. The journal there says which plan is carried out and which files are on disk, one line each,
synced after the file itself; `--resume` goes on after them if the plan is still the same, byte for byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from checkpoint.format.files import fsync_dir
from converters.errors import FolderError
from converters.offline.targets import OutFile

__all__ = ["WorkFolder"]

JOURNAL = ".journal"


class WorkFolder:
    """`path` is where to write; leave the `with` block without `publish` and it is removed, unless `keep`.

    Args:
        target: must not exist, but for an empty folder.
        plan: digest of all that decides the bytes.
        resume: go on with what an earlier run left; `keep` what a failure leaves.

    Raises:
        FolderError: the target exists or cannot be made; another run works on it; what is left is of another plan.
    """

    def __init__(self, target: Path, plan: str, *, resume: bool) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.converting")
        self.keep = resume
        self._small: list[Path] = []
        check_target(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=True)
            self._fd = os.open(self.path / JOURNAL, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise FolderError(f"{target} cannot be written: {e.strerror} ({e.filename})") from e
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FolderError(f"{target} is being written by another conversion ({self.path})") from None
            self.done = self._read(plan) if resume else {}
            self._restart(plan)
        except BaseException:
            os.close(self._fd)
            raise

    def _read(self, plan: str) -> dict[str, int]:
        lines = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace").split("\n")
        if not lines[0]:
            return {}
        if lines[0] != plan:
            raise FolderError(
                f"{self.path} is of another conversion (source, options or versions differ): delete it, or convert "
                "without --resume"
            )
        done = {}
        # The last line may be half of one: a kill came between its bytes.
        for line in lines[1:-1]:
            name, nbytes = json.loads(line)
            file = self.path / name
            if file.exists() and file.stat().st_size == nbytes:
                done[name] = nbytes
        return done

    def _restart(self, plan: str) -> None:
        """A journal of this plan with the files that count, and nothing else in the folder."""
        for entry in list(os.scandir(self.path)):
            if entry.name != JOURNAL and entry.name not in self._roots():
                _remove(Path(entry.path))
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._append(plan + "\n" + "".join(json.dumps([name, size]) + "\n" for name, size in self.done.items()))

    def _roots(self) -> set[str]:
        return {Path(name).parts[0] for name in self.done}

    def _append(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def mark(self, file: OutFile) -> None:
        """The file is on disk."""
        fsync_dir((self.path / file.name).parent)
        self._append(json.dumps([file.name, file.nbytes]) + "\n")
        self.done[file.name] = file.nbytes

    def put(self, files: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
        """Write small files in this order, each whole or not at all; synced by `publish`.

        Raises:
            FolderError: a file cannot be written.
        """
        for name, make in files:
            path = self.path / name
            temporary = path.with_name(f".{path.name}.tmp")
            try:
                temporary.write_bytes(make())
                os.rename(temporary, path)
            except OSError as e:
                raise FolderError(f"{path} cannot be written: {e.strerror}") from e
            self._small.append(path)

    def publish(self) -> None:
        """The folder gets the target's name.

        Raises:
            FolderError: the target came into being meanwhile.
        """
        check_target(self.target)
        for path in self._small:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for base, _, _ in os.walk(self.path):
            fsync_dir(base)
        try:
            self.path.rename(self.target)
        except OSError as e:
            raise FolderError(f"{self.target} cannot be made: {e.strerror}") from e
        # Until now a kill left all of it to be resumed; from now on it is finished, and the journal only in the way.
        (self.target / JOURNAL).unlink()
        fsync_dir(self.target.parent)

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists() and not self.keep:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def check_target(target: Path) -> None:
    """Raises FolderError if the target is there already (an empty folder does not count)."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise FolderError(f"{target} exists already: give a new path, or remove it first")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
