"""Compares tensors that lie in checkpoints, piece by piece and bit by bit.

    require_equal   tensors of one source that must hold the same bytes (tied weights)
    verify          what was written, read back through the inverse rules, against its source
    differences     any two sets of layouts: which differ, and by how much (`ckpt diff`)

The inverse rules are the same tables backwards: a table that is wrong both ways alike passes. That is what
`converters.semantic` is for, and the tests that compare logits.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from converters.errors import FolderError, MappingError
from converters.offline.layout import Block, Layout, leaf
from converters.offline.mapping import Decoded, DtypePolicy, Mapped, megatron_weights, to_hf, to_mcore
from converters.offline.move import Budget, Values, in_parallel, pieces
from converters.offline.sources import HfSource, Source
from converters.rules.ruleset import RuleSet

__all__ = ["Difference", "Pair", "differences", "require_equal", "verify"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two tensors of the same shape; both are read as `dtype`."""

    name: str
    first: Layout
    second: Layout
    dtype: torch.dtype


@dataclasses.dataclass(kw_only=True, slots=True)
class Difference:
    """`num_elements` of `name` differ in their bits; `max_abs` as numbers (None where one is not finite)."""

    name: str
    num_elements: int = 0
    max_abs: float | None = 0.0


def differences(
    pairs: Sequence[Pair], first: Values, second: Values, decoded: Mapping[str, Decoded], budget: Budget
) -> list[Difference]:
    """The pairs whose bits differ, in their order. `decoded`: of either side, for cutting at the right places."""
    found: dict[str, Difference] = {}
    work = _tasks(pairs, decoded, budget)
    lock = threading.Lock()

    def compare(stop: threading.Event) -> None:
        buffers = bytearray(budget.piece_bytes), bytearray(budget.piece_bytes)
        while not stop.is_set():
            with lock:
                task = next(work, None)
            if task is None:
                return
            pair, start, until, blocks = task
            size = (until - start) * pair.dtype.itemsize
            if size > len(buffers[0]):
                buffers = bytearray(size), bytearray(size)
            a, b = (memoryview(x)[:size] for x in buffers)
            first.fill(blocks, pair.first.dtype, pair.dtype, a)
            second.fill(pair.second.cut(start, until), pair.second.dtype, pair.dtype, b)
            if a != b:
                one = _differ(torch.frombuffer(a, dtype=pair.dtype), torch.frombuffer(b, dtype=pair.dtype))
                with lock:
                    into = found.setdefault(pair.name, Difference(name=pair.name))
                    into.num_elements += one[0]
                    into.max_abs = None if into.max_abs is None or one[1] is None else max(into.max_abs, one[1])

    in_parallel(compare, budget.workers)
    return [found[pair.name] for pair in pairs if pair.name in found]


def _tasks(
    pairs: Sequence[Pair], decoded: Mapping[str, Decoded], budget: Budget
) -> Iterator[tuple[Pair, int, int, list[Block]]]:
    for pair in pairs:
        for start, until, blocks in pieces(pair.first, pair.dtype.itemsize, decoded, budget):
            yield pair, start, until, blocks


def _differ(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float | None]:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    apart = a.view(bits) != b.view(bits)
    largest = (a[apart].double() - b[apart].double()).abs().max().item()
    return int(apart.sum()), largest if largest == largest and largest != float("inf") else None


def require_equal(
    equal: Sequence[tuple[Layout, Layout, str]], values: Values, decoded: Mapping[str, Decoded], budget: Budget
) -> None:
    """Raises MappingError if tensors that a config ties differ; nothing was written then."""
    pairs = []
    for first, second, text in equal:
        if first.shape != second.shape or first.dtype != second.dtype:
            raise MappingError(
                f"{text}, are {first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"
            )
        pairs.append(Pair(name=text, first=first, second=second, dtype=first.dtype))
    if found := differences(pairs, values, values, decoded, budget):
        raise MappingError(
            f"{found[0].name}, differ in {found[0].num_elements} elements: config and weights do not belong together"
        )


def verify(source: Source, mapped: Mapped, written: Source, rules: RuleSet, budget: Budget) -> dict[str, Any]:
    """Proves that `written` holds `source`: names, shapes, dtypes and bits.

    Where a dtype was chosen that differs from the source's, source values are cast the same way before the comparison.

    Raises:
        FolderError: something differs; the message says what.
    """
    values = Values(source, mapped.decoded)
    carried = tuple(mapped.carried)
    policy = DtypePolicy()
    if isinstance(source, HfSource):
        back = to_hf(
            written.headers, rules, policy=policy, drop=_absent(rules, mapped), carry=carried, what="the result"
        )
        origin = {n: leaf(n, *source.headers[n]) for n in back.tensors if n in source.headers}
        origin |= {n: leaf(n, *d.header) for n, d in mapped.decoded.items()}
        stored = megatron_weights({k: h for k, h in written.headers.items() if k not in carried}, rules)
    else:
        back = to_mcore(
            written.headers, rules, policy=policy, drop=_absent(rules, mapped), carry=carried, what="the result"
        )
        origin = megatron_weights({k: h for k, h in source.headers.items() if k not in _left_out(mapped)}, rules)
        origin |= {n: leaf(n, *source.headers[n]) for n in carried}
        stored = {n: leaf(n, *h) for n, h in written.headers.items()}
    _same_headers(mapped, {**stored, **{n: leaf(n, *written.headers[n]) for n in carried}})
    pairs, again = [], []
    for name, output in back.tensors.items():
        if name not in origin:
            raise FolderError(f"verification: {name} comes out of the result, but is not in the source")
        first, second = origin[name], output.layout
        if any(block.add for block in second.blocks):
            continue  # a rounded sum has no exact inverse: compared forwards, below
        if first.shape != second.shape:  # vocabulary padding, which the result does not have
            first = first.rows(0, second.shape[0])
        pairs.append(Pair(name=name, first=first, second=second, dtype=second.dtype))
    for name, output in mapped.tensors.items():
        if any(block.add for block in output.layout.blocks):
            again.append(Pair(name=name, first=output.layout, second=stored[name], dtype=output.dtype))
    found = differences([*pairs, *again], values, Values(written, {}), mapped.decoded, budget)
    if found:
        text = ", ".join(f"{d.name} ({d.num_elements} elements, max {d.max_abs})" for d in found[:3])
        raise FolderError(f"verification: {len(found)} tensors differ from the source: {text}")
    return {
        "tensors": len(pairs) + len(again),
        "bytes": sum(p.first.numel() * p.dtype.itemsize for p in [*pairs, *again]),
    }


def _left_out(mapped: Mapped) -> set[str]:
    return {*mapped.dropped, *mapped.optimizer, *mapped.carried}


def _absent(rules: RuleSet, mapped: Mapped) -> list[str]:
    """Names of weights, on both sides, that the conversion did without."""
    there = set(mapped.tensors)
    return [
        name
        for mapping in rules.mappings()
        if not there.intersection((*mapping.mcore, *mapping.hf))
        for name in (*mapping.mcore, *mapping.hf)
    ]


def _same_headers(mapped: Mapped, stored: Mapping[str, Layout]) -> None:
    planned = {n: (tuple(o.layout.shape), o.dtype) for n, o in mapped.tensors.items()}
    got = {n: (tuple(t.shape), t.dtype) for n, t in stored.items()}
    if planned != got:
        wrong = sorted(n for n in planned.keys() | got.keys() if planned.get(n) != got.get(n))
        raise FolderError(
            f"verification: {len(wrong)} tensors of the result are not as planned, e.g. {wrong[0]}: "
            f"{got.get(wrong[0])}, expected {planned.get(wrong[0])}"
        )
