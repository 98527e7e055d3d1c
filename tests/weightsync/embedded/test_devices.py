"""Devices of an embedded engine's ranks, and on a GPU what a publish leaves in its memory."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.weightsync.embedded.test_engine import CONFIG, PROMPT, expected_tokens
from tests.weightsync.engine.test_receiver import SPECS, models, publish, random_tensors, setting
from tests.weightsync.engine.toy import draft_runner, target_runner
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.embedded.known import known_argmax
from weightsync.embedded.parallel import rank_device
from weightsync.errors import ConfigError
from weightsync.publisher import PublishConfig, Publisher
from weightsync.sources.state_dict import StateDictSource


@pytest.mark.parametrize(
    ("text", "tp", "devices"),
    [
        ("cpu", 2, ["cpu", "cpu"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:4", 2, ["cuda:4", "cuda:5"]),
        ("cuda:3, cuda:0", 2, ["cuda:3", "cuda:0"]),
        ("cuda:0,cuda:0", 2, ["cuda:0", "cuda:0"]),
    ],
)
def test_every_rank_has_its_device(text, tp, devices):
    assert [str(rank_device(text, rank, tp)) for rank in range(tp)] == devices


@pytest.mark.parametrize(("text", "problem"), [("gpu", "'gpu'"), ("cuda:0,cuda:1", "2 devices for 1 ranks")])
def test_devices_that_cannot_be_are_refused_before_anything_starts(text, problem):
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(device=text)


@pytest.mark.multiproc
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_a_rank_does_not_see_is_named():
    with pytest.raises(ConfigError, match=r"rank 0 did not start: device 'cuda:1': rank 0 wants cuda:1, .* sees 0"):
        launch(EngineConfig(device="cuda:1", start_deadline_s=60.0))


def weights(seed, device):
    known = known_argmax(CONFIG, seed=seed, draft="mtp")
    return {name: t.to(device) for tensors in known.values() for name, t in tensors.items()}


@contextlib.contextmanager
def publishing(transport, device, engine_device, tp):
    """An engine, and a function that publishes the known weights of a seed to it."""
    held = {}
    config = EngineConfig(draft="mtp", tp=tp, device=engine_device, start_deadline_s=120.0)
    with launch(config) as engine:
        options = {"run_id": "devices", "bucket_bytes": 64 << 10, "deadline_s": 30.0, "transport": transport}
        publisher = Publisher(StateDictSource(lambda: held), [engine.control()], PublishConfig(**options))

        def send(version, seed):
            held.clear()
            held.update(weights(seed, device))
            before = allocated()
            report = publisher.publish(version)
            return report, allocated() - before

        held.update(weights(1, device))
        try:
            yield engine, send
        finally:
            publisher.close()


def allocated():
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def bytes_of(engine):
    return [{(r, n): p["digest"] for r, ps in rank.items() for n, p in ps.items()} for rank in engine.weights()]


def pointers_of(engine):
    return [{(r, n): p["data_ptr"] for r, ps in rank.items() for n, p in ps.items()} for rank in engine.weights()]


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("transport", ["ipc", "shm", "gloo"])
def test_a_colocated_engine_gets_the_same_bytes_in_place(transport, tp):
    with publishing("shm", "cpu", "cpu", tp) as (engine, send):
        send(1, 1)
        send(2, 2)
        expected = bytes_of(engine)
    with publishing(transport, "cuda:0", ",".join(["cuda:0"] * tp), tp) as (engine, send):
        first, first_kept = send(1, 1)
        before = pointers_of(engine)
        report, kept = send(2, 2)
        assert first.version == 1
        assert report.version == 2
        assert bytes_of(engine) == expected
        assert pointers_of(engine) == before
        reply = engine.generate([PROMPT], max_tokens=8)
        assert reply["tokens"] == [expected_tokens(2, 8)]
        assert reply["acceptance"] == 1.0
        # The weights of the digest stay, 33 KiB; the ring of 256 KiB does not.
        assert first_kept < 128 << 10
        assert kept == 0


@pytest.mark.gpu
@pytest.mark.multiproc
def test_a_captured_cuda_graph_computes_with_the_published_weights():
    target, draft = (model.to("cuda") for model in models())
    draft.embed = target.embed
    x = torch.ones(8, device="cuda")
    (target.layer @ x).sum()  # what a first use allocates is not captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = target.layer @ x + draft.mtp @ x
    runners = [target_runner(target), draft_runner(draft, roles=("draft", "target"))]
    with setting(runners, device=torch.device("cuda")) as (trainer, receiver, submit):
        for version in (1, 2):
            tensors = random_tensors(SPECS, seed=version)
            publish(trainer, receiver, submit, tensors=tensors, version=version)
            graph.replay()
            torch.testing.assert_close(y.cpu(), tensors[1] @ torch.ones(8) + tensors[2] @ torch.ones(8))
