"""vLLM's front end without vLLM: what the leader does when vLLM refuses, sleeps, or is of a kind that is not supported.

Everything that vLLM does well is tested with a real one (`test_vllm_mtp`, `test_vllm_eagle3`, `test_vllm_offline`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from weightsync import errors
from weightsync.engines.capabilities import find_row
from weightsync.engines.settings import Settings
from weightsync.engines.vllm import leader as leading
from weightsync.engines.vllm import server
from weightsync.engines.vllm.leader import EngineFacts, Leader, facts_of
from weightsync.protocol import Ack, Keys, PublishCall
from weightsync.store import HostedStore, host_store

FACTS = EngineFacts(
    version="0.32.0", world_size=2, method="mtp", has_draft=True, by_extension=False, row=find_row("vllm", "0.32.0")
)


class Rpc:
    """vLLM as the leader sees it; `acks` is what its ranks would write."""

    def __init__(self, store: HostedStore) -> None:
        self.store = store
        self.did: list[str] = []
        self.acks: dict[int, tuple[str, bool]] = {0: ("committed", True), 1: ("committed", True)}
        self.flushes = [True]
        self.frozen: list[str] = []
        self.requests: list[str] = []

    def preflight(self, words: Mapping[str, Any], timeout_s: float) -> None:
        self.did.append("preflight")
        self._write(PublishCall.from_json(words["call"]), dict.fromkeys(self.acks, ("connected", True)))

    def bind_draft(self, timeout_s: float) -> None:
        self.did.append("bind")

    def update(self, words: Mapping[str, Any], timeout_s: float) -> None:
        self.did.append("update")
        self._write(PublishCall.from_json(words["call"]), self.acks)

    def _write(self, call: PublishCall, acks: Mapping[int, tuple[str, bool]]) -> None:
        for rank, (phase, ok) in acks.items():
            ack = Ack(engine="e", rank=rank, phase=phase, ok=ok, error=None if ok else "RoutingError: test")  # type: ignore[arg-type]
            key = Keys(call.run_id, call.epoch).ack(call.seq, 0, rank, ack.phase)
            self.store.store.set(key, ack.to_json())

    def pause(self, mode: str, timeout_s: float) -> list[str]:
        self.did.append(f"pause {mode}")
        return self.frozen

    def resume(self, timeout_s: float) -> None:
        self.did.append("resume")

    def running(self) -> list[str]:
        return self.requests

    def abort(self, ids: list[str], timeout_s: float) -> None:
        self.did.append(f"abort {ids}")

    def flush(self, reset_running: bool, timeout_s: float) -> bool:
        self.did.append(f"flush {reset_running}")
        return self.flushes.pop(0) if self.flushes else False

    def set_version(self, version: str, timeout_s: float) -> None:
        self.did.append(f"version {version}")

    def counts(self) -> Mapping[str, float]:
        return {}


@pytest.fixture
def store() -> Iterator[HostedStore]:
    with host_store("127.0.0.1") as hosted:
        yield hosted


@pytest.fixture
def rpc(store: HostedStore, monkeypatch: pytest.MonkeyPatch) -> Rpc:
    monkeypatch.setattr(leading, "FLUSH_WAIT_S", 0.0)
    return Rpc(store)


def call_of(store: HostedStore, seq: int = 0, **changes: object) -> PublishCall:
    call = PublishCall(
        run_id="run", epoch=1, seq=seq, nonce="n", version=7, manifest_digest="d", store_host=store.host,
        store_port=store.port, engine_index=0, first_group_rank=1, group_size=3, transport="gloo", num_buffers=2,
        deadline_s=2.0,
    )  # fmt: skip
    return dataclasses.replace(call, **changes)  # type: ignore[arg-type]


def new(rpc: Rpc) -> Leader:
    return Leader("v", rpc, FACTS, Settings())


def test_a_publish_binds_once_flushes_once_then_sets_the_version_and_resumes(store: HostedStore, rpc: Rpc) -> None:
    leader = new(rpc)
    for seq, label in enumerate([None, "step-8"]):
        call = call_of(store, seq, label=label)
        rpc.flushes = [True]
        assert leader.preflight(call)["ok"]
        assert leader.fenced is None
        leader.pause("wait", 1.0)
        assert leader.receive(call)["ok"]
        assert leader.commit(call)["versions"] == {"target": 7, "draft[0]": 7}
        assert leader.commit(call) == leader.commit(call)
    assert rpc.did == [
        "bind", "preflight", "pause wait", "update", "flush False", "version 7", "resume",
        "preflight", "pause wait", "update", "flush False", "version step-8", "resume",
    ]  # fmt: skip
    assert (leader.run_id, leader.epoch, leader.fenced) == ("run", 1, None)


def test_frozen_requests_are_computed_anew_and_listed_if_they_still_run(store: HostedStore, rpc: Rpc) -> None:
    leader = new(rpc)
    rpc.frozen, rpc.requests = ["a", "b"], ["b", "c"]
    leader.preflight(call_of(store))
    leader.pause("keep", 1.0)
    leader.receive(call_of(store))
    assert leader.commit(call_of(store))["spanning"] == [{"id": "b"}]
    assert "flush True" in rpc.did


@pytest.mark.parametrize("acks", [{0: ("committed", True), 1: ("prepared", False)}, {0: ("committed", True)}])
def test_one_rank_that_did_not_commit_fences_and_ends_requests_that_wait(
    store: HostedStore, rpc: Rpc, acks: dict[int, tuple[str, bool]]
) -> None:
    leader = new(rpc)
    rpc.acks, rpc.frozen, rpc.requests = acks, ["kept"], ["kept", "queued"]
    leader.preflight(call_of(store))
    leader.pause("keep", 1.0)
    assert not leader.receive(call_of(store))["ok"]
    assert "rank 1" in str(leader.fenced)
    assert rpc.did[-1] == "abort ['queued']"
    for refused in (lambda: leader.resume(1.0), lambda: leader.commit(call_of(store))):
        with pytest.raises(errors.EngineFenced, match="a full publish heals it"):
            refused()
    rpc.acks = {0: ("committed", True), 1: ("committed", True)}
    assert leader.receive(call_of(store, 1))["ok"]
    assert leader.fenced is None


def test_a_partial_publish_does_not_lift_a_fence(store: HostedStore, rpc: Rpc) -> None:
    leader = new(rpc)
    leader.weights_lost("its weights were discarded (sleep level 2)")
    assert leader.status()["versions"] == {"target": None, "draft[0]": None}
    leader.receive(call_of(store, scope="target", full=False))
    assert "sleep level 2" in str(leader.fenced)


def test_a_prefix_cache_that_cannot_be_reset_keeps_the_fence(store: HostedStore, rpc: Rpc) -> None:
    leader = new(rpc)
    rpc.flushes = [False, False, True]
    leader.receive(call_of(store))
    assert leader.fenced is None
    rpc.flushes = []
    with pytest.raises(errors.EngineError, match="refused to reset its prefix cache"):
        leader.receive(call_of(store, 1))
    assert "refused to reset" in str(leader.fenced)
    assert "resume" not in rpc.did[rpc.did.index("resume") + 1 :]
    assert leader.versions == {"target": None, "draft[0]": None}


def test_what_vllm_raises_fences_and_is_named(store: HostedStore, rpc: Rpc, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = new(rpc)

    def dead(*args: object) -> None:
        raise OSError("EngineCore died")

    monkeypatch.setattr(rpc, "update", dead)
    with pytest.raises(errors.EngineError, match="receive: vLLM: OSError: EngineCore died"):
        leader.receive(call_of(store))
    assert "EngineCore died" in str(leader.fenced)


def test_sleeping_weights_are_refused_before_anything_is_asked_of_vllm(store: HostedStore, rpc: Rpc) -> None:
    leader = new(rpc)
    leader.asleep = frozenset({"weights", "kv_cache"})
    with pytest.raises(errors.EngineError, match="asleep: wake them first"):
        leader.preflight(call_of(store))
    leader.asleep = frozenset({"kv_cache"})
    assert leader.preflight(call_of(store))["ok"]


def test_calls_that_cannot_be_are_refused(store: HostedStore, rpc: Rpc) -> None:
    leader = new(rpc)
    with pytest.raises(errors.ConfigError, match="pause mode is 'gently'"):
        leader.pause("gently", 1.0)
    with pytest.raises(errors.EngineError, match="receive first"):
        leader.commit(call_of(store))
    with pytest.raises(errors.UnsupportedError, match="no such path generate"):
        leader.handler("generate")


def config(**changes: Any) -> types.SimpleNamespace:
    values = {
        "backend": "weightsync",
        "extension": "",
        "dp": 1,
        "pp": 1,
        "quantization": None,
        "lora": None,
        "method": None,
    } | changes
    space = types.SimpleNamespace
    return space(
        parallel_config=space(
            data_parallel_size=values["dp"],
            pipeline_parallel_size=values["pp"],
            world_size=2,
            worker_extension_cls=values["extension"],
        ),
        model_config=space(quantization=values["quantization"]),
        speculative_config=None if values["method"] is None else space(method=values["method"]),
        weight_transfer_config=None if values["backend"] is None else space(backend=values["backend"]),
        lora_config=values["lora"],
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backend": None}, "start it with --weight-transfer-config"),
        ({"backend": "nccl"}, "'nccl'"),
        ({"dp": 2}, "data parallelism of 2"),
        ({"pp": 2}, "pipeline parallelism of 2"),
        ({"quantization": "fp8"}, "quantised weights"),
        ({"lora": object()}, "LoRA"),
        ({"method": "medusa"}, "'medusa'; supported are mtp, eagle"),
    ],
)
def test_engines_that_cannot_be_published_to_say_why(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=says):
        facts_of(config(**changes), "0.32.0", Settings())


def test_before_0_28_a_worker_extension_is_needed_and_mtp_refused() -> None:
    ours = "weightsync.engines.vllm.extension.Extension"
    for version in ("0.22.1", "0.24.0", "0.27.1"):
        with pytest.raises(errors.UnsupportedError, match=f"--worker-extension-cls {ours}"):
            facts_of(config(method="eagle"), version, Settings())
        facts = facts_of(config(method="eagle", extension=ours, backend=None), version, Settings())
        assert (facts.by_extension, facts.has_draft) == (True, True)
        with pytest.raises(errors.UnsupportedError, match="method 'mtp'; supported are eagle, eagle3"):
            facts_of(config(method="mtp", extension=ours), version, Settings())
    with pytest.raises(errors.UnsupportedError, match=r"use 0\.22 or later"):
        facts_of(config(extension=ours), "0.20.2", Settings())
    assert facts_of(config(method="mtp", extension=ours, backend=None), "0.32.0", Settings()).by_extension


def test_a_draft_is_known_by_its_method() -> None:
    assert facts_of(config(method="eagle3"), "0.32.0+cpu", Settings()).has_draft
    assert not facts_of(config(method="ngram"), "0.32.0", Settings()).has_draft
    assert not facts_of(config(), "0.32.0", Settings()).has_draft


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment() == Settings()
    monkeypatch.setenv("WEIGHTSYNC_BIND_HOST", "10.0.0.2")
    monkeypatch.setenv("WEIGHTSYNC_ALLOW_UNTESTED_ENGINE", "1")
    assert Settings.from_environment() == Settings(bind_host="10.0.0.2", allow_untested=True)
    monkeypatch.setenv("WEIGHTSYNC_ALLOW_UNTESTED_ENGINE", "yes")
    with pytest.raises(errors.ConfigError, match="expected 0 or 1"):
        Settings.from_environment()


def ask(fence: server.Fence, path: str, *, kind: str = "http", key: str | None = None, query: str = "") -> Any:
    """(status, JSON) that the middleware, or the application behind it, answers."""
    app = types.SimpleNamespace(state=types.SimpleNamespace(args=types.SimpleNamespace(api_key=["secret"])))
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": kind, "path": path, "app": app, "headers": headers, "query_string": query.encode()}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(fence(scope, receive, send))
    if kind == "websocket":
        return sent[0]["type"]
    return sent[0]["status"], json.loads(sent[1]["body"])


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'"served"'})


def test_the_fence_lets_through_only_what_tells(store: HostedStore, rpc: Rpc) -> None:
    fence = server.Fence(application)
    assert ask(fence, "/v1/completions") == (200, "served")
    fence._leader = new(rpc)
    assert ask(fence, "/v1/completions") == (200, "served")
    assert ask(fence, "/update_weights")[0] == 501
    fence._leader.weights_lost("test")
    for path in ("/v1/completions", "/v1/chat/completions", "/resume", "/anything/new"):
        status, body = ask(fence, path)
        assert status == 503, path
        assert body["error"]["type"] == "EngineFenced"
    assert ask(fence, "/v1/realtime", kind="websocket") == "websocket.close"
    for path in ("/health", "/metrics", "/v1/models", "/wake_up"):
        assert ask(fence, path) == (200, "served"), path
    assert ask(fence, "/weightsync/v1/status")[0] == 401
    assert ask(fence, "/weightsync/v1/status", key="guess")[0] == 401
    status, body = ask(fence, "/weightsync/v1/status", key="secret")
    assert (status, body["fenced"]) == (200, "test")


def test_sleep_level_2_costs_the_version_and_waking_parts_is_followed(store: HostedStore, rpc: Rpc) -> None:
    fence = server.Fence(application)
    fence._leader = leader = new(rpc)
    leader.versions = {"target": 3, "draft[0]": 3}
    ask(fence, "/sleep", query="level=1")
    assert leader.asleep == {"weights", "kv_cache"}
    assert (leader.versions["target"], leader.fenced) == (3, None)
    ask(fence, "/wake_up", query="tags=weights")
    assert leader.asleep == {"kv_cache"}
    ask(fence, "/wake_up")
    assert leader.asleep == frozenset()
    ask(fence, "/sleep", query="level=2")
    assert leader.versions == {"target": None, "draft[0]": None}
    assert "sleep level 2" in str(leader.fenced)
