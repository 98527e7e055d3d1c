"""Copy committed checkpoints to durable storage, behind the back of training: any URL that fsspec opens.

    drain(root, step, url)          in this process; returns the bytes that were copied
    DrainProcess(root, step, url)   the same in a process of its own, with `poll`

Objects go up in this order: this node's data, a mark that the node is done, and, by whoever finds the marks of all
nodes, `common.pt`, `.metadata`, `commit.json` and last `metadata.json`, which makes the copy a checkpoint. Nothing is
renamed: object stores copy to rename. What is read from the local disk is digested on the way and compared with its
seal, so that damage is not made durable; what was written is read back and digested, too. A drain that was interrupted
goes on with the objects that are missing or differ.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checkpoint.errors import CheckpointError, ConfigError, DigestError, FormatError
from checkpoint.format.files import STEP_BYTES, FileRecord, new_digest
from checkpoint.format.folder import TorchDistReader
from checkpoint.format.index import dump_metadata
from checkpoint.layout import committed_path
from checkpoint.process import child_environment
from checkpoint.seals import CommitRecord, index_from_seals, read_commit

__all__ = ["DrainProcess", "DrainQueue", "DrainReport", "drain", "main", "open_durable"]

log = logging.getLogger("checkpoint")

AGAIN_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrainReport:
    """`bytes_copied` does not count what an earlier drain had copied; `committed`: the copy is a whole checkpoint now
    (with several nodes, only the last one's drain says so)."""

    step: int
    bytes_copied: int
    files_copied: int
    files_there: int
    committed: bool


def _filesystem(url: str, options: dict[str, Any] | None) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as e:
        raise ConfigError("durable storage needs the package `fsspec`: pip install 'weightsync[storage]'") from e
    try:
        fs, path = fsspec.core.url_to_fs(url, **(options or {}))
    except (ImportError, ValueError) as e:
        raise ConfigError(f"fsspec cannot open {url!r}: {e}") from e
    return fs, str(path).rstrip("/")


class _Throttle:
    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate, self._began, self._done = bytes_per_s, time.monotonic(), 0

    def passed(self, nbytes: int) -> None:
        self._done += nbytes
        if self._rate:
            time.sleep(max(self._began + self._done / self._rate - time.monotonic(), 0))


def _remote_digest(fs: Any, path: str) -> str:
    digest = new_digest()
    with fs.open(path, "rb") as file:
        while piece := file.read(STEP_BYTES):
            digest.update(piece)
    return str(digest.hexdigest())


def _is_there(fs: Any, path: str, record: FileRecord) -> bool:
    try:
        return int(fs.size(path)) == record.nbytes and _remote_digest(fs, path) == record.xxh3
    except FileNotFoundError:
        return False


def _copy(fs: Any, source: Path, target: str, record: FileRecord, throttle: _Throttle) -> None:
    digest, total = new_digest(), 0
    with open(source, "rb", buffering=0) as file, fs.open(target, "wb", block_size=STEP_BYTES) as out:
        while piece := file.read(STEP_BYTES):
            digest.update(piece)
            total += len(piece)
            out.write(piece)
            throttle.passed(len(piece))
    if (total, digest.hexdigest()) != (record.nbytes, record.xxh3):
        fs.rm_file(target)
        raise DigestError(f"{source} was changed after it was sealed: it is not made durable")
    if not _is_there(fs, target, record):
        raise DigestError(f"{target} does not hold what was written to it: drain again, or look at that storage")


def drain(
    root: str | Path,
    step: int,
    url: str,
    *,
    storage_options: dict[str, Any] | None = None,
    bytes_per_s: float | None = None,
) -> DrainReport:
    """Copy this node's part of a committed step to `<url>/iter_<step>`; idempotent and resumable.

    Args:
        url: what fsspec opens: "s3://bucket/run", "file:///mnt/durable", "memory://...".
        storage_options: for fsspec.
        bytes_per_s: upper bound of the rate of copying; None: none.

    Raises:
        FormatError: the step is not committed here; DigestError: a file differs from its seal, here or there.
        OSError: from either storage.
    """
    folder = committed_path(root, step)
    try:
        record = read_commit(folder / "commit.json")
    except FileNotFoundError as e:
        raise FormatError(f"{folder} is not committed: nothing to drain") from e
    fs, base = _filesystem(url, storage_options)
    target = f"{base}/{folder.name}"
    fs.makedirs(target, exist_ok=True)
    throttle, copied, there, nbytes = _Throttle(bytes_per_s), 0, 0, 0
    mark = f"{target}/drained.{record.node}.json"
    for file in record.own_files():
        if _is_there(fs, f"{target}/{file.name}", file):
            there += 1
            continue
        _copy(fs, folder / file.name, f"{target}/{file.name}", file, throttle)
        copied += 1
        nbytes += file.nbytes
    fs.pipe_file(mark, json.dumps({"attempt": record.attempt}).encode())
    committed = _all_marked(fs, target, record)
    if committed:
        _commit(fs, target, record, folder)
    return DrainReport(step=step, bytes_copied=nbytes, files_copied=copied, files_there=there, committed=committed)


def _all_marked(fs: Any, target: str, record: CommitRecord) -> bool:
    for node in {seal.node for seal in record.seals}:
        try:
            if json.loads(fs.cat_file(f"{target}/drained.{node}.json"))["attempt"] != record.attempt:
                return False  # of an earlier attempt at the same step
        except FileNotFoundError:
            return False
    return True


def _commit(fs: Any, target: str, record: CommitRecord, folder: Path) -> None:
    """The metadata of a copy that holds the files of all nodes."""
    seals = tuple(dataclasses.replace(seal, node=0) for seal in record.seals)
    contents = {name: (folder / name).read_bytes() for name in ("common.pt", "metadata.json")}
    contents[".metadata"] = dump_metadata(index_from_seals(seals))
    records = []
    for name, data in contents.items():
        digest = new_digest()
        digest.update(data)
        records.append(FileRecord(name=name, nbytes=len(data), xxh3=digest.hexdigest()))
    whole = CommitRecord(attempt=record.attempt, step=record.step, node=0, seals=seals, metadata=tuple(records))
    contents["commit.json"] = whole.dump()
    for name in ("common.pt", ".metadata", "commit.json", "metadata.json"):
        fs.pipe_file(f"{target}/{name}", contents[name])


def open_durable(url: str, step: int, *, storage_options: dict[str, Any] | None = None) -> TorchDistReader:
    """Read tensors of a drained step by ranges, without downloading the rest.

    Raises:
        FormatError: no complete checkpoint there.
    """
    fs, base = _filesystem(url, storage_options)
    folder = f"{base}/{committed_path('', step).name}"

    def fetch(name: str, pos: int, size: int | None) -> bytes:
        return bytes(fs.cat_file(f"{folder}/{name}", start=pos, end=None if size is None else pos + size))

    return TorchDistReader(f"{url}/{committed_path('', step).name}", fetch=fetch)


class DrainProcess:
    """A drain in a process of its own: its reads, digests and uploads take no time from the trainer's threads."""

    def __init__(self, root: str | Path, step: int, url: str, *, bytes_per_s: float | None = None) -> None:
        self.step = step
        self._outcome: DrainReport | str | None = None
        order = {"root": str(root), "step": step, "url": url, "bytes_per_s": bytes_per_s}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from checkpoint.drain import main; main()", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
            env=child_environment(),
        )

    def poll(self) -> DrainReport | str | None:
        """None while it runs; then its report, or in words why there is none. Never waits."""
        code = self._process.poll()
        if self._outcome is not None or code is None:
            return self._outcome
        assert self._process.stdout is not None
        with self._process.stdout as out:
            said = out.read()
        try:
            value = json.loads(said)
            self._outcome = DrainReport(**value["report"]) if "report" in value else str(value["error"])
        except ValueError:
            self._outcome = f"the drain of step {self.step} ended with code {code}"
        return self._outcome

    def stop(self) -> None:
        """End it; what it copied is found by the next drain."""
        self._process.kill()
        self._process.wait(5)
        if self._process.stdout is not None:
            self._process.stdout.close()


class DrainQueue:
    """Drains of one node, one after the other, oldest step first. For one thread; nothing waits."""

    def __init__(self, root: str | Path, url: str, bytes_per_s: float | None) -> None:
        self._root, self._url, self._rate = root, url, bytes_per_s
        self.pending: list[int] = []
        """Steps that are not durable yet; the first one is being copied, if any is."""
        self._process: DrainProcess | None = None
        self._not_before = 0.0

    def add(self, step: int) -> None:
        self.pending.append(step)

    @property
    def reading(self) -> list[int]:
        """Steps that must not be removed now. Only the one being copied: durable storage that is down must not fill the
        local disk."""
        return [] if self._process is None else [self._process.step]

    def poll(self) -> list[int]:
        """Steps that became durable since the last call; starts the next drain."""
        if self._process is None:
            while self.pending and not committed_path(self._root, self.pending[0]).exists():
                log.warning("step %d was pruned before it was drained to %s", self.pending.pop(0), self._url)
            if self.pending and time.monotonic() >= self._not_before:
                self._process = DrainProcess(self._root, self.pending[0], self._url, bytes_per_s=self._rate)
            return []
        outcome = self._process.poll()
        if outcome is None:
            return []
        self._process = None
        if isinstance(outcome, str):
            # It stays first in line: the next drain goes on where this one ended.
            self._not_before = time.monotonic() + AGAIN_S
            log.warning("%s; trying again in %g s", outcome, AGAIN_S)
            return []
        return [self.pending.pop(0)]

    def stop(self) -> None:
        """End the running drain; says what is not durable."""
        if self._process is not None:
            self._process.stop()
            self._process = None
        if self.pending:
            log.warning("not drained to %s: steps %s", self._url, self.pending)


def main() -> None:
    """What a `DrainProcess` runs: one order as JSON argument, one line of JSON as answer."""
    order = json.loads(sys.argv[1])
    try:
        report = drain(order["root"], order["step"], order["url"], bytes_per_s=order["bytes_per_s"])
    except (CheckpointError, OSError) as e:
        print(json.dumps({"error": f"step {order['step']} was not drained to {order['url']}: {e}"}))
        return
    print(json.dumps({"report": dataclasses.asdict(report)}))
