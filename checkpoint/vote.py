"""How ranks agree on an attempt through the store: seal, prepare, one decision, publish.

Keys of an attempt, below the run's prefix:

    <a>/seal/<rank>, <a>/sealed      a rank's data is on its disk; counter
    <a>/fail/<rank>, <a>/failed      a rank cannot; counter
    <a>/go                           the coordinator has checked all seals: nodes write their commit records
    <a>/common                       the common state of rank 0, for the other nodes' folders
    <a>/prepared                     counter of nodes whose commit record is on disk
    <a>/verdict                      set once, by compare-and-set: {"commit": ...} or {"abort": ...}
    <a>/published/<node>             that node's folder has its final name (or why not)

The coordinator is the writer of rank 0. A rank that saw no verdict by its deadline and a grace decides for an abort
itself; compare-and-set makes that the verdict for everybody, or tells it the one that there is. `progress/<rank>`
holds what a rank last said about itself, for the report.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpoint.errors import CoverageError
from checkpoint.seals import Seal, common_differences, index_from_seals
from checkpoint.store import Store

__all__ = ["Ballot", "Culprit", "decide_abort", "describe", "dump", "read_verdict", "report_failure"]

WATCH_EVERY_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """Why an attempt was aborted: one rank, and what is known of it."""

    rank: int
    host: str
    phase: str
    """"never began" if it said nothing about this attempt."""
    error: str
    bytes_done: int = 0
    bytes_total: int = 0
    rate_bytes_s: float = 0.0
    heartbeat_age_s: float | None = None

    def __str__(self) -> str:
        parts = [f"rank {self.rank} on {self.host}: {self.error} (phase {self.phase}"]
        if self.bytes_total:
            parts.append(f"{self.bytes_done} of {self.bytes_total} bytes at {self.rate_bytes_s / 1e6:.1f} MB/s")
        if self.heartbeat_age_s is not None:
            parts.append(f"last heartbeat {self.heartbeat_age_s:.1f} s ago")
        return ", ".join(parts) + ")"


def describe(culprits: Sequence[Culprit]) -> str:
    more = f"; and {len(culprits) - 4} more ranks" if len(culprits) > 4 else ""
    return "; ".join(str(c) for c in culprits[:4]) + more


class _Watch:
    """Looks at the ranks that are missing, so that their silence can be dated by this host's clock."""

    def __init__(self, store: Store, attempt: str, hosts: Mapping[int, str]) -> None:
        self._store, self._attempt, self._hosts = store, attempt, hosts
        self._seen: dict[int, tuple[Any, float]] = {}

    def look(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            value = self._store.get(f"progress/{rank}")
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, time.monotonic())

    def age_s(self, rank: int) -> float | None:
        """Seconds since a rank that has begun this attempt last said anything new; None if it has not begun."""
        value, since = self._seen.get(rank, (None, 0.0))
        if value is None or value["attempt"] != self._attempt:
            return None
        return time.monotonic() - since

    def culprit(self, rank: int, error: str) -> Culprit:
        value = self._seen.get(rank, (None, 0.0))[0]
        host = self._hosts.get(rank, "?")
        if value is None or value["attempt"] != self._attempt:
            return Culprit(rank=rank, host=host, phase="never began", error=error)
        return Culprit(
            rank=rank,
            host=host,
            phase=value["phase"],
            error=error,
            bytes_done=value["bytes_done"],
            bytes_total=value["bytes_total"],
            rate_bytes_s=value["rate_bytes_s"],
            heartbeat_age_s=self.age_s(rank),
        )


def _collect_seals(
    store: Store, attempt: str, hosts: Mapping[int, str], end: float, stall_s: float
) -> tuple[list[Seal], list[Culprit]]:
    """All seals by rank, checked to make up a whole checkpoint; or else who is to blame. Coordinator only.

    `hosts` names every rank. Ends at `end` (monotonic seconds), as soon as a rank reports a failure, or when a rank
    that has begun says nothing for `stall_s`.
    """
    world_size = len(hosts)
    watch = _Watch(store, attempt, hosts)
    missing, next_watch, pause = set(range(world_size)), time.monotonic() + WATCH_EVERY_S, 0.002
    while True:
        if store.count(f"{attempt}/failed"):
            return [], _failures(store, attempt, world_size)
        if store.count(f"{attempt}/sealed") >= world_size:
            break
        now = time.monotonic()
        if now >= next_watch or now >= end:
            next_watch = now + WATCH_EVERY_S
            missing = {rank for rank in missing if not store.has(f"{attempt}/seal/{rank}")}
            watch.look(sorted(missing))
            silent = [rank for rank in sorted(missing) if (watch.age_s(rank) or 0.0) > stall_s]
            if silent:
                return [], [watch.culprit(rank, f"said nothing for {stall_s:g} s") for rank in silent]
        if now >= end and missing:
            return [], [watch.culprit(rank, "had not sealed at the deadline") for rank in sorted(missing)]
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    values = store.get_all([f"{attempt}/seal/{rank}" for rank in range(world_size)])
    seals = [Seal.from_json(value, f"seal of rank {rank}") for rank, value in enumerate(values)]
    if other := [seal for seal in seals if seal.basis != seals[0].basis]:
        why = "spread its replicas by {!r}, rank 0 by {!r}: one of them has not seen that save end"
        errors = [why.format(seal.basis, seals[0].basis) for seal in other]
        return [], [
            Culprit(rank=seal.rank, host=seal.host, phase="decide", error=error)
            for seal, error in zip(other, errors, strict=True)
        ]
    try:
        index_from_seals(seals)
    except CoverageError as e:
        return [], [Culprit(rank=0, host=hosts[0], phase="decide", error=f"the seals do not fit together: {e}")]
    return seals, []


def _failures(store: Store, attempt: str, world_size: int) -> list[Culprit]:
    found = [store.get(f"{attempt}/fail/{rank}") for rank in range(world_size)]
    return [Culprit(**value) for value in found if value is not None]


Prepare = Callable[[Sequence[Seal], bytes], Culprit | None]
"""(seals of all ranks, common state) -> None once this node's commit record is on disk, or why it is not."""


class Ballot:
    """One attempt, as a writer votes on it.

    Args:
        nodes, hosts: of every rank: lowest rank of its node, name of its host.
        end, grace_s: who has not sealed at `end` is named; who has no verdict `grace_s` later decides for an abort.
    """

    def __init__(
        self,
        store: Store,
        attempt: str,
        nodes: Mapping[int, int],
        hosts: Mapping[int, str],
        *,
        end: float,
        grace_s: float,
    ) -> None:
        self._store, self._attempt, self._hosts = store, attempt, hosts
        self._nodes, self._ranks = sorted(set(nodes.values())), sorted(nodes)
        self._end, self._grace_s = end, grace_s
        self.decided_after_s = 0.0
        """Of the coordinator: from the last seal to the verdict."""

    def cast(self, seal: Seal, common: bytes | None) -> None:
        """A rank's data is on its disk; rank 0 adds the common state."""
        if common is not None:
            self._store.set(f"{self._attempt}/common", common.hex())
        self._store.set(f"{self._attempt}/seal/{seal.rank}", seal.to_json())
        self._store.count(f"{self._attempt}/sealed", 1)

    def coordinate(self, prepare: Prepare, common: bytes, stall_s: float) -> dict[str, Any]:
        """Rank 0: gather the seals, let every node write its commit record, decide; returns the verdict."""
        store, attempt = self._store, self._attempt
        seals, culprits = _collect_seals(store, attempt, self._hosts, self._end, stall_s)
        if culprits:
            return decide_abort(store, attempt, culprits)
        all_sealed = time.monotonic()
        store.set(f"{attempt}/go", 1)
        if (culprit := prepare(seals, common)) is not None:
            return decide_abort(store, attempt, [culprit])
        store.count(f"{attempt}/prepared", 1)
        if culprits := self._await_prepared():
            return decide_abort(store, attempt, culprits)
        replicated = any(seal.replicas for seal in seals)
        differs = {str(k): v[:20] for k, v in common_differences(seals).items()}
        self.decided_after_s = time.monotonic() - all_sealed
        verdict = store.decide(
            f"{attempt}/verdict", {"commit": seals[0].step, "common_differs": differs, "replicated": replicated}
        )
        assert isinstance(verdict, dict)
        return verdict

    def _await_prepared(self) -> list[Culprit]:
        store, attempt, pause = self._store, self._attempt, 0.001
        while store.count(f"{attempt}/prepared") < len(self._nodes):
            if store.count(f"{attempt}/failed") or time.monotonic() >= self._end:
                error = "did not write its commit record in time"
                missing = [n for n in self._nodes if n and not store.has(f"{attempt}/ready/{n}")]
                return _failures(store, attempt, len(self._ranks)) or [
                    Culprit(rank=n, host=self._hosts[n], phase="prepare", error=error) for n in missing
                ]
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return []

    def follow(self, node: int, prepare: Prepare) -> Any:
        """The lowest rank of another node: write its commit record when rank 0 says so; returns the verdict."""
        store, attempt = self._store, self._attempt
        while not store.has(f"{attempt}/go"):
            if store.has(f"{attempt}/verdict") or time.monotonic() >= self._end + self._grace_s:
                return self.await_verdict()
            time.sleep(0.01)
        values = store.get_all([f"{attempt}/seal/{rank}" for rank in self._ranks])
        seals = [Seal.from_json(v, f"seal of rank {r}") for r, v in enumerate(values)]
        if (culprit := prepare(seals, bytes.fromhex(store.get(f"{attempt}/common")))) is not None:
            report_failure(store, attempt, culprit)
        else:
            store.set(f"{attempt}/ready/{node}", 1)
            store.count(f"{attempt}/prepared", 1)
        return self.await_verdict()

    def await_verdict(self) -> Any:
        """The verdict; an abort of this rank's own if there is none in time."""
        verdict = self._store.wait(f"{self._attempt}/verdict", self._end + self._grace_s)
        if verdict is None:
            error = "the coordinator gave no verdict by the deadline"
            culprit = Culprit(rank=0, host=self._hosts[0], phase="decide", error=error)
            verdict = decide_abort(self._store, self._attempt, [culprit])
        return verdict


def report_failure(store: Store, attempt: str, culprit: Culprit) -> None:
    """Tell the coordinator that a rank cannot finish this attempt."""
    store.set(f"{attempt}/fail/{culprit.rank}", dataclasses.asdict(culprit))
    store.count(f"{attempt}/failed", 1)


def decide_abort(store: Store, attempt: str, culprits: Sequence[Culprit]) -> dict[str, Any]:
    """Decide for an abort, unless there is a verdict; returns the one that holds."""
    verdict = store.decide(f"{attempt}/verdict", {"abort": [dataclasses.asdict(c) for c in culprits]})
    assert isinstance(verdict, dict)
    return verdict


def read_verdict(verdict: Mapping[str, Any]) -> tuple[bool, list[Culprit]]:
    """(committed, who is to blame if not)"""
    if "abort" in verdict:
        return False, [Culprit(**value) for value in verdict["abort"]]
    return True, []


def dump(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
