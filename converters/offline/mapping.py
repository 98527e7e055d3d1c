"""From a source's headers to every tensor of the other side: which stored elements it is made of, and in which dtype.

Nothing here reads data or writes. `to_mcore` and `to_hf` run a model's rules on `Layout`s, and refuse a source that the
rules do not use up exactly: unmapped, missing, twice, or of shapes that do not fit. `converters.offline.targets` turns
the result into files, `converters.offline.check` compares it with what a folder holds.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from converters.errors import MappingError
from converters.offline.keys import is_optimizer, weights_of
from converters.offline.layout import Layout, join, leaf, used_once
from converters.offline.sources import Header
from converters.rules.encodings import Encoding
from converters.rules.ops import Chain, Copies, Op, Rows
from converters.rules.ruleset import RuleSet, TensorMapping, account

__all__ = ["Decoded", "DtypePolicy", "Mapped", "Output", "megatron_weights", "to_hf", "to_mcore"]

KEEP_DTYPE = ("*.A_log", "*.dt_bias", "*.expert_bias", "*e_score_correction_bias")
"""Tensors that models keep in fp32 beside bf16 weights: `--dtype` leaves them as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DtypePolicy:
    """Dtype of what is written: `reference` (by name) if `dtype` is not given; integers are never cast.

    `dtype` spares what matches `keep`. Without either a tensor keeps its dtype.
    """

    dtype: torch.dtype | None = None
    keep: tuple[str, ...] = KEEP_DTYPE
    reference: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)

    def of(self, name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        if self.dtype is not None:
            return stored if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keep) else self.dtype
        wanted = self.reference.get(name, stored)
        return wanted if wanted.is_floating_point and wanted.itemsize > 1 else stored


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """A weight that is stored as several tensors, under its own name in layouts."""

    encoding: Encoding
    stored: tuple[str, ...]
    header: Header


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """`blocks`: row counts of the parts that Megatron shards one by one (`Op.blocks`)."""

    layout: Layout
    dtype: torch.dtype
    role: str = "target"
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass(kw_only=True, slots=True)
class Mapped:
    """All tensors of the other side, in streaming order. `equal` must hold the same bytes (tied tensors)."""

    tensors: dict[str, Output] = dataclasses.field(default_factory=dict)
    decoded: dict[str, Decoded] = dataclasses.field(default_factory=dict)
    equal: list[tuple[Layout, Layout, str]] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    carried: list[str] = dataclasses.field(default_factory=list)
    ignored: list[str] = dataclasses.field(default_factory=list)
    optimizer: list[str] = dataclasses.field(default_factory=list)
    padding: dict[str, int] = dataclasses.field(default_factory=dict)
    """Elements of vocabulary padding that are cut off, by stored name."""

    @property
    def nbytes(self) -> int:
        return sum(o.layout.numel() * o.dtype.itemsize for o in self.tensors.values())

    def casts(self) -> dict[str, int]:
        """Number of tensors by "from -> to", where the dtype changes; decoding is not a cast."""
        pairs = ((o.layout.dtype, o.dtype) for o in self.tensors.values())
        return dict(collections.Counter(f"{_name(a)} -> {_name(b)}" for a, b in pairs if a != b))


def matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def to_mcore(
    headers: Mapping[str, Header],
    rules: RuleSet,
    *,
    policy: DtypePolicy,
    drop: Collection[str] = (),
    carry: Collection[str] = (),
    what: str,
) -> Mapped:
    """Canonical Megatron weights out of Hugging Face tensors.

    Raises:
        MappingError: names or shapes do not fit the rules; nothing was read.
    """
    mapped = Mapped()
    mapped.dropped = [name for name in headers if matches(name, drop)]
    names = [name for name in headers if not matches(name, drop)]
    used = _accounted(rules, names, "hf", drop, carry, mapped, what)
    for mapping in used:
        leaves = tuple(_hf_leaf(mapping, name, headers, mapped) for name in mapping.hf)
        outputs = _run(mapping.op.to_mcore, leaves, mapping, what)
        copies = _copies(mapping.op)
        mapped.equal += [
            (leaves[0], other, f"{mapping.hf[0]} and {name}, which the config ties")
            for name, other in zip(mapping.hf[1 : 1 + copies], leaves[1 : 1 + copies], strict=True)
        ]
        sizes = {n: t.numel() for n, t in zip(mapping.hf, leaves, strict=True) if n not in mapping.hf[1 : 1 + copies]}
        if rest := {name: n for name, n in used_once(outputs, sizes).items() if n}:
            raise MappingError(f"{what}: the {rules.family} rules leave elements of {rest} unused")
        for name, tensor in zip(mapping.mcore, outputs, strict=True):
            mapped.tensors[name] = Output(
                layout=tensor,
                dtype=policy.of(name, tensor.dtype),
                role=mapping.role,
                blocks=mapping.blocks(name),
            )
    for name in mapped.carried:
        mapped.tensors[name] = Output(layout=leaf(name, *headers[name]), dtype=headers[name].dtype)
    return mapped


def to_hf(
    headers: Mapping[str, Header],
    rules: RuleSet,
    *,
    policy: DtypePolicy,
    drop: Collection[str] = (),
    carry: Collection[str] = (),
    what: str,
) -> Mapped:
    """Hugging Face tensors out of the stored tensors of a Megatron checkpoint.

    Raises:
        MappingError: names or shapes do not fit the rules; nothing was read.
    """
    mapped = Mapped()
    mapped.optimizer = [key for key in headers if is_optimizer(key)]
    left_out = {*mapped.optimizer, *(key for key in headers if matches(key, [*drop, *carry]))}
    weights = megatron_weights({k: h for k, h in headers.items() if k not in left_out}, rules)
    mapped.dropped = [key for key in headers if key in left_out and matches(key, drop)]
    mapped.dropped += [name for name in weights if matches(name, drop)]
    mapped.carried = [key for key in headers if key in left_out and matches(key, carry) and not matches(key, drop)]
    names = [name for name in weights if not matches(name, drop)]
    for mapping in _accounted(rules, names, "mcore", drop, (), mapped, what):
        leaves = tuple(weights[name] for name in mapping.mcore)
        outputs = _run(mapping.op.to_hf, leaves, mapping, what)
        copies = _copies(mapping.op)
        distinct = [*outputs[:1], *outputs[1 + copies :]] if copies else outputs
        _note_padding(leaves, distinct, mapping, mapped, what)
        for name, tensor in zip(mapping.hf, outputs, strict=True):
            mapped.tensors[name] = Output(layout=tensor, dtype=policy.of(name, tensor.dtype), role=mapping.role)
    for name, source in rules.mcore_copies.items():
        if name in weights and source in weights and weights[name].shape == weights[source].shape:
            mapped.equal.append((weights[source], weights[name], f"{source} and {name}, which the config ties"))
    for key in mapped.carried:
        mapped.tensors[key] = Output(layout=leaf(key, *headers[key]), dtype=headers[key].dtype)
    return mapped


def megatron_weights(headers: Mapping[str, Header], rules: RuleSet | None) -> dict[str, Layout]:
    """Full weights by canonical name, put together from what a checkpoint stores.

    Raises:
        MappingError: a part of a weight is missing or there twice, or parts have different dtypes.
    """
    parts: dict[str, dict[int, tuple[str, Layout]]] = {}
    for key, header in headers.items():
        for stored in weights_of(key, header.shape):
            name = rules.canonical(stored.name) if rules else stored.name
            found = parts.setdefault(name, {})
            if stored.part in found:
                raise MappingError(f"{found[stored.part][0]} and {key} are both {name}: which one holds?")
            found[stored.part] = (key, leaf(key, stored.shape, header.dtype, stored.start))
    out = {}
    for name, found in parts.items():
        pieces = [found[k][1] for k in sorted(found)]
        if sorted(found) != list(range(len(found))) or len({p.dtype for p in pieces}) != 1:
            keys = ", ".join(key for key, _ in found.values())
            raise MappingError(f"{name} is stored in parts ({keys}), of which some are missing or of another dtype")
        out[name] = pieces[0] if len(pieces) == 1 else join(pieces)
    return out


def _accounted(
    rules: RuleSet,
    names: Sequence[str],
    side: Any,
    drop: Collection[str],
    carry: Collection[str],
    mapped: Mapped,
    what: str,
) -> list[TensorMapping]:
    """The mappings that hold, once every name is used by exactly one of them."""
    found = account(rules, names, side)
    mapped.carried += [name for name in found.unmapped if matches(name, carry)]
    unmapped = tuple(name for name in found.unmapped if not matches(name, carry))
    missing = tuple(name for name in found.missing if not matches(name, drop))
    mapped.ignored += found.ignored
    dataclasses.replace(found, unmapped=unmapped, missing=missing).check(
        f"{what} against the {rules.family} rules" + _hint(unmapped, missing)
    )
    have = set(names)
    out = []
    for mapping in rules.mappings():
        wanted = mapping.mcore if side == "mcore" else mapping.hf_sources(have)
        there = [name for name in wanted if name in have]
        if len(there) == len(wanted):
            out.append(mapping)
        elif there and not mapping.optional:
            raise MappingError(
                f"{what}: {', '.join(n for n in wanted if n not in have)} dropped, but {', '.join(there)} of the same "
                f"weight kept: drop all of them or none"
            )
    return out


def _hint(unmapped: Sequence[str], missing: Sequence[str]) -> str:
    if unmapped and not missing:
        return " (--drop PATTERN leaves tensors out, --carry PATTERN copies them as they are)"
    if missing and not unmapped:
        return " (--drop PATTERN does without weights that are not there)"
    return ""


def _hf_leaf(mapping: TensorMapping, name: str, headers: Mapping[str, Header], mapped: Mapped) -> Layout:
    encoding = mapping.encoding
    stored = encoding.stored(name) if encoding else ()
    if encoding is None or any(s not in headers for s in stored):
        header = headers[name]
        if header.dtype.itemsize == 1 and header.dtype.is_floating_point:
            raise MappingError(f"{name} is {header.dtype} and has no scales: the weight cannot be decoded")
        return leaf(name, *header)
    try:
        header = _decoded_header(encoding, tuple(headers[s] for s in stored))
    except MappingError as e:
        raise MappingError(f"{name}: {e}") from e
    mapped.decoded[name] = Decoded(encoding=encoding, stored=stored, header=header)
    return leaf(name, *header)


@functools.lru_cache(1024)
def _decoded_header(encoding: Encoding, stored: tuple[Header, ...]) -> Header:
    """Shape and dtype of a decoded weight: of its first rows, which stand for all.

    Not by `meta` tensors: an operator on them can import torch's whole compiler.
    """
    rows = stored[0].shape[0]
    step = min(encoding.rows_together(stored[0].shape), rows)
    slices = []
    for header in stored:
        per = 1 if header.shape[0] == rows else step
        if header.shape[0] != -(-rows // per):
            raise MappingError(
                f"{header.shape[0]} rows of scales for {rows} rows of weights, expected {-(-rows // per)}"
            )
        slices.append(torch.zeros((-(-step // per), *header.shape[1:]), dtype=header.dtype))
    first = encoding.decode(tuple(slices))
    return Header((rows, *first.shape[1:]), first.dtype)


def _run(op: Callable[[Any], Any], leaves: Sequence[Layout], mapping: TensorMapping, what: str) -> Sequence[Layout]:
    try:
        outputs: Sequence[Layout] = op(tuple(leaves))
    except MappingError as e:
        raise MappingError(f"{what}: {' + '.join(mapping.hf)} <-> {' + '.join(mapping.mcore)}: {e}") from e
    return outputs


def _note_padding(
    leaves: Sequence[Layout], outputs: Sequence[Layout], mapping: TensorMapping, mapped: Mapped, what: str
) -> None:
    sizes: dict[str, int] = collections.Counter()
    for tensor in leaves:
        for block in tensor.blocks:
            sizes[block.source] = max(sizes[block.source], block.start + block.span)
    rest = used_once(outputs, sizes)
    used = sum(sizes.values()) - sum(rest.values())
    left = sum(t.numel() for t in leaves) - used
    if left and not _cuts_rows(mapping.op):
        raise MappingError(f"{what}: the rule of {', '.join(mapping.mcore)} leaves {left} elements unused")
    if left:
        mapped.padding[mapping.mcore[0]] = left


def _copies(op: Op) -> int:
    """How many of an operation's Hugging Face tensors after the first only repeat it."""
    first = op.ops[0] if isinstance(op, Chain) else op
    return first.count - 1 if isinstance(first, Copies) else 0


def _cuts_rows(op: Op) -> bool:
    return isinstance(op, Rows) or (isinstance(op, Chain) and any(_cuts_rows(o) for o in op.ops))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
