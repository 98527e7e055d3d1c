"""Whole engines in processes of their own: publishes, pauses, fences, lost ranks, starts and stops."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from weightsync.embedded.config import SHAPES, resolve_config
from weightsync.embedded.drafts import MtpDraft
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.embedded.known import known_argmax, known_next, write_hf_folder
from weightsync.embedded.loading import load_folder
from weightsync.embedded.model import Target
from weightsync.embedded.parallel import TpGroup
from weightsync.engine.control import HttpControl
from weightsync.errors import AuthError, ConfigError, EngineError, EngineFenced
from weightsync.protocol import PublishCall
from weightsync.publisher import PublishConfig, Publisher
from weightsync.sources.state_dict import StateDictSource

pytestmark = pytest.mark.multiproc

CONFIG = SHAPES["tiny"]
PROMPT = [5, 17, 300]


def expected_tokens(seed, count, start=PROMPT[-1]):
    following, tokens, token = known_next(CONFIG, seed=seed, draft="mtp"), [], start
    for _ in range(count):
        token = int(following[token])
        tokens.append(token)
    return tokens


class Trainer:
    """Known weights of one seed after the other, and a publisher for them."""

    def __init__(self, engine, **config):
        self.weights = known_argmax(CONFIG, seed=1, draft="mtp")
        source = StateDictSource(lambda: self.weights["target"] | self.weights["draft"])
        options = {"run_id": "tests", "bucket_bytes": 64 << 10, "deadline_s": 20.0, "transport": "shm", **config}
        self.publisher = Publisher(source, [engine.control()], PublishConfig(**options))
        self.version = 0

    def publish(self, seed, *, scope="both", **kwargs):
        self.weights = known_argmax(CONFIG, seed=seed, draft="mtp", **kwargs)
        self.version += 1
        return self.publisher.publish(self.version, scope=scope)

    def close(self):
        if self.publisher is not None:
            self.publisher.close()
            # Its store listens as long as somebody holds it, and the test's arguments outlive the test.
            self.publisher = None


@pytest.fixture(scope="module")
def engine():
    with launch(EngineConfig(model="tiny", tp=2, draft="mtp", name="pair", num_draft=3)) as handle:
        yield handle


@pytest.fixture
def trainer(engine):
    trainer = Trainer(engine, takeover=True, run_id=f"run-{time.monotonic_ns()}")
    with contextlib.closing(trainer):
        trainer.version = max((v or 0) for v in engine.status()["versions"].values())
        yield trainer


def describe(module):
    named = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: hashlib.blake2b(t.detach().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        for name, t in named.items()
    }


def test_a_publish_gives_what_a_folder_gives_on_every_rank_and_moves_nothing(engine, trainer, tmp_path):
    trainer.publish(4)
    before = engine.weights()
    trainer.publish(7)
    after = engine.weights()
    write_hf_folder(tmp_path, CONFIG, trainer.weights["target"] | trainer.weights["draft"])
    for rank in (0, 1):
        target = Target(resolve_config(tmp_path), TpGroup(rank, 2))
        draft = MtpDraft(target)
        load_folder(tmp_path, {"target": target, "draft": draft}, trainer.weights)
        for name, module in (("target", target), ("draft[0]", draft)):
            live = after[rank][name]
            assert {n: live[n]["digest"] for n in live} == describe(module)
            assert {n: live[n]["data_ptr"] for n in live} == {n: p["data_ptr"] for n, p in before[rank][name].items()}
            assert live != before[rank][name]


def test_acceptance_follows_the_draft_and_tokens_follow_the_target(engine, trainer):
    trainer.publish(1)
    both = engine.generate([PROMPT, [8]], max_tokens=12)
    assert both["tokens"] == [expected_tokens(1, 12), expected_tokens(1, 12, 8)]
    assert both["acceptance"] == 1.0
    assert both["versions"] == {"target": trainer.version, "draft[0]": trainer.version}
    plain = engine.generate([PROMPT], max_tokens=12, speculate=0)
    assert (plain["tokens"], plain["acceptance"]) == ([expected_tokens(1, 12)], None)
    trainer.publish(2, scope="target")
    stale = engine.generate([PROMPT], max_tokens=12)
    assert stale["tokens"] == [expected_tokens(2, 12)]
    assert stale["acceptance"] == 0.0
    assert stale["versions"] == {"target": trainer.version, "draft[0]": trainer.version - 1}
    trainer.publish(2)
    assert engine.generate([PROMPT], max_tokens=12)["acceptance"] == 1.0


def test_a_commit_flushes_once_however_often_it_is_asked_for(engine, trainer):
    trainer.publish(1)
    first = engine.generate([PROMPT], max_tokens=8)["outputs"][0]
    again = engine.generate([PROMPT], max_tokens=8)["outputs"][0]
    assert (first["reused"] > 0, again["reused"] > 0) == (False, True)
    flushes = engine.status()["flushes"]
    trainer.publish(3)
    status = engine.status()
    assert status["flushes"] == flushes + 1
    assert status["prefix_entries"] == 0
    fresh = engine.generate([PROMPT], max_tokens=8)["outputs"][0]
    assert (fresh["reused"], fresh["tokens"]) == (0, expected_tokens(3, 8))
    call = {
        "run_id": status["run_id"],
        "epoch": status["epoch"],
        "seq": 0,
        "nonce": "",
        "version": trainer.version,
        "manifest_digest": "",
        "store_host": "",
        "store_port": 1,
        "engine_index": 0,
        "first_group_rank": 1,
        "group_size": 3,
        "transport": "shm",
        "num_buffers": 2,
        "deadline_s": 5.0,
    }
    control = engine.control()
    replies = []
    for seq in range(5):
        with contextlib.suppress(EngineError):
            replies.append(control.commit(PublishCall(**{**call, "seq": seq}), deadline_s=5))
    assert [r["version"] for r in replies] == [trainer.version]
    assert engine.status()["flushes"] == flushes + 1


def running(engine, count):
    end = time.monotonic() + 20
    while engine.status()["running"] != count:
        assert time.monotonic() < end
        time.sleep(0.005)


def generating(engine, **kwargs):
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(engine.generate([PROMPT], speculate=0, **kwargs)))
    thread.start()
    running(engine, 1)
    return thread, outcome


def test_a_kept_request_spans_versions_and_the_report_lists_it(engine, trainer):
    trainer.publish(1)
    trainer.close()
    keeper = Trainer(engine, pause_mode="keep", takeover=True, run_id="keeper")
    keeper.version = trainer.version
    with contextlib.closing(keeper):
        keeper.publish(1)  # opens the groups: the next one is fast enough to find the request running
        thread, outcome = generating(engine, max_tokens=200)
        report = keeper.publish(2)
        thread.join(60)
    spans = [keeper.version - 1, keeper.version]
    assert [s["versions"] for s in report.engines[0].spanning_requests] == [spans]
    output = outcome[0]["outputs"][0]
    assert output["versions"] == spans
    following = [known_next(CONFIG, seed=s, draft="mtp").tolist() for s in (1, 2)]
    tokens = [PROMPT[-1], *output["tokens"]]
    by = [[f[a] == b for a, b in itertools.pairwise(tokens)] for f in following]
    switch = by[0].index(False)
    assert 0 < switch < 200
    assert all(by[1][switch:])
    assert engine.status()["prefix_entries"] == 0


def test_pause_aborts_or_waits_and_new_requests_queue(engine, trainer):
    trainer.publish(1)
    control = engine.control()
    thread, outcome = generating(engine, max_tokens=400)
    aborted = control.pause("abort", deadline_s=10)["aborted"]
    thread.join(20)
    output = outcome[0]["outputs"][0]
    assert [output["id"]] == aborted
    assert output["finish_reason"] == "abort"
    assert output["tokens"] == expected_tokens(1, len(output["tokens"]))
    assert 0 < len(output["tokens"]) < 400
    with pytest.raises(EngineError, match=r"no answer to generate within 0\.3 s"):
        engine.generate([PROMPT], max_tokens=2, deadline_s=0.3)
    control.resume(deadline_s=10)
    thread, outcome = generating(engine, max_tokens=100)
    assert control.pause("wait", deadline_s=20) == {"mode": "wait", "kept": [], "aborted": []}
    thread.join(20)
    assert outcome[0]["tokens"] == [expected_tokens(1, 100)]
    queued = []
    waiter = threading.Thread(target=lambda: queued.append(engine.generate([PROMPT], max_tokens=2)))
    waiter.start()
    end = time.monotonic() + 20
    while engine.status()["waiting"] != 1:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert engine.status()["state"] == "paused"
    control.resume(deadline_s=10)
    waiter.join(20)
    assert queued[0]["tokens"] == [expected_tokens(1, 2)]
    with pytest.raises(ConfigError, match="expected one of abort, wait, keep"):
        control.pause("soon", deadline_s=10)


def test_an_engine_that_holds_no_complete_version_refuses_until_a_full_publish(engine, trainer):
    trainer.publish(1)
    stream = trainer.publisher.source.stream
    count = 0

    def stumble(roles, timeline):
        nonlocal count
        for tensor in stream(roles, timeline):
            count += 1
            if count == 20:
                raise RuntimeError("the trainer stumbles")
            yield tensor

    trainer.publisher.source.stream = stumble
    with pytest.raises(RuntimeError, match="the trainer stumbles"):
        trainer.publish(2)
    trainer.publisher.source.stream = stream
    end = time.monotonic() + 20
    while "not loaded completely" not in (status := engine.status())["fenced"]:  # first: "is being loaded"
        assert time.monotonic() < end
        time.sleep(0.01)
    assert status["state"] == "fenced"
    for refused in (lambda: engine.generate([PROMPT]), lambda: engine.control().resume(deadline_s=5)):
        with pytest.raises(EngineFenced, match=r"engine pair is fenced.*full publish heals"):
            refused()
    trainer.publish(2)
    healed = engine.generate([PROMPT], max_tokens=8)
    assert (healed["tokens"], healed["acceptance"]) == ([expected_tokens(2, 8)], 1.0)


def test_requests_are_checked_and_keys_asked_for(engine):
    with pytest.raises(ConfigError, match=r"within 0\.\.508"):
        engine.generate([[600]])
    with pytest.raises(ConfigError, match="list of lists of token ids"):
        engine.control().call("generate", {"prompts": "hello"}, deadline_s=5)
    with pytest.raises(AuthError, match="wrong API key"):
        HttpControl(engine.url, api_key="guess").status(deadline_s=5)


def test_a_stopped_rank_is_named_within_the_deadline_and_goes_on_when_continued(engine, trainer):
    trainer.publish(1)
    os.kill(engine.pids[1], signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"engine pair rank 1: no answer to generate within 1 s") as e:
            engine.generate([PROMPT], max_tokens=4, deadline_s=1)
        assert (e.value.rank, e.value.phase) == (1, "generate")
        with pytest.raises(EngineError, match="rank 1: no answer to pause within 1 s"):
            engine.control().call("pause", {"mode": "wait", "deadline_s": 1}, deadline_s=5)
        assert time.monotonic() - started < 5
        assert engine.status()["engine"] == "pair"
    finally:
        os.kill(engine.pids[1], signal.SIGCONT)
    assert engine.generate([PROMPT], max_tokens=4)["tokens"] == [expected_tokens(1, 4)]


def gone(pids, within_s=10.0):
    end = time.monotonic() + within_s
    while left := [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > end:
            return left
        time.sleep(0.02)
    return []


def test_a_killed_rank_ends_every_wait_at_once_and_stop_leaves_nothing(tmp_path):
    log = tmp_path / "log"
    with launch(EngineConfig(model="tiny-llama", tp=2, name="doomed", log=log)) as engine:
        outcome = []

        def ask():
            try:
                engine.generate([[1]], max_tokens=500)
            except EngineError as e:
                outcome.append(e)

        thread = threading.Thread(target=ask)
        thread.start()
        running(engine, 1)
        started = time.monotonic()
        engine.processes[1].kill()
        thread.join(20)
        assert time.monotonic() - started < 5
        assert outcome[0].rank in (0, 1)
        assert "rank 1" in str(outcome[0])
        status = engine.status()
        assert status["state"] == "broken"
        assert [r["alive"] for r in status["ranks"]] == [True, False]
        with pytest.raises(EngineError, match="rank 1"):
            engine.control().pause("wait", deadline_s=5)
        pids = engine.pids
        started = time.monotonic()
    assert time.monotonic() - started < 6
    assert gone(pids, 0) == []
    engine.stop()
    with pytest.raises(EngineError, match="cannot reach"):
        engine.status()


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    weights = known_argmax(CONFIG, seed=1, draft="mtp")
    lacking = {n: t for n, t in (weights["target"] | weights["draft"]).items() if "hidden_layernorm" not in n}
    write_hf_folder(tmp_path, CONFIG, lacking)
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"engine broken rank 0 did not start.*lacks 1 tensors of the draft"):
        launch(EngineConfig(model=tmp_path, draft="mtp", name="broken", log=tmp_path / "log"))
    assert psutil.Process().children() == before
    for wrong, words in (
        ({"tp": 3}, "tp=3: expected 1 or 2"),
        ({"model": "tiny-lama"}, "neither a shape"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"draft": str(tmp_path)}, "expected an EAGLE3 drafter"),
        ({"name": "two words"}, "without spaces"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"tp_timeout_s": 0.0}, "tp_timeout_s is 0.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig(**wrong)


def test_the_command_line_starts_an_engine_that_ends_with_it():
    process = subprocess.Popen(
        [sys.executable, "-m", "weightsync.embedded", "--model", "tiny-qwen2", "--draft", "eagle3", "--tp", "2"],
        stdout=subprocess.PIPE,
    )
    try:
        shown = json.loads(process.stdout.readline())
        control = HttpControl(shown["url"], api_key=shown["api_key"])
        assert control.status(deadline_s=10)["world_size"] == 2
        body = {"prompts": [[1, 2]], "max_tokens": 5}
        assert len(control.call("generate", body, deadline_s=20)["tokens"][0]) == 5
        process.kill()
        process.wait(10)
        assert gone(shown["pids"]) == []
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
