"""What a publish did, for the user: outcome per engine, seconds by phase, bytes; JSON, so that every rank gets it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from weightsync.protocol import plain
from weightsync.timeline import PHASES

__all__ = ["EngineReport", "Measurements", "PublishReport", "acceptance"]

Outcome = Literal["committed", "noop", "refused", "aborted"]
EngineOutcome = Literal["committed", "noop", "untouched", "fenced", "dropped", "lost"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """One engine after one publish.

    `outcome`: `committed` serves the new version; `noop` had it already; `untouched` serves the version it had;
    `fenced` refuses to serve until the next full publish; `dropped` was left out of this publish (before the decision);
    `lost` failed after the decision and must rejoin.
    """

    name: str
    outcome: EngineOutcome
    error: str | None = None
    bytes_received: tuple[int, ...] = ()
    """By rank, counted in the transport, padding included."""
    num_tensors: int = 0
    loaded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Runner -> tensors loaded, of rank 0."""
    spanning_requests: tuple[Mapping[str, Any], ...] = ()
    """Requests that were kept running and so span two versions (pause mode `keep`)."""
    missing_guarantees: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Guarantee (`weightsync.guarantees`) that this engine's way of taking weights lacks -> why, and how to get it."""
    speculation_before: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """`spec_accept_rate` and `spec_accept_length` (tokens per step) of what was generated since this publisher's last
    commit (before its first: since the engine's start), by the engine's counters; empty without any."""
    speculation_after: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The same of what was generated since this commit: empty until `Publisher.measure_acceptance` looks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """One publish. `phases` holds the seconds of the slowest process in each phase of `timeline.PHASES`.

    Phases overlap (packing, wire and loading run at the same time), so they add up to more than `seconds`, the wall
    time from the call to the last engine serving again, measured on the coordinator.
    """

    version: int
    outcome: Outcome
    scope: str
    run_id: str
    label: str | None = None
    error: str | None = None
    epoch: int = 0
    attempts: int = 1
    seconds: float = 0.0
    num_tensors: int = 0
    num_buckets: int = 0
    payload_bytes: int = 0
    """Unique bytes of the published tensors."""
    wire_bytes: int = 0
    """Bytes that each engine rank received: payload and alignment padding."""
    engines: tuple[EngineReport, ...] = ()
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    phase_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    peak_extra_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Process -> peak memory during the publish minus that before it."""
    events: tuple[Mapping[str, Any], ...] = ()
    """Spans of every process, if tracing: `process`, `name`, `start_s`, `dur_s`, `args`."""

    def to_json(self) -> str:
        return json.dumps({**plain(self), "engines": [plain(e) for e in self.engines]}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PublishReport:
        obj = json.loads(text)
        obj["engines"] = tuple(
            [
                EngineReport(
                    **{
                        **e,
                        "bytes_received": tuple(e["bytes_received"]),
                        "spanning_requests": tuple(e["spanning_requests"]),
                    }
                )
                for e in obj["engines"]
            ]
        )
        obj["events"] = tuple(obj["events"])
        return cls(**obj)

    def metrics(self, prefix: str = "weightsync/") -> dict[str, float]:
        """A flat dict of numbers for W&B, TensorBoard or Prometheus."""
        out = {
            "version": float(self.version),
            "seconds": self.seconds,
            "payload_bytes": float(self.payload_bytes),
            "wire_bytes": float(self.wire_bytes),
            "engines_committed": float(sum(e.outcome in ("committed", "noop") for e in self.engines)),
            "engines_failed": float(sum(e.outcome in ("fenced", "dropped", "lost") for e in self.engines)),
            "attempts": float(self.attempts),
        }
        out |= {f"seconds_{p}": self.phases[p] for p in PHASES if p in self.phases}
        for when in ("before", "after"):
            found = [e.speculation_before if when == "before" else e.speculation_after for e in self.engines]
            for key in ("spec_accept_length", "spec_accept_rate"):
                values = [speculation[key] for speculation in found if key in speculation]
                if values:
                    out[f"{key}_{when}"] = sum(values) / len(values)
        out["guarantees_missing"] = float(len({name for e in self.engines for name in e.missing_guarantees}))
        return {prefix + k: v for k, v in out.items()}


class Measurements:
    """Timelines and memory of many processes, merged as `PublishReport` shows them."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.phase_bytes: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []

    def add(self, process: str, timeline: Mapping[str, Any], peak_extra_bytes: int | None) -> None:
        """`timeline` as `Timeline.to_json` gives it; of each phase the slowest process counts."""
        for phase, s in timeline.get("seconds", {}).items():
            self.phases[phase] = max(self.phases.get(phase, 0.0), s)
        for phase, n in timeline.get("nbytes", {}).items():
            self.phase_bytes[phase] = max(self.phase_bytes.get(phase, 0), n)
        self.events.extend({"process": process, **e} for e in timeline.get("events") or ())
        if peak_extra_bytes is not None:
            self.peaks[process] = peak_extra_bytes


def acceptance(then: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """`spec_accept_rate` (accepted share of the proposed tokens) and `spec_accept_length` (tokens per step, the
    target's own included) between two readings; empty if nothing was proposed."""
    drafts, proposed, accepted = (
        now.get(k, 0.0) - then.get(k, 0.0) for k in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts <= 0 or proposed <= 0:
        return {}
    return {"spec_accept_rate": accepted / proposed, "spec_accept_length": 1.0 + accepted / drafts}
