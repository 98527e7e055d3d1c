"""Every error that `checkpoint` raises.

    CheckpointError
    ├── ConfigError (ValueError)     an option or an argument that cannot work; unknown options too
    ├── FormatError                  a file is not what its name says: damaged, truncated, of another kind
    │   ├── DigestError              bytes differ from what was sealed
    │   └── CoverageError            shards overlap, leave holes, or something is missing from a checkpoint or a model
    ├── DiskError                    a folder, a disk or a quota does not take what a save needs
    ├── SaveError                    a save ended without a committed checkpoint; names rank, host, phase, bytes
    │   └── WriterLost               this rank's writer process died or stalled
    ├── LoadError                    no candidate could be loaded; lists every one with its reason. Or: the optimizer
    │                                was saved as a chain of another length
    ├── StorageError                 durable storage refuses or does not answer
    └── StoreLost                    the coordinator's store does not answer; names its address

Messages say what went wrong, where (step, rank, path), what was got and expected, and the next step.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CoverageError",
    "DigestError",
    "DiskError",
    "FormatError",
    "LoadError",
    "SaveError",
    "StorageError",
    "StoreLost",
    "WriterLost",
]


class CheckpointError(Exception):
    """Root of everything that `checkpoint` raises on purpose."""


class ConfigError(CheckpointError, ValueError):
    """An option or an argument cannot work."""


class FormatError(CheckpointError):
    """A file is not what its name says."""


class DigestError(FormatError):
    """Bytes differ from what was sealed."""


class CoverageError(FormatError):
    """Shards overlap or leave holes, or a key is missing on one side."""


class DiskError(CheckpointError):
    """A folder, a disk or a quota does not take what a save needs."""


class SaveError(CheckpointError):
    """A save ended without a committed checkpoint."""


class WriterLost(SaveError):
    """This rank's writer process died or stalled."""


class LoadError(CheckpointError):
    """No candidate could be loaded."""


class StorageError(CheckpointError):
    """Durable storage refuses or does not answer."""


class StoreLost(CheckpointError):
    """The coordinator's store does not answer."""
