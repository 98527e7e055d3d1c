"""What a rule table becomes for one model: mappings between full tensors, looked up by either side's names.

Made by `converters.families.rules_for`; used by the live exporter (per mapping: gather, `to_hf`), by the offline
converter (`account` first, then per mapping) and by `ckpt inspect` (names and shapes only).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from converters.errors import MappingError
from converters.rules.config import ModelConfig
from converters.rules.encodings import Encoding
from converters.rules.names import SPELLINGS, Spelling, candidates, is_ignored
from converters.rules.ops import Op, Tensors

__all__ = ["Accounting", "RuleSet", "Side", "TensorMapping", "TensorMeta", "account"]

Side: TypeAlias = Literal["hf", "mcore"]
Headers: TypeAlias = Mapping[str, tuple[Sequence[int], torch.dtype]]


class TensorMeta(NamedTuple):
    """A tensor without its data."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorMapping:
    """The Hugging Face tensors `hf` and the Megatron tensors `mcore` (canonical names) that hold the same weights.

    `role` is "target" or "draft". Tensors with the same `group` are loaded as one by engines. An `optional` mapping
    may be absent as a whole. `op` takes the tensors in the order of `hf` and `mcore`.
    """

    mcore: tuple[str, ...]
    hf: tuple[str, ...]
    op: Op
    role: str = "target"
    group: str | None = None
    optional: bool = False
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        if (len(self.hf), len(self.mcore)) != (self.op.n_hf, self.op.n_mcore):
            raise MappingError(
                f"rule for {self.mcore[0]}: {len(self.hf)} -> {len(self.mcore)} names, but its operation takes "
                f"{self.op.n_hf} -> {self.op.n_mcore}"
            )

    def to_hf(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full Megatron tensors by canonical name -> contiguous Hugging Face tensors; both may share storage.

        Raises:
            MappingError: other names than `mcore`, or shapes or dtypes that do not fit.
        """
        return self._run(self.op.to_hf, self._pick(tensors, self.mcore), self.hf)

    def to_mcore(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inverse of `to_hf`. An encoded weight is given as its stored tensors (`hf_sources`) and decoded.

        Raises:
            MappingError: other names than `hf_sources`, or shapes or dtypes that do not fit.
        """
        names = self.hf_sources(tensors)
        values = dict(zip(names, self._pick(tensors, names), strict=True))
        return self._run(self.op.to_mcore, tuple(self._decode(name, values) for name in self.hf), self.mcore)

    def hf_meta(self, mcore: Headers) -> tuple[TensorMeta, ...]:
        """Names, shapes and dtypes of what `to_hf` would give."""
        return _metas(self.to_hf(_meta_tensors(mcore)))

    def mcore_meta(self, hf: Headers) -> tuple[TensorMeta, ...]:
        """Names, shapes and dtypes of what `to_mcore` would give."""
        return _metas(self.to_mcore(_meta_tensors(hf)))

    def hf_sources(self, present: Iterable[str]) -> tuple[str, ...]:
        """The names to read for `to_mcore` where the folder holds `present`: `hf`, encoded ones as stored."""
        have = present if isinstance(present, Mapping | set | frozenset) else set(present)
        out: list[str] = []
        for name in self.hf:
            stored = self.encoding.stored(name) if self.encoding else ()
            out.extend(stored if stored and all(s in have for s in stored) else (name,))
        return tuple(out)

    def blocks(self, mcore_name: str) -> tuple[int, ...]:
        """Sizes along dimension 0 of the parts that tensor parallelism shards one by one; see `Op.blocks`."""
        return self.op.blocks[self.mcore.index(mcore_name)]

    def _decode(self, name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.encoding and all(s in values for s in self.encoding.stored(name)):
            try:
                return self.encoding.decode(tuple(values[s] for s in self.encoding.stored(name)))
            except MappingError as e:
                raise MappingError(f"{name}: {e}") from e
        if values[name].dtype.itemsize == 1 and values[name].dtype.is_floating_point:
            raise MappingError(f"{name} is {values[name].dtype} and has no scales: the weight cannot be decoded")
        return values[name]

    def _pick(self, tensors: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> Tensors:
        if tensors.keys() != set(names):
            raise MappingError(f"mapping takes {sorted(names)}, got {sorted(tensors)}")
        return tuple(tensors[name] for name in names)

    def _run(
        self, run: Callable[[Tensors], Tensors], given: Tensors, names: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        try:
            results = run(given)
        except MappingError as e:
            raise MappingError(f"{' + '.join(self.hf)} <-> {' + '.join(self.mcore)}: {e}") from e
        return {name: tensor.contiguous() for name, tensor in zip(names, results, strict=True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSet:
    """All mappings of one model. `mcore_copies` names Megatron tensors that only repeat another (tied output layer):
    they have no mapping of their own and need not be read."""

    family: str
    config: ModelConfig
    all_mappings: tuple[TensorMapping, ...]
    mcore_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    spellings: tuple[Spelling, ...] = ()

    def __post_init__(self) -> None:
        for side in ("hf", "mcore"):
            counts = collections.Counter(name for m in self.all_mappings for name in getattr(m, side))
            if twice := [name for name, n in counts.items() if n > 1]:
                raise MappingError(f"{self.family} rules map {side} name {twice[0]!r} more than once")

    def mappings(self) -> Sequence[TensorMapping]:
        """In streaming order: embedding, layers ascending, final norm, output layer, then MTP layers."""
        return self.all_mappings

    def canonical(self, name: str) -> str:
        """The canonical spelling of Megatron name `name`: the first that this family knows."""
        options = candidates(name, SPELLINGS + self.spellings)
        return next((o for o in options if o in self._mcore or o in self.mcore_copies), options[-1])

    def by_mcore(self, name: str) -> TensorMapping | None:
        """The mapping of Megatron tensor `name`, in any spelling; None if unknown or only a copy (`mcore_copies`)."""
        return self._mcore.get(self.canonical(name))

    def by_hf(self, name: str) -> TensorMapping | None:
        """The mapping of Hugging Face tensor `name`, or of the encoded weight that it is a part of."""
        return self._hf.get(name)

    @functools.cached_property
    def _mcore(self) -> dict[str, TensorMapping]:
        return {name: m for m in self.all_mappings for name in m.mcore}

    @functools.cached_property
    def _hf(self) -> dict[str, TensorMapping]:
        out = {s: m for m in self.all_mappings if m.encoding for name in m.hf for s in m.encoding.stored(name)}
        return out | {name: m for m in self.all_mappings for name in m.hf}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """How names and rules fit together. `ignored` are known not to be weights, or only repeat another tensor."""

    unmapped: tuple[str, ...]
    missing: tuple[str, ...]
    duplicate: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.unmapped or self.missing or self.duplicate)

    def check(self, what: str) -> None:
        """Raises MappingError unless every name is used exactly once; `what` says whose names they are."""
        found = [
            f"{len(names)} {label} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for label in ("unmapped", "missing", "duplicate")
            if (names := getattr(self, label))
        ]
        if found:
            raise MappingError(f"{what}: {'; '.join(found)}. Do config and weights belong together?")


def account(ruleset: RuleSet, names: Iterable[str], side: Side = "hf") -> Accounting:
    """Checks that each of `names`, the tensors of a whole model on `side`, is used by exactly one mapping.

    Of a part of a model (one pipeline stage) `missing` is to be disregarded. Duplicates are names given twice, on the
    Megatron side also in two spellings.
    """
    counts: collections.Counter[str] = collections.Counter()
    ignored: list[str] = []
    for name in names:
        if is_ignored(name, side):
            ignored.append(name)
            continue
        counts[ruleset.canonical(name) if side == "mcore" else name] += 1
    find = ruleset.by_mcore if side == "mcore" else ruleset.by_hf
    unmapped = [name for name in counts if find(name) is None]
    if side == "mcore":
        ignored += [name for name in unmapped if name in ruleset.mcore_copies]
        unmapped = [name for name in unmapped if name not in ruleset.mcore_copies]
    missing: list[str] = []
    for mapping in ruleset.mappings():
        wanted = mapping.mcore if side == "mcore" else mapping.hf_sources(counts)
        absent = [name for name in wanted if name not in counts]
        if absent and not (mapping.optional and len(absent) == len(wanted)):
            missing += absent
    return Accounting(
        unmapped=tuple(unmapped),
        missing=tuple(missing),
        duplicate=tuple(name for name, n in counts.items() if n > 1 and name not in ruleset.mcore_copies),
        ignored=tuple(ignored),
    )


def _meta_tensors(headers: Headers) -> dict[str, torch.Tensor]:
    return {name: torch.empty(tuple(s), dtype=d, device="meta") for name, (s, d) in headers.items()}


def _metas(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(name, tuple(t.shape), t.dtype) for name, t in tensors.items())
