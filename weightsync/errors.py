"""Every error that `weightsync` raises.

    WeightSyncError
    ├── ConfigError (ValueError)            an argument or configuration value that cannot work
    ├── ManifestError (ValueError)          what a source declares or sends does not fit the plan
    ├── RoutingError (ValueError)           unknown, missing, duplicate, misshapen or miscast tensors
    ├── UnsupportedError                    asked for something that this engine or transport can't do
    ├── VersionError (ValueError)           an older version than the engines serve, not forced
    ├── AuthError (PermissionError)         a missing or wrong key or nonce
    ├── TransportError                      bytes did not arrive
    │   ├── TransferTimeout (TimeoutError)  ... before the deadline
    │   └── PeerLost (ConnectionError)      ... because the other side is gone
    ├── EngineError                         an engine said no, or said nothing
    │   └── EngineFenced                    it does not serve until a full publish succeeds
    └── PublishError                        the verdict of a publish was not "committed"
        ├── PreflightError                  nothing was changed: the old version still serves
        └── PublishAborted                  after begin: named engines are fenced

Messages say what went wrong, where (engine, rank, phase, bytes done), what was got and expected, and the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.report import PublishReport

__all__ = [
    "AuthError",
    "ConfigError",
    "EngineError",
    "EngineFenced",
    "ManifestError",
    "PeerLost",
    "PreflightError",
    "PublishAborted",
    "PublishError",
    "RoutingError",
    "TransferTimeout",
    "TransportError",
    "UnsupportedError",
    "VersionError",
    "WeightSyncError",
]


class WeightSyncError(Exception):
    """Root of everything that `weightsync` raises on purpose."""


class ConfigError(WeightSyncError, ValueError):
    """An argument or configuration value that cannot work."""


class ManifestError(WeightSyncError, ValueError):
    """A source declares tensors that cannot be planned, or sends others than it declared."""


class RoutingError(WeightSyncError, ValueError):
    """Published tensors and live modules do not fit together; raised before anything is written."""


class UnsupportedError(WeightSyncError):
    """The engine or transport at hand cannot do what was asked."""


class VersionError(WeightSyncError, ValueError):
    """The version to publish is older than the one served, and `force` was not given."""


class AuthError(WeightSyncError, PermissionError):
    """A missing or wrong API key, run id or nonce."""


class TransportError(WeightSyncError):
    """Bytes did not arrive. `peer` names the other side, `bytes_done` how far it got."""

    def __init__(self, message: str, *, peer: str | None = None, bytes_done: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        self.bytes_done = bytes_done


class TransferTimeout(TransportError, TimeoutError):
    """The deadline passed first."""


class PeerLost(TransportError, ConnectionError):
    """The other side closed its connection or died."""


class EngineError(WeightSyncError):
    """An engine refused or failed. `engine`, `rank`, `phase` say where; `remote` is its traceback, as text."""

    def __init__(
        self,
        message: str,
        *,
        engine: str | None = None,
        rank: int | None = None,
        phase: str | None = None,
        remote: str | None = None,
    ) -> None:
        super().__init__(message)
        self.engine = engine
        self.rank = rank
        self.phase = phase
        self.remote = remote


class EngineFenced(EngineError):
    """The engine holds no complete version: it refuses to generate until a full publish succeeds."""


class PublishError(WeightSyncError):
    """A publish did not commit everywhere. `report` tells the state of every engine."""

    def __init__(self, message: str, *, report: PublishReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class PreflightError(PublishError):
    """Refused before anything was changed: every engine still serves the version it had."""


class PublishAborted(PublishError):
    """Failed after begin: the engines that the report names as fenced do not serve until the next full publish."""
