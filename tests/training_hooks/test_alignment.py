"""Alignment of labels and masks against plain Python over lists of sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_hooks.alignment import Alignment, CpSplit, Layout, mtp_targets
from training_hooks.errors import AlignmentError

TOKEN, NEXT = Alignment.TOKEN, Alignment.NEXT_TOKEN


def _wanted(sequences, supervised, depth):
    """{(sequence, position): label} of one depth, from the definition."""
    return {
        (k, i): tokens[i + depth + 1]
        for k, tokens in enumerate(sequences)
        for i in range(len(tokens) - depth - 1)
        if supervised[k][i + depth + 1]
    }


def _pack(sequences, rooms, values, next_token=False):
    """[1, columns] of `values` per token; with `next_token`, element i speaks of token i + 1."""
    out = torch.zeros(1, sum(rooms), dtype=torch.int64)
    start = 0
    for tokens, room, row in zip(sequences, rooms, values, strict=True):
        row = [*row[1:], 0] if next_token else list(row)
        out[0, start : start + len(tokens)] = torch.tensor(row, dtype=torch.int64)
        start += room
    return out


def _cumulative(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    sequences = [[100 * k + i + 1 for i in range(n)] for k, n in enumerate(lengths)]
    supervised = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    cp = draw(st.sampled_from([1, 2, 3]))
    rooms = [-(-n // (2 * cp)) * 2 * cp + 2 * cp * draw(st.integers(0, 1)) for n in lengths]
    return sequences, supervised, rooms, cp, draw(st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(
    batches(), st.sampled_from([TOKEN, NEXT]), st.sampled_from([TOKEN, NEXT]), st.sampled_from(["zigzag", "contiguous"])
)
def test_every_position_predicts_what_the_definition_says_whatever_the_conventions_and_the_split(
    batch, mask_alignment, labels_alignment, scheme
):
    sequences, supervised, rooms, cp, depths = batch
    layout = Layout.packed(_cumulative([len(s) for s in sequences]), _cumulative(rooms))
    ids = _pack(sequences, rooms, sequences)
    mask = _pack(sequences, rooms, supervised, next_token=mask_alignment is NEXT)
    labels = _pack(sequences, rooms, sequences, next_token=labels_alignment is NEXT)
    keys = layout.keys()
    seen = [{} for _ in range(depths)]
    for rank in range(cp):
        split = CpSplit(size=cp, rank=rank, scheme=scheme)
        got = mtp_targets(
            ids, mask, layout=layout, depths=depths, mask_alignment=mask_alignment, labels=labels,
            labels_alignment=labels_alignment, cp=split,
        )  # fmt: skip
        columns = split.local_columns(layout).tolist()
        for depth in range(depths):
            assert got.counts[depth] == int(got.mask[depth].sum())
            for j, column in enumerate(columns):
                k, i = keys[0, column].tolist()
                if got.mask[depth, 0, j]:
                    assert (k, i) not in seen[depth]
                    seen[depth][k, i] = int(got.labels[depth, 0, j])
                inside = k >= 0 and i + depth + 1 < len(sequences[k])
                assert int(got.input_ids[depth, 0, j]) == (sequences[k][i + depth + 1] if inside else 0)
    assert seen == [_wanted(sequences, supervised, d + 1) for d in range(depths)]


def test_padded_rows_and_documents_keep_their_borders():
    ids = torch.tensor([[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6])
    layout = Layout.padded([5, 6], 6, documents=[[5], [2, 4]])
    got = mtp_targets(ids, mask, layout=layout, depths=2, mask_alignment=TOKEN)
    assert got.labels.tolist() == [
        [[3, 4, 5, 0, 0, 0], [0, 0, 10, 11, 0, 0]],
        [[4, 5, 0, 0, 0, 0], [0, 0, 11, 0, 0, 0]],
    ]
    assert got.counts == (5, 3)
    assert got.input_ids[0].tolist() == [[2, 3, 4, 5, 0, 0], [7, 0, 9, 10, 11, 0]]
    assert got.position_ids[0].tolist() == [[1, 2, 3, 4, 0, 0], [1, 0, 1, 2, 3, 0]]


def test_next_token_labels_may_reach_one_token_beyond_the_input():
    ids, labels = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, 5]])
    got = mtp_targets(
        ids, torch.ones(1, 4), layout=Layout.padded([4], 4), depths=1, mask_alignment=NEXT, labels=labels,
        labels_alignment=NEXT,
    )  # fmt: skip
    assert got.labels.tolist() == [[[3, 4, 5, 0]]]


def test_a_mask_that_is_shifted_twice_would_supervise_the_prompt():
    """The response is tokens 4 to 9: the stock contract rolls a next-token mask, a token-aligned one is one off."""
    ids = torch.arange(10)[None]
    response = (ids >= 4).int()
    layout = Layout.padded([10], 10)
    right = mtp_targets(ids, response, layout=layout, depths=1, mask_alignment=TOKEN)
    assert right.labels[right.mask].tolist() == [4, 5, 6, 7, 8, 9]
    next_aligned = torch.nn.functional.pad(response[:, 1:], (0, 1))
    same = mtp_targets(ids, next_aligned, layout=layout, depths=1, mask_alignment=NEXT)
    assert torch.equal(same.mask, right.mask)
    mislabelled = mtp_targets(ids, next_aligned, layout=layout, depths=1, mask_alignment=TOKEN)
    assert mislabelled.labels[mislabelled.mask].tolist() == [3, 4, 5, 6, 7, 8]  # last prompt token, no end of text


def test_media_tokens_are_never_targets():
    ids = torch.tensor([[1, 9, 9, 4, 5]])
    for alignment, mask in ((TOKEN, [[1, 1, 1, 1, 1]]), (NEXT, [[1, 1, 1, 1, 0]])):
        got = mtp_targets(
            ids, torch.tensor(mask), layout=Layout.padded([5], 5), depths=2, mask_alignment=alignment,
            media_mask=ids == 9,
        )  # fmt: skip
        assert got.labels.tolist() == [[[0, 4, 5, 0, 0]], [[4, 5, 0, 0, 0]]]


def test_explicit_columns_select_what_a_model_slices_by_itself():
    ids = torch.tensor([[1, 9, 3, 4, 5, 6]])
    columns = torch.tensor([4, 0, 1])
    got = mtp_targets(
        ids, torch.ones(1, 6), layout=Layout.padded([6], 6), depths=1, mask_alignment=TOKEN, media_mask=ids == 9,
        cp=CpSplit(size=2, rank=0, columns=columns),
    )  # fmt: skip
    assert got.labels.tolist() == [[[0, 3, 4]]]


LAYOUT = Layout.padded([3, 4], 4)
GOOD = {"layout": LAYOUT, "depths": 1, "mask_alignment": TOKEN}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_mask": torch.ones(2, 4)}, "1 positions of padding"),
        ({"loss_mask": torch.full((2, 4), 0.5)}, "weights are no mask"),
        ({"loss_mask": torch.ones(2, 2)}, "before context parallel slicing"),
        ({"depths": 0}, "no MTP targets"),
        ({"mask_alignment": "token"}, "Alignment.TOKEN or Alignment.NEXT_TOKEN"),
        ({"cp": CpSplit(size=2, rank=0), "media_mask": torch.zeros(2, 4)}, "slices its merged sequence by itself"),
        ({"cp": CpSplit(size=3, rank=0)}, "2 \\* 3 CP chunks.*pad the rows"),
        ({"cp": CpSplit(columns=torch.tensor([4]))}, "outside of the 4 columns"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_reason(change, words):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    arguments = {"input_ids": torch.arange(8).view(2, 4), "loss_mask": mask, **GOOD, **change}
    with pytest.raises(AlignmentError, match=words):
        mtp_targets(arguments.pop("input_ids"), arguments.pop("loss_mask"), **arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout.packed([0, 8, 16], [0, 5, 11]), "swapped"),
        (lambda: Layout.packed([0, 5, 11], [0, 8]), "one entry per sequence"),
        (lambda: Layout.padded([5], 4), "length 5, but rows have 4"),
        (lambda: Layout.padded([4], 4, documents=[[1, 2]]), "do not add up"),
        (lambda: CpSplit(size=2, rank=2), "rank 2 of 2"),
        (lambda: CpSplit(scheme="ring"), "unknown context parallel scheme"),
        (lambda: CpSplit(size=2).local_columns(Layout.packed([0, 3], [0, 6])), "pad each sequence"),
        (lambda: CpSplit(size=4, scheme="contiguous").local_columns(Layout.padded([6], 6)), "do not divide"),
    ],
)
def test_impossible_layouts_and_splits_are_refused(make, words):
    with pytest.raises(AlignmentError, match=words):
        make()
