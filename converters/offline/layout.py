"""Where the elements of a tensor come from: the rules' operations, run without data.

A `Layout` stands in for a tensor. The operations of `converters.rules.ops` run on it as they run on tensors, and what
comes out says, in row-major order, which elements of which stored tensor make up the result. So the converter knows the
source of every byte before it reads one, can cut a tensor of any size into pieces that fit into memory, and can prove
that each source element is used exactly once. There is no second description of an operation that could disagree with
the first; an operation that does something a `Layout` cannot follow fails a test, not a conversion.

Used by `converters.offline.plan`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from converters.errors import MappingError

__all__ = ["Block", "Layout", "join", "leaf", "used_once"]


class Block(NamedTuple):
    """Elements of stored tensor `source`: from `start`, `shape` of them with `strides`, in row-major order.

    `add` is added to each (zero-centred norms). Contiguous elements have one dimension and stride 1.
    """

    source: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    add: float = 0.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether the elements lie one after the other in the source."""
        return self.strides == (1,)

    @property
    def span(self) -> int:
        """Number of source elements from the first to the last that is used."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def _run(source: str, start: int, count: int, add: float = 0.0) -> Block:
    return Block(source, start, (count,), (1,), add)


def _cut(block: Block, first: int, stop: int) -> list[Block]:
    """Elements [first, stop) of a block."""
    if first == 0 and stop == block.numel:
        return [block]
    if len(block.shape) == 1:
        step = block.strides[0]
        return [block._replace(start=block.start + first * step, shape=(stop - first,))]
    inner = math.prod(block.shape[1:])
    out: list[Block] = []
    while first < stop:
        row, at = divmod(first, inner)
        if at == 0 and stop - first >= inner:
            rows = (stop - first) // inner
            out.append(
                block._replace(start=block.start + row * block.strides[0], shape=(rows, *block.shape[1:]))
                if rows > 1
                else Block(
                    block.source,
                    block.start + row * block.strides[0],
                    block.shape[1:],
                    block.strides[1:],
                    block.add,
                )
            )
            first += rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        one = Block(block.source, block.start + row * block.strides[0], block.shape[1:], block.strides[1:], block.add)
        out += _cut(one, at, at + end - first)
        first = end
    return out


def _extend(out: list[Block], blocks: Iterable[Block]) -> None:
    """Append, joining runs that continue each other."""
    for block in blocks:
        if out and block.is_run and out[-1].is_run:
            last = out[-1]
            if (last.source, last.add, last.start + last.shape[0]) == (block.source, block.add, block.start):
                out[-1] = last._replace(shape=(last.shape[0] + block.shape[0],))
                continue
        out.append(block)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A tensor of `shape` and `dtype` whose elements are those of `blocks`, one block after the other."""

    shape: torch.Size
    dtype: torch.dtype
    blocks: tuple[Block, ...]

    # What operations ask of a tensor. `meta`: there is no data to compare.
    device = torch.device("meta")

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> Layout:
        return self

    def reshape(self, *shape: Any) -> Layout:
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            rest = math.prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = self.numel() // rest if rest else 0
        assert math.prod(sizes) == self.numel()
        return Layout(torch.Size(sizes), self.dtype, self.blocks)

    view = reshape

    def flatten(self, first: int = 0, last: int = -1) -> Layout:
        first, last = first % self.dim(), last % self.dim()
        joined = math.prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], joined, *self.shape[last + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Layout:
        dim %= self.dim()
        return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def unsqueeze(self, dim: int) -> Layout:
        dim %= self.dim() + 1
        return self.reshape(*self.shape[:dim], 1, *self.shape[dim:])

    def squeeze(self, dim: int) -> Layout:
        dim %= self.dim()
        return self.reshape(*self.shape[:dim], *self.shape[dim + 1 :]) if self.shape[dim] == 1 else self

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> tuple[Layout, ...]:
        dim %= self.dim()
        inner = math.prod(self.shape[dim + 1 :])
        bounds = [n * inner for _ in range(math.prod(self.shape[:dim])) for n in sizes]
        pieces = self._cut_at(bounds)
        return tuple(
            Layout(
                torch.Size((*self.shape[:dim], n, *self.shape[dim + 1 :])),
                self.dtype,
                _joined(pieces[k :: len(sizes)]),
            )
            for k, n in enumerate(sizes)
        )

    def split(self, size: int | Sequence[int], dim: int = 0) -> tuple[Layout, ...]:
        if isinstance(size, int):
            length = self.shape[dim]
            size = [min(size, length - at) for at in range(0, length, size)]
        return self.split_with_sizes(size, dim)

    def chunk(self, count: int, dim: int = 0) -> tuple[Layout, ...]:
        return self.split(-(-self.shape[dim] // count), dim)

    def narrow(self, dim: int, start: int, length: int) -> Layout:
        rest = self.shape[dim] - start - length
        return self.split_with_sizes((start, length, rest), dim)[1]

    def unbind(self, dim: int = 0) -> tuple[Layout, ...]:
        return tuple(part.squeeze(dim) for part in self.split_with_sizes((1,) * self.shape[dim], dim))

    def __getitem__(self, index: Any) -> Layout:
        out = self
        at = 0
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, int):
                out = out.narrow(at, part % out.shape[at], 1).squeeze(at)
                continue
            start, stop, step = part.indices(out.shape[at])
            assert step == 1
            if (start, stop) != (0, out.shape[at]):
                out = out.narrow(at, start, stop - start)
            at += 1
        return out

    def transpose(self, a: int, b: int) -> Layout:
        a, b = sorted((a % self.dim(), b % self.dim()))
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        blocks: list[Block] = []
        inner = self.shape[a:]
        for piece in self._cut_at([math.prod(inner)] * math.prod(self.shape[:a])):
            _extend(blocks, _transposed(piece, inner, b - a))
        return Layout(torch.Size(shape), self.dtype, tuple(blocks))

    def permute(self, *order: Any) -> Layout:
        axes = list(order[0] if len(order) == 1 and not isinstance(order[0], int) else order)
        out, now = self, list(range(self.dim()))
        for at, axis in enumerate(axes):
            if (found := now.index(axis)) != at:
                out = out.transpose(at, found)
                now[at], now[found] = now[found], now[at]
        return out

    def __add__(self, by: float) -> Layout:
        # One addition is one rounding: two of them would not be the operation that was asked for.
        assert all(block.add == 0 for block in self.blocks)
        return Layout(self.shape, self.dtype, tuple(block._replace(add=by) for block in self.blocks))

    def __sub__(self, by: float) -> Layout:
        return self + -by

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat:
            return join(*args, **kwargs)
        if func is torch.stack:
            tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return join([t.unsqueeze(dim) for t in tensors], dim)
        return NotImplemented

    def cut(self, first: int, stop: int) -> list[Block]:
        """The blocks of elements [first, stop)."""
        out: list[Block] = []
        at = 0
        for block in self.blocks:
            count = block.numel
            if at + count > first and at < stop:
                _extend(out, _cut(block, max(first - at, 0), min(stop - at, count)))
            at += count
            if at >= stop:
                break
        return out

    def rows(self, first: int, stop: int) -> Layout:
        """Rows [first, stop) of dimension 0."""
        row = math.prod(self.shape[1:])
        return Layout(torch.Size((stop - first, *self.shape[1:])), self.dtype, tuple(self.cut(first * row, stop * row)))

    def _cut_at(self, counts: Sequence[int]) -> list[list[Block]]:
        """Consecutive pieces of so many elements each."""
        out: list[list[Block]] = []
        at = used = 0
        for count in counts:
            piece: list[Block] = []
            while count:
                block = self.blocks[at]
                size = block.numel
                take = min(count, size - used)
                _extend(piece, _cut(block, used, used + take))
                count -= take
                used += take
                if used == size:
                    at, used = at + 1, 0
            out.append(piece)
        return out


def leaf(source: str, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Layout:
    """A whole stored tensor, or the consecutive elements of it from `start`."""
    count = math.prod(shape)
    return Layout(torch.Size(shape), dtype, (_run(source, start, count),) if count else ())


def _joined(pieces: Iterable[Iterable[Block]]) -> tuple[Block, ...]:
    out: list[Block] = []
    for piece in pieces:
        _extend(out, piece)
    return tuple(out)


def join(tensors: Sequence[Layout], dim: int = 0) -> Layout:
    """What torch.cat does."""
    first = tensors[0]
    dim %= first.dim()
    outer = math.prod(first.shape[:dim])
    shape = torch.Size((*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :]))
    if outer > 1 and (blocks := _woven(tensors, outer)):
        return Layout(shape, first.dtype, blocks)
    parts = [t._cut_at([math.prod(t.shape[dim:])] * outer) for t in tensors]
    return Layout(shape, first.dtype, _joined(part[o] for o in range(outer) for part in parts))


def _woven(tensors: Sequence[Layout], outer: int) -> tuple[Block, ...]:
    """Blocks for equal parts of the same stored tensors, taken in turn (even and odd rows); () where they are not."""
    count = len(tensors[0].blocks)
    if len(tensors) < 2 or not count or outer % count or any(len(t.blocks) != count for t in tensors):
        return ()
    turns = outer // count
    out = []
    for blocks in zip(*(t.blocks for t in tensors), strict=True):
        first, second = blocks[:2]
        step = second.start - first.start
        expected = tuple(first._replace(start=first.start + k * step) for k in range(len(blocks)))
        inner, rest = divmod(first.numel, turns)
        if step < 0 or not inner or rest or not first.is_run or blocks != expected:
            return ()
        out.append(first._replace(shape=(turns, len(blocks), inner), strides=(inner, step, 1)))
    return tuple(out)


def _transposed(piece: list[Block], shape: Sequence[int], b: int) -> list[Block]:
    """The elements of a tensor of `shape` with dimensions 0 and `b` exchanged."""
    if len(piece) == 1 and (groups := _grouped(piece[0], shape)) is not None:
        groups[0], groups[b] = groups[b], groups[0]
        dims = [(n, s) for group in groups for n, s in group]
        return [piece[0]._replace(shape=tuple(n for n, _ in dims), strides=tuple(s for _, s in dims))]
    # Joined of several parts: element by element (or run by run, if dimensions follow `b`).
    middle, last, tail = math.prod(shape[1:b]), shape[b], math.prod(shape[b + 1 :])
    whole = Layout(torch.Size(shape), torch.uint8, tuple(piece))
    cells = whole._cut_at([tail] * (shape[0] * middle * last))
    order = (cells[(r * middle + m) * last + k] for k in range(last) for m in range(middle) for r in range(shape[0]))
    return list(_joined(order))


def _grouped(block: Block, shape: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """(size, stride) pairs of `block` for each dimension of `shape`; None where they do not divide so."""
    left = list(zip(block.shape, block.strides, strict=True))
    groups: list[list[tuple[int, int]]] = []
    for size in reversed(shape):
        group: list[tuple[int, int]] = []
        while size > 1:
            have, stride = left.pop()
            if have > size:
                if have % size:
                    return None
                left.append((have // size, stride * size))
                have = size
            elif size % have:
                return None
            group.insert(0, (have, stride))
            size //= have
        groups.insert(0, group or [(1, 1)])
    return groups


def used_once(layouts: Iterable[Layout], sizes: dict[str, int]) -> dict[str, int]:
    """Number of elements of each source in `sizes` that `layouts` leave out; 0 where all are used.

    Raises:
        MappingError: an element is used twice, or one that its source does not have.
    """
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    used = dict.fromkeys(sizes, 0)
    for layout in layouts:
        for block in layout.blocks:
            used[block.source] += block.numel
            if block.is_run:
                runs[block.source].append((block.start, block.start + block.shape[0]))
            if block.start + block.span > sizes[block.source]:
                raise MappingError(f"{block.source} has {sizes[block.source]} elements, its rule reads beyond them")
    for name, found in runs.items():
        found.sort()
        twice = any(a[1] > b[0] for a, b in itertools.pairwise(found))
        if twice or used[name] > sizes[name]:
            raise MappingError(f"the rule of {name} uses some of its elements twice")
    return {name: size - used[name] for name, size in sizes.items()}
