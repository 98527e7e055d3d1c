"""A trainer in this process and embedded engines beside it, for publish tests: versions that show in tokens.

Version v's weights are `known_argmax(seed=v)`: what a prompt continues with tells which version an engine serves, and
an acceptance of 1.0 that its draft is of the same one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator

import torch

from weightsync.config import PublishConfig
from weightsync.embedded.config import resolve_config
from weightsync.embedded.engine import EngineConfig, EngineHandle, launch
from weightsync.embedded.known import known_argmax, known_next
from weightsync.publisher import Publisher
from weightsync.sources.state_dict import StateDictSource
from weightsync.timeline import Timeline

MODEL = "tiny"
PROMPT = [3, 4, 5]
DEADLINE_S = 4.0
"""Of each phase, in fault tests: what a stopped process may cost."""


@functools.lru_cache(maxsize=8)
def weights(version: int) -> dict[str, dict[str, torch.Tensor]]:
    return known_argmax(resolve_config(MODEL), seed=version, draft="mtp")


class Weights(StateDictSource):
    """The weights of `version`; calls `at[i]` just before tensor number `i` is handed out."""

    def __init__(self, version: int = 1, *, stage: int = 0, num_stages: int = 1) -> None:
        self.version = version
        self.at: dict[int, Callable[[], None]] = {}
        part = slice(stage, None, num_stages)
        super().__init__(
            lambda: dict(list(weights(self.version)["target"].items())[part]),
            drafts={"draft": lambda: dict(list(weights(self.version)["draft"].items())[part])},
            stage=stage,
            num_stages=num_stages,
        )

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        for i, tensor in enumerate(super().stream(roles, timeline)):
            if i in self.at:
                self.at.pop(i)()
            yield tensor

    def __repr__(self) -> str:
        return f"Weights({self.version})"


@functools.lru_cache(maxsize=16)
def expected_tokens(version: int, n: int = 6) -> list[int]:
    """What the known-argmax target of `version` continues `PROMPT` with, from its definition alone."""
    follows = known_next(resolve_config(MODEL), seed=version, draft="mtp")
    tokens = [PROMPT[-1]]
    for _ in range(n):
        tokens.append(int(follows[tokens[-1]]))
    return tokens[1:]


def engine(name: str, tp: int = 1) -> EngineHandle:
    return launch(EngineConfig(model=MODEL, tp=tp, draft="mtp", name=name, seed=99, tp_timeout_s=30))


def publisher(source: Weights, engines: list[EngineHandle], **config: object) -> Publisher:
    values: dict[str, object] = {"deadline_s": DEADLINE_S, "control_s": 20.0, "heartbeat_s": 3.0, "run_id": "test"}
    return Publisher(source, [e.control() for e in engines], PublishConfig(**values | config))  # type: ignore[arg-type]


def serves(handle: EngineHandle, version: int) -> None:
    """The engine serves exactly `version`: its tokens, and a draft that agrees with them."""
    reply = handle.generate([PROMPT], max_tokens=6, deadline_s=20)
    assert reply["tokens"][0] == expected_tokens(version), (handle.name, version, reply)
    assert reply["acceptance"] == 1.0, (handle.name, version, reply)
    assert set(handle.status()["versions"].values()) == {version}


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block ends in time: a fault may cost deadlines, not more."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"took {took:.1f} s, expected less than {seconds:g} s"


def hit(handle: EngineHandle, rank: int, sig: signal.Signals) -> Callable[[], None]:
    """A fault: `sig` to one rank of an engine."""
    return lambda: os.kill(handle.pids[rank], sig)
