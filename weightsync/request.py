"""What a user asks a publisher for, checked: version, scope, deadline. Equal on every trainer rank."""

from __future__ import annotations

import dataclasses
from typing import Literal, cast

from weightsync import errors

__all__ = ["Request", "Scope", "roles_in_scope", "scope_of"]

Scope = Literal["target", "draft", "both"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for; equal on every trainer rank."""

    version: int
    label: str | None
    scope: Scope
    force: bool
    deadline_s: float


def roles_in_scope(scope: Scope, roles: frozenset[str]) -> frozenset[str]:
    """The published roles that a scope covers: `target` itself, every other role is a draft's."""
    match scope:
        case "target":
            return roles & {"target"}
        case "draft":
            return roles - {"target"}
        case _:
            return roles


def scope_of(text: str) -> Scope:
    """Checks a scope given by a user. Raises `ConfigError`."""
    if text not in ("target", "draft", "both"):
        raise errors.ConfigError(f"scope is {text!r}; expected 'target', 'draft' or 'both'")
    return cast("Scope", text)
