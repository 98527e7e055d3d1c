"""What a publish to an engine guarantees, by name: one vocabulary for engine status, reports, configuration and doctor.

An engine in which weightsync's own part is at work gives all of them. A control client that drives an engine's own,
stock way says in `status()["missing_guarantees"]` (name -> why, and how to get it) which ones that way lacks; the
report repeats it, and `PublishConfig(require=...)` refuses such an engine before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.errors import ConfigError, UnsupportedError

__all__ = ["GUARANTEES", "check_names", "check_required", "missing"]

GUARANTEES: Mapping[str, str] = {
    "all_rank_acks": "every rank acknowledges every byte",
    "atomic_commit": "target and drafts change at once, or the engine is fenced until a full publish",
    "one_receive": "target and drafts are loaded from one receive",
    "prefix_cache": "no cached prefix outlives its version",
    "routing": "routes and coverage are proved before anything is written",
}
"""Name -> what it says."""


def missing(status: Mapping[str, Any]) -> dict[str, str]:
    """Of an engine's status: guarantee -> why it is missing and how to get it; empty: it gives all of them."""
    return dict(status.get("missing_guarantees") or {})


def check_names(names: Sequence[str]) -> None:
    """Raises `ConfigError` for names that are no guarantees."""
    if isinstance(names, str) or (unknown := sorted(set(names) - set(GUARANTEES))):
        wrong = names if isinstance(names, str) else unknown
        raise ConfigError(f"require: {wrong!r}; expected a list of guarantees out of {', '.join(GUARANTEES)}")


def check_required(engine: str, status: Mapping[str, Any], required: Sequence[str]) -> None:
    """Raises `UnsupportedError` if the engine lacks a guarantee that the caller requires."""
    lacking = {name: why for name, why in missing(status).items() if name in required}
    if lacking:
        text = "; ".join(f"{name} ({GUARANTEES[name]}): {why}" for name, why in lacking.items())
        raise UnsupportedError(f"engine {engine} does not give what PublishConfig(require=...) asks for: {text}")
