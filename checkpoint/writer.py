"""The writer process of one rank: `python -c "from checkpoint.writer import main; main()" <socket>`.

Started by `checkpoint.process`, in a fresh interpreter: never forked (a fork of a process with threads and CUDA can
deadlock or crash), and not by multiprocessing, whose spawn runs the user's main module again. It maps the trainer's
staging memory, and does all that waits for a disk or for other ranks: write and digest, sync, seal, vote, and for the
node's lowest rank also the commit. The trainer reads its progress from the header of the staging memory and may kill it
at any time: until the verdict nothing is promised, after it a successor finishes the rename.

Commands come as descriptors of JSON in memory, so that no command ever waits for this process; events go back as lines
of JSON. When the trainer dies, the save in flight is still brought to its end.

long: one program, whose steps are read from top to bottom.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from checkpoint.errors import CheckpointError
from checkpoint.format.files import FileRecord, RecordFile, fsync_dir, put_file
from checkpoint.format.folder import write_folder_metadata
from checkpoint.format.index import Index, dump_metadata
from checkpoint.layout import committed_path, owner_record, remove_folder, saving_path, write_tracker
from checkpoint.retention import Retention, prune
from checkpoint.seals import CommitRecord, Seal, common_differences, index_from_seals
from checkpoint.staging import (
    ALIVE_NS,
    BATCHES_STAGED,
    BATCHES_WRITTEN,
    BYTES_DONE,
    PHASE,
    PHASES,
    PROGRESS_NS,
    Staging,
)
from checkpoint.store import Store
from checkpoint.vote import Culprit, collect_seals, decide_abort, dump, read_verdict, report_failure

__all__ = ["main"]

ALIVE_EVERY_S = 0.2
REPORT_EVERY_S = 0.5


class _Aborted(CheckpointError):
    """The verdict came while this rank was still writing."""


@dataclasses.dataclass(slots=True)
class _Job:
    """One attempt."""

    attempt: str
    step: int
    end: float
    stall_s: float
    grace_s: float
    items: list[Any]
    batches: list[list[list[int]]]
    num_files: int
    nbytes: int
    common: dict[str, str]
    retention: Retention
    keep_aborted: bool
    protect: list[int]
    began: float = 0.0
    common_record: bytes = b""
    times: dict[str, float] = dataclasses.field(default_factory=dict)


class _Writer:
    def __init__(self, channel: socket.socket, start: dict[str, Any]) -> None:
        self._channel = channel
        self.root = Path(start["root"])
        self.rank, self.world_size = int(start["rank"]), int(start["world_size"])
        self.trainer_pid = int(start["trainer_pid"])
        self.host = socket.gethostname()
        self.store = Store(start["store"], start["run_id"] + "/")
        self.staging: Staging | None = None
        self._plan: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._job: _Job | None = None
        self._verdict_seen = False
        self._wake = threading.Event()
        self.nodes: dict[int, int]
        self.hosts: dict[int, str]
        if start["nodes"] is None:
            self._meet(time.monotonic() + start["deadline_s"], start["run_id"])
        else:
            self.nodes = {int(k): v for k, v in start["nodes"].items()}
            self.hosts = {int(k): v for k, v in start["hosts"].items()}
        self.node = self.nodes[self.rank]
        self.leader = self.node == self.rank
        if self.leader:
            # Seconds of imports: now, not between the last seal and the commit of the first save.
            dump_metadata(Index(tensors={}, objects={}))
        threading.Thread(target=self._show_life, daemon=True).start()
        threading.Thread(target=self._report, daemon=True).start()
        self.tell({"event": "ready", "nodes": self.nodes, "hosts": self.hosts})

    def tell(self, event: dict[str, Any]) -> None:
        # The trainer may be gone; the save in flight goes on without it.
        try:
            self._channel.sendall(dump(event) + b"\n")
        except OSError as e:
            sys.stderr.write(f"checkpoint writer of rank {self.rank}: the trainer is gone ({e})\n")

    def _meet(self, end: float, run_id: str) -> None:
        """Find out which ranks see the same root: by files, because hosts and mount points tell nothing certain."""
        probe = self.root / f".probe-{run_id}-{self.rank}"
        put_file(probe, b"probe")
        try:
            self.store.set(f"hello/{self.rank}", self.host)
            self.hosts = self._everybody("hello", end)
            seen = [r for r in range(self.world_size) if (self.root / f".probe-{run_id}-{r}").exists()]
            self.store.set(f"sees/{self.rank}", seen)
            views = self._everybody("sees", end)
        finally:
            probe.unlink(missing_ok=True)
        self.nodes = {rank: min(ranks) for rank, ranks in views.items()}
        for rank, ranks in views.items():
            if views[self.nodes[rank]] != ranks:
                raise CheckpointError(
                    f"rank {rank} on {self.hosts[rank]} sees the checkpoint folders of ranks {ranks}, rank "
                    f"{self.nodes[rank]} those of {views[self.nodes[rank]]}: give all ranks of a node the same root"
                )

    def _everybody(self, key: str, end: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        while True:
            for rank in range(self.world_size):
                if rank not in found and (value := self.store.get(f"{key}/{rank}")) is not None:
                    found[rank] = value
            if len(found) == self.world_size:
                return found
            if time.monotonic() >= end:
                missing = [r for r in range(self.world_size) if r not in found]
                raise CheckpointError(f"ranks {missing} did not start their Checkpointer in time")
            time.sleep(0.01)

    # Life signs

    def _show_life(self) -> None:
        while True:
            self._wake.wait()
            if self.staging is not None:
                self.staging.header[ALIVE_NS] = time.monotonic_ns()
            time.sleep(ALIVE_EVERY_S)

    def _report(self) -> None:
        """Tell the other ranks how far this one is, and notice a verdict while the disk is busy."""
        beat = 0
        try:
            while True:
                self._wake.wait()
                job = self._job
                if job is not None:
                    beat += 1
                    self.store.set(f"progress/{self.rank}", {**self._progress(job), "beat": beat})
                    if PHASES[self._phase()] == "write" and self.store.has(f"{job.attempt}/verdict"):
                        self._verdict_seen = True
                time.sleep(REPORT_EVERY_S)
        except CheckpointError as e:
            # The main thread meets the same loss at its next question and reports it.
            sys.stderr.write(f"checkpoint writer of rank {self.rank}: no longer reports progress: {e}\n")

    def _phase(self) -> int:
        return int(self.staging.header[PHASE]) if self.staging is not None else 0

    def _progress(self, job: _Job) -> dict[str, Any]:
        # The framing of the records is written, too, but it is not what the total counts.
        done = min(int(self.staging.header[BYTES_DONE]), job.nbytes) if self.staging is not None else 0
        return {
            "attempt": job.attempt,
            "phase": PHASES[self._phase()],
            "bytes_done": done,
            "bytes_total": job.nbytes,
            "rate_bytes_s": done / max(time.monotonic() - job.began, 1e-6),
        }

    def _enter(self, phase: str) -> None:
        assert self.staging is not None
        self.staging.header[PROGRESS_NS] = time.monotonic_ns()
        self.staging.header[PHASE] = PHASES.index(phase)

    def _wrote(self, nbytes: int) -> None:
        assert self.staging is not None
        if self._verdict_seen:
            raise _Aborted("the attempt was decided while this rank wrote")
        with self._lock:
            self.staging.header[BYTES_DONE] += nbytes
            self.staging.header[PROGRESS_NS] = time.monotonic_ns()

    # A save

    def save(self, command: dict[str, Any]) -> None:
        if command["plan"] is not None:
            self._plan = command["plan"]
        plan = self._plan
        job = _Job(
            attempt=command["attempt"], step=command["step"], end=command["end"], stall_s=command["stall_s"],
            grace_s=command["grace_s"], items=plan["items"], batches=plan["batches"], num_files=plan["num_files"],
            nbytes=plan["nbytes"], common=command["common"], retention=Retention(**command["retention"]),
            keep_aborted=command["keep_aborted"], protect=command["protect"], began=time.monotonic(),
        )  # fmt: skip
        self._job, self._verdict_seen = job, False
        self._wake.set()
        try:
            result = self._attempt(job)
        finally:
            self._job = None
            self._wake.clear()
        self._enter("finished")
        self.tell({"event": "result", "attempt": job.attempt, "times": job.times, **result})

    def _attempt(self, job: _Job) -> dict[str, Any]:
        folder = saving_path(self.root, job.step, job.attempt)
        try:
            verdict = self.store.get(f"{job.attempt}/verdict")
            if verdict is None:
                verdict = self._seal_and_vote(job, folder)
        except _Aborted:
            verdict = self.store.get(f"{job.attempt}/verdict")
        except CheckpointError as e:
            # Of the store: what is sealed stays on disk, where `rebuild` finds it.
            return {"outcome": "unknown", "culprits": [self._culprit(job, str(e))]}
        try:
            committed, culprits = read_verdict(verdict)
            if not committed:
                self._discard(job, folder)
                return {"outcome": "aborted", "culprits": [dataclasses.asdict(c) for c in culprits]}
            return self._publish(job, folder)
        except (CheckpointError, OSError) as e:
            return {"outcome": "unknown", "culprits": [self._culprit(job, f"{type(e).__name__}: {e}")]}

    def _seal_and_vote(self, job: _Job, folder: Path) -> Any:
        try:
            seal = self._write(job, folder)
        except _Aborted:
            raise
        except Exception as e:  # noqa: BLE001
            # Whatever went wrong on this rank must become a verdict: silence would cost everybody the deadline.
            culprit = Culprit(**self._culprit(job, f"{type(e).__name__}: {e}"))
            report_failure(self.store, job.attempt, culprit)
            if self.rank == 0:
                return decide_abort(self.store, job.attempt, [culprit])
            return self._await_verdict(job)
        self._enter("vote")
        if self.rank == 0:
            self.store.set(f"{job.attempt}/common", job.common_record.hex())
        self.store.set(f"{job.attempt}/seal/{self.rank}", seal.to_json())
        self.store.count(f"{job.attempt}/sealed", 1)
        return self._coordinate(job, folder) if self.rank == 0 else self._follow(job, folder)

    def _culprit(self, job: _Job, error: str) -> dict[str, Any]:
        progress = self._progress(job)
        del progress["attempt"]
        return dataclasses.asdict(Culprit(rank=self.rank, host=self.host, error=error, heartbeat_age_s=0.0, **progress))

    def _write(self, job: _Job, folder: Path) -> Seal:
        staging = self.staging
        assert staging is not None
        self._enter("write")
        folder.mkdir(parents=True, exist_ok=True)
        put_file(folder / f"owner.{self.rank}.json", owner_record(os.getpid()))
        files = [RecordFile(folder / f"__{self.rank}_{i}.distcp", self._wrote) for i in range(job.num_files)]
        places: dict[int, tuple[int, int, int]] = {}
        try:
            with concurrent.futures.ThreadPoolExecutor(max(job.num_files, 1)) as pool:
                for number, batch in enumerate(job.batches):
                    self._await_batch(job, number)
                    parts: list[list[list[int]]] = [[] for _ in files]
                    for entry in batch:
                        parts[job.items[entry[0]]["file"]].append(entry)
                    work = [pool.submit(self._write_part, job, files[i], i, part) for i, part in enumerate(parts)]
                    for future in concurrent.futures.as_completed(work):
                        places.update(future.result())
                    staging.header[BATCHES_WRITTEN] = number + 1
                job.times["write_s"] = time.monotonic() - job.began
                self._enter("sync")
                for done in [pool.submit(file.sync) for file in files]:
                    done.result()
            records = [file.close() for file in files]
        except BaseException:
            for file in files:
                file.abandon()
            raise
        job.times["sync_s"] = time.monotonic() - job.began - job.times["write_s"]
        self._enter("seal")
        if self.rank == 0:
            # Now, not at the commit: a folder with all seals is a checkpoint that only lacks its index.
            put_file(folder / "common.pt", job.common_record)
        seal = self._make_seal(job, records, places)
        put_file(folder / f"seal.{self.rank}.json", dump(seal.to_json()))
        job.times["sealed_s"] = time.monotonic() - job.began
        return seal

    def _await_batch(self, job: _Job, number: int) -> None:
        assert self.staging is not None
        while self.staging.header[BATCHES_STAGED] <= number:
            if time.monotonic() >= job.end:
                raise CheckpointError(f"the trainer did not stage part {number + 1} of {len(job.batches)} in time")
            if self._verdict_seen:
                raise _Aborted("the attempt was decided while the trainer staged")
            time.sleep(0.001)

    def _write_part(
        self, job: _Job, file: RecordFile, number: int, part: list[list[int]]
    ) -> dict[int, tuple[int, int, int]]:
        assert self.staging is not None
        places = {}
        for index, offset in part:
            item = job.items[index]
            if item["kind"] == "tensor":
                dtype: torch.dtype = getattr(torch, item["dtype"])
                nbytes = math.prod(item["shape"]) * dtype.itemsize
                if nbytes:
                    # A storage of exactly this tensor: torch.save writes whole storages.
                    piece = torch.frombuffer(self.staging.raw, dtype=torch.uint8, offset=offset, count=nbytes)
                    tensor = piece.view(dtype).view(item["shape"])
                else:
                    tensor = torch.empty(item["shape"], dtype=dtype)
                pos, size = file.put_tensor(tensor)
            else:
                data = self.staging.raw[offset : offset + item["nbytes"]]
                if item["kind"] == "common":
                    job.common_record = bytes(data)
                    continue
                pos, size = file.put_bytes(data)
            places[index] = (number, pos, size)
        return places

    def _make_seal(self, job: _Job, records: list[FileRecord], places: dict[int, tuple[int, int, int]]) -> Seal:
        tensors, objects = [], []
        for index, (number, pos, size) in places.items():
            item = job.items[index]
            if item["kind"] == "tensor":
                where = (item["global_shape"], item["offset"], item["shape"])
                tensors.append((item["key"], item["dtype"], *where, number, pos, size))
            else:
                objects.append((item["key"], number, pos, size))
        return Seal(
            attempt=job.attempt, step=job.step, rank=self.rank, world_size=self.world_size, host=self.host,
            node=self.node, files=tuple(records), tensors=tuple(tensors), objects=tuple(objects), common=job.common,
        )  # fmt: skip

    # Agreement

    def _coordinate(self, job: _Job, folder: Path) -> Any:
        seals, culprits = collect_seals(self.store, job.attempt, self.hosts, job.end, job.stall_s)
        if culprits:
            return decide_abort(self.store, job.attempt, culprits)
        all_sealed = time.monotonic()
        self.store.set(f"{job.attempt}/go", 1)
        try:
            self._prepare(job, folder, seals, job.common_record)
        except OSError as e:
            return decide_abort(self.store, job.attempt, [Culprit(**self._culprit(job, f"{type(e).__name__}: {e}"))])
        self.store.count(f"{job.attempt}/prepared", 1)
        self._enter("decide")
        num_nodes, pause = len(set(self.nodes.values())), 0.001
        while self.store.count(f"{job.attempt}/prepared") < num_nodes:
            failed = self.store.count(f"{job.attempt}/failed")
            if failed or time.monotonic() >= job.end:
                missing = [
                    n for n in sorted(set(self.nodes.values())) if not self.store.has(f"{job.attempt}/ready/{n}")
                ]
                values = [self.store.get(f"{job.attempt}/fail/{r}") for r in range(self.world_size)]
                culprits = [Culprit(**v) for v in values if v] or [
                    Culprit(
                        rank=n, host=self.hosts[n], phase="prepare", error="did not write its commit record in time"
                    )
                    for n in missing
                    if n
                ]
                return decide_abort(self.store, job.attempt, culprits)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        differs = {str(k): v[:20] for k, v in common_differences(seals).items()}
        job.times["decided_after_last_seal_s"] = time.monotonic() - all_sealed
        return self.store.decide(f"{job.attempt}/verdict", {"commit": job.step, "common_differs": differs})

    def _follow(self, job: _Job, folder: Path) -> Any:
        if not self.leader:
            return self._await_verdict(job)
        end = job.end + job.grace_s
        while not self.store.has(f"{job.attempt}/go"):
            if self.store.has(f"{job.attempt}/verdict") or time.monotonic() >= end:
                return self._await_verdict(job)
            time.sleep(0.01)
        values = self.store.get_all([f"{job.attempt}/seal/{rank}" for rank in range(self.world_size)])
        seals = [Seal.from_json(v, f"seal of rank {r}") for r, v in enumerate(values)]
        try:
            self._prepare(job, folder, seals, bytes.fromhex(self.store.get(f"{job.attempt}/common")))
        except OSError as e:
            report_failure(self.store, job.attempt, Culprit(**self._culprit(job, f"{type(e).__name__}: {e}")))
        else:
            self.store.set(f"{job.attempt}/ready/{self.node}", 1)
            self.store.count(f"{job.attempt}/prepared", 1)
        return self._await_verdict(job)

    def _await_verdict(self, job: _Job) -> Any:
        verdict = self.store.wait(f"{job.attempt}/verdict", job.end + job.grace_s)
        if verdict is None:
            coordinator = Culprit(
                rank=0, host=self.hosts[0], phase="decide", error="the coordinator gave no verdict by the deadline"
            )
            verdict = decide_abort(self.store, job.attempt, [coordinator])
        return verdict

    def _prepare(self, job: _Job, folder: Path, seals: list[Seal], common: bytes) -> None:
        """Write all that the committed folder needs, so that after the verdict only a rename is left."""
        self._enter("prepare")
        metadata = write_folder_metadata(folder, index_from_seals(seals), common)
        record = CommitRecord(
            attempt=job.attempt, step=job.step, node=self.node, seals=tuple(seals), metadata=tuple(metadata)
        )
        put_file(folder / "commit.json", record.dump())

    def _publish(self, job: _Job, folder: Path) -> dict[str, Any]:
        self._enter("publish")
        if self.leader:
            self._rename(folder, job.step)
            self.store.set(f"{job.attempt}/published/{self.node}", 1)
        end = max(job.end, time.monotonic()) + job.grace_s
        nodes = sorted(set(self.nodes.values()))
        late = [n for n in nodes if self.store.wait(f"{job.attempt}/published/{n}", end, poll_s=0.01) is None]
        if self.rank == 0 and not late:
            old = [f"{job.attempt}/seal/{rank}" for rank in range(self.world_size)]
            self.store.forget([*old, f"{job.attempt}/common"])
        job.times["committed_s"] = time.monotonic() - job.began
        verdict = self.store.get(f"{job.attempt}/verdict")
        removed = prune(self.root, job.retention, job.protect) if self.leader else []
        return {
            "outcome": "committed",
            "culprits": [],
            "late_nodes": [f"node of rank {n} on {self.hosts[n]}" for n in late],
            "common_differs": verdict.get("common_differs", {}),
            "removed": removed,
            "nbytes": job.nbytes,
        }

    def _rename(self, folder: Path, step: int) -> None:
        final = committed_path(self.root, step)
        if folder.exists():
            if final.exists():
                remove_folder(final)  # the same step of an earlier life of this run
            os.rename(folder, final)
            fsync_dir(self.root)
        write_tracker(self.root, step)

    def _discard(self, job: _Job, folder: Path) -> None:
        """Remove what this rank wrote; the folder goes with the last one."""
        if job.keep_aborted or not folder.exists():
            return
        names = [f"__{self.rank}_{i}.distcp" for i in range(job.num_files)]
        names += [f"owner.{self.rank}.json", f"seal.{self.rank}.json"]
        if self.leader:
            names += ["commit.json", ".metadata", "metadata.json", "common.pt"]
        for name in names:
            (folder / name).unlink(missing_ok=True)
        _remove_if_empty(folder)

    def finish(self, command: dict[str, Any]) -> None:
        """A predecessor died around the verdict: end its attempt as the verdict says."""
        attempt, step = command["attempt"], command["step"]
        verdict = self.store.wait(f"{attempt}/verdict", time.monotonic() + command["grace_s"])
        folder = saving_path(self.root, step, attempt)
        if verdict is not None and read_verdict(verdict)[0] and self.leader:
            self._rename(folder, step)
            self.store.set(f"{attempt}/published/{self.node}", 1)
        elif verdict is not None and not read_verdict(verdict)[0] and folder.exists() and not command["keep_aborted"]:
            for path in (*folder.glob(f"__{self.rank}_*.distcp"), *folder.glob(f"*.{self.rank}.json")):
                path.unlink(missing_ok=True)
            if self.leader:
                for name in ("commit.json", ".metadata", "metadata.json", "common.pt"):
                    (folder / name).unlink(missing_ok=True)
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)
            _remove_if_empty(folder)
        self.tell({"event": "finished", "attempt": attempt})


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as e:
        # Other ranks still have files there, or one of them was a moment earlier.
        if e.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next command and the descriptors that came with it; None when the trainer is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, 1, 2)
    except OSError:
        return None
    if not data:
        return None
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        return json.load(file), list(fds[1:])


def main() -> None:
    """Serve the trainer at the other end of the socket given as the only argument."""
    # Ctrl-C goes to the whole group of processes; the trainer decides what becomes of the save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)
    channel = socket.socket(fileno=int(sys.argv[1]))
    first = _receive(channel)
    if first is None:
        return
    try:
        writer = _Writer(channel, first[0])
    except (CheckpointError, OSError) as e:
        channel.sendall(dump({"event": "failed", "error": f"{type(e).__name__}: {e}"}) + b"\n")
        os._exit(1)  # without waiting for a store that does not answer
    while (received := _receive(channel)) is not None:
        command, fds = received
        if command["op"] == "staging":
            writer.staging = Staging(command["nbytes"], fds[0])
        elif command["op"] == "save":
            writer.save(command)
        elif command["op"] == "finish":
            writer.finish(command)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
