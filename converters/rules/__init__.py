"""The rule engine: operations on full tensors, rule tables, and what they become for one model."""

from converters.rules.names import canonical_name
from converters.rules.ruleset import Accounting, RuleSet, TensorMapping, TensorMeta, account
from converters.rules.table import Copy, Family, Row, Section, build

__all__ = [
    "Accounting",
    "Copy",
    "Family",
    "Row",
    "RuleSet",
    "Section",
    "TensorMapping",
    "TensorMeta",
    "account",
    "build",
    "canonical_name",
]
