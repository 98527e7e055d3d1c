"""The folder of one attempt on this node, from its first byte to its final name or its removal.

In this order: `write` (data, synced, then this rank's seal) by every rank; `prepare` (metadata and `commit.json`),
`commit` (one rename) and the tracker by the node's lowest rank; or `discard` by every rank, which also ends what a
predecessor left behind. Nothing here talks to other ranks: `checkpoint.writer` does, in between.
"""

from __future__ import annotations

import concurrent.futures
import errno
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from checkpoint.errors import CheckpointError, FormatError
from checkpoint.format.files import FileRecord, RecordFile, fsync_dir, put_file
from checkpoint.format.folder import write_folder_metadata
from checkpoint.layout import committed_path, owner_record, remove_folder, saving_path, write_tracker
from checkpoint.progress import Job, Progress
from checkpoint.seals import CommitRecord, Seal, index_from_seals, read_commit
from checkpoint.staging import BATCHES_STAGED, BATCHES_WRITTEN
from checkpoint.vote import dump

__all__ = ["AttemptFolder"]

_OF_A_NODE = ("commit.json", ".metadata", "metadata.json", "common.pt")

Places = dict[int, tuple[int, int, int]]
"""Item -> (number of its file, position, bytes of its record)."""


class AttemptFolder:
    """What `rank` does in the folder of one attempt.

    Args:
        node: lowest rank that sees the same root; that one also writes what belongs to the node.
    """

    def __init__(self, root: Path, step: int, attempt: str, *, rank: int, node: int) -> None:
        self.root, self.step, self.attempt = root, step, attempt
        self.rank, self.node, self.leader = rank, node, rank == node
        self.path = saving_path(root, step, attempt)

    def write(self, job: Job, progress: Progress, world_size: int) -> Seal:
        """Write what is staged, and the seal over it, to the disk; returns the seal.

        Raises:
            OSError: from the disk. CheckpointError: the trainer did not stage all in time, or the attempt was decided.
        """
        progress.enter("write")
        self.path.mkdir(parents=True, exist_ok=True)
        put_file(self.path / f"owner.{self.rank}.json", owner_record(os.getpid()))
        records, places = self._write_data(job, progress)
        progress.enter("seal")
        if self.rank == 0:
            # Now, not at the commit: a folder with all seals is a checkpoint that only lacks its index.
            put_file(self.path / "common.pt", job.common_record)
        seal = self._seal(job, records, places, world_size, progress.host)
        put_file(self.path / f"seal.{self.rank}.json", dump(seal.to_json()))
        job.times["sealed_s"] = time.monotonic() - job.began
        return seal

    def _write_data(self, job: Job, progress: Progress) -> tuple[list[FileRecord], Places]:
        staging = progress.staging
        assert staging is not None
        files = [RecordFile(self.path / f"__{self.rank}_{i}.distcp", progress.wrote) for i in range(job.num_files)]
        places: Places = {}
        try:
            with concurrent.futures.ThreadPoolExecutor(max(job.num_files, 1)) as pool:
                for number, batch in enumerate(job.batches):
                    _await_batch(job, progress, number)
                    parts: list[list[list[int]]] = [[] for _ in files]
                    for entry in batch:
                        parts[job.items[entry[0]]["file"]].append(entry)
                    work = [
                        pool.submit(_write_part, job, staging.raw, files[i], i, part) for i, part in enumerate(parts)
                    ]
                    for future in concurrent.futures.as_completed(work):
                        places.update(future.result())
                    staging.header[BATCHES_WRITTEN] = number + 1
                job.times["write_s"] = time.monotonic() - job.began
                progress.enter("sync")
                for done in [pool.submit(file.sync) for file in files]:
                    done.result()
            records = [file.close() for file in files]
        except BaseException:
            for file in files:
                file.abandon()
            raise
        job.times["sync_s"] = time.monotonic() - job.began - job.times["write_s"]
        return records, places

    def _seal(self, job: Job, records: list[FileRecord], places: Places, world_size: int, host: str) -> Seal:
        tensors, objects = [], []
        for index, (number, pos, size) in places.items():
            item = job.items[index]
            if item["kind"] == "tensor":
                where = (item["global_shape"], item["offset"], item["shape"])
                tensors.append((item["key"], item["dtype"], *where, number, pos, size))
            else:
                objects.append((item["key"], number, pos, size))
        return Seal(
            attempt=self.attempt, step=self.step, rank=self.rank, world_size=world_size, host=host,
            node=self.node, files=tuple(records), tensors=tuple(tensors), objects=tuple(objects), common=job.common,
            replicas=tuple(job.replicas), basis=job.basis, write_s=round(job.times["write_s"], 3),
        )  # fmt: skip

    def prepare(self, seals: Sequence[Seal], common: bytes) -> None:
        """Write all that the committed folder needs, so that after the verdict only a rename is left."""
        metadata = write_folder_metadata(self.path, index_from_seals(seals), common)
        record = CommitRecord(
            attempt=self.attempt, step=self.step, node=self.node, seals=tuple(seals), metadata=tuple(metadata)
        )
        put_file(self.path / "commit.json", record.dump())

    def commit(self) -> None:
        """Give it its final name; whoever did that before is not disturbed."""
        final = committed_path(self.root, self.step)
        if self.path.exists():
            if final.exists():
                remove_folder(final)  # the same step of an earlier life of this run
            os.rename(self.path, final)
            fsync_dir(self.root)
        write_tracker(self.root, self.step)

    def is_committed(self) -> bool:
        """Whether this attempt has its final name, and no other has it."""
        try:
            return read_commit(committed_path(self.root, self.step) / "commit.json").attempt == self.attempt
        except (OSError, FormatError):
            return False

    def discard(self) -> None:
        """Remove what this rank wrote, half-written files too; the folder goes with the last one."""
        if not self.path.exists():
            return
        patterns = [f"__{self.rank}_*.distcp", f"*.{self.rank}.json", f".*.{self.rank}.json.*.tmp"]
        if self.leader:
            patterns += [pattern for name in _OF_A_NODE for pattern in (name, f".{name}.*.tmp")]
        for pattern in patterns:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as e:
            # Other ranks still have files there, or one of them was a moment earlier.
            if e.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise


def _await_batch(job: Job, progress: Progress, number: int) -> None:
    assert progress.staging is not None
    while progress.staging.header[BATCHES_STAGED] <= number:
        if time.monotonic() >= job.end:
            raise CheckpointError(f"the trainer did not stage part {number + 1} of {len(job.batches)} in time")
        progress.check()
        time.sleep(0.001)


def _write_part(job: Job, raw: memoryview, file: RecordFile, number: int, part: list[list[int]]) -> Places:
    places = {}
    for index, offset in part:
        item = job.items[index]
        if item["kind"] == "tensor":
            dtype: torch.dtype = getattr(torch, item["dtype"])
            nbytes = math.prod(item["shape"]) * dtype.itemsize
            if nbytes:
                # A storage of exactly this tensor: torch.save writes whole storages.
                piece = torch.frombuffer(raw, dtype=torch.uint8, offset=offset, count=nbytes)
                tensor = piece.view(dtype).view(item["shape"])
            else:
                tensor = torch.empty(item["shape"], dtype=dtype)
            pos, size = file.put_tensor(tensor)
        else:
            data = raw[offset : offset + item["nbytes"]]
            if item["kind"] == "common":
                job.common_record = bytes(data)
                continue
            pos, size = file.put_bytes(data)
        places[index] = (number, pos, size)
    return places
