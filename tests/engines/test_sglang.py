"""Real SGLang servers of the oldest and the newest supported release: one publish moves target and draft, or fences."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import sglang_models as models
from tests.engines.sglang_server import DEADLINE_S, KEY, RELEASES, Server, stock_update
from weightsync import errors
from weightsync.doctor import diagnose
from weightsync.embedded.known import known_next
from weightsync.engines.sglang import control
from weightsync.engines.sglang.acceptance import acceptance_of
from weightsync.engines.sglang.control import SglangControl
from weightsync.guarantees import GUARANTEES
from weightsync.timeline import Timeline

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=sorted(RELEASES))
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One server with an MTP draft, one with an EAGLE3 drafter; they start at the same time."""
    with contextlib.ExitStack() as stack:
        started = {}
        for draft in ("mtp", "eagle3"):
            started[draft] = Server(tmp_path_factory.mktemp(draft), request.param, draft)
            stack.callback(started[draft].close)
        yield {draft: server.wait() for draft, server in started.items()}


@pytest.fixture
def mtp(servers: dict[str, Server]) -> Server:
    return servers["mtp"]


@pytest.fixture
def eagle3(servers: dict[str, Server]) -> Server:
    return servers["eagle3"]


def changed(before: dict, after: dict, runner: str, what: str = "digest") -> list[str]:
    return [n for n, facts in after[runner].items() if facts[what] != before[runner][n][what]]


@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
def test_tokens_acceptance_and_every_parameter_equal_a_fresh_engine(servers: dict[str, Server], draft: str) -> None:
    server = servers[draft]
    fresh_tokens, fresh = server.decode(), server.weights()
    assert fresh_tokens == (models.expected(draft, 1, 6), 1.0)
    with server.publisher(models.Weights(draft, 2)) as p:
        server.serves(1)
        report = p.publish(2)
        assert p.measure_acceptance(report).engines[0].speculation_after == {}
        server.serves(2)
        measured = p.measure_acceptance(report).engines[0]
        assert p.publish(2).outcome == "noop"
    assert measured.speculation_before == measured.speculation_after == acceptance_of([server.generate()[1]])
    assert measured.speculation_before == {"spec_accept_rate": 1.0, "spec_accept_length": 2.0}
    unique = sum(t.nbytes for tensors in models.weights(draft, 2).values() for t in tensors.values())
    assert report.payload_bytes == unique
    assert report.engines[0].bytes_received == (report.wire_bytes,)
    assert report.engines[0].loaded["target"] > 20
    assert report.engines[0].loaded["draft[0]"] > 10
    server.serves(2)
    _, reply = server.generate()
    assert reply["meta_info"]["weight_version"] == "2"
    moved = server.weights()
    assert len(changed(fresh, moved, "target")) > 10
    assert len(changed(fresh, moved, "draft[0]")) > 5
    for runner in fresh:
        assert changed(fresh, moved, runner, "data_ptr") == []
    server.publish(1)
    assert server.decode() == fresh_tokens
    assert server.weights() == fresh


@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
def test_target_alone_breaks_acceptance_and_the_draft_alone_mends_it(servers: dict[str, Server], draft: str) -> None:
    server = servers[draft]
    server.publish(1)
    before = server.weights()
    server.publish(2, "target")
    tokens, acceptance = server.decode()
    assert tokens == models.expected(draft, 2, 6)
    assert acceptance < 0.2
    # Names of the target that a drafter has too (EAGLE3: norm, layers) did not reach it; what it shares moved with it.
    after = server.weights()
    shared = {facts["data_ptr"] for facts in after["target"].values()}
    own = [n for n, facts in after["draft[0]"].items() if facts["data_ptr"] not in shared]
    assert len(own) > 8
    assert [n for n in changed(before, after, "draft[0]") if n in own] == []
    server.publish(2, "draft")
    server.serves(2)


def test_a_load_that_fails_fences_until_a_full_publish(eagle3: Server) -> None:
    eagle3.publish(1)
    d2t = models.weights("eagle3", 2)["draft"]["d2t"]
    with pytest.raises(errors.PublishAborted, match="d2t maps draft ids outside"):
        eagle3.publish(2, changes={"d2t": d2t + 10_000})
    assert "d2t" in eagle3.control.status(deadline_s=30)["fenced"]
    status, reply = eagle3.generate()
    assert status == 503
    assert "fenced" in str(reply)
    with pytest.raises(errors.EngineFenced, match="full publish"):
        eagle3.control.resume(deadline_s=30)
    with pytest.raises(errors.PreflightError, match="publish with scope='both'"):
        eagle3.publish(3, "target")
    eagle3.publish(2)
    eagle3.serves(2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.norm.weight": torch.zeros(63)}, "model.norm.weight"),
        ({"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128, dtype=torch.float64)}, "cast from float64"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_old_version_serves(mtp: Server, changes: dict, says: str) -> None:
    mtp.publish(1)
    with pytest.raises((errors.PreflightError, errors.RoutingError), match=says):
        mtp.publish(2, changes=changes)
    mtp.serves(1)


def in_background(server: Server, n: int, state: str = "running") -> tuple[threading.Thread, list]:
    """A request of `n` tokens that is running (or held) when this returns."""
    got: list = []
    thread = threading.Thread(target=lambda: got.append(server.generate(n)), daemon=True)
    thread.start()
    end = time.monotonic() + 100
    while not (server.control.status(deadline_s=30)[state] or got):
        assert time.monotonic() < end, "the request never ran"
        time.sleep(0.02)
    assert not got
    return thread, got


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_pause_modes(mtp: Server, mode: str) -> None:
    mtp.publish(1)
    n = 24
    thread, got = in_background(mtp, n)
    report = mtp.publish(2, pause_mode=mode)
    thread.join(60)
    ((status, reply),) = got
    old, follows = models.expected("mtp", 1, n), known_next(models.config("mtp"), seed=2, draft="mtp")
    tokens = reply["output_ids"]
    assert status == 200
    if mode == "wait":
        assert tokens == old
    elif mode == "abort":
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(tokens) < n
        assert tokens == old[: len(tokens)]
    else:
        assert len(tokens) == n
        ((kept),) = report.engines[0].spanning_requests
        assert 0 < kept["tokens"] < n
        assert tokens[: kept["tokens"]] == old[: kept["tokens"]]
        since = tokens[kept["tokens"] - 1 :]
        assert since[1:] == [int(follows[t]) for t in since[:-1]]
    mtp.serves(2)


def test_requests_that_arrive_during_a_pause_are_answered_by_what_serves_next(mtp: Server) -> None:
    mtp.publish(1)
    assert mtp.control.pause("wait", deadline_s=30)["idle"]
    thread, got = in_background(mtp, 6, "held")
    mtp.publish(2)
    thread.join(60)
    assert got[0][1]["output_ids"] == models.expected("mtp", 2, 6)


def test_a_pause_that_nobody_ends_is_over_after_its_lease(mtp: Server) -> None:
    mtp.publish(1)
    mtp.control.call("pause", {"mode": "keep", "lease_s": 1.0}, deadline_s=30)
    assert mtp.control.status(deadline_s=30)["state"] == "paused"
    mtp.serves(1)
    assert mtp.control.status(deadline_s=30)["state"] == "serving"


def test_the_prefix_cache_is_flushed_once_per_publish(mtp: Server) -> None:
    mtp.publish(1)
    mtp.decode()
    _, warm = mtp.generate()
    assert warm["meta_info"]["cached_tokens"] > 0
    mtp.publish(2)
    _, cold = mtp.generate()
    assert cold["meta_info"]["cached_tokens"] == 0


def test_a_server_without_the_bridge_refuses_the_backend_at_once_and_serves_on(mtp: Server) -> None:
    """Asked for a backend that no one answers to, SGLang's own code runs, as in a server that knows nothing of us."""
    mtp.publish(1)
    started = time.monotonic()
    body = {**control._SENTINEL, "backend": f"not{control.BACKEND}", "group_name": "{}"}
    status, reply = mtp.post("/init_weights_update_group", **body)
    assert time.monotonic() - started < 10
    assert (status, reply["success"]) == (400, False)
    mtp.serves(1)

    class Stock:
        name = "stock"

        def update_group(self, group_name: str, *, deadline_s: float) -> tuple[bool, str]:
            return False, str(reply["message"])

    client = SglangControl("http://127.0.0.1:1", name="stock")
    client.link = Stock()  # type: ignore[assignment]
    with pytest.raises(errors.UnsupportedError, match="no weightsync bridge"):
        client.status(deadline_s=5)


@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
def test_the_doctor_says_what_the_server_is_and_what_a_publish_guarantees(
    servers: dict[str, Server], draft: str
) -> None:
    server = servers[draft]
    found = diagnose(server.link._url, api_key=KEY, deadline_s=30)
    assert (found.engine, found.version, found.health) == ("sglang", server.release, "ready")
    assert (found.guarantees, found.missing) == (tuple(GUARANTEES), ())
    assert found.status["evidence"] == "tested"
    speculation = found.status["speculation"]
    algorithm, folder = {"mtp": ("EAGLE", "target"), "eagle3": ("EAGLE3", "draft")}[draft]
    assert speculation.startswith(f"{algorithm} (draft ")
    assert f"/{folder}, steps 1, top-k 1, draft tokens 2)" in speculation


def test_a_wrong_key_is_refused(mtp: Server) -> None:
    stranger = SglangControl(mtp.control.link._url, api_key="wrong")  # type: ignore[attr-defined]
    with pytest.raises(errors.AuthError, match="api_key"):
        stranger.status(deadline_s=30)


class Interrupted(models.Weights):
    """The weights of `version`; calls `hook` when half of them have been handed over."""

    def __init__(self, draft: str, version: int, hook: Callable[[], None]) -> None:
        super().__init__(draft, version)
        self._hook = hook

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        half = len(self.specs()) // 2
        for i, tensor in enumerate(super().stream(roles, timeline)):
            if i == half:
                self._hook()
            yield tensor


def test_killed_in_mid_publish_or_between_publishes_it_restarts_and_rejoins(
    servers: dict[str, Server], no_leftovers: Callable[[list[int]], None]
) -> None:
    mtp, eagle3 = servers["mtp"], servers["eagle3"]
    hooks: list[Callable[[], None]] = [mtp.kill]
    source = Interrupted("mtp", 2, lambda: hooks.pop()() if hooks else None)
    # Small buckets: some have arrived, and the engine is in its one receive call.
    with mtp.publisher(source, bucket_bytes=1 << 16) as p, eagle3.publisher(models.Weights("eagle3", 2)) as q:
        q.publish(2, force=True)
        started = time.monotonic()
        with pytest.raises(errors.PublishAborted, match=f"engine {mtp.control.name}") as failed:
            p.publish(2, force=True)
        assert time.monotonic() - started < DEADLINE_S / 2
        assert failed.value.report.engines[0].outcome == "fenced"
        with pytest.raises(errors.PreflightError, match="cannot reach"):
            p.publish(2)
        eagle3.kill()
        for server in (mtp, eagle3):
            server.start()
        for server in (mtp, eagle3):
            server.wait()
        no_leftovers([*mtp.pids, *eagle3.pids])
        # From disk, of no version, and no longer fenced.
        assert mtp.decode() == (models.expected("mtp", 1, 6), 1.0)
        assert set(mtp.control.status(deadline_s=30)["versions"].values()) == {None}
        for server, publisher in ((mtp, p), (eagle3, q)):
            report = publisher.publish(2)
            assert (report.outcome, report.engines[0].outcome) == ("committed", "committed")
            server.serves(2)


# -- what SGLang's own distributed update does, so that the day it changes we know -------------------------------------


def test_pinned_its_own_update_leaves_an_mtp_draft_stale_in_the_oldest_release(mtp: Server, tmp_path: Path) -> None:
    mtp.publish(1)
    tensors = models.weights("mtp", 2)
    status, reply = stock_update(mtp, tensors["target"] | tensors["draft"], tmp_path)
    # Both say success. The oldest release never looks at the draft, the newest loads it by name.
    assert (status, reply["success"]) == (200, True)
    tokens, acceptance = mtp.decode()
    assert tokens == models.expected("mtp", 2, 6)
    assert (acceptance < 0.2) if mtp.release == "0.5.10.post1" else (acceptance == 1.0)
    # To us such weights are of no version: the next publish is none that could be left out.
    said = mtp.control.status(deadline_s=30)
    assert set(said["versions"].values()) == {None}
    assert "UpdateWeightsFromDistributed" in said["changed_by"]
    mtp.publish(2)
    mtp.serves(2)


def test_pinned_its_own_update_writes_the_target_over_a_drafter_in_the_newest_release(
    eagle3: Server, tmp_path: Path
) -> None:
    eagle3.publish(1)
    before = eagle3.weights()
    status, reply = stock_update(eagle3, models.weights("eagle3", 2)["target"], tmp_path)
    after = eagle3.weights()
    shared = {facts["data_ptr"] for facts in after["target"].values()}
    spoilt = [n for n in changed(before, after, "draft[0]") if after["draft[0]"][n]["data_ptr"] not in shared]
    if eagle3.release == "0.5.10.post1":
        assert (status, reply["success"], spoilt) == (200, True, [])
    else:
        assert (status, reply["success"]) == (400, False)
        assert len(spoilt) >= 3, spoilt
    eagle3.publish(2)
    eagle3.serves(2)
