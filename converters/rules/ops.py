"""The algebra of layout changes: how the Hugging Face tensors of one mapping become its Megatron tensors, and back.

An `Op` turns a tuple of `n_hf` tensors into a tuple of `n_mcore` tensors; each class states both directions, and
`Chain`, `Par` and `Inverse` build larger ones, so a table never writes a direction twice. Tables (converters/families)
build ops, `TensorMapping` (rules/ruleset.py) runs them.

    Same               one tensor, as it is (a rename)
    concat, interleave parts joined along a dimension, as a whole or group by group (QKV of GQA, even/odd gate and up)
    Stack              equal tensors under a new leading axis (layers, packed experts)
    Reorder            another order within the tuple; `half_swap` exchanges the halves of one dimension
    Transpose          two dimensions exchanged
    Shift              a constant added (zero-centred norms)
    Rows               a vocabulary: rows of padding are cut on the way to Hugging Face
    Copies             one tensor under several Hugging Face names (tied or copied heads)
    Inverse, Par, Chain  backwards, side by side, one after the other (in the order Hugging Face -> Megatron)

All ops work on full tensors, on any device, `meta` included: that is how shapes are found without data. None casts.
Results may share storage with their inputs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import torch

from converters.errors import MappingError

__all__ = [
    "Chain",
    "Copies",
    "Inverse",
    "Op",
    "Par",
    "Reorder",
    "Rows",
    "Same",
    "Shift",
    "Stack",
    "Transpose",
    "concat",
    "half_swap",
    "interleave",
]

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Blocks: TypeAlias = tuple[int, ...]


class Op(abc.ABC):
    """A bijection between `n_hf` Hugging Face tensors and `n_mcore` Megatron tensors."""

    __slots__ = ()

    @property
    def n_hf(self) -> int:
        return 1

    @property
    def n_mcore(self) -> int:
        return 1

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """Per Megatron tensor: sizes along dimension 0 of the parts that tensor parallelism shards one by one.

        A rank's shard is then `[part_0 of the rank; part_1 of the rank; ...]`, so gathered shards must be regrouped.
        Empty for a tensor whose gathered shards only need concatenation.
        """
        return ((),) * self.n_mcore

    @abc.abstractmethod
    def to_mcore(self, hf: Tensors) -> Tensors:
        """Raises MappingError where shapes or dtypes do not fit."""

    @abc.abstractmethod
    def to_hf(self, mcore: Tensors) -> Tensors:
        """Raises MappingError where shapes or dtypes do not fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Same(Op):
    """The tensor as it is. `sharded` declares `blocks` of a tensor that Hugging Face stores joined already."""

    sharded: Blocks = ()

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        return (self.sharded,)

    def to_mcore(self, hf: Tensors) -> Tensors:
        return hf

    def to_hf(self, mcore: Tensors) -> Tensors:
        return mcore


@dataclasses.dataclass(frozen=True, slots=True)
class Join(Op):
    """Hugging Face parts joined along `dim`, `groups` times `[sizes[0] of part 0, sizes[1] of part 1, ...]`.

    Part k has `groups * sizes[k]` entries along `dim`. Use `concat` or `interleave`: with one group both lay out the
    same, but Megatron shards a concatenation part by part and an interleaving by raw rows (`apart`).
    """

    sizes: tuple[int, ...]
    groups: int
    dim: int
    apart: bool

    @property
    def n_hf(self) -> int:
        return len(self.sizes)

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        return (self.sizes if self.apart else (),)

    def to_mcore(self, hf: Tensors) -> Tensors:
        _same_dtype(hf)
        for part, size in zip(hf, self.sizes, strict=True):
            self._expect(part, size)
        grouped = [self._group(part, size) for part, size in zip(hf, self.sizes, strict=True)]
        for part in grouped:
            if _without(part.shape, self.dim + 1) != _without(grouped[0].shape, self.dim + 1):
                raise MappingError(f"parts to join along dimension {self.dim} have shapes {_shapes(hf)}")
        return (torch.cat(grouped, self.dim + 1).flatten(self.dim, self.dim + 1),)

    def to_hf(self, mcore: Tensors) -> Tensors:
        (whole,) = mcore
        self._expect(whole, sum(self.sizes))
        parts = self._group(whole, sum(self.sizes)).split_with_sizes(self.sizes, self.dim + 1)
        return tuple(part.flatten(self.dim, self.dim + 1) for part in parts)

    def _group(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        shape = tensor.shape
        return tensor.reshape(*shape[: self.dim], self.groups, size, *shape[self.dim + 1 :])

    def _expect(self, tensor: torch.Tensor, size: int) -> None:
        if tensor.dim() <= self.dim or tensor.shape[self.dim] != self.groups * size:
            raise MappingError(
                f"shape {tuple(tensor.shape)}, expected {self.groups} x {size} = {self.groups * size} along dimension "
                f"{self.dim}: the config (heads, groups, head_dim, intermediate size) and the weights disagree"
            )


def concat(sizes: Sequence[int], dim: int = 0) -> Join:
    """Parts one after the other (gate and up). Its `Inverse` splits one Hugging Face tensor into several keys."""
    return Join(tuple(sizes), 1, dim, apart=dim == 0)


def interleave(groups: int, sizes: Sequence[int], dim: int = 0) -> Join:
    """Parts group by group: QKV of GQA is `interleave(groups, (heads_per_group * head_dim, head_dim, head_dim))`."""
    return Join(tuple(sizes), groups, dim, apart=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Stack(Op):
    """`count` Hugging Face tensors of one shape under a new leading axis."""

    count: int

    @property
    def n_hf(self) -> int:
        return self.count

    def to_mcore(self, hf: Tensors) -> Tensors:
        _same_dtype(hf)
        if len({tuple(t.shape) for t in hf}) != 1:
            raise MappingError(f"tensors to stack have shapes {_shapes(hf)}")
        return (torch.stack(hf),)

    def to_hf(self, mcore: Tensors) -> Tensors:
        (whole,) = mcore
        if whole.dim() < 1 or whole.shape[0] != self.count:
            raise MappingError(f"shape {tuple(whole.shape)}, expected a leading axis of {self.count}")
        return whole.unbind(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Reorder(Op):
    """Megatron tensor k is Hugging Face tensor `order[k]`."""

    order: tuple[int, ...]

    @property
    def n_hf(self) -> int:
        return len(self.order)

    @property
    def n_mcore(self) -> int:
        return len(self.order)

    def to_mcore(self, hf: Tensors) -> Tensors:
        return tuple(hf[k] for k in self.order)

    def to_hf(self, mcore: Tensors) -> Tensors:
        return tuple(mcore[self.order.index(k)] for k in range(len(self.order)))


@dataclasses.dataclass(frozen=True, slots=True)
class Transpose(Op):
    """Dimensions `a` and `b` exchanged."""

    a: int
    b: int

    def to_mcore(self, hf: Tensors) -> Tensors:
        (tensor,) = hf
        if tensor.dim() <= max(self.a, self.b):
            raise MappingError(f"shape {tuple(tensor.shape)} has no dimensions {self.a} and {self.b} to transpose")
        return (tensor.transpose(self.a, self.b),)

    def to_hf(self, mcore: Tensors) -> Tensors:
        return self.to_mcore(mcore)


@dataclasses.dataclass(frozen=True, slots=True)
class Shift(Op):
    """Megatron stores the Hugging Face value plus `by` (zero-centred norms: -1), computed in the tensor's dtype.

    Hugging Face -> Megatron -> Hugging Face is exact for values in [0.5, 2] with `by=-1`; elsewhere a low-precision
    dtype rounds.
    """

    by: float

    def to_mcore(self, hf: Tensors) -> Tensors:
        return (self._add(hf, self.by),)

    def to_hf(self, mcore: Tensors) -> Tensors:
        return (self._add(mcore, -self.by),)

    @staticmethod
    def _add(tensors: Tensors, by: float) -> torch.Tensor:
        (tensor,) = tensors
        if not tensor.dtype.is_floating_point:
            raise MappingError(f"dtype {tensor.dtype}, expected a floating one: a shift of {by} would cast it")
        return tensor + by


@dataclasses.dataclass(frozen=True, slots=True)
class Rows(Op):
    """A vocabulary of `rows` rows: Megatron may hold more (padding); what goes to Hugging Face is cut to `rows`."""

    rows: int

    def to_mcore(self, hf: Tensors) -> Tensors:
        (tensor,) = hf
        if tensor.dim() < 1 or tensor.shape[0] != self.rows:
            raise MappingError(f"shape {tuple(tensor.shape)}, expected {self.rows} rows (the config's vocabulary)")
        return hf

    def to_hf(self, mcore: Tensors) -> Tensors:
        (tensor,) = mcore
        if tensor.dim() < 1 or tensor.shape[0] < self.rows:
            raise MappingError(
                f"shape {tuple(tensor.shape)}, expected at least {self.rows} rows (the config's vocabulary): "
                "is this one shard of the tensor?"
            )
        return (tensor[: self.rows],)


@dataclasses.dataclass(frozen=True, slots=True)
class Copies(Op):
    """One tensor under `count` Hugging Face names; bitwise different copies are an error, not a choice."""

    count: int

    @property
    def n_hf(self) -> int:
        return self.count

    def to_mcore(self, hf: Tensors) -> Tensors:
        first = hf[0]
        _same_dtype(hf)
        for k, other in enumerate(hf[1:], 1):
            if other.shape != first.shape:
                raise MappingError(f"tied tensors have shapes {_shapes(hf)}")
            # On `meta` there is no data; NaN must equal NaN, so bytes are compared.
            if first.device.type != "meta" and not torch.equal(_bytes(first), _bytes(other)):
                raise MappingError(f"copy {k} of a tied tensor differs from the first: the config should not tie them")
        return (first,)

    def to_hf(self, mcore: Tensors) -> Tensors:
        return mcore * self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Inverse(Op):
    """`op` with the sides exchanged."""

    op: Op

    @property
    def n_hf(self) -> int:
        return self.op.n_mcore

    @property
    def n_mcore(self) -> int:
        return self.op.n_hf

    def to_mcore(self, hf: Tensors) -> Tensors:
        return self.op.to_hf(hf)

    def to_hf(self, mcore: Tensors) -> Tensors:
        return self.op.to_mcore(mcore)


@dataclasses.dataclass(frozen=True, slots=True)
class Par(Op):
    """Ops side by side, each on its share of the tuple."""

    ops: tuple[Op, ...]

    @property
    def n_hf(self) -> int:
        return sum(op.n_hf for op in self.ops)

    @property
    def n_mcore(self) -> int:
        return sum(op.n_mcore for op in self.ops)

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        return tuple(b for op in self.ops for b in op.blocks)

    def to_mcore(self, hf: Tensors) -> Tensors:
        rest = hf
        out: list[torch.Tensor] = []
        for op in self.ops:
            out.extend(op.to_mcore(rest[: op.n_hf]))
            rest = rest[op.n_hf :]
        return tuple(out)

    def to_hf(self, mcore: Tensors) -> Tensors:
        rest = mcore
        out: list[torch.Tensor] = []
        for op in self.ops:
            out.extend(op.to_hf(rest[: op.n_mcore]))
            rest = rest[op.n_mcore :]
        return tuple(out)


@dataclasses.dataclass(frozen=True, slots=True)
class Chain(Op):
    """Ops one after the other, listed in the order Hugging Face -> Megatron."""

    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        for first, second in zip(self.ops, self.ops[1:], strict=False):
            if first.n_mcore != second.n_hf:
                raise MappingError(f"{first} gives {first.n_mcore} tensors, {second} takes {second.n_hf}")

    @property
    def n_hf(self) -> int:
        return self.ops[0].n_hf

    @property
    def n_mcore(self) -> int:
        return self.ops[-1].n_mcore

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        return self.ops[-1].blocks

    def to_mcore(self, hf: Tensors) -> Tensors:
        for op in self.ops:
            hf = op.to_mcore(hf)
        return hf

    def to_hf(self, mcore: Tensors) -> Tensors:
        for op in reversed(self.ops):
            mcore = op.to_hf(mcore)
        return mcore


def half_swap(half: int, dim: int) -> Chain:
    """The two halves (`half` entries each) of `dim` exchanged: MiMo's input_proj <-> eh_proj."""
    halves = concat((half, half), dim)
    return Chain((Inverse(halves), Reorder((1, 0)), halves))


def _same_dtype(tensors: Tensors) -> None:
    # torch.cat promotes mixed dtypes in silence.
    if len({t.dtype for t in tensors}) != 1:
        raise MappingError(f"parts of one tensor have dtypes {sorted(str(t.dtype) for t in tensors)}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _shapes(tensors: Tensors) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
