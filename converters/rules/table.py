"""The form in which a family's rules are written down, and its expansion into mappings.

A `Family` is a list of `Section`s (embedding, decoder layers, MTP layers, ...) in streaming order; a section is a list
of `Row`s under a prefix on each side, repeated per layer. Rows are data: names, the op that links them, and conditions
on the config. Name templates know

    {i}   the layer, from 0 in its section; {j}  `i` plus the section's `first` (layers numbered on from others)
    {e}   the expert: a row with `each` is repeated per expert if both sides use {e}; a side that alone uses it lists
          all experts in one mapping (packed experts)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from converters.errors import ConfigMismatch
from converters.rules.config import ModelConfig
from converters.rules.encodings import Encoding, fp8_blocks
from converters.rules.names import Spelling
from converters.rules.ops import Chain, Copies, Op, Same
from converters.rules.ruleset import RuleSet, TensorMapping

__all__ = ["Copy", "Family", "Row", "Section", "build", "under"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A further name of a row's tensor, `when` the config says so: tied heads, embeddings repeated in an MTP layer.

    Hugging Face name `hf` is read, compared and written iff the source has it or the caller asks for it. Megatron name
    `mcore` is known to repeat the row's tensor, and never mapped. `repeat` copies are numbered by {i} and {j}.
    """

    when: Callable[[ModelConfig], bool]
    hf: str
    mcore: str | None = None
    repeat: Callable[[ModelConfig], int] | None = None
    first: Callable[[ModelConfig], int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One mapping: Megatron name(s), Hugging Face name(s), and the op between them (default: the same tensor).

    The row holds `when` the config says so, `at` the layers that are of its kind (one MoE layer in two, three linear
    attentions in four). An `optional` row's tensors may be absent from a model.
    """

    mcore: str | tuple[str, ...]
    hf: str | tuple[str, ...]
    op: Callable[[ModelConfig], Op] = dataclasses.field(default=lambda config: Same(), kw_only=True)
    when: Callable[[ModelConfig], bool] = dataclasses.field(default=lambda config: True, kw_only=True)
    at: Callable[[ModelConfig, int], bool] = dataclasses.field(default=lambda config, layer: True, kw_only=True)
    each: Callable[[ModelConfig], int] | None = dataclasses.field(default=None, kw_only=True)
    optional: bool = dataclasses.field(default=False, kw_only=True)
    copies: tuple[Copy, ...] = dataclasses.field(default=(), kw_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Rows under a prefix on each side, for each of `repeat` layers. A section with a `group` loads as one."""

    rows: tuple[Row, ...]
    mcore: str = ""
    hf: str = ""
    repeat: Callable[[ModelConfig], int] = lambda config: 1
    first: Callable[[ModelConfig], int] = lambda config: 0
    role: str = "target"
    group: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family. `defaults` are what its config class assumes for absent keys.

    `dialects` are prefixes that writers use in place of the first of them, which is the one in the table. `check`
    raises ConfigMismatch for a config that the rules do not cover. A `part` of a larger model: its key in the config,
    and the prefix that the table's (second) has in the whole (third).
    """

    name: str
    architectures: tuple[str, ...]
    sections: tuple[Section, ...]
    model_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spellings: tuple[Spelling, ...] = ()
    dialects: tuple[str, ...] = ()
    part: tuple[str, str, str] | None = None
    encoding: Callable[[ModelConfig], Encoding | None] = fp8_blocks
    check: Callable[[ModelConfig], None] = lambda config: None


def under(rows: tuple[Row, ...], *, mcore: str = "", hf: str = "") -> tuple[Row, ...]:
    """`rows` under a further prefix on each side."""

    def prefixed(prefix: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return prefix + names if isinstance(names, str) else tuple(prefix + name for name in names)

    return tuple(dataclasses.replace(r, mcore=prefixed(mcore, r.mcore), hf=prefixed(hf, r.hf)) for r in rows)


def build(
    family: Family,
    values: Mapping[str, Any],
    *,
    names: Collection[str] | None = None,
    emit_copies: bool = False,
    dialect: str | None = None,
) -> RuleSet:
    """Expands `family` for one config. `names` are the source's tensor names, if known.

    Raises:
        ConfigMismatch: the config lacks or contradicts a value.
    """
    have = frozenset(names or ())
    if family.part:
        key, own, whole = family.part
        if not isinstance(values.get(key), Mapping):
            raise ConfigMismatch(f"config has no {key!r}, which the {family.name} rules need")
        values = {**values, **values[key]}

        def spelled(name: str) -> str:
            return whole + name.removeprefix(own) if name.startswith(own) else name
    else:

        def spelled(name: str) -> str:
            return _in_dialect(name, family.dialects, dialect)

    config = ModelConfig(family=family.name, values=values, defaults=family.defaults, names=have)
    family.check(config)
    encoding = family.encoding(config)
    if dialect is not None and dialect not in family.dialects:
        raise ConfigMismatch(f"{family.name} has no dialect {dialect!r}; it has {list(family.dialects)}")
    if dialect is None and family.dialects:
        dialect = next((d for d in family.dialects if any(n.startswith(d) for n in have)), family.dialects[0])

    def hf_copies(row: Row) -> tuple[str, ...]:
        found = (hf for copy in row.copies if copy.when(config) for hf, _ in _copy_names(copy, config))
        return tuple(hf for hf in found if emit_copies or hf in have)

    mappings: list[TensorMapping] = []
    mcore_copies: dict[str, str] = {}
    for section in family.sections:
        for i in range(section.repeat(config)):
            at = {"i": i, "j": section.first(config) + i}
            group = section.group.format(**at) if section.group else None
            for row in section.rows:
                if not (row.when(config) and row.at(config, i)):
                    continue
                op = row.op(config)
                for mcore, hf in _names(section, row, config, at):
                    copies = hf_copies(row)
                    mappings.append(
                        TensorMapping(
                            mcore=mcore,
                            hf=tuple(spelled(n) for n in hf + copies),
                            op=Chain((Copies(1 + len(copies)), op)) if copies else op,
                            role=section.role,
                            group=group or (mcore[0] if len(hf) > 1 else None),
                            optional=row.optional,
                            encoding=encoding,
                        )
                    )
                    for copy in row.copies:
                        if copy.when(config):
                            mcore_copies |= {name: mcore[0] for _, name in _copy_names(copy, config) if name}
    return RuleSet(
        family=family.name,
        config=config,
        all_mappings=tuple(mappings),
        mcore_copies=mcore_copies,
        spellings=family.spellings,
    )


def _names(
    section: Section, row: Row, config: ModelConfig, at: Mapping[str, int]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(mcore, hf) names of each mapping that `row` stands for in one layer."""
    templates = [
        tuple(prefix + name for name in ((side,) if isinstance(side, str) else side))
        for prefix, side in ((section.mcore, row.mcore), (section.hf, row.hf))
    ]
    experts = range(row.each(config)) if row.each else range(1)
    per_expert = [any("{e}" in name for name in side) for side in templates]
    if all(per_expert):
        for e in experts:
            mcore, hf = (tuple(name.format(e=e, **at) for name in side) for side in templates)
            yield mcore, hf
        return
    # Packed: the side that numbers experts lists them all, expert by expert.
    mcore, hf = (
        tuple(name.format(e=e, **at) for e in (experts if numbered else range(1)) for name in side)
        for side, numbered in zip(templates, per_expert, strict=True)
    )
    yield mcore, hf


def _copy_names(copy: Copy, config: ModelConfig) -> Iterator[tuple[str, str | None]]:
    first = copy.first(config) if copy.first else 0
    for i in range(copy.repeat(config) if copy.repeat else 1):
        yield copy.hf.format(i=i, j=first + i), copy.mcore and copy.mcore.format(i=i, j=first + i)


def _in_dialect(name: str, dialects: tuple[str, ...], dialect: str | None) -> str:
    if dialect and name.startswith(dialects[0]):
        return dialect + name.removeprefix(dialects[0])
    return name
