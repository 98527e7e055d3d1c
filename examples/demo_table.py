"""The demo's table: one row per publish, and what must hold for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.report import PublishReport
from weightsync.timeline import PHASES

Answer = Mapping[str, Any]
"""An engine's reply: `tokens`, `proposed`, `accepted`, `versions`."""

_PHASE_WIDTHS = {phase: len(phase.removeprefix("load_")) for phase in PHASES}
_PHASE_NAMES = " ".join(phase.removeprefix("load_") for phase in PHASES)
_FALLEN = 0.5
"""A draft that was left behind gets at most this part of the acceptance of its successor."""

HEADER = "\n".join(
    (
        f"{'':28} {'milliseconds of the slowest process, by phase':^{len(_PHASE_NAMES)}}"
        f" {'bytes to':>9} {'acceptance':^18} {'like fresh':>13}",
        f"version scope   loss publish {_PHASE_NAMES} {'each rank':>9} before after fresh tokens accept",
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One publish: its report, the answers of every engine before and after it, and those of an engine that loaded the
    same version from a folder."""

    report: PublishReport
    loss: float
    before: Sequence[Answer]
    after: Sequence[Answer]
    fresh: Answer

    @property
    def same_tokens(self) -> bool:
        return all(a["tokens"] == self.fresh["tokens"] for a in self.after)

    @property
    def same_acceptance(self) -> bool:
        counts = ("proposed", "accepted")
        return all(a[c] == self.fresh[c] for a in self.after for c in counts)

    def __str__(self) -> str:
        r = self.report
        # Phases overlap, and a scope may lack one.
        phases = [f"{1e3 * r.phases[p]:{w}.0f}" if p in r.phases else "-".rjust(w) for p, w in _PHASE_WIDTHS.items()]
        return " ".join(
            (
                f"{r.version:7} {r.scope:6} {self.loss:5.2f} {1e3 * r.seconds:7.0f}",
                *phases,
                f"{r.wire_bytes:9,}",
                f"{acceptance(self.before):6.2f} {acceptance(self.after):5.2f} {acceptance([self.fresh]):5.2f}",
                f"{_yes_no(self.same_tokens):>6} {_yes_no(self.same_acceptance):>6}",
            )
        )


def acceptance(answers: Sequence[Answer]) -> float:
    """Share of the proposed draft tokens that the targets accepted."""
    return sum(a["accepted"] for a in answers) / sum(a["proposed"] for a in answers)


def problems(rows: Sequence[Row], versions: int) -> list[str]:
    """What does not hold, for a run that should have published `versions` versions."""
    wrong = []
    for row in rows:
        r = row.report
        where = f"version {r.version}, scope {r.scope}"
        for engine, answer in zip(r.engines, row.after, strict=True):
            runners = answer["versions"] if r.scope == "both" else {"target": answer["versions"]["target"]}
            if engine.outcome != "committed" or set(runners.values()) != {r.version}:
                wrong.append(f"{where}: {engine.name} is {engine.outcome} and serves {answer['versions']}")
            if set(engine.bytes_received) != {r.wire_bytes}:
                wrong.append(f"{where}: {engine.name} received {engine.bytes_received} bytes, not {r.wire_bytes} each")
        if not row.same_tokens:
            wrong.append(f"{where}: tokens differ from those of the fresh engine")
        if r.scope == "both" and not row.same_acceptance:
            wrong.append(f"{where}: acceptance differs from that of the fresh engine")
    if [*dict.fromkeys(row.report.version for row in rows)] != [*range(1, versions + 1)]:
        wrong.append(f"{len(rows)} publishes do not make versions 1 to {versions}")
        return wrong
    both, target_only = (_of_scope(rows, scope) for scope in ("both", "target"))
    if len(both) > 1 and not acceptance(both[-1].after) > acceptance(both[0].after):
        wrong.append("acceptance did not rise from the first version to the last")
    left_behind, kept = acceptance(target_only[-1].after), acceptance([target_only[-1].fresh])
    if not left_behind <= _FALLEN * kept:
        wrong.append(f"acceptance without the draft is {left_behind:.2f}, with it {kept:.2f}: no fall")
    return wrong


def summary(rows: Sequence[Row]) -> str:
    """The one line that says what target-only publishing costs."""
    row = _of_scope(rows, "target")[-1]
    version = row.report.version
    draft_version = min(min(a["versions"].values()) for a in row.after)
    return (
        f"Target {version} beside draft {draft_version}: acceptance {acceptance(row.after):.2f}. "
        f"Both of version {version}: {acceptance([row.fresh]):.2f}."
    )


def _of_scope(rows: Sequence[Row], scope: str) -> list[Row]:
    return [row for row in rows if row.report.scope == scope]


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
