"""What the adapters read from the environment of an engine's processes: here, and nowhere else."""

from __future__ import annotations

import dataclasses
import os

from weightsync.engines.capabilities import OPT_IN
from weightsync.errors import ConfigError

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Set in the environment that the engine is started in; its command line has no place for them."""

    bind_host: str = "127.0.0.1"
    """`WEIGHTSYNC_BIND_HOST`: address of this host that the trainer and the other engines reach."""
    name: str | None = None
    """`WEIGHTSYNC_ENGINE_NAME`: for messages of the engine's own log."""
    allow_untested: bool = False
    """`WEIGHTSYNC_ALLOW_UNTESTED_ENGINE=1`: use this adapter with versions after those that were tested."""

    @classmethod
    def from_environment(cls) -> Settings:
        """Raises `ConfigError`."""
        opt_in = os.environ.get(OPT_IN, "0")
        if opt_in not in ("0", "1"):
            raise ConfigError(f"{OPT_IN} is {opt_in!r}; expected 0 or 1")
        return cls(
            bind_host=os.environ.get("WEIGHTSYNC_BIND_HOST", "127.0.0.1"),
            name=os.environ.get("WEIGHTSYNC_ENGINE_NAME"),
            allow_untested=opt_in == "1",
        )
