"""Layouts follow every operation: the elements they name are those that the operation puts there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import MappingError
from converters.offline.layout import Layout, leaf, used_once
from converters.rules.ops import (
    Chain,
    Copies,
    Inverse,
    Par,
    Reorder,
    Rows,
    Same,
    Shift,
    Stack,
    Transpose,
    concat,
    half_swap,
    interleave,
)
from tests.converters.support import same

CASES = {
    "same": (Same(), [(3, 4)]),
    "scalar": (Same(), [()]),
    "qkv": (interleave(3, (4, 2, 2)), [(12, 5), (6, 5), (6, 5)]),
    "qkv bias": (interleave(3, (4, 2, 2)), [(12,), (6,), (6,)]),
    "gate and up": (concat((4, 6)), [(4, 5), (6, 5)]),
    "columns": (concat((4, 3), 1), [(2, 4), (2, 3)]),
    "half swap": (half_swap(4, 1), [(5, 8)]),
    "stack": (Stack(3), [(2, 3)] * 3),
    "unstack": (Inverse(Stack(3)), [(3, 2, 3)]),
    "transpose": (Transpose(1, 2), [(3, 4, 5)]),
    "transpose far": (Transpose(0, 2), [(3, 4, 5)]),
    "reorder": (Reorder((2, 0, 1)), [(2,), (3,), (4,)]),
    "shift": (Shift(-1.0), [(7,)]),
    "rows": (Rows(5), [(5, 3)]),
    "packed experts": (
        Chain((Transpose(1, 2), Inverse(interleave(4, (1, 1), 1)), concat((4, 4), 1), Inverse(Stack(3)))),
        [(3, 5, 8)],
    ),
    "delta net": (
        Chain(
            (
                Par((Inverse(interleave(2, (3, 3, 4, 4))), Inverse(interleave(2, (2, 2))))),
                concat((6, 6, 8, 8, 4, 4)),
            )
        ),
        [(28, 3), (8, 3)],
    ),
    "joined and transposed": (
        Chain((Transpose(1, 2), Inverse(interleave(2, (1, 3), 1)), Par((Transpose(1, 2), Transpose(0, 2))))),
        [(3, 5, 8)],
    ),
    "copies": (Chain((Copies(2), Rows(4))), [(4, 2)] * 2),
}


def elements(layout, tensors):
    """The values of a layout."""
    parts = []
    for block in layout.blocks:
        source = tensors[block.source].reshape(-1)
        values = torch.as_strided(source, block.shape, block.strides, block.start).reshape(-1)
        parts.append(values + block.add if block.add else values)
    return torch.cat(parts).reshape(layout.shape) if parts else torch.empty(layout.shape, dtype=layout.dtype)


def check(run, tensors):
    """`run` on layouts names what `run` on the tensors gives; returns the layouts and the tensors."""
    leaves = tuple(leaf(name, t.shape, t.dtype) for name, t in tensors.items())
    want, got = run(tuple(tensors.values())), run(leaves)
    for a, b in zip(want, got, strict=True):
        assert same(a, elements(b, tensors))
    return got, want


@pytest.mark.parametrize("case", CASES)
def test_layouts_follow_every_operation_both_ways(case):
    op, shapes = CASES[case]
    tensors = {str(k): torch.randn(shape).bfloat16() for k, shape in enumerate(shapes)}
    if case == "copies":
        tensors["1"] = tensors["0"].clone()
    got, want = check(op.to_mcore, tensors)
    sizes = {name: t.numel() for name, t in tensors.items()}
    unused = {name for name, left in used_once(got, sizes).items() if left}
    assert unused == ({"1"} if case == "copies" else set())
    check(op.to_hf, {str(k): t.clone(memory_format=torch.contiguous_format) for k, t in enumerate(want)})


def test_gate_and_up_in_turn_are_one_block_each_way():
    """A packed expert of a large model must not become one block for every element."""
    op = CASES["packed experts"][0]
    leaves = tuple(leaf(str(e), (8, 5), torch.bfloat16) for e in range(3))
    (packed,) = op.to_hf(leaves)
    assert len(packed.blocks) == 3


@given(data=st.data())
def test_any_cut_of_a_layout_is_that_range_of_its_elements(data):
    op, shapes = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    tensors = {str(k): torch.arange(float(torch.Size(s).numel())).reshape(s) for k, s in enumerate(shapes)}
    for layout in op.to_mcore(tuple(leaf(name, t.shape, t.dtype) for name, t in tensors.items())):
        whole = elements(layout, tensors).reshape(-1)
        first = data.draw(st.integers(0, layout.numel()))
        stop = data.draw(st.integers(first, layout.numel()))
        part = Layout(torch.Size((stop - first,)), layout.dtype, tuple(layout.cut(first, stop)))
        assert torch.equal(elements(part, tensors), whole[first:stop])


def test_an_element_that_is_used_twice_or_not_there_is_found():
    tensor = leaf("a", (4, 2), torch.float32)
    assert used_once([tensor.rows(0, 3)], {"a": 8}) == {"a": 2}
    with pytest.raises(MappingError, match="twice"):
        used_once([tensor, tensor.rows(1, 2)], {"a": 8})
    with pytest.raises(MappingError, match="beyond"):
        used_once([leaf("a", (5, 2), torch.float32)], {"a": 8})
