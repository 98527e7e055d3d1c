"""Every operation of the rule engine, in both directions, against loops that are written down on their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.errors import ConfigMismatch, MappingError
from converters.rules.config import ModelConfig
from converters.rules.encodings import BlockScales, fp8_blocks
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

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
SMALL = st.integers(1, 4)
quick = settings(max_examples=40, deadline=None)


def numbered(*shape, dtype=torch.float32, start=0):
    """Distinct values, as far as `dtype` has them."""
    return (torch.arange(start, start + int(np.prod(shape))) % 250).reshape(shape).to(dtype)


def round_trips(op, hf):
    """hf -> mcore -> hf -> mcore, with nothing lost and no dtype changed; the same on `meta`, shapes only."""
    mcore = op.to_mcore(hf)
    assert len(hf) == op.n_hf
    assert len(mcore) == op.n_mcore == len(op.blocks)
    back = op.to_hf(mcore)
    again = op.to_mcore(back)
    shapes = op.to_mcore(tuple(t.to("meta") for t in hf))
    assert all(same(a, b) for a, b in zip(hf, back, strict=True))
    assert all(same(a, b) for a, b in zip(mcore, again, strict=True))
    assert [(t.shape, t.dtype) for t in shapes] == [(t.shape, t.dtype) for t in mcore]
    return mcore


@quick
@given(st.lists(SMALL, min_size=1, max_size=4), SMALL, st.integers(0, 2), DTYPES)
def test_interleave_joins_parts_group_by_group(sizes, groups, dim, dtype):
    shape = [2, 3, 2]
    parts = []
    for k, size in enumerate(sizes):
        shape[dim] = groups * size
        parts.append(numbered(*shape, dtype=dtype, start=7 * k))
    (whole,) = round_trips(interleave(groups, sizes, dim), tuple(parts))
    rows = []
    for group in range(groups):
        for part, size in zip(parts, sizes, strict=True):
            rows += [part.select(dim, group * size + r) for r in range(size)]
    assert same(whole, torch.stack(rows, dim))


def test_only_a_plain_join_along_dimension_0_is_sharded_part_by_part():
    assert concat((4, 6)).blocks == ((4, 6),)
    assert interleave(2, (4, 6)).blocks == ((),)
    assert interleave(1, (4, 6)).blocks == ((),)
    assert concat((4, 6), dim=1).blocks == ((),)
    assert Chain((Inverse(interleave(3, (1, 1))), concat((3, 3)))).blocks == ((3, 3),)
    assert Par((Same(sharded=(2, 2)), Same())).blocks == ((2, 2), ())


@quick
@given(SMALL, st.lists(SMALL, min_size=0, max_size=3), DTYPES)
def test_stack_adds_a_leading_axis_and_its_inverse_takes_it_off(count, shape, dtype):
    tensors = tuple(numbered(*shape, dtype=dtype, start=11 * k) for k in range(count))
    (whole,) = round_trips(Stack(count), tensors)
    assert all(same(whole[k], t) for k, t in enumerate(tensors))
    assert all(same(a, b) for a, b in zip(round_trips(Inverse(Stack(count)), (whole,)), tensors, strict=True))


@quick
@given(st.lists(SMALL, min_size=2, max_size=4), SMALL)
def test_the_inverse_of_concat_splits_one_key_into_several(sizes, columns):
    whole = numbered(sum(sizes), columns)
    parts = round_trips(Inverse(concat(sizes)), (whole,))
    assert [p.shape[0] for p in parts] == sizes
    assert same(torch.cat(parts), whole)


@quick
@given(st.permutations(range(4)))
def test_reorder_puts_tensor_order_k_in_place_k(order):
    tensors = tuple(numbered(2, start=10 * k) for k in range(4))
    out = round_trips(Reorder(tuple(order)), tensors)
    assert all(same(out[k], tensors[order[k]]) for k in range(4))


@quick
@given(SMALL, SMALL, st.integers(0, 1), DTYPES)
def test_half_swap_exchanges_the_halves_and_is_its_own_inverse(half, other, dim, dtype):
    tensor = numbered(*((2 * half, other) if dim == 0 else (other, 2 * half)), dtype=dtype)
    op = half_swap(half, dim)
    (out,) = round_trips(op, (tensor,))
    first, second = tensor.split(half, dim)
    assert same(out, torch.cat((second, first), dim))
    assert same(op.to_mcore((out,))[0], tensor)


@quick
@given(SMALL, SMALL, SMALL)
def test_transpose_exchanges_two_dimensions(a, b, c):
    tensor = numbered(a, b, c)
    (out,) = round_trips(Transpose(1, 2), (tensor,))
    assert same(out, torch.from_numpy(np.swapaxes(tensor.numpy(), 1, 2).copy()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shift_is_exact_for_norm_weights_near_one_and_keeps_the_dtype(dtype):
    weights = torch.linspace(0.5, 2.0, 513, dtype=torch.float64).to(dtype)
    (out,) = Shift(-1.0).to_mcore((weights,))
    assert out.dtype == dtype
    assert torch.equal(out.double(), weights.double() - 1)
    assert same(Shift(-1.0).to_hf((out,))[0], weights)


def test_shift_refuses_integers():
    with pytest.raises(MappingError, match="would cast"):
        Shift(-1.0).to_mcore((torch.ones(2, dtype=torch.int64),))


def test_rows_cut_padding_on_the_way_to_hugging_face_only():
    op = Rows(5)
    padded = numbered(8, 3)
    (out,) = op.to_hf((padded,))
    assert same(out, padded[:5])
    round_trips(op, (out,))
    with pytest.raises(MappingError, match=r"\(8, 3\), expected 5 rows"):
        op.to_mcore((padded,))
    with pytest.raises(MappingError, match="at least 5 rows"):
        op.to_hf((padded[:4],))


def test_copies_must_agree_bit_by_bit():
    nan = torch.tensor([float("nan"), -0.0])
    round_trips(Copies(3), (nan, nan.clone(), nan.clone()))
    round_trips(Copies(2), (torch.tensor(1.0), torch.tensor(1.0)))
    with pytest.raises(MappingError, match="copy 1 of a tied tensor differs"):
        Copies(2).to_mcore((torch.tensor([0.0]), torch.tensor([-0.0])))
    with pytest.raises(MappingError, match="shapes"):
        Copies(2).to_mcore((torch.zeros(2), torch.zeros(3)))


def test_par_and_chain_hand_each_op_its_share():
    op = Chain((Par((Inverse(concat((2, 3))), Same())), Reorder((2, 0, 1)), concat((4, 2, 3))))
    joined, alone = numbered(5, 2), numbered(4, 2, start=100)
    (out,) = round_trips(op, (joined, alone))
    assert same(out, torch.cat((alone, joined)))
    with pytest.raises(MappingError, match="gives 2 tensors"):
        Chain((Inverse(concat((2, 3))), Same()))


@pytest.mark.parametrize("op", [concat((2, 2)), Stack(2), Copies(2)])
def test_parts_of_one_tensor_with_two_dtypes_are_refused_not_promoted(op):
    with pytest.raises(MappingError, match="dtypes"):
        op.to_mcore((torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("op", "hf"),
    [
        (interleave(2, (4, 2)), (torch.zeros(8, 3), torch.zeros(6, 3))),
        (interleave(2, (4, 2)), (torch.zeros(8, 3), torch.zeros(4, 5))),
        (interleave(2, (4, 2)), (torch.zeros(8, 3), torch.zeros(()))),
        (Stack(2), (torch.zeros(2), torch.zeros(3))),
        (Inverse(Stack(2)), (torch.zeros(3, 2),)),
        (Inverse(concat((2, 2))), (torch.zeros(5, 2),)),
        (Transpose(0, 1), (torch.zeros(3),)),
    ],
)
def test_shapes_that_do_not_fit_are_named(op, hf):
    with pytest.raises(MappingError, match="shape"):
        op.to_mcore(hf)


@pytest.mark.parametrize("shape", [(128, 256), (100, 30), (3, 130, 129)])
def test_block_scales_are_applied_in_fp32_and_rounded_once(shape):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = [-(-n // 128) for n in shape[-2:]]
    scale = torch.rand((*shape[:-2], *blocks), generator=generator) + 0.1
    encoding = BlockScales()
    assert encoding.stored("a.weight") == ("a.weight", "a.weight_scale_inv")
    out = encoding.decode((weight, scale))
    flat, scales = weight.float().numpy().reshape(-1, *shape[-2:]), scale.numpy().reshape(-1, *blocks)
    expected = np.empty_like(flat)
    for e, r, c in np.ndindex(flat.shape):
        expected[e, r, c] = flat[e, r, c] * scales[e, r // 128, c // 128]
    assert out.dtype == torch.bfloat16
    assert same(out, torch.from_numpy(expected).reshape(shape).bfloat16())


def test_block_scales_of_another_shape_are_refused():
    with pytest.raises(MappingError, match=r"expected \(2, 1\)"):
        BlockScales().decode((torch.zeros(129, 5, dtype=torch.float8_e4m3fn), torch.ones(1, 1)))


def test_the_config_declares_block_scales():
    def encoding(**values):
        return fp8_blocks(ModelConfig(family="any", values=values))

    fp8 = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    assert encoding() is None
    assert encoding(quantization_config={"quant_method": "awq"}) is None
    assert encoding(quantization_config=fp8, torch_dtype="float16") == BlockScales((64, 128), torch.float16)
    with pytest.raises(ConfigMismatch, match="weight_block_size"):
        encoding(quantization_config=fp8 | {"weight_block_size": [0, 1]})
    with pytest.raises(ConfigMismatch, match="dtype 'half16'"):
        encoding(quantization_config=fp8, dtype="half16")
