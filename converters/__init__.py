"""Hugging Face <-> Megatron-Core: one set of rules on full tensors for files and for live models.

`convert(src, dst)` converts a checkpoint on disk, as `ckpt convert` does. `rules_for(config)` gives the mappings of one
model, `account` checks that names and rules fit together. The offline side and the live exporter add files and
parallelism to these and change no rule.
"""

from converters.errors import ConfigMismatch, ConverterError, FolderError, MappingError, UnsupportedFamilyError
from converters.families import rules_for
from converters.offline import ConvertReport, convert
from converters.rules import Accounting, RuleSet, TensorMapping, TensorMeta, account, canonical_name

__all__ = [
    "Accounting",
    "ConfigMismatch",
    "ConvertReport",
    "ConverterError",
    "FolderError",
    "MappingError",
    "RuleSet",
    "TensorMapping",
    "TensorMeta",
    "UnsupportedFamilyError",
    "account",
    "canonical_name",
    "convert",
    "rules_for",
]
