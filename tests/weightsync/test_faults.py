"""Engines and trainers that die or freeze at every point of a publish: survivors serve one version, the next heals all.

A fault strikes from outside, at a step of the coordinator or at a tensor of the source: the processes hit are real
engines and trainers that know nothing of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.weightsync.fleet import DEADLINE_S, Weights, engine, hit, publisher, serves, within
from weightsync import errors
from weightsync.embedded.engine import EngineHandle
from weightsync.publisher import Publisher

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WORST_S = 5 * DEADLINE_S
"""No fault may cost more than each phase's deadline once."""


class Fleet:
    """Engines `a` (two ranks, the victim) and `b` (one rank, the survivor), restarted when a test has ruined them."""

    def __init__(self) -> None:
        self.a = engine("a", tp=2)
        self.b = engine("b")
        self.runs = 0

    @property
    def engines(self) -> list[EngineHandle]:
        return [self.a, self.b]

    def restart_victim(self, hand_over: Callable[[list[int]], None]) -> None:
        self.a.stop()
        self.a = engine("a", tp=2)
        hand_over(self.a.pids)

    def stop(self) -> None:
        self.a.stop()
        self.b.stop()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.stop()


def _strike(p: Publisher, source: Weights, where: str, fault: Callable[[], None]) -> None:
    """Arrange for `fault` to happen once, just before the step that `where` names."""
    coordinator: Any = p._coordinator
    if where == "mid-stream":
        source.at[9] = fault
        return
    step = {"preflight": "_post", "begin": "begin", "verify": "verify", "commit": "commit"}[where]
    real = getattr(coordinator, step)

    def struck(*args: Any, **kwargs: Any) -> Any:
        setattr(coordinator, step, real)
        fault()
        return real(*args, **kwargs)

    setattr(coordinator, step, struck)


def _attempt(p: Publisher, version: int) -> tuple[str, errors.PublishError | None]:
    with within(WORST_S):
        try:
            return p.publish(version).outcome, None
        except errors.PublishError as e:
            return (e.report.outcome if e.report else "?"), e


def _one_version(handle: EngineHandle, old: int, new: int) -> str:
    """An engine serves the old version, the new one, or nothing; returns which."""
    if handle.status()["fenced"]:
        with pytest.raises(errors.EngineFenced, match="full publish"):
            handle.generate([[3]], max_tokens=1)
        return "fenced"
    held = set(handle.status()["versions"].values())
    assert held in ({old}, {new}), held
    serves(handle, held.pop())
    return "old" if handle.status()["versions"]["target"] == old else "new"


CASES = [
    # where, signal, rank hit, what the survivor may be afterwards
    ("preflight", signal.SIGKILL, 1, {"old"}),
    ("preflight", signal.SIGSTOP, 0, {"old"}),
    ("begin", signal.SIGKILL, 0, {"old"}),
    ("begin", signal.SIGSTOP, 1, {"old", "fenced"}),
    ("mid-stream", signal.SIGKILL, 1, {"fenced"}),
    ("mid-stream", signal.SIGSTOP, 1, {"fenced"}),
    ("verify", signal.SIGKILL, 1, {"fenced", "new"}),
    ("verify", signal.SIGSTOP, 0, {"fenced", "new"}),
    ("commit", signal.SIGKILL, 1, {"new"}),
    ("commit", signal.SIGSTOP, 0, {"new"}),
]


@pytest.mark.parametrize(("where", "sig", "rank", "survivor"), CASES)
def test_an_engine_rank_lost(
    fleet: Fleet, where: str, sig: signal.Signals, rank: int, survivor: set[str], no_leftovers: Any
) -> None:
    fleet.runs += 1
    source = Weights(1)
    with publisher(source, fleet.engines, run_id=f"faults-{fleet.runs}", takeover=True) as p:
        assert p.publish(1).outcome == "committed"
        source.version = 2
        _strike(p, source, where, hit(fleet.a, rank, sig))
        outcome, error = _attempt(p, 2)
        assert _one_version(fleet.b, 1, 2) in survivor
        if error is not None:
            # Who, not only that: the engine that was hit is named, its victim is not blamed.
            assert "a" in {e.name for e in error.report.engines if e.error}  # type: ignore[union-attr]
            assert "engine a" in str(error) or "trainer stage" in str(error), str(error)
        assert outcome in {"refused", "aborted", "committed"}
        if sig == signal.SIGSTOP:
            os.kill(fleet.a.pids[rank], signal.SIGCONT)
            _settled(fleet.a, 1, 2)
        else:
            fleet.restart_victim(no_leftovers)
            p.engines = [e.control() for e in fleet.engines]
        source.version = 3
        healed = p.publish(3)
    assert {e.outcome for e in healed.engines} == {"committed"}
    for e in fleet.engines:
        serves(e, 3)


def test_a_lost_engine_is_dropped_and_rejoins(fleet: Fleet, no_leftovers: Any) -> None:
    fleet.runs += 1
    source = Weights(1)
    with publisher(source, fleet.engines, run_id=f"faults-{fleet.runs}", takeover=True, on_engine_failure="drop") as p:
        p.publish(1)
        source.version = 2
        source.at[9] = hit(fleet.a, 1, signal.SIGKILL)
        with within(WORST_S):
            report = p.publish(2)
        assert {e.name: e.outcome for e in report.engines} == {"b": "committed", "a": "dropped"}
        assert report.attempts == 2
        serves(fleet.b, 2)
        fleet.restart_victim(no_leftovers)
        p.engines = [e.control() for e in fleet.engines]
        source.version = 3
        assert {e.outcome for e in p.publish(3).engines} == {"committed"}
    for e in fleet.engines:
        serves(e, 3)


def test_a_corrupted_bucket_is_found_before_the_decision(fleet: Fleet) -> None:
    fleet.runs += 1
    source = Weights(1)
    with publisher(source, fleet.engines, run_id=f"faults-{fleet.runs}", takeover=True, bucket_bytes=64 << 10) as p:
        p.publish(1)
        endpoint: Any = p._sender._endpoint
        real_send, real_acquire, last = endpoint.send, endpoint.acquire, []

        def acquire() -> Any:
            last[:] = [real_acquire()]
            return last[0]

        def send(nbytes: int) -> None:
            # After the digest was taken, as a bad wire or bad memory would.
            endpoint.send = real_send
            last[0][nbytes // 2] ^= 0x10
            real_send(nbytes)

        endpoint.acquire, endpoint.send = acquire, send
        source.version = 2
        with pytest.raises(errors.PublishAborted, match="another digest than the sender"):
            p.publish(2)
        assert {_one_version(e, 1, 2) for e in fleet.engines} == {"fenced"}
        with pytest.raises(errors.PreflightError, match=r"fenced.*scope='both'"):
            p.publish(2, "target")
        assert p.publish(2).outcome == "committed"
    for e in fleet.engines:
        serves(e, 2)


def test_a_wrong_nonce_is_refused_and_the_old_version_serves(fleet: Fleet) -> None:
    fleet.runs += 1
    source = Weights(1)
    with publisher(source, fleet.engines, run_id=f"faults-{fleet.runs}", takeover=True) as p:
        p.publish(1)
        p._coordinator._nonce = "0" * 32  # type: ignore[union-attr]
        with within(WORST_S), pytest.raises(errors.PreflightError, match="nonce"):
            p.publish(2)
        assert {_one_version(e, 1, 2) for e in fleet.engines} == {"old"}
        source.version = 2
        assert p.publish(2).outcome == "committed"
    for e in fleet.engines:
        serves(e, 2)


def test_an_advertised_address_that_engines_cannot_reach(fleet: Fleet) -> None:
    fleet.runs += 1
    run = f"faults-{fleet.runs}"
    with publisher(Weights(1), fleet.engines, run_id=run, takeover=True) as p:
        p.publish(1)
    with (
        publisher(Weights(2), fleet.engines, run_id=run, advertise_host="127.0.0.77") as p,
        within(WORST_S),
        pytest.raises(errors.PreflightError, match=r"127\.0\.0\.77"),
    ):
        p.publish(2)
    assert {_one_version(e, 1, 2) for e in fleet.engines} == {"old"}


def test_a_taken_port_is_named(fleet: Fleet) -> None:
    with publisher(Weights(1), fleet.engines, run_id="port") as p:
        port = p._hosted.port  # type: ignore[union-attr]
        with pytest.raises(errors.TransportError, match=f"{port}.*widen port_range"):
            publisher(Weights(1), fleet.engines, port_range=(port, port))
        with publisher(Weights(1), fleet.engines, port_range=(port, port + 50)) as other:
            assert port < other._hosted.port <= port + 50  # type: ignore[union-attr]


def test_a_second_publisher_of_the_same_run_takes_over_and_the_first_may_come_back(fleet: Fleet) -> None:
    fleet.runs += 1
    run = f"faults-{fleet.runs}"
    first, second = Weights(1), Weights(2)
    with (
        publisher(first, fleet.engines, run_id=run, takeover=True) as p,
        publisher(second, fleet.engines, run_id=run) as q,
    ):
        epoch = p.publish(1).epoch
        report = q.publish(2)
        assert report.epoch > epoch
        for e in fleet.engines:
            serves(e, 2)
        first.version = 3
        assert p.publish(3).epoch > report.epoch
    for e in fleet.engines:
        serves(e, 3)


def _trainer(fleet: Fleet, run: str, version: int, stages: int, die: str) -> list[subprocess.Popen[str]]:
    """Trainer ranks as processes of their own; `die` says which one ends itself, and when."""
    root = Path(__file__).resolve().parents[2]
    job = {
        "run": run,
        "version": version,
        "stages": stages,
        "die": die,
        "deadline_s": DEADLINE_S,
        "engines": [[e.url, e.api_key, e.name] for e in fleet.engines],
    }
    ranks = []
    port = ""
    for rank in range(stages):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.weightsync.trainer_main", json.dumps({**job, "rank": rank, "port": port})],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        ranks.append(child)
        if rank == 0:
            assert child.stdout is not None
            port = child.stdout.readline().strip()
    return ranks


def _ended(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    out = []
    for child in ranks:
        try:
            text, _ = child.communicate(timeout=2 * WORST_S)
        except subprocess.TimeoutExpired:
            child.kill()
            text, _ = child.communicate()
            text += " TIMED OUT"
        out.append((child.returncode, text))
    return out


@pytest.mark.parametrize(
    ("die", "after"),
    [
        ("stage 1 mid-stream", {"fenced"}),
        ("coordinator mid-stream", {"fenced", "old"}),
        ("coordinator decided", {"new", "fenced"}),
    ],
)
def test_a_trainer_rank_killed(fleet: Fleet, die: str, after: set[str]) -> None:
    fleet.runs += 1
    run = f"faults-{fleet.runs}"
    with publisher(Weights(1), fleet.engines, run_id=run, takeover=True) as p:
        p.publish(1)
    with within(3 * WORST_S):
        ranks = _ended(_trainer(fleet, run, 2, 2, die))
    killed = 0 if die.startswith("coordinator") else 1
    assert ranks[killed][0] == -signal.SIGKILL
    code, text = ranks[1 - killed]
    assert code == 3, (code, text)
    assert ("coordinator" in text) if killed == 0 else ("trainer stage 1" in text), text
    with within(WORST_S):
        states = {_settled(e, 1, 2) for e in fleet.engines}
    assert states <= after, states
    # A new publisher with the same run id heals all.
    with publisher(Weights(3), fleet.engines, run_id=run) as p:
        assert {e.outcome for e in p.publish(3).engines} == {"committed"}
    for e in fleet.engines:
        serves(e, 3)


def test_a_pause_for_a_publish_that_never_begins_ends_by_itself(fleet: Fleet) -> None:
    fleet.runs += 1
    with publisher(Weights(1), fleet.engines, run_id=f"faults-{fleet.runs}", takeover=True) as p:
        p.publish(1, force=True)
    control = fleet.b.control()
    control.call("pause", {"mode": "keep", "lease_s": 0.5}, deadline_s=10)
    assert fleet.b.status()["state"] == "paused"
    with within(10):
        serves(fleet.b, 1)
    assert fleet.b.status()["state"] == "serving"
    with pytest.raises(errors.ConfigError, match="lease_s is -1"):
        control.call("pause", {"mode": "keep", "lease_s": -1}, deadline_s=10)


def _settled(handle: EngineHandle, old: int, new: int) -> str:
    """What an engine is once it has noticed that its publisher is gone: it may still be waiting for a decision."""
    end = time.monotonic() + 2 * DEADLINE_S
    while time.monotonic() < end:
        fenced = handle.status()["fenced"]
        if fenced is None or "was not loaded completely" in fenced:
            break
        time.sleep(0.1)
    return _one_version(handle, old, new)


def test_no_memory_for_the_ring_leaves_the_old_version_serving(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.runs += 1
    run = f"faults-{fleet.runs}"
    with publisher(Weights(1), fleet.engines, run_id=run, takeover=True) as p:
        p.publish(1)

    def refused(fd: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    with publisher(Weights(2), fleet.engines, run_id=run, transport="shm") as p:
        with monkeypatch.context() as patched:
            patched.setattr(os, "ftruncate", refused)
            patched.setattr(os, "posix_fallocate", lambda fd, offset, length: refused(fd, length))
            with within(WORST_S), pytest.raises(errors.PreflightError, match="memory"):
                p.publish(2)
        assert {_one_version(e, 1, 2) for e in fleet.engines} == {"old"}
        assert p.publish(2).outcome == "committed"
    for e in fleet.engines:
        serves(e, 2)


def test_faults_leave_no_process_or_descriptor_behind(fleet: Fleet) -> None:
    """After all of the above: engine ranks hold the same few threads and descriptors as after a quiet publish."""
    fleet.runs += 1
    counts = []
    for _ in range(3):
        with publisher(Weights(1), fleet.engines, run_id=f"faults-{fleet.runs}", takeover=True) as p:
            p.publish(1, force=True)
        ranks = [psutil.Process(pid) for e in fleet.engines for pid in e.pids]
        counts.append([(r.num_threads(), r.num_fds()) for r in ranks])
    assert counts[1] == counts[2], counts
    assert all(threads < 40 and fds < 60 for threads, fds in counts[2]), counts
