"""Publishing to real embedded engines: what users see before, after, and when they ask for something odd."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.weightsync.fleet import PROMPT, Weights, engine, expected_tokens, publisher, serves, weights
from weightsync import errors
from weightsync.config import PublishConfig
from weightsync.embedded.engine import EngineHandle
from weightsync.engine.control import HttpControl
from weightsync.protocol import PROTOCOL_VERSION
from weightsync.publisher import Publisher
from weightsync.sources.state_dict import StateDictSource

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[EngineHandle]]:
    """One engine of two ranks, one of one rank."""
    with engine("e0", tp=2) as e0, engine("e1") as e1:
        yield [e0, e1]


@pytest.fixture
def run(fleet: list[EngineHandle], request: pytest.FixtureRequest) -> str:
    """A run id of its own, so that versions of other tests are of another run."""
    del fleet
    return str(request.node.name).replace("[", "-").replace("]", "")


def _pub(fleet: list[EngineHandle], run: str, source: Any = None, **config: Any) -> Publisher:
    return publisher(source if source is not None else Weights(1), fleet, run_id=run, takeover=True, **config)


def test_target_and_draft_change_together_and_in_place(fleet: list[EngineHandle], run: str) -> None:
    source = Weights(1)
    with _pub(fleet, run, source) as p:
        assert p.publish(1).outcome == "committed"
        before = [e.weights() for e in fleet]
        for e in fleet:
            serves(e, 1)
        source.version = 2
        report = p.publish(2)
    assert [e.outcome for e in report.engines] == ["committed", "committed"]
    for e, old in zip(fleet, before, strict=True):
        serves(e, 2)
        new = e.weights()
        changed = 0
        for old_rank, new_rank in zip(old, new, strict=True):
            for runner, params in old_rank.items():
                for name, facts in params.items():
                    assert new_rank[runner][name]["data_ptr"] == facts["data_ptr"], (runner, name)
                    changed += new_rank[runner][name]["digest"] != facts["digest"]
        assert changed > 20


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_every_rank_receives_the_unique_bytes_once(fleet: list[EngineHandle], run: str, transport: str) -> None:
    with _pub(fleet, run, transport=transport, bucket_bytes=64 << 10) as p:
        report = p.publish(1)
    unique = sum(t.nbytes for tensors in weights(1).values() for t in tensors.values())
    assert report.payload_bytes == unique
    assert report.num_buckets > 3
    assert 0 <= report.wire_bytes - unique < 0.001 * unique + 16 * report.num_tensors
    for e, world in zip(report.engines, (2, 1), strict=True):
        assert e.bytes_received == (report.wire_bytes,) * world
        assert e.num_tensors == report.num_tensors
        assert set(e.loaded) == {"target", "draft[0]"}
    assert {"wire", "load_target", "load_draft", "pack", "verify", "commit"} <= set(report.phases)
    for e in fleet:
        serves(e, 1)


def test_target_alone_breaks_acceptance_and_the_draft_at_the_same_version_mends_it(
    fleet: list[EngineHandle], run: str
) -> None:
    source = Weights(1)
    with _pub(fleet, run, source) as p:
        p.publish(1)
        source.version = 2
        p.publish(2, "target")
        for e in fleet:
            reply = e.generate([PROMPT], max_tokens=6)
            assert reply["tokens"][0] == expected_tokens(2)
            assert reply["acceptance"] < 0.2
            assert e.status()["versions"] == {"target": 2, "draft[0]": 1}
        assert p.publish(2, "draft").outcome == "committed"
        assert p.publish(2).outcome == "noop"
        assert p.publish(2, "draft").outcome == "noop"
    for e in fleet:
        serves(e, 2)


def test_an_older_version_is_refused_unless_forced(fleet: list[EngineHandle], run: str) -> None:
    source = Weights(1)
    with _pub(fleet, run, source) as p:
        p.publish(7)
        with pytest.raises(errors.VersionError, match=r"newer than version 6.*force=True"):
            p.publish(6)
        assert p.publish(7).outcome == "noop"
        source.version = 6
        assert p.publish(6, force=True).outcome == "committed"
    for e in fleet:
        serves(e, 6)


def test_async_publishes_what_the_weights_were(fleet: list[EngineHandle], run: str) -> None:
    state = {role: {n: t.clone() for n, t in tensors.items()} for role, tensors in weights(3).items()}
    source = StateDictSource(state["target"], drafts={"draft": state["draft"]})
    with _pub(fleet, run, source) as p:
        handle = p.publish_async(3)
        for tensors in state.values():
            for t in tensors.values():
                t.zero_()
        assert handle.result(60).outcome == "committed"
        assert handle.done()
        for e in fleet:
            serves(e, 3)
        gate = threading.Event()
        p.engines = [_Gated(fleet[0], gate), *p.engines[1:]]
        again = p.publish_async(4)
        with pytest.raises(errors.ConfigError, match="still running"):
            p.publish(5)
        with pytest.raises(errors.TransferTimeout, match="still running"):
            again.result(0.05)
        gate.set()
        assert again.result(60).outcome == "committed"


class _Gated(HttpControl):
    """An engine that answers its first status call only when told."""

    def __init__(self, handle: EngineHandle, gate: threading.Event) -> None:
        super().__init__(handle.url, api_key=handle.api_key, name=handle.name)
        self.gate = gate

    def status(self, *, deadline_s: float) -> Any:
        assert self.gate.wait(30)
        return super().status(deadline_s=deadline_s)


class _OfAnotherRelease(HttpControl):
    """An engine whose weightsync digests, or says, things otherwise."""

    def __init__(self, handle: EngineHandle) -> None:
        super().__init__(handle.url, api_key=handle.api_key, name=handle.name)

    def status(self, *, deadline_s: float) -> Any:
        return {**super().status(deadline_s=deadline_s), "protocol": PROTOCOL_VERSION + 1}


def test_an_engine_of_another_protocol_is_named_before_any_byte(fleet: list[EngineHandle], run: str) -> None:
    with _pub(fleet, run) as p:
        p.publish(1)
    config = PublishConfig(run_id=run, takeover=True)
    with (
        Publisher(Weights(2), [fleet[0].control(), _OfAnotherRelease(fleet[1])], config) as p,
        pytest.raises(errors.PreflightError, match=rf"e1 speaks weightsync protocol {PROTOCOL_VERSION + 1}, this") as e,
    ):
        p.publish(2)
    assert e.value.report is not None
    assert {o.outcome for o in e.value.report.engines} == {"untouched"}
    for handle in fleet:
        serves(handle, 1)


class _Without(StateDictSource):
    """A source that keeps some tensors back, or hands out others."""

    def __init__(self, drop: str = "", shape: str = "", add: str = "") -> None:
        target = dict(weights(2)["target"])
        if drop:
            del target[drop]
        if shape:
            target[shape] = target[shape][:-1].contiguous()
        if add:
            target[add] = torch.zeros(3)
        super().__init__(target, drafts={"draft": weights(2)["draft"]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": "model.norm.weight"}, "norm"),
        ({"drop": "model.layers.1.self_attn.k_proj.weight"}, "qkv_proj"),
        ({"shape": "model.layers.0.mlp.down_proj.weight"}, "down_proj"),
        ({"add": "model.layers.0.mystery.weight"}, "mystery"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_old_version_serves(
    fleet: list[EngineHandle], run: str, change: dict[str, str], says: str
) -> None:
    with _pub(fleet, run) as p:
        p.publish(1)
    with _pub(fleet, run, _Without(**change)) as p, pytest.raises(errors.PreflightError, match=says) as refused:
        p.publish(2)
    report = refused.value.report
    assert report is not None
    assert report.outcome == "refused"
    assert {e.outcome for e in report.engines} == {"untouched"}
    for e in fleet:
        serves(e, 1)


def test_a_dead_engine_aborts_or_is_dropped_as_configured(fleet: list[EngineHandle], run: str) -> None:
    dead = HttpControl("http://127.0.0.1:1", api_key="k", name="dead")
    source = Weights(1)
    with _pub(fleet, run, source) as p:
        p.publish(1)
        p.engines = [*p.engines, dead]
        source.version = 2
        with pytest.raises(errors.PreflightError, match=r"dead.*cannot reach"):
            p.publish(2)
        for e in fleet:
            serves(e, 1)
    with _pub(fleet, run, source, on_engine_failure="drop") as p:
        p.engines = [dead, *p.engines]
        report = p.publish(2)
    assert {e.name: e.outcome for e in report.engines} == {"e0": "committed", "e1": "committed", "dead": "dropped"}
    assert report.attempts == 2
    for e in fleet:
        serves(e, 2)


def test_two_trainer_stages_send_to_every_engine(fleet: list[EngineHandle], run: str) -> None:
    config = PublishConfig(run_id=run, takeover=True, deadline_s=20, bucket_bytes=32 << 10)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reports: dict[int, Any] = {}

    def rank(r: int, engines: Sequence[HttpControl]) -> None:
        source = Weights(5, stage=r, num_stages=2)
        with Publisher(source, engines, config, rank=r, world_size=2, store_address=("127.0.0.1", port)) as p:
            reports[r] = p.publish(5)

    threads = [threading.Thread(target=rank, args=(r, [e.control() for e in fleet] if r == 0 else [])) for r in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert reports[0] == dataclasses.replace(reports[1], seconds=reports[0].seconds)
    assert reports[0].outcome == "committed"
    unique = sum(t.nbytes for tensors in weights(5).values() for t in tensors.values())
    assert reports[0].payload_bytes == unique
    for e in fleet:
        serves(e, 5)


def test_requests_that_span_versions_are_listed(fleet: list[EngineHandle], run: str) -> None:
    source = Weights(1)
    with _pub(fleet, run, source, pause_mode="keep") as p:
        p.publish(1)
        source.version = 2
        replies: list[dict[str, Any]] = []
        asking = threading.Thread(
            target=lambda: replies.append(fleet[1].generate([PROMPT] * 8, max_tokens=480, speculate=0, deadline_s=90))
        )
        asking.start()
        end = time.monotonic() + 10
        while not fleet[1].status()["running"] and time.monotonic() < end:
            time.sleep(0.005)
        report = p.publish(2)
        asking.join(90)
    spanning = {e.name: e.spanning_requests for e in report.engines}
    assert len(spanning["e1"]) == 8
    assert spanning["e0"] == ()
    assert [len(t) for t in replies[0]["tokens"]] == [480] * 8
    serves(fleet[1], 2)


def test_two_runs_do_not_share_an_engine_unless_told(fleet: list[EngineHandle], run: str) -> None:
    with _pub(fleet, run) as p:
        p.publish(1)
    with (
        publisher(Weights(2), fleet, run_id="stranger") as other,
        pytest.raises(errors.PreflightError, match="belongs to run"),
    ):
        other.publish(2)
    for e in fleet:
        serves(e, 1)


def test_a_wrong_key_changes_nothing(fleet: list[EngineHandle], run: str) -> None:
    with _pub(fleet, run) as p:
        p.publish(1)
        p.engines = [HttpControl(fleet[0].url, api_key="guess", name="e0")]
        with pytest.raises(errors.PreflightError, match="API key"):
            p.publish(2)
    serves(fleet[0], 1)


@pytest.mark.parametrize("bad", [-1, True, 1.5, "3", None])
def test_versions_are_ints(fleet: list[EngineHandle], run: str, bad: Any) -> None:
    with _pub(fleet, run) as p, pytest.raises(errors.ConfigError, match="version is"):
        p.publish(bad)


def test_unknown_scope_and_no_engines_are_named(fleet: list[EngineHandle], run: str) -> None:
    with _pub(fleet, run) as p, pytest.raises(errors.ConfigError, match="'everything'"):
        p.publish(1, "everything")
    with pytest.raises(errors.ConfigError, match="at least one engine"):
        Publisher(Weights(1), [])
    for no_client in (fleet[0], fleet[0].url):
        with pytest.raises(errors.ConfigError, match="no control client"):
            Publisher(Weights(1), [no_client])  # type: ignore[list-item]
