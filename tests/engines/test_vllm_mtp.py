"""A real vLLM server with an MTP draft (MiMo): a publish moves target and draft, or the server is fenced."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.engines import vllm_models as models
from tests.engines.vllm_server import KEY, ROOT, Server
from weightsync import errors

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]

DRAFT = "mtp"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("vllm"), DRAFT)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def without_faults(server: Server) -> Iterator[None]:
    yield
    server.fail()


def publish(server: Server, version: int, scope: str = "both", **config: object) -> object:
    with server.publisher(models.Weights(DRAFT, version), **config) as p:
        return p.publish(version, scope, force=True)


def test_tokens_acceptance_and_every_weight_equal_a_fresh_engine(server: Server) -> None:
    fresh_tokens, fresh_facts = server.generate(), server.facts()
    assert fresh_tokens == (models.expected(DRAFT, 1, 12), 1.0)
    report = publish(server, 2)
    unique = sum(t.nbytes for tensors in models.weights(DRAFT, 2).values() for t in tensors.values())
    assert report.payload_bytes == unique
    assert report.engines[0].bytes_received == (report.wire_bytes,)
    assert report.engines[0].loaded["draft[0]"] > 0
    server.serves(2)
    assert server.get("/weight_info") == {"weight_version": "2"}
    moved = server.facts()
    for runner in ("target", "draft"):
        assert any("packed" in name for name in moved[0][runner])
        for name, (_, address) in fresh_facts[0][runner].items():
            assert moved[0][runner][name][1] == address, name
    publish(server, 1)
    assert server.generate() == fresh_tokens
    assert server.facts() == fresh_facts


def test_target_alone_breaks_acceptance_and_the_draft_alone_mends_it(server: Server) -> None:
    publish(server, 1)
    before = server.facts()[0]
    publish(server, 2, "target")
    tokens, acceptance = server.generate()
    assert tokens == models.expected(DRAFT, 2, 12)
    assert acceptance is not None
    assert acceptance < 0.2
    after = server.facts()[0]
    own = [n for n in before["draft"] if "mtp_layers" in n]
    assert len(own) > 8
    assert [n for n in own if after["draft"][n] != before["draft"][n]] == []
    publish(server, 2, "draft")
    server.serves(2)


@pytest.mark.parametrize(
    ("role", "name", "tensor", "says"),
    [
        ("target", "model.layers.1.self_attn.q_proj.weight", torch.zeros(3, 64).bfloat16(), "qkv_proj"),
        ("target", "model.layers.9.mystery.weight", torch.zeros(3).bfloat16(), "mystery"),
        ("draft", "model.mtp_layers.0.mystery.weight", torch.zeros(3).bfloat16(), "mystery"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_old_version_serves(
    server: Server, role: str, name: str, tensor: torch.Tensor, says: str
) -> None:
    publish(server, 1)
    source = models.Weights(DRAFT, 2)
    source.changed[role, name] = tensor
    with server.publisher(source) as p, pytest.raises(errors.PreflightError, match=says):
        p.publish(2)
    server.serves(1)


@pytest.mark.parametrize(
    ("role", "name", "says"),
    [
        ("target", "model.layers.1.self_attn.q_proj.weight", "layers.1.self_attn.qkv_proj"),
        ("target", "model.layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_up_proj"),
        ("draft", "model.mtp_layers.0.input_proj.weight", "input_proj"),
    ],
)
def test_part_of_a_fused_layer_or_of_a_draft_is_refused_and_the_old_version_serves(
    server: Server, role: str, name: str, says: str
) -> None:
    publish(server, 1)
    source = models.Weights(DRAFT, 2)
    source.dropped.add((role, name))
    with server.publisher(source) as p, pytest.raises(errors.PreflightError, match=says):
        p.publish(2)
    server.serves(1)


def test_sleep_and_wake_between_publishes(server: Server) -> None:
    # vLLM's workers take the call on a CPU, but free nothing: what is tested is the front end's part.
    publish(server, 1)
    server.post("/sleep?level=1")
    with server.publisher(models.Weights(DRAFT, 2)) as p:
        with pytest.raises(errors.PreflightError, match="asleep: wake them first"):
            p.publish(2)
        server.post("/wake_up")
        server.serves(1)
        assert p.publish(2).outcome == "committed"
        server.serves(2)
        server.post("/sleep?level=2")
        server.post("/wake_up")
        assert server.status()["versions"] == {"target": None, "draft[0]": None}
        code, text = server.refused("/v1/completions", {"model": "m", "prompt": [1]})
        assert code == 503
        assert "sleep level 2" in text
        # Not a no-op, although it was the last version published.
        report = p.publish(2)
        assert report.outcome == "committed"
    server.serves(2)


def test_a_load_that_fails_fences_until_a_full_publish(server: Server) -> None:
    publish(server, 1)
    server.fail(r0=2)
    source = models.Weights(DRAFT, 2)
    with server.publisher(source) as p:
        with pytest.raises(errors.PublishAborted, match="test fault on rank 0") as aborted:
            p.publish(2)
        assert aborted.value.report is not None
        assert aborted.value.report.engines[0].outcome == "fenced"
        for path in ("/v1/completions", "/v1/chat/completions", "/resume", "/reset_prefix_cache"):
            code, text = server.refused(path, {"model": "m", "prompt": [1], "max_tokens": 1})
            assert code == 503, path
            assert "fenced" in text
        server.get("/health")
        server.get("/metrics")
        assert "was not loaded completely" in server.status()["fenced"]
        server.fail()
        with pytest.raises(errors.PreflightError, match="publish with scope='both'"):
            p.publish(2, "target")
        assert p.publish(2).outcome == "committed"
    server.serves(2)


def test_a_sender_that_fails_in_mid_stream_fences_and_the_same_publisher_heals(server: Server) -> None:
    publish(server, 1)
    source = models.Weights(DRAFT, 2)

    def broken() -> None:
        raise OSError("test: the weights cannot be read")

    source.at[30] = broken
    with server.publisher(source) as p:
        with pytest.raises((errors.PublishAborted, OSError), match="cannot be read"):
            p.publish(2)
        assert server.refused("/v1/completions", {"model": "m", "prompt": [1]})[0] == 503
        assert p.publish(2).outcome == "committed"
    server.serves(2)


DYING_TRAINER = """
import os, signal, sys
from tests.engines import vllm_models as models
from weightsync.config import PublishConfig
from weightsync.engine.control import HttpControl
from weightsync.publisher import Publisher

source = models.Weights("mtp", 2)
source.at[20] = lambda: os.kill(os.getpid(), signal.SIGKILL)
config = PublishConfig(run_id="test", takeover=True, deadline_s=20, bucket_bytes=64 << 10)
Publisher(source, [HttpControl(sys.argv[1], api_key=sys.argv[2])], config).publish(2, force=True)
"""


def test_a_trainer_that_dies_in_mid_publish_leaves_a_fence_that_the_next_one_lifts(server: Server) -> None:
    publish(server, 1)
    command = [sys.executable, "-c", DYING_TRAINER, server.url, KEY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    end = time.monotonic() + 45
    while "was not loaded completely" not in str(server.status()["fenced"]):
        assert time.monotonic() < end, server.status()
        time.sleep(0.05)
    assert server.refused("/v1/completions", {"model": "m", "prompt": [1]})[0] == 503
    publish(server, 2)
    server.serves(2)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_no_cached_prefix_survives_a_publish(server: Server, mode: str) -> None:
    publish(server, 1)
    prompt = [1, *range(3, 140)]

    def cached() -> int:
        return server.complete(prompt, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    publish(server, 2, pause_mode=mode)
    assert cached() == 0
    assert cached() > 0
    server.serves(2)


def test_requests_that_are_kept_go_on_and_are_listed(server: Server) -> None:
    publish(server, 1)
    replies: list[dict] = []
    asking = threading.Thread(target=lambda: replies.append(server.complete(n=400)))
    asking.start()
    end = time.monotonic() + 20
    while "vllm:num_requests_running{" not in (text := server.get("/metrics")) or not any(
        line.startswith("vllm:num_requests_running{") and float(line.split()[-1]) > 0 for line in text.splitlines()
    ):
        assert time.monotonic() < end
        time.sleep(0.01)
    report = publish(server, 2, pause_mode="keep")
    asking.join(60)
    assert len(report.engines[0].spanning_requests) == 1
    tokens = replies[0]["choices"][0]["token_ids"]
    assert len(tokens) == 400
    follows = models.expected(DRAFT, 2, 1, prompt=[tokens[-2]])
    assert tokens[-1:] == follows
    server.serves(2)


def test_the_control_api_asks_for_the_key_and_other_ways_to_the_weights_are_closed(server: Server) -> None:
    with pytest.raises(errors.AuthError, match="API key"):
        server.control("guess").status(deadline_s=10)
    for path in ("/update_weights", "/start_weight_update", "/finish_weight_update", "/update_weight_version"):
        code, text = server.refused(path, {"update_info": {}})
        assert code == 501
        assert "/weightsync/v1" in text
    server.generate()


def test_the_report_has_the_acceptance_before_a_publish_and_after_it(server: Server) -> None:
    source = models.Weights(DRAFT, 1)
    with server.publisher(source) as p:
        p.publish(1, force=True)
        server.generate()
        source.version = 2
        good = p.publish(2, "target")
        server.generate()
        stale = p.publish(2)
        unmeasured = p.measure_acceptance(stale)
        server.generate()
        stale = p.measure_acceptance(stale)
        p.publish(3)
        silent = p.publish(4)
    assert good.engines[0].speculation_before == {"spec_accept_rate": 1.0, "spec_accept_length": 2.0}
    assert good.metrics()["weightsync/spec_accept_rate_before"] == 1.0
    assert stale.engines[0].speculation_before["spec_accept_rate"] < 0.2
    assert unmeasured.engines[0].speculation_after == {}
    assert stale.engines[0].speculation_after == {"spec_accept_rate": 1.0, "spec_accept_length": 2.0}
    assert stale.metrics()["weightsync/spec_accept_length_after"] == 2.0
    assert silent.engines[0].speculation_before == {}


def test_status_says_what_the_engine_is(server: Server) -> None:
    publish(server, 1)
    status = server.status()
    assert (status["engine_kind"], status["engine_version"], status["world_size"]) == ("vllm", "0.32.0", 1)
    assert (status["speculation"], status["draft"], status["evidence"]) == ("mtp", "bound", "tested")
    assert status["versions"] == {"target": 1, "draft[0]": 1}
    assert status["fenced"] is None
