"""Requests of one engine: waiting, running, held; pause modes; what each of them produced under which versions.

Every engine rank holds one `Scheduler` and makes the same calls in the same order (rank 0's loop in `worker.py` sees to
that), so that the ranks' collectives meet. Only rank 0's results are used.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from weightsync.embedded.speculative import Decoder, Decoding, PrefixCache
from weightsync.errors import ConfigError

__all__ = ["PAUSE_MODES", "Request", "Result", "Scheduler"]

PAUSE_MODES = ("abort", "wait", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`num_draft` draft tokens per step, 0 to decode plainly."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    num_draft: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """`finish_reason` is `length` or `abort`; `versions` are the target versions under which tokens were computed."""

    id: str
    tokens: list[int]
    finish_reason: str
    proposed: int
    accepted: int
    reused: int
    versions: list[int | None]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
    request: Request
    decoding: Decoding
    stamp: Hashable
    versions: list[int | None]


class Scheduler:
    """Steps running requests in turn.

    Args:
        decoder: the models.
        versions: runner name -> version served now; read when a request starts and after a commit.
        max_running: more than these wait.
        prefix_entries: capacity of the prefix cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        versions: Callable[[], Mapping[str, int | None]],
        *,
        max_running: int = 8,
        prefix_entries: int = 16,
    ) -> None:
        self.decoder = decoder
        self.prefix = PrefixCache(prefix_entries)
        self.max_running = max_running
        self.paused: str | None = None
        self._versions = versions
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: collections.deque[_Running] = collections.deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """True if `step` would do something."""
        return (bool(self._running) and self.paused != "keep") or (bool(self._waiting) and self.paused is None)

    def add(self, request: Request) -> None:
        """Queue a request that `check` let pass."""
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Refuse what cannot be served.

        Raises:
            ConfigError: an empty prompt, a token outside the vocabulary, or more positions than the model has.
        """
        config = self.decoder.target.config
        where = f"request {request.id}"
        if not request.prompt or request.max_tokens < 1 or request.num_draft < 0:
            raise ConfigError(f"{where}: expected at least one prompt token, max_tokens >= 1 and speculate >= 0")
        if not all(isinstance(t, int) and 0 <= t < config.vocab_size for t in request.prompt):
            raise ConfigError(f"{where}: prompt tokens must be integers within 0..{config.vocab_size - 1}")
        if len(request.prompt) + request.max_tokens > config.max_positions:
            raise ConfigError(
                f"{where}: {len(request.prompt)} prompt and {request.max_tokens} new tokens exceed the model's "
                f"{config.max_positions} positions"
            )

    def step(self) -> list[Result]:
        """Admit what fits, advance one running request by one target pass; returns what finished."""
        while self.paused is None and self._waiting and len(self._running) < self.max_running:
            self._running.append(self._start(self._waiting.popleft()))
        if not self._running or self.paused == "keep":
            return []
        running = self._running.popleft()
        self.decoder.step(running.decoding)
        if running.decoding.remaining > 0:
            self._running.append(running)
            return []
        if len(running.versions) == 1:
            self.prefix.put(running.decoding, running.stamp)
        return [self._result(running, "length")]

    def pause(self, mode: str) -> list[Result]:
        """Admit nothing more. `abort` ends the running requests and returns them, `keep` holds them, `wait` lets `step`
        finish them (poll `num_running`).

        Raises:
            ConfigError: another mode.
        """
        if mode not in PAUSE_MODES:
            raise ConfigError(f"pause mode is {mode!r}; expected one of {', '.join(PAUSE_MODES)}")
        self.paused = mode
        aborted = []
        if mode == "abort":
            aborted = [self._result(r, "abort") for r in self._running]
            self._running.clear()
        return aborted

    def held(self) -> list[dict[str, Any]]:
        """Requests that are running or held, and the versions that they span so far."""
        return [{"id": r.request.id, "versions": list(r.versions)} for r in self._running]

    def new_version(self) -> list[dict[str, Any]]:
        """A publish committed: flush the prefix cache; held requests compute their keys and values again.

        Returns:
            What `held` says: those requests span versions.
        """
        self.prefix.flush()
        version = self._versions().get("target")
        for running in self._running:
            self.decoder.restart(running.decoding)
            running.stamp = self._stamp()
            if version not in running.versions:
                running.versions.append(version)
        return self.held()

    def resume(self) -> None:
        self.paused = None

    def cancel(self, ids: Sequence[str]) -> list[Result]:
        """Forget waiting and running requests (their caller is gone); returns the running ones as aborted."""
        gone = set(ids)
        out = [self._result(r, "abort") for r in self._running if r.request.id in gone]
        self._running = collections.deque(r for r in self._running if r.request.id not in gone)
        self._waiting = collections.deque(r for r in self._waiting if r.id not in gone)
        return out

    def _stamp(self) -> Hashable:
        return tuple(sorted(self._versions().items()))

    def _start(self, request: Request) -> _Running:
        stamp = self._stamp()
        speculate = request.num_draft > 0 and self.decoder.draft is not None
        decoding = self.decoder.start(
            request.prompt,
            max_tokens=request.max_tokens,
            num_draft=request.num_draft,
            prefix=self.prefix.take(request.prompt, stamp, draft=speculate),
        )
        versions = [self._versions().get("target")]
        return _Running(request=request, decoding=decoding, stamp=stamp, versions=versions)

    def _result(self, running: _Running, reason: str) -> Result:
        d = running.decoding
        return Result(
            id=running.request.id,
            tokens=d.generated,
            finish_reason=reason,
            proposed=d.proposed,
            accepted=d.accepted,
            reused=d.reused,
            versions=running.versions,
        )
