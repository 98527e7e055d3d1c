"""A relay and a real publisher over gloo, with a stock engine that only writes down what it is told.

What real engines make of it: `tests/engines/test_vllm_stock.py` and `test_sglang_stock.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from weightsync import errors
from weightsync.config import PublishConfig
from weightsync.engines.relay import Relay, StockFacts
from weightsync.publisher import Publisher
from weightsync.sources.state_dict import StateDictSource


class Engine:
    """Every call, in order; tensors by runner, as they were when they came."""

    name = "stock"

    def __init__(self, *runners: str) -> None:
        self.runners = runners or ("target", "draft[0]")
        self.did: list[str] = []
        self.held: dict[str, dict[str, torch.Tensor]] = {r: {} for r in self.runners}
        self.weight_version = "default"
        self.fail_at: str | None = None
        self._open = ""

    def describe(self, deadline_s: float) -> StockFacts:
        return StockFacts(
            kind="test", version="1", runners=self.runners, speculation=None, weight_version=self.weight_version,
            world_size=4, missing={"routing": "it is a test"}, row="all", evidence="tested", how="written down",
        )  # fmt: skip

    def counts(self, deadline_s: float) -> Mapping[str, float]:
        return {}

    def _do(self, what: str) -> None:
        self.did.append(what)
        if self.fail_at == what.partition(" ")[0]:
            raise errors.EngineError(f"test: {what} failed")

    def connect(self, deadline_s: float) -> None:
        self._do("connect")

    def pause(self, mode: str, deadline_s: float) -> None:
        self._do(f"pause {mode}")

    def resume(self, deadline_s: float) -> None:
        self._do("resume")

    def begin(self, runner: str, deadline_s: float) -> None:
        self._do(f"begin {runner}")
        self._open = runner

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]], deadline_s: float) -> None:
        self._do("load")
        self.held[self._open] |= {name: t.clone() for name, t in pairs}

    def finish(self, runner: str, deadline_s: float) -> None:
        assert runner == self._open
        self._do(f"finish {runner}")

    def abort(self) -> None:
        self.did.append("abort")

    def commit(self, weight_version: str, mode: str, deadline_s: float) -> None:
        self._do(f"commit {weight_version} {mode}")
        self.weight_version = weight_version

    def close(self) -> None:
        self.did.append("close")

    @property
    def steps(self) -> list[str]:
        """Without the loads, whose number is the buckets'."""
        steps, self.did = [s for s in self.did if s != "load"], []
        return steps


TARGET = {"model.embed.weight": torch.randn(300, 64), "model.norm.weight": torch.randn(64).bfloat16()}
DRAFT = {"model.mtp_layers.0.fc.weight": torch.randn(64, 64).bfloat16(), "d2t": torch.arange(7)}


def equal(held: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> bool:
    return set(held) == set(sent) and all(torch.equal(held[n], t) and held[n].dtype == t.dtype for n, t in sent.items())


@pytest.fixture
def relays() -> Iterator[list[Relay]]:
    made: list[Relay] = []
    yield made
    for relay in made:
        relay.close()


def publisher(engines: Sequence[Relay], *, drafts: Any = None, **config: Any) -> Publisher:
    source = StateDictSource(dict(TARGET), drafts={"draft": dict(DRAFT)} if drafts is None else drafts)
    values = {"run_id": "test", "takeover": True, "deadline_s": 10.0, "bucket_bytes": 16 << 10, **config}
    return Publisher(source, engines, PublishConfig(**values))


def test_every_tensor_arrives_whole_in_the_session_of_its_runner(relays: list[Relay]) -> None:
    engine = Engine()
    relays.append(Relay(engine))
    with publisher(relays, pause_mode="abort") as p:
        report = p.publish(1, label="step-1")
        assert engine.steps == [
            "connect", "pause abort", "begin target", "finish target", "begin draft[0]", "finish draft[0]",
            "commit step-1 abort",
        ]  # fmt: skip
        assert equal(engine.held["target"], TARGET)
        assert equal(engine.held["draft[0]"], DRAFT)
        assert report.engines[0].missing_guarantees == {"routing": "it is a test"}
        assert report.engines[0].loaded == {"target": 2, "draft[0]": 2}
        assert p.publish(1).outcome == "noop"
        assert engine.steps == []
        p.publish(2, "draft")
        assert engine.steps == ["connect", "pause abort", "begin draft[0]", "finish draft[0]", "commit 2 abort"]
        # Somebody else has set a version of his own: what we knew of this engine is over.
        engine.weight_version = "other"
        assert p.publish(2).outcome == "committed"


@pytest.mark.parametrize("at", ["load", "begin", "finish"])
def test_a_failure_in_a_session_fences_and_the_next_full_publish_heals(relays: list[Relay], at: str) -> None:
    engine = Engine()
    relays.append(Relay(engine))
    with publisher(relays) as p:
        p.publish(1)
        engine.fail_at = at
        with pytest.raises(errors.PublishAborted, match=f"test: {at}.* failed") as failed:
            p.publish(2)
        assert failed.value.report is not None
        assert failed.value.report.engines[0].outcome == "fenced"
        assert "abort" in engine.did
        assert "resume" not in engine.did
        engine.fail_at = None
        with pytest.raises(errors.PreflightError, match="publish with scope='both'"):
            p.publish(2, "target")
        assert p.publish(2).outcome == "committed"
    assert relays[0].status(deadline_s=1)["versions"] == {"target": 2, "draft[0]": 2}


def test_a_failed_preflight_or_pause_leaves_it_serving(relays: list[Relay]) -> None:
    engine = Engine()
    relays.append(Relay(engine))
    with publisher(relays) as p:
        for at in ("connect", "pause"):
            engine.fail_at = at
            with pytest.raises(errors.PreflightError, match=f"test: {at}"):
                p.publish(1)
        assert engine.did[-1] == "resume"
        assert relays[0].status(deadline_s=1)["fenced"] is None
        engine.fail_at = None
        p.publish(1)


def test_a_commit_that_the_engine_refuses_loses_it_until_the_next_publish(relays: list[Relay]) -> None:
    engine = Engine()
    relays.append(Relay(engine))
    with publisher(relays) as p:
        engine.fail_at = "commit"
        with pytest.raises(errors.PublishAborted, match="test: commit 1 wait failed"):
            p.publish(1)
        engine.fail_at = None
        assert p.publish(1).outcome == "committed"
    assert engine.weight_version == "1"


def test_a_role_that_its_own_way_does_not_reach_is_refused(relays: list[Relay]) -> None:
    engine = Engine("target")
    relays.append(Relay(engine))
    with publisher(relays) as p, pytest.raises(errors.PreflightError, match="leave the role out of the source"):
        p.publish(1)
    with publisher(relays, drafts={}) as p:
        assert p.publish(1).outcome == "committed"
    assert equal(engine.held["target"], TARGET)
