"""Region arithmetic against sets of elements."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weightsync.engine.regions import Region, clip, overlap, tally


def elements(r):
    return [
        r.offset + sum(i * s for i, s in zip(index, r.stride, strict=True))
        for index in itertools.product(*(range(n) for n in r.size))
    ]


@st.composite
def regions(draw, size=None, distinct=False):
    size = draw(st.lists(st.integers(1, 4), max_size=3)) if size is None else size
    if distinct:  # dense, then transposed and thinned: no element twice
        stride, step = [], draw(st.integers(1, 2))
        for n in size:
            stride.append(step)
            step *= n * draw(st.integers(1, 2))
    else:
        stride = [draw(st.integers(0, 12)) for _ in size]
    return Region.of(draw(st.integers(0, 6)), size, stride)


@given(st.data(), st.integers(0, 40), st.integers(0, 40))
def test_clip_keeps_exactly_the_pairs_whose_source_is_in_range(data, start, length):
    src = data.draw(regions())
    dst = Region(data.draw(st.integers(0, 6)), src.size, tuple(data.draw(st.integers(0, 12)) for _ in src.size))
    stop = start + length
    expected = Counter((s, d) for s, d in zip(elements(src), elements(dst), strict=True) if start <= s < stop)
    parts = clip(dst, src, start, stop)
    got = Counter(p for d, s in parts for p in zip(elements(s), elements(d), strict=True))
    assert got == expected


def test_a_cut_at_rows_gives_one_copy():
    # Columns 2..6 of an [10, 8] matrix into a [10, 4] parameter, rows 3 to 7 of it arrived.
    parts = clip(Region(0, (10, 4), (4, 1)), Region(2, (10, 4), (8, 1)), 24, 56)
    assert parts == [(Region(12, (4, 4), (4, 1)), Region(26, (4, 4), (8, 1)))]


@given(st.data())
def test_tally_counts_missing_and_doubled_elements(data):
    some = st.lists(regions(distinct=True), max_size=4)
    needed, copies, fills = data.draw(some), data.draw(some), data.draw(some)
    count = Counter(e for r in copies for e in elements(r))
    filled = {e for r in fills for e in elements(r)}
    missing = {e for r in needed for e in elements(r) if not count[e] and e not in filled}
    result = tally(needed, copies, fills)
    assert result.missing == len(missing)
    assert result.doubled == sum(n - 1 for n in count.values())
    assert (result.first_missing in missing) if missing else (result.first_missing is None)
    assert (count[result.first_doubled] > 1) if result.doubled else (result.first_doubled is None)


@given(regions(distinct=True), regions(distinct=True))
def test_overlap_is_a_common_element(a, b):
    assert overlap(a, b) == bool(set(elements(a)) & set(elements(b)))
