"""How far a writer process is: told to its trainer through staging memory, and to the other ranks through the store.

`Progress` belongs to the writer. Its two threads show that the process is scheduled, tell the store where the attempt
stands, and notice a verdict while the disk is busy. Whoever does the work calls `enter` when a phase begins and `wrote`
when bytes have left for the kernel; both are the places at which tests and benchmarks inject faults.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from typing import Any

from checkpoint.errors import CheckpointError
from checkpoint.retention import Retention
from checkpoint.staging import ALIVE_NS, BYTES_DONE, PHASE, PHASES, PROGRESS_NS, Staging
from checkpoint.store import Store
from checkpoint.vote import Culprit

__all__ = ["Job", "Progress"]

ALIVE_EVERY_S = 0.2
REPORT_EVERY_S = 0.5


class _Aborted(CheckpointError):
    """The verdict came while this rank was still writing."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """One attempt, as the trainer ordered it; `end` in monotonic seconds."""

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
    replicas: list[str]
    basis: str
    retention: Retention
    keep_aborted: bool
    protect: list[int]
    began: float = dataclasses.field(default_factory=time.monotonic)
    common_record: bytes = b""
    times: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_command(cls, command: dict[str, Any], plan: dict[str, Any]) -> Job:
        names = (
            "attempt",
            "step",
            "end",
            "stall_s",
            "grace_s",
            "common",
            "replicas",
            "basis",
            "keep_aborted",
            "protect",
        )
        order = {name: command[name] for name in names}
        return cls(**order, **plan, retention=Retention(**command["retention"]))


class Progress:
    """Of the writer of `rank` on `host`."""

    def __init__(self, rank: int, host: str, store: Store) -> None:
        self.rank, self.host = rank, host
        self.staging: Staging | None = None
        self._store = store
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._decided = False
        self._wake = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        threading.Thread(target=self._show_life, name="checkpoint-life", daemon=True).start()
        threading.Thread(target=self._report, name="checkpoint-report", daemon=True).start()

    def begin(self, job: Job) -> None:
        """An attempt begins."""
        self._job, self._decided = job, False
        self._wake.set()

    def end(self) -> None:
        """It is over."""
        self._job = None
        self._wake.clear()

    def enter(self, phase: str) -> None:
        """A phase of PHASES begins."""
        assert self.staging is not None
        self.staging.header[PROGRESS_NS] = time.monotonic_ns()
        self.staging.header[PHASE] = PHASES.index(phase)

    def wrote(self, nbytes: int) -> None:
        """Bytes were handed to the kernel; called by several threads. Raises _Aborted, as `check`."""
        assert self.staging is not None
        self.check()
        with self._lock:
            self.staging.header[BYTES_DONE] += nbytes
            self.staging.header[PROGRESS_NS] = time.monotonic_ns()

    def check(self) -> None:
        """Raises _Aborted: there is a verdict, which this rank did not wait for."""
        if self._decided:
            raise _Aborted("the attempt was decided while this rank wrote")

    def culprit(self, job: Job, error: str) -> Culprit:
        """This rank, as it would blame itself."""
        progress = self._of(job)
        del progress["attempt"]
        return Culprit(rank=self.rank, host=self.host, error=error, heartbeat_age_s=0.0, **progress)

    def _of(self, job: Job) -> dict[str, Any]:
        # The framing of the records is written, too, but it is not what the total counts.
        done = min(int(self.staging.header[BYTES_DONE]), job.nbytes) if self.staging is not None else 0
        return {
            "attempt": job.attempt,
            "phase": self._phase(),
            "bytes_done": done,
            "bytes_total": job.nbytes,
            "rate_bytes_s": done / max(time.monotonic() - job.began, 1e-6),
        }

    def _phase(self) -> str:
        return PHASES[int(self.staging.header[PHASE])] if self.staging is not None else PHASES[0]

    def _show_life(self) -> None:
        while True:
            self._wake.wait()
            if self.staging is not None:
                self.staging.header[ALIVE_NS] = time.monotonic_ns()
            time.sleep(ALIVE_EVERY_S)

    def _report(self) -> None:
        beat, silent = 0, None
        while True:
            self._wake.wait()
            job = self._job
            try:
                if job is not None and job is not silent:
                    beat += 1
                    self._store.set(f"progress/{self.rank}", {**self._of(job), "beat": beat})
                    if self._phase() == "write" and self._store.has(f"{job.attempt}/verdict"):
                        self._decided = True
            except CheckpointError as e:
                # The main thread meets the same loss at its next question, and tries again with the next attempt.
                sys.stderr.write(f"checkpoint writer of rank {self.rank}: reports no progress: {e}\n")
                silent = job
            time.sleep(REPORT_EVERY_S)
