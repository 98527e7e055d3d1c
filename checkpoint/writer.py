"""The writer process of one rank: `python -c "from checkpoint.writer import main; main()" <socket>`.

Started by `checkpoint.process`, in a fresh interpreter: never forked (a fork of a process with threads and CUDA can
deadlock or crash), and not by multiprocessing, whose spawn runs the user's main module again. It maps the trainer's
staging memory, and does all that waits for a disk or for other ranks: write and digest, sync, seal, vote, and for the
node's lowest rank also the commit. The trainer reads its progress from the header of the staging memory and may kill it
at any time: until the verdict nothing is promised, after it a successor finishes the rename.

Commands come as descriptors of JSON in memory, so that no command ever waits for this process; events go back as lines
of JSON. When the trainer dies, the save in flight is still brought to its end. This module is the order of events;
`attempt` touches the disk, `vote` the store, `progress` tells how far it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from checkpoint.attempt import AttemptFolder
from checkpoint.errors import CheckpointError, StoreLost
from checkpoint.format.files import put_file
from checkpoint.format.index import Index, dump_metadata
from checkpoint.layout import committed_path, remove_older_attempts
from checkpoint.progress import Job, Progress, _Aborted
from checkpoint.replicas import Share, share_of
from checkpoint.retention import prune
from checkpoint.seals import read_commit
from checkpoint.staging import Staging
from checkpoint.store import Store
from checkpoint.vote import Ballot, Culprit, decide_abort, dump, read_verdict, report_failure

__all__ = ["main"]

NICE = 10
"""Training goes first: on a busy machine the writer of a rank that staged early must not hold up the others' copies."""


class _Writer:
    def __init__(self, channel: socket.socket, start: dict[str, Any]) -> None:
        self._channel = channel
        self.root = Path(start["root"])
        self.rank, self.world_size = int(start["rank"]), int(start["world_size"])
        self.host = socket.gethostname()
        self.store = Store(start["store"], start["run_id"] + "/")
        self._rank_0_hosts = bool(start["rank_0_hosts"])
        self._plan: dict[str, Any] = {}
        self._untidy: str | None = None
        """The last attempt that was committed, until its leftovers are known to be gone."""
        self._unsettled: list[AttemptFolder] = []
        """Of attempts whose verdict this rank did not learn, as the store was out of reach."""
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
        # Only now: a process that has just started, on a busy machine, may be slow to hear its first answers.
        self.store.reply_timeout_s = start["reply_timeout_s"]
        self.progress = Progress(self.rank, self.host, self.store)
        self.progress.start()
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

    def _folder(self, step: int, attempt: str) -> AttemptFolder:
        return AttemptFolder(self.root, step, attempt, rank=self.rank, node=self.node)

    # Commands

    def take_staging(self, nbytes: int, fd: int) -> None:
        """Map the trainer's staging memory."""
        self.progress.staging = Staging(nbytes, fd)

    def save(self, command: dict[str, Any]) -> None:
        """Bring one attempt to its end."""
        if command["plan"] is not None:
            self._plan = command["plan"]
        job = Job.from_command(command, self._plan)
        self.progress.begin(job)
        try:
            result = self._attempt(job)
            self.progress.enter("finished")
            self.tell({"event": "result", "attempt": job.attempt, "times": job.times, **result})
            if result["outcome"] == "committed":
                # After the word: deleting a checkpoint can take as long as writing one.
                self._tidy(job)
        finally:
            self.progress.end()

    def _tidy(self, job: Job) -> None:
        """Delete what the commit made superfluous. The node's other ranks write nothing before that is done."""
        self._untidy = job.attempt
        if not self.leader:
            return
        try:
            prune(self.root, job.retention, job.protect)
            if not job.keep_aborted:
                remove_older_attempts(self.root, job.attempt)
            self.store.set(f"tidy/{self.node}", job.attempt)
        except (CheckpointError, OSError) as e:
            sys.stderr.write(f"checkpoint writer of rank {self.rank}: step {job.step} is committed, but {e}\n")

    def _await_tidy(self, job: Job) -> None:
        """So that a root never holds more than it promised. A dead leader is not waited for longer than the grace."""
        end = min(time.monotonic() + job.grace_s, job.end)
        while self._untidy is not None and not self.leader and time.monotonic() < end:
            if self.store.get(f"tidy/{self.node}") == self._untidy:
                break
            time.sleep(0.005)
        self._untidy = None

    def finish(self, command: dict[str, Any]) -> None:
        """A predecessor died around the verdict: end its attempt as the verdict says."""
        attempt = command["attempt"]
        verdict = self.store.wait(f"{attempt}/verdict", time.monotonic() + command["grace_s"])
        folder = self._folder(command["step"], attempt)
        if verdict is not None and read_verdict(verdict)[0] and self.leader:
            folder.commit()
            self.store.set(f"{attempt}/published/{self.node}", 1)
        elif verdict is not None and not read_verdict(verdict)[0] and not command["keep_aborted"]:
            folder.discard()
        share = self._share(command["step"], verdict) if verdict is not None and read_verdict(verdict)[0] else None
        self.tell({"event": "finished", "attempt": attempt, "share": share})

    def _share(self, step: int, verdict: Any) -> dict[str, Any]:
        """What this rank's trainer has to write of the next save."""
        if verdict.get("replicated", True):
            try:
                record = read_commit(committed_path(self.root, step) / "commit.json")
                return share_of(record, self.rank).to_json()
            except (OSError, CheckpointError) as e:
                # The next save then ends with a verdict that names this rank, and all begin anew.
                sys.stderr.write(
                    f"checkpoint writer of rank {self.rank}: replicas of step {step} are not spread: {e}\n"
                )
        return Share().to_json()

    # An attempt

    def _attempt(self, job: Job) -> dict[str, Any]:
        folder = self._folder(job.step, job.attempt)
        try:
            self.store.revive()
            self._settle(job.keep_aborted)
            verdict = self.store.get(f"{job.attempt}/verdict")
            if verdict is None:
                self._await_tidy(job)
                verdict = self._seal_and_vote(job, folder)
        except _Aborted:
            verdict = self.store.get(f"{job.attempt}/verdict")
        except CheckpointError as e:
            # Of the store: what is sealed stays on disk, where `rebuild` finds it.
            return self._unknown(job, folder, e)
        try:
            committed, culprits = read_verdict(verdict)
            if committed:
                return self._publish(job, folder, verdict)
            if not job.keep_aborted:
                folder.discard()
            return {"outcome": "aborted", "culprits": [dataclasses.asdict(c) for c in culprits]}
        except (CheckpointError, OSError) as e:
            return self._unknown(job, folder, e)

    def _settle(self, keep_aborted: bool) -> None:
        """The store answers again: end the attempts before as they were decided."""
        while self._unsettled:
            folder = self._unsettled[-1]
            verdict = self.store.get(f"{folder.attempt}/verdict")
            self._unsettled.pop()
            try:
                if verdict is not None and not read_verdict(verdict)[0] and not keep_aborted:
                    folder.discard()
                elif verdict is not None and read_verdict(verdict)[0] and self.leader and folder.path.exists():
                    folder.commit()
                    sys.stderr.write(
                        f"checkpoint writer of rank {self.rank}: step {folder.step} is committed after all\n"
                    )
            except OSError as e:
                sys.stderr.write(f"checkpoint writer of rank {self.rank}: {folder.path} is left as it is: {e}\n")

    def _unknown(self, job: Job, folder: AttemptFolder, error: Exception) -> dict[str, Any]:
        end = time.monotonic() + job.grace_s
        while isinstance(error, StoreLost) and time.monotonic() < end:
            # Without the store the disk can still tell: the leader may have learnt the verdict just in time.
            if folder.is_committed():
                return self._committed(job, sorted(set(self.nodes.values()) - {self.node}), {})
            time.sleep(0.05)
        if folder.path.exists():
            self._unsettled.append(folder)
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        culprit = self.progress.culprit(job, text)
        if isinstance(error, StoreLost) and self._rank_0_hosts:
            # Whoever notices it is not the one to look at.
            culprit = Culprit(rank=0, host=self.hosts[0], phase=culprit.phase, error=text)
        return {"outcome": "unknown", "culprits": [dataclasses.asdict(culprit)]}

    def _seal_and_vote(self, job: Job, folder: AttemptFolder) -> Any:
        ballot = Ballot(self.store, job.attempt, self.nodes, self.hosts, end=job.end, grace_s=job.grace_s)
        try:
            seal = folder.write(job, self.progress, self.world_size)
        except _Aborted:
            raise
        except Exception as e:  # noqa: BLE001
            # Whatever went wrong on this rank must become a verdict: silence would cost everybody the deadline.
            culprit = self.progress.culprit(job, f"{type(e).__name__}: {e}")
            report_failure(self.store, job.attempt, culprit)
            if self.rank == 0:
                return decide_abort(self.store, job.attempt, [culprit])
            return ballot.await_verdict()
        self.progress.enter("vote")
        ballot.cast(seal, job.common_record if self.rank == 0 else None)

        def prepare(seals: Any, common: bytes) -> Any:
            self.progress.enter("prepare")
            try:
                folder.prepare(seals, common)
            except OSError as e:
                return self.progress.culprit(job, f"{type(e).__name__}: {e}")
            self.progress.enter("decide")
            return None

        if self.rank == 0:
            verdict = ballot.coordinate(prepare, job.common_record, job.stall_s)
            job.times["decided_after_last_seal_s"] = ballot.decided_after_s
            return verdict
        return ballot.follow(self.node, prepare) if self.leader else ballot.await_verdict()

    def _publish(self, job: Job, folder: AttemptFolder, verdict: Any) -> dict[str, Any]:
        self.progress.enter("publish")
        if self.leader:
            folder.commit()
        late = self._await_published(job)
        job.times["committed_s"] = time.monotonic() - job.began
        return self._committed(job, late, verdict)

    def _committed(self, job: Job, late: list[int], verdict: Any) -> dict[str, Any]:
        return {
            "outcome": "committed",
            "culprits": [],
            "late_nodes": [f"node of rank {n} on {self.hosts[n]}" for n in late],
            "common_differs": verdict.get("common_differs", {}),
            "nbytes": job.nbytes,
            "share": self._share(job.step, verdict),
        }

    def _await_published(self, job: Job) -> list[int]:
        """Nodes whose folder has not got its final name yet. It will: the verdict stands, with or without the store."""
        nodes = sorted(set(self.nodes.values()))
        end = max(job.end, time.monotonic()) + job.grace_s
        try:
            if self.leader:
                self.store.set(f"{job.attempt}/published/{self.node}", 1)
            late = [n for n in nodes if self.store.wait(f"{job.attempt}/published/{n}", end, poll_s=0.01) is None]
            if self.rank == 0 and not late:
                old = [f"{job.attempt}/seal/{rank}" for rank in range(self.world_size)]
                self.store.forget([*old, f"{job.attempt}/common"])
        except StoreLost as e:
            sys.stderr.write(f"checkpoint writer of rank {self.rank}: step {job.step} is committed, and {e}\n")
            return [n for n in nodes if not (self.leader and n == self.node)]
        return late


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
    os.nice(NICE)
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
            writer.take_staging(command["nbytes"], fds[0])
        elif command["op"] == "save":
            writer.save(command)
        elif command["op"] == "finish":
            writer.finish(command)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
