"""Every error that `converters` raises.

    ConverterError
    ├── ConfigMismatch (ValueError)          a Hugging Face config lacks or contradicts a value that the rules need
    ├── UnsupportedFamilyError (ValueError)  no rule set for this architecture
    ├── MappingError (ValueError)            unmapped, missing or duplicate names; shapes or dtypes that do not fit
    ├── TopologyError (ValueError)           sizes of parallel groups that fit neither world nor model
    ├── LiveModelError (RuntimeError)        a live model whose parameters cannot be exported as they are
    └── FolderError (OSError)                a folder that cannot be read or written as a checkpoint

Messages say which tensor or key, what was got and expected, and the next step.
"""

from __future__ import annotations

__all__ = [
    "ConfigMismatch",
    "ConverterError",
    "FolderError",
    "LiveModelError",
    "MappingError",
    "TopologyError",
    "UnsupportedFamilyError",
]


class ConverterError(Exception):
    """Root of everything that `converters` raises on purpose."""


class ConfigMismatch(ConverterError, ValueError):
    """The Hugging Face config lacks a value that the rules need, or holds one that cannot be."""


class UnsupportedFamilyError(ConverterError, ValueError):
    """No rule set knows this architecture."""


class MappingError(ConverterError, ValueError):
    """Tensors and rules do not fit: names unmapped, missing or given twice, a wrong shape or dtype."""


class TopologyError(ConverterError, ValueError):
    """Sizes of parallel groups that fit neither the world nor the model."""


class LiveModelError(ConverterError, RuntimeError):
    """The parameters of a live model do not hold the weights as they are: offloaded, quantised, stale, sharded."""


class FolderError(ConverterError, OSError):
    """Not a checkpoint folder, or one that cannot be read or written."""
