"""A real vLLM server in which nothing of ours runs: published to by its own API, its faults pinned, the report honest.

Over a labelled stand-in for NCCL (`vllm_stock_gloo`), which needs CUDA; everything else in the server is vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.engines import vllm_models as models
from tests.engines.vllm_server import KEY, Server
from weightsync import doctor, errors
from weightsync.engines.vllm.stock import MISSING

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]

DRAFT = "mtp"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.mtp_layers.0.post_attention_layernorm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("vllm"), DRAFT, stock=True)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def hung_up(server: Server) -> Iterator[None]:
    """A relay is an engine rank in this process: it keeps its groups until it is closed."""
    yield
    server.hang_up()


def publish(server: Server, version: int, scope: str = "both", **config: object) -> object:
    with server.publisher(models.Weights(DRAFT, version), **config) as p:
        return p.publish(version, scope, force=True)


def test_target_and_draft_equal_a_fresh_engine_and_the_report_says_what_is_missing(server: Server) -> None:
    fresh_tokens, fresh_facts = server.generate(), server.facts()
    report = publish(server, 2)
    assert report.engines[0].missing_guarantees == MISSING
    assert report.metrics("")["guarantees_missing"] == 4.0
    assert report.engines[0].bytes_received == (report.wire_bytes,)
    assert report.engines[0].speculation_before == {"spec_accept_rate": 1.0, "spec_accept_length": 2.0}
    server.serves(2)
    assert server.get("/weight_info") == {"weight_version": "2"}
    publish(server, 1, pause_mode="keep")
    assert server.generate() == fresh_tokens
    assert server.facts() == fresh_facts


def test_target_alone_breaks_acceptance_and_the_draft_alone_mends_it(server: Server) -> None:
    publish(server, 1)
    publish(server, 2, "target")
    tokens, acceptance = server.generate()
    assert tokens == models.expected(DRAFT, 2, 12)
    assert acceptance is not None
    assert acceptance < 0.2
    publish(server, 2, "draft")
    server.serves(2)


def test_a_required_guarantee_is_refused_before_anything_changes(server: Server) -> None:
    publish(server, 1)
    with pytest.raises(errors.PreflightError, match=r"routing \(routes and coverage .*start vLLM with weightsync"):
        publish(server, 2, require=["routing"])
    server.serves(1)
    assert publish(server, 2, require=["prefix_cache"]).outcome == "committed"


def test_doctor_says_what_a_stock_server_gives(server: Server) -> None:
    found = doctor.diagnose(server.url, api_key=KEY)
    assert (found.engine, found.version, found.health) == ("vllm (stock)", "0.32.0", "ready")
    assert found.guarantees == ("prefix_cache",)
    assert "--middleware weightsync.engines.vllm.server.Fence" in " ".join(found.missing)


@pytest.mark.parametrize("case", ["cut", "refused target", "refused draft"])
def test_what_a_failed_publish_leaves_behind_the_next_one_replaces(server: Server, case: str) -> None:
    publish(server, 2)
    facts = server.facts()
    source = models.Weights(DRAFT, 1)
    match case:
        case "cut":
            source.at[30] = lambda: (_ for _ in ()).throw(OSError("test: the weights cannot be read"))
        case "refused target":
            source.changed["target", Q_PROJ] = torch.zeros(3, 64).bfloat16()
        case _:
            source.changed["draft", Q_PROJ.replace("layers.1", "mtp_layers.0")] = torch.zeros(3, 64).bfloat16()
    with server.publisher(source) as p, pytest.raises((errors.PublishAborted, OSError)) as failed:
        p.publish(3, force=True)
    if case != "cut":
        assert "vLLM answered 500 to /update_weights" in str(failed.value)
    assert server.get("/is_paused") == {"is_paused": True}
    end = time.monotonic() + 15
    while server.control().status(deadline_s=5)["busy"]:  # it hears the end of that publish
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(errors.EngineFenced, match="no complete version"):
        server.control().resume(deadline_s=5)
    publish(server, 2)
    server.serves(2)
    assert server.facts() == facts


def test_pinned_stock_calls_it_updated_when_tensors_are_missing(server: Server) -> None:
    # Ours refuses both in preflight (`test_vllm_mtp`).
    publish(server, 1)
    old = server.facts()[0]
    source = models.Weights(DRAFT, 2)
    source.dropped |= {("target", Q_PROJ), ("draft", NORM)}
    with server.publisher(source) as p:
        assert p.publish(2).outcome == "committed"
    mixed = server.facts()[0]
    publish(server, 2)
    new = server.facts()[0]
    qkv = next(n for n in new["target"] if "layers.1.self_attn.qkv_proj.weight" in n)
    # A third of a fused layer is of no version; a norm of the draft is the old one.
    assert mixed["target"][qkv] != new["target"][qkv]
    norm = next(n for n in new["draft"] if "post_attention_layernorm" in n)
    assert mixed["draft"][norm] == old["draft"][norm] != new["draft"][norm]
    assert all(mixed["target"][n] == fact for n, fact in new["target"].items() if n != qkv)


def test_pinned_stock_overwrites_memory_of_the_target_with_what_is_published_as_a_draft(server: Server) -> None:
    # Ours compares, and fails the publish (`test_vllm_offline`).
    publish(server, 1)
    source = models.Weights(DRAFT, 1)
    source.changed["draft", EMBED] = models.weights(DRAFT, 2)["target"][EMBED]
    with server.publisher(source) as p:
        assert p.publish(2, "draft").outcome == "committed"
    tokens, _ = server.generate()
    assert tokens != models.expected(DRAFT, 1, 12)
    publish(server, 1)
    server.serves(1)


def test_a_server_that_others_have_changed_is_noticed_and_published_to_again(server: Server) -> None:
    publish(server, 2)
    relay = server.control()
    assert relay.status(deadline_s=10)["versions"] == {"target": 2, "draft[0]": 2}
    server.post("/update_weight_version", {"new_version": "another trainer's"})
    assert relay.status(deadline_s=10)["versions"] == {"target": None, "draft[0]": None}
    publish(server, 2)
    server.serves(2)


def test_pinned_stock_crashes_when_somebody_resumes_it_after_a_failed_publish(server: Server) -> None:
    # Ours answers 503 to /resume and to all that generates (`test_vllm_mtp`). The last test: no server is left.
    publish(server, 1)
    source = models.Weights(DRAFT, 2)
    source.at[30] = lambda: (_ for _ in ()).throw(OSError("test"))
    with server.publisher(source) as p, pytest.raises((errors.PublishAborted, OSError)):
        p.publish(2)
    assert server.post("/resume") == {"status": "resumed"}
    assert server.refused("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 1})[0] == 500
