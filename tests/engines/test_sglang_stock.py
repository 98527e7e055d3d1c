"""Stock SGLang servers, with nothing of ours in them: what their own way can do is used, what it cannot is said.

Also what it does wrong without us, so that the day it changes we know.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import sglang_models as models
from tests.engines.sglang_server import KEY, Server, stock_update
from weightsync import errors
from weightsync.doctor import diagnose
from weightsync.engines.sglang.acceptance import acceptance_of
from weightsync.engines.sglang.control import SglangControl
from weightsync.guarantees import GUARANTEES

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]

STARTED = {"mtp": ("0.5.23", "mtp"), "eagle3": ("0.5.23", "eagle3"), "old": ("0.5.10.post1", "mtp")}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack:
        started = {}
        for name, (release, draft) in STARTED.items():
            started[name] = Server(tmp_path_factory.mktemp(name), release, draft, stock=True)
            stack.callback(started[name].close)
        yield {name: server.wait() for name, server in started.items()}


@pytest.fixture
def mtp(servers: dict[str, Server]) -> Iterator[Server]:
    yield servers["mtp"]
    servers["mtp"].control.close()


@pytest.fixture
def eagle3(servers: dict[str, Server]) -> Iterator[Server]:
    yield servers["eagle3"]
    servers["eagle3"].control.close()


def test_its_own_sessions_load_target_and_draft_and_the_report_says_what_that_lacks(mtp: Server) -> None:
    assert mtp.decode() == (models.expected("mtp", 1, 6), 1.0)
    status = mtp.control.status(deadline_s=30)
    assert (status["row"], status["evidence"], status["speculation"]) == (">= 0.5.21", "tested", "EAGLE")
    with mtp.publisher(models.Weights("mtp", 2)) as p:
        first = p.publish(2)
        mtp.serves(2)
        again = p.publish(2)
    assert first.outcome == "committed"
    assert again.outcome == "noop"
    assert first.engines[0].bytes_received == (first.wire_bytes,)
    lacking = first.engines[0].missing_guarantees
    assert set(lacking) == {"all_rank_acks", "atomic_commit", "routing"}
    assert all("weightsync.engines.sglang.launch" in why for why in lacking.values())
    assert first.metrics()["weightsync/guarantees_missing"] == 3
    _, reply = mtp.generate()
    assert reply["meta_info"]["weight_version"] == "2"
    found = diagnose(mtp.link._url, api_key=KEY, deadline_s=30)
    assert (found.engine, found.version, found.health) == ("sglang (stock)", "0.5.23", "ready")
    assert found.guarantees == ("one_receive", "prefix_cache")
    assert any("weightsync.engines.sglang.launch" in text for text in found.missing)


def test_acceptance_is_read_from_responses_before_and_after(mtp: Server) -> None:
    mtp.publish(1)
    before = acceptance_of([mtp.generate()[1] for _ in range(2)])
    mtp.publish(2, "target")
    stale = acceptance_of([mtp.generate()[1]])
    mtp.publish(2, "draft")
    after = acceptance_of([mtp.generate()[1]])
    assert before == after == {"spec_accept_rate": 1.0, "spec_accept_length": 2.0}
    assert stale["spec_accept_rate"] < 0.2


@pytest.mark.parametrize("guarantee", ["all_rank_acks", "atomic_commit", "routing"])
def test_a_guarantee_that_the_caller_requires_is_an_error(mtp: Server, guarantee: str) -> None:
    mtp.publish(1)
    with pytest.raises(errors.PreflightError, match=GUARANTEES[guarantee]):
        mtp.publish(2, require=[guarantee])
    mtp.publish(2, require=["one_receive", "prefix_cache"])
    mtp.serves(2)


def test_running_requests_are_kept_or_aborted_and_waiting_for_them_is_refused(mtp: Server) -> None:
    mtp.publish(1)
    with pytest.raises(errors.PreflightError, match="cannot pause in mode 'wait'"):
        mtp.publish(2, pause_mode="wait")
    mtp.serves(1)
    got: list = []
    thread = threading.Thread(target=lambda: got.append(mtp.generate(60)), daemon=True)
    thread.start()
    time.sleep(0.5)
    mtp.publish(2, pause_mode="keep")
    thread.join(60)
    ((status, reply),) = got
    assert (status, len(reply["output_ids"])) == (200, 60)
    mtp.serves(2)


def test_a_load_that_fails_leaves_it_paused_until_a_full_publish(mtp: Server) -> None:
    mtp.publish(1)
    with pytest.raises(errors.PublishAborted, match="partially updated"):
        mtp.publish(2, changes={"model.norm.weight": torch.zeros(63)})
    assert "not loaded completely" in mtp.control.status(deadline_s=30)["fenced"]
    got: list = []
    waiting = threading.Thread(target=lambda: got.append(mtp.generate()), daemon=True)
    waiting.start()
    with pytest.raises(errors.EngineFenced):
        mtp.control.resume(deadline_s=30)
    time.sleep(0.5)
    assert got == []
    mtp.publish(2)
    waiting.join(60)
    assert got[0][1]["output_ids"] == models.expected("mtp", 2, 6)
    mtp.serves(2)


def test_a_drafter_takes_nothing_of_the_target_and_keeps_its_vocabulary(eagle3: Server) -> None:
    server = eagle3
    assert server.decode() == (models.expected("eagle3", 1, 6), 1.0)
    server.publish(2)
    tokens, acceptance = server.decode()
    assert tokens == models.expected("eagle3", 2, 6)
    # Pinned: version 2 has other draft ids, and its own way leaves those that the worker reads (hot_token_id).
    assert acceptance < 0.2
    # With the vocabulary that it started with, everything else of the drafter has been replaced, and is right.
    server.publish(1)
    assert server.decode() == (models.expected("eagle3", 1, 6), 1.0)


def test_pinned_the_oldest_release_never_looks_at_the_draft(servers: dict[str, Server], tmp_path: Path) -> None:
    server = servers["old"]
    assert server.decode() == (models.expected("mtp", 1, 6), 1.0)
    with pytest.raises(errors.UnsupportedError, match="never reaches a draft"):
        server.control.status(deadline_s=30)
    bridge = SglangControl(server.link._url, api_key=KEY)
    with pytest.raises(errors.UnsupportedError, match="no weightsync bridge"):
        bridge.status(deadline_s=30)
    found = diagnose(server.link._url, api_key=KEY, deadline_s=30)
    assert (found.engine, found.version, found.health) == ("sglang", "0.5.10.post1", "not ready")
    assert any("never reaches a draft" in text for text in found.missing)
    tensors = models.weights("mtp", 2)
    status, reply = stock_update(server, tensors["target"] | tensors["draft"], tmp_path)
    assert (status, reply["success"]) == (200, True)
    tokens, acceptance = server.decode()
    assert tokens == models.expected("mtp", 2, 6)
    assert acceptance < 0.2
