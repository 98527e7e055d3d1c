"""Planning and putting together of tensor-parallel shards, without processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import MappingError
from converters.live.gather import Piece, Scratch, assemble, plan_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def models(draw):
    """(ranks, units of (piece, full tensor)): what a stage may hold."""
    parts = draw(st.sampled_from((1, 2, 4)))
    units, count = [], 0
    for _ in range(draw(st.integers(1, 12))):
        unit = []
        for _ in range(draw(st.integers(1, 2))):
            dim = draw(st.sampled_from((None, 0, 1)))
            rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
            blocks = ()
            if dim == 0:
                rows *= parts
                if draw(st.booleans()):
                    other = parts * draw(st.integers(1, 3))
                    blocks, rows = (rows, other), rows + other
            elif dim == 1:
                columns *= parts
            full = torch.randn(rows, columns).to(draw(st.sampled_from(DTYPES)))
            shape = shards_of(full, dim, parts, blocks)[0].shape
            count += 1
            piece = Piece(name=f"t{count}", shape=tuple(shape), dtype=full.dtype, dim=dim, parts=parts, blocks=blocks)
            unit.append((piece, full))
        units.append(unit)
    return parts, units


def shards_of(full, dim, parts, blocks):
    if dim is None:
        return [full] * parts
    chunks = [block.chunk(parts, dim) for block in (full.split(blocks) if blocks else (full,))]
    return [torch.cat(mine, dim) for mine in zip(*chunks, strict=True)]


@given(models(), st.integers(1, 2000))
def test_gathered_shards_make_the_full_tensors(model, gather_bytes):
    parts, units = model
    buckets = plan_buckets([[piece for piece, _ in unit] for unit in units], gather_bytes)
    assert [n for b in buckets for n in b.units] == list(range(len(units))), "every unit once, in order"
    scratch = Scratch(torch.device("cpu"))
    for bucket in buckets:
        members = [(piece, full) for n in bucket.units for piece, full in units[n] if piece.is_sharded]
        assert sorted(bucket.offsets) == sorted(piece.name for piece, _ in members)
        if len([n for n in bucket.units if any(p.is_sharded for p, _ in units[n])]) > 1:
            assert bucket.nbytes * parts <= gather_bytes
        rows = torch.zeros(parts, bucket.nbytes, dtype=torch.uint8)
        for piece, full in members:
            offset = bucket.offsets[piece.name]
            for rank, shard in enumerate(shards_of(full, piece.dim, parts, piece.blocks)):
                rows[rank, offset : offset + piece.nbytes] = shard.contiguous().view(-1).view(torch.uint8)
        for n in bucket.units:
            scratch.reset()
            made = [
                (assemble(piece, rows, bucket.offsets[piece.name], scratch), full)
                for piece, full in units[n]
                if piece.is_sharded
            ]
            for got, full in made:
                assert got.is_contiguous()
                assert got.dtype == full.dtype
                assert torch.equal(got, full)


def test_a_tensor_larger_than_a_bucket_travels_alone_and_is_not_copied():
    small = Piece(name="small", shape=(2, 4), dtype=torch.float32, dim=0, parts=2)
    large = Piece(name="large", shape=(50, 4), dtype=torch.float32, dim=0, parts=2)
    buckets = plan_buckets([[small], [large], [small]], 512)
    assert [b.units for b in buckets] == [(0,), (1,), (2,)]
    assert buckets[1].nbytes == large.nbytes
    rows = torch.zeros(2, large.nbytes, dtype=torch.uint8)
    scratch = Scratch(torch.device("cpu"))
    assert assemble(large, rows, 0, scratch).data_ptr() == rows.data_ptr()
    assert scratch.nbytes == 0


def test_replicated_tensors_are_not_gathered():
    norm = Piece(name="norm", shape=(8,), dtype=torch.float32, parts=2)
    (bucket,) = plan_buckets([[norm], [norm]], 1)
    assert (bucket.units, bucket.nbytes, dict(bucket.offsets)) == ((0, 1), 0, {})


def test_parts_that_do_not_divide_are_refused():
    with pytest.raises(MappingError, match=r"fc1: parts of \(3, 3\) rows do not divide by 2 ranks"):
        Piece(name="fc1", shape=(3, 4), dtype=torch.float32, dim=0, parts=2, blocks=(3, 3))
    with pytest.raises(MappingError, match="cannot be cut along dimension 1"):
        Piece(name="bias", shape=(3,), dtype=torch.float32, dim=1, parts=2)
