"""How well drafts were accepted before a publish and after it, from the counters that engines keep of themselves.

An engine's status, and its reply to commit, may have `speculation_counts`: totals since its start of `drafts`,
`draft_tokens` and `accepted_tokens`. The coordinator owns one `AcceptanceMeter` and tells it of every commit.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsync.acks import start_call
from weightsync.errors import WeightSyncError
from weightsync.report import PublishReport, acceptance

if TYPE_CHECKING:
    from weightsync.engine.base import EngineControl

__all__ = ["AcceptanceMeter"]

Counts = Mapping[str, float]


class AcceptanceMeter:
    """Readings by instance of an engine: one that restarted counts from zero again."""

    def __init__(self) -> None:
        self._at_commit: dict[str, Counts] = {}
        self._at_last_commit: dict[str, Counts] = {}

    def new_publish(self) -> None:
        self._at_last_commit = dict(self._at_commit)

    def committed(self, status: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """Counts of the reply to commit where it has them: requests that drained for it belong to the time before."""
        self._at_commit[str(status["instance"])] = reply.get("speculation_counts") or _counts(status)

    def before(self, status: Mapping[str, Any], *, committed: bool) -> dict[str, float]:
        """Acceptance since the commit before this publish; without one, since the engine's start."""
        instance, now = str(status["instance"]), _counts(status)
        if committed:
            now = self._at_commit.get(instance, now)
        return acceptance(self._at_last_commit.get(instance, {}), now)

    def measure(self, report: PublishReport, engines: Sequence[EngineControl], deadline_s: float) -> PublishReport:
        """`report` with `speculation_after` of every engine that answers and has generated since its last commit."""
        asked = [(e.name, start_call(e.status, deadline_s=deadline_s)) for e in engines]
        found: dict[str, dict[str, float]] = {}
        for name, future in asked:
            try:
                status = future.result(deadline_s + 1)
            except (WeightSyncError, concurrent.futures.TimeoutError):
                continue  # it is not there to be measured: that is for the next publish to say
            if (then := self._at_commit.get(str(status["instance"]))) is not None:
                found[name] = acceptance(then, _counts(status))
        measured = [dataclasses.replace(e, speculation_after=found.get(e.name, {})) for e in report.engines]
        return dataclasses.replace(report, engines=tuple(measured))


def _counts(status: Mapping[str, Any]) -> Counts:
    return status.get("speculation_counts") or {}
