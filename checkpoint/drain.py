"""Copy committed checkpoints to durable storage, behind the back of training: any URL that fsspec opens.

    drain(root, step, url)          in this process; returns what was copied
    DrainProcess(root, step, url)   the same in a process of its own, with `poll`
    DrainQueue(root, url, ...)      of one node: one after the other, the step that is not durable yet and oldest first

Objects go up in this order: this node's data, a mark that the node is done, and, by whoever finds the marks of all
nodes, `common.pt`, `.metadata`, `commit.json` and last `metadata.json`, which makes the copy a checkpoint. What is read
from the local disk is digested on the way and compared with its seal, so that damage is not made durable; what was
written is read back and digested, too. A drain that was interrupted goes on with the objects that are missing or
differ; `drained.json` in the local folder says afterwards where the step went.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.durable import Durable
from checkpoint.errors import CheckpointError, ConfigError, DigestError, FormatError
from checkpoint.format.files import STEP_BYTES, FileRecord, new_digest, put_file
from checkpoint.format.index import dump_metadata
from checkpoint.layout import committed_path, committed_steps
from checkpoint.process import child_environment
from checkpoint.seals import CommitRecord, index_from_seals, read_commit

__all__ = ["DrainProcess", "DrainQueue", "DrainReport", "drain", "drained_to", "main", "refuse_root"]

log = logging.getLogger("checkpoint")

AGAIN_S = 10.0
STALL_S = 600.0
"""A drain process that moves no byte for so long ends itself; the next one goes on."""
MARK = "drained.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrainReport:
    """`bytes_copied` does not count what an earlier drain had copied; `committed`: the copy is a whole checkpoint now
    (with several nodes, only the last one's drain says so)."""

    step: int
    bytes_copied: int
    files_copied: int
    files_there: int
    committed: bool


class _Meter:
    """Bounds the rate of what passes, and knows when something last did."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate, self._free_at = bytes_per_s, 0.0
        self.last = time.monotonic()
        # Small pieces at a small rate: pauses of a tenth of a second instead of bursts.
        self.piece_bytes = STEP_BYTES if bytes_per_s is None else int(min(max(bytes_per_s / 10, 64 << 10), STEP_BYTES))

    def passed(self, nbytes: int) -> None:
        now = time.monotonic()
        if self._rate:
            # What was not used is not saved up: a pause must not be followed by a burst.
            self._free_at = max(self._free_at, now) + nbytes / self._rate
            time.sleep(max(self._free_at - now, 0))
        self.last = time.monotonic()


def drain(
    root: str | Path,
    step: int,
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    bytes_per_s: float | None = None,
    meter: _Meter | None = None,
) -> DrainReport:
    """Copy this node's part of a committed step to `<url>/iter_<step>`; idempotent and resumable.

    Args:
        url: what fsspec opens: "s3://bucket/run", "file:///mnt/durable", "memory://...".
        storage_options: for fsspec.
        bytes_per_s: upper bound of the rate of copying, reading back included; None: none.

    Raises:
        ConfigError: `url` is no place to copy to. FormatError: the step is not committed here.
        DigestError: a file differs from its seal, here or there.
        StorageError: from durable storage. OSError: from the local disk.
    """
    refuse_root(root, url)
    folder = committed_path(root, step)
    try:
        record = read_commit(folder / "commit.json")
    except FileNotFoundError as e:
        raise FormatError(f"{folder} is not committed: nothing to drain") from e
    meter = meter or _Meter(bytes_per_s)
    durable = Durable(url, storage_options)
    durable.prepare(step)
    _retract(durable, record)
    copied, there, nbytes = 0, 0, 0
    for file in record.own_files():
        if _is_there(durable, step, file, meter):
            there += 1
            continue
        durable.send(step, folder / file.name, file, meter.piece_bytes, meter.passed)
        if not _is_there(durable, step, file, meter):
            raise DigestError(
                f"{durable.place(step, file.name)} does not hold what was written to it: drain again, or look at that "
                "storage"
            )
        copied += 1
        nbytes += file.nbytes
    durable.put(step, f"drained.{record.node}.json", json.dumps({"attempt": record.attempt}).encode())
    committed = _all_marked(durable, record)
    if committed:
        _commit(durable, record, folder)
    put_file(folder / MARK, json.dumps({"url": url, "attempt": record.attempt}).encode())
    return DrainReport(step=step, bytes_copied=nbytes, files_copied=copied, files_there=there, committed=committed)


def refuse_root(root: str | Path, url: str) -> None:
    """Raises ConfigError: `url` is `root` itself. Every step would be found there and pass for durable."""
    protocol, _, path = url.rpartition("://")
    if protocol in ("", "file", "local") and Path(path).resolve() == Path(root).resolve():
        raise ConfigError(f"{url} is the root of the checkpoints itself, no copy of it: name another place")


def drained_to(folder: str | Path) -> str | None:
    """The URL that this node's part of a local step was drained to; None: to nowhere yet."""
    try:
        return str(json.loads((Path(folder) / MARK).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not drained, or torn: draining again costs a comparison


def _is_there(durable: Durable, step: int, expected: FileRecord, meter: _Meter) -> bool:
    if durable.size(step, expected.name) != expected.nbytes:
        return False
    return durable.digest(step, expected.name, meter.passed) == expected


def _retract(durable: Durable, record: CommitRecord) -> None:
    """An earlier attempt at the same step must not stay committed while its files are replaced."""
    try:
        if durable.record(record.step).attempt == record.attempt:
            return
    except FormatError:
        pass  # none, or damaged: then it goes, too
    for name in ("metadata.json", "commit.json"):
        durable.remove(record.step, name)


def _all_marked(durable: Durable, record: CommitRecord) -> bool:
    for node in {seal.node for seal in record.seals}:
        try:
            if json.loads(durable.get(record.step, f"drained.{node}.json"))["attempt"] != record.attempt:
                return False  # of an earlier attempt at the same step
        except FileNotFoundError:
            return False
    return True


def _commit(durable: Durable, record: CommitRecord, folder: Path) -> None:
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
        durable.put(record.step, name, contents[name])


class DrainProcess:
    """A drain in a process of its own, of low priority: it takes no time from the trainer's threads.

    Its order goes through a pipe: `storage_options` may hold what no list of processes should show.
    """

    def __init__(
        self,
        root: str | Path,
        step: int,
        url: str,
        *,
        bytes_per_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.step = step
        self._outcome: DrainReport | str | None = None
        order = {
            "root": str(root),
            "step": step,
            "url": url,
            "bytes_per_s": bytes_per_s,
            "storage_options": dict(storage_options or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from checkpoint.drain import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env=child_environment(),
        )
        assert self._process.stdin is not None
        try:
            # Far less than a pipe holds: this waits for nobody.
            self._process.stdin.write(json.dumps(order).encode())
            self._process.stdin.close()
        except OSError:
            pass  # it died at once; `poll` says so

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
    """Drains of one node, one after the other, oldest step first. For one thread; nothing waits.

    Begins with the committed steps that an earlier life of the run did not drain to this URL.
    """

    def __init__(
        self,
        root: str | Path,
        url: str,
        bytes_per_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._root, self._url, self._rate, self._options = root, url, bytes_per_s, storage_options
        self.pending: list[int] = [
            step
            for step in committed_steps(root)
            if (committed_path(root, step) / "commit.json").exists() and drained_to(committed_path(root, step)) != url
        ]
        """Steps that are not durable yet; the first one is being copied, if any is."""
        self._process: DrainProcess | None = None
        self._not_before = 0.0

    def add(self, step: int) -> None:
        if step not in self.pending[1:]:  # the first may be half copied, of an earlier attempt at the same step
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
                self._process = DrainProcess(
                    self._root,
                    self.pending[0],
                    self._url,
                    bytes_per_s=self._rate,
                    storage_options=self._options,
                )
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
    """What a `DrainProcess` runs: one order as JSON on stdin, one line of JSON as answer."""
    order = json.load(sys.stdin)
    os.nice(10)
    meter = _Meter(order["bytes_per_s"])
    # A client may wait for ever for a server that is gone; who waits for this process must not.
    threading.Thread(target=_end_when_stalled, args=(meter, order), daemon=True).start()
    try:
        report = drain(
            order["root"], order["step"], order["url"], storage_options=order["storage_options"], meter=meter
        )
    except (CheckpointError, OSError) as e:
        print(json.dumps({"error": f"step {order['step']} was not drained to {order['url']}: {e}"}))
        return
    print(json.dumps({"report": dataclasses.asdict(report)}))


def _end_when_stalled(meter: _Meter, order: dict[str, Any]) -> None:
    while (left := meter.last + STALL_S - time.monotonic()) > 0:
        time.sleep(left)
    said = f"step {order['step']} was not drained to {order['url']}: no byte moved for {STALL_S:g} s"
    print(json.dumps({"error": said}), flush=True)
    os._exit(1)
