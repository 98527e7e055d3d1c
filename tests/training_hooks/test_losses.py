"""EAGLE3 and DSpark losses against plain Python over positions."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from training_hooks.alignment import Alignment, Layout, mtp_targets
from training_hooks.dspark import (
    DSparkLoss,
    GatedMarkovHead,
    MarkovHead,
    block_targets,
    dspark_loss,
    sample_anchors,
)
from training_hooks.eagle3 import DraftVocabulary, Eagle3Loss, eagle3_loss
from training_hooks.errors import AlignmentError, SettingsError
from training_hooks.losses import accepted_length, megatron_loss

LENGTHS, COLUMNS, TARGET, STEPS = (7, 4), 8, 12, 3
D2T = torch.tensor([1, 1, 2, 4, 5])  # offsets: target ids 1, 2, 4, 7, 9


def _eagle(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    full = torch.randn(rows, COLUMNS, TARGET, generator=generator, dtype=torch.float64) * 2
    steps = [
        torch.randn(rows, COLUMNS, 5, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(STEPS)
    ]
    supervised = torch.rand(rows, COLUMNS, generator=generator) > 0.3
    for row, n in enumerate(lengths):
        supervised[row, n:] = False
    targets = mtp_targets(
        torch.zeros(rows, COLUMNS, dtype=torch.int64), supervised, layout=Layout.padded(lengths, COLUMNS), depths=STEPS,
        mask_alignment=Alignment.TOKEN,
    )  # fmt: skip
    return full, steps, supervised, targets


def test_eagle3_equals_the_sum_over_positions_by_definition():
    full, steps, supervised, targets = _eagle()
    vocabulary = DraftVocabulary(D2T, TARGET)
    assert vocabulary.target_ids.tolist() == [1, 2, 4, 7, 9]
    teacher, log_mass = vocabulary.teacher(full)
    covered = vocabulary.t2d[full.argmax(-1)]
    for require_top1 in (False, True):
        loss = eagle3_loss(
            steps, teacher, targets, Eagle3Loss(decay=0.7, require_top1=require_top1), teacher_log_mass=log_mass,
            top1_covered=covered,
        )  # fmt: skip
        want, count, accept0, chains, length = 0.0, 0, 0.0, 0, 0.0
        for row, n in enumerate(LENGTHS):
            for t in range(n):
                alive = 1.0
                for i in range(STEPS):
                    ok = t + 2 + i < n and supervised[row, t + 2 + i]
                    if not ok or (require_top1 and not covered[row, t + 1 + i]):
                        alive = 0.0
                        continue
                    z = full[row, t + 1 + i]
                    p, q = z[vocabulary.target_ids].softmax(-1), steps[i][row, t].log_softmax(-1)
                    want = want + 0.7**i * -(p * q).sum()
                    count += 1
                    rate = torch.minimum(z.softmax(-1)[vocabulary.target_ids], q.exp()).sum().item()
                    if i == 0:
                        accept0, chains, length = accept0 + rate, chains + 1, length + 1
                    alive *= rate
                    length += alive
        assert loss.tokens == count
        torch.testing.assert_close(loss.numerator, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(loss.report["eagle3_accept/step_0"].tolist(), [accept0, float(chains)])
        torch.testing.assert_close(loss.report["eagle3_accept_length"].tolist(), [length, float(chains)])
        grads = torch.autograd.grad(loss.numerator, steps, retain_graph=True)
        wanted = torch.autograd.grad(want, steps)
        for got, plain in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got, plain, rtol=1e-11, atol=1e-13)


def test_uneven_micro_batches_add_up_to_the_global_mean():
    both = _eagle()
    whole = eagle3_loss(both[1], both[0][..., D2T + torch.arange(5)], both[3])
    numerator, tokens, pairs = 0.0, 0, 0.0
    for row in range(2):
        targets = dataclasses.replace(
            both[3],
            **{k: getattr(both[3], k)[:, row : row + 1] for k in ("input_ids", "labels", "mask", "position_ids")},
        )
        part = eagle3_loss(
            [s[row : row + 1] for s in both[1]], both[0][row : row + 1][..., D2T + torch.arange(5)], targets
        )
        numerator, tokens = numerator + part.numerator, tokens + part.tokens
        pairs = pairs + part.report["eagle3_loss/step_1"]
    torch.testing.assert_close(numerator / tokens, whole.numerator / whole.tokens, rtol=1e-13, atol=0)
    torch.testing.assert_close(pairs, whole.report["eagle3_loss/step_1"])


def test_rows_beyond_the_sequences_change_nothing_bit_for_bit():
    full, steps, _, targets = _eagle()
    teacher, log_mass = DraftVocabulary(D2T, TARGET).teacher(full)
    clean = eagle3_loss(steps, teacher, targets, teacher_log_mass=log_mass)
    grads = torch.autograd.grad(clean.numerator, steps)
    bad_steps = []
    for step, logits in enumerate(steps):
        bad = logits.detach().clone()
        bad[~targets.mask[step]] = float("nan")
        bad_steps.append(bad.requires_grad_())
    bad_teacher, bad_mass = teacher.clone(), log_mass.clone()
    for row, n in enumerate(LENGTHS):
        bad_teacher[row, n:], bad_mass[row, n:] = float("inf"), float("nan")
    poisoned = eagle3_loss(bad_steps, bad_teacher, targets, teacher_log_mass=bad_mass)
    assert torch.equal(poisoned.numerator, clean.numerator)
    for got, want in zip(torch.autograd.grad(poisoned.numerator, bad_steps), grads, strict=True):
        assert torch.equal(got, want)
    for name, pair in clean.report.items():
        assert torch.equal(pair, poisoned.report[name]), name


def test_eagle3_refuses_target_ids_for_offsets_teachers_with_gradients_and_missing_inputs():
    full, steps, _, targets = _eagle()
    teacher = full[..., :5]
    with pytest.raises(SettingsError, match="not target ids"):
        DraftVocabulary(torch.tensor([1, 2, 4, 7, 9]), TARGET)
    with pytest.raises(SettingsError, match="trains its target"):
        eagle3_loss(steps, teacher.clone().requires_grad_(), targets)
    with pytest.raises(SettingsError, match="2 steps of logits, but targets of 3"):
        eagle3_loss(steps[:2], teacher, targets)
    with pytest.raises(SettingsError, match="needs top1_covered"):
        eagle3_loss(steps, teacher, targets, Eagle3Loss(require_top1=True))
    with pytest.raises(SettingsError, match="decay"):
        Eagle3Loss(decay=0.0)


def test_accepted_length_counts_the_targets_own_token_and_stops_at_a_gap():
    yes, no = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    half = torch.full((3,), 0.5)
    assert accepted_length([half, half], [yes, no]).tolist() == [(1 + 0.5 + 0.25) + (1 + 0.5), 2]


def test_megatron_takes_the_loss_only_where_it_divides_by_global_tokens():
    _, steps, _, targets = _eagle()
    loss = eagle3_loss(steps, torch.zeros_like(steps[0]), targets)
    numerator, tokens, report = megatron_loss(loss, SimpleNamespace(calculate_per_token_loss=True))
    assert numerator is loss.numerator
    assert (tokens, report) == (loss.tokens, dict(loss.report))
    with pytest.raises(SettingsError, match="calculate_per_token_loss is off"):
        megatron_loss(loss, SimpleNamespace(calculate_per_token_loss=False))
    with pytest.raises(SettingsError, match="denominator='tokens'"):
        megatron_loss(
            dataclasses.replace(loss, tokens=torch.tensor(1.5)), SimpleNamespace(calculate_per_token_loss=True)
        )


def _blocks(seed=1, blocks=4, length=5, vocab=6):
    generator = torch.Generator().manual_seed(seed)
    draft, teacher = (
        torch.randn(blocks, length, vocab, generator=generator, dtype=torch.float64) * 2 for _ in range(2)
    )
    labels = torch.randint(0, vocab, (blocks, length), generator=generator)
    mask = (torch.rand(blocks, length, generator=generator) > 0.2).long().cumprod(1).bool()
    keep = torch.tensor([True, False, True, True])
    confidence = torch.randn(blocks, length, generator=generator, dtype=torch.float64)
    return draft.requires_grad_(), teacher, labels, mask, keep, confidence.requires_grad_()


@pytest.mark.parametrize("denominator", ["tokens", "weights"])
def test_dspark_equals_the_sum_over_block_entries_by_definition(denominator):
    draft, teacher, labels, mask, keep, confidence = _blocks()
    loss = dspark_loss(
        draft, teacher, labels, mask, DSparkLoss(denominator=denominator), confidence_logits=confidence,
        block_keep_mask=keep,
    )  # fmt: skip
    want, count, weight, accept, length, chains = 0.0, 0, 0.0, 0.0, 0.0, 0
    for b in range(4):
        alive = 1.0
        for k in range(5):
            if not (mask[b, k] and keep[b]):
                break
            q, p = draft[b, k].softmax(-1), teacher[b, k].softmax(-1)
            l1 = (p - q).abs().sum()
            rate = 1 - l1.item() / 2
            bce = torch.nn.functional.binary_cross_entropy_with_logits(
                confidence[b, k], torch.tensor(rate, dtype=torch.float64)
            )
            w = math.exp(-k / 4)
            want = want + w * (0.1 * -q[labels[b, k]].log() + 0.9 * l1 + bce)
            count, weight, accept = count + 1, weight + w, accept + rate
            if k == 0:
                chains, length = chains + 1, length + 1
            alive *= rate
            length += alive
    torch.testing.assert_close(loss.numerator, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(float(loss.tokens), float(count if denominator == "tokens" else weight))
    torch.testing.assert_close(loss.report["dspark_accept"].tolist(), [accept, float(count)])
    torch.testing.assert_close(loss.report["dspark_accept_length"].tolist(), [length, float(chains)])
    for got, plain in zip(
        torch.autograd.grad(loss.numerator, (draft, confidence)),
        torch.autograd.grad(want, (draft, confidence)),
        strict=True,
    ):
        torch.testing.assert_close(got, plain, rtol=1e-11, atol=1e-13)


def test_dspark_is_not_reached_by_what_stands_outside_of_its_masks():
    draft, teacher, labels, mask, keep, confidence = _blocks()
    arguments = {"block_keep_mask": keep}
    clean = dspark_loss(draft, teacher, labels, mask, confidence_logits=confidence, **arguments)
    grads = torch.autograd.grad(clean.numerator, (draft, confidence))
    out = ~(mask & keep[:, None])
    assert out.any()
    assert (~out).any()
    bad = [x.detach().clone() for x in (draft, teacher, confidence)]
    for tensor, value in zip(bad, (float("nan"), float("inf"), float("nan")), strict=True):
        tensor[out] = value
    bad_labels = torch.where(out, -100, labels)
    bad[0].requires_grad_(), bad[2].requires_grad_()
    poisoned = dspark_loss(bad[0], bad[1], bad_labels, mask, confidence_logits=bad[2], **arguments)
    assert torch.equal(poisoned.numerator, clean.numerator)
    for got, want in zip(torch.autograd.grad(poisoned.numerator, (bad[0], bad[2])), grads, strict=True):
        assert torch.equal(got, want)


def test_anchors_are_supervised_and_their_blocks_stay_in_one_chunk():
    supervised = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    assert sample_anchors(supervised, count=99, block=3).tolist() == [1, 2, 5, 6, 7, 8, 9, 10]
    chunks = [(0, 4), (6, 12)]
    assert sample_anchors(supervised, count=99, block=3, borders=chunks).tolist() == [6, 7, 8]
    picked = sample_anchors(supervised, count=3, block=3, generator=torch.Generator().manual_seed(0))
    assert picked.tolist() == sorted(set(picked.tolist()))
    assert len(picked) == 3
    assert sample_anchors(torch.zeros(5, dtype=torch.bool), count=3, block=2).tolist() == []
    with pytest.raises(AlignmentError, match="outside of the 12 columns"):
        sample_anchors(supervised, count=1, block=1, borders=[(0, 13)])


def test_block_entries_predict_the_tokens_behind_their_anchor_up_to_the_first_gap():
    tokens = torch.arange(10, 20)
    supervised = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    got = block_targets(tokens, supervised, torch.tensor([1, 7, 5]), block=3, keep=torch.tensor([True, True, False]))
    assert got.mask.tolist() == [[True, True, False], [True, True, False], [False] * 3]
    assert got.labels.tolist() == [[12, 13, 0], [18, 19, 0], [0, 0, 0]]
    assert got.previous.tolist() == [[11, 12, 0], [17, 18, 0], [0, 0, 0]]
    assert got.teacher_position[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gamma": 0.0}, "gamma"),
        ({"confidence": -1.0}, "not be negative"),
        ({"denominator": "rows"}, "unknown denominator"),
    ],
)
def test_dspark_settings_are_checked_when_built(change, words):
    with pytest.raises(SettingsError, match=words):
        DSparkLoss(**change)


def test_dspark_needs_what_its_terms_read():
    draft, teacher, labels, mask, *_ = _blocks()
    with pytest.raises(SettingsError, match="no confidence_logits"):
        dspark_loss(draft, teacher, labels, mask)
    with pytest.raises(SettingsError, match="eval_mask has shape"):
        dspark_loss(draft, teacher, labels, mask[:, 0], DSparkLoss(confidence=0.0))
    assert dspark_loss(draft, teacher, labels, mask, DSparkLoss(confidence=0.0)).tokens == mask.sum()


def test_markov_heads_start_neutral_and_read_the_previous_token():
    previous, hidden = torch.tensor([[1, 2], [3, 1]]), torch.randn(2, 2, 4)
    for head in (MarkovHead(6, 3), GatedMarkovHead(6, 3, 4)):
        assert not head(previous, hidden).any()
        torch.nn.init.ones_(head.out.weight)
        out = head(previous, hidden)
        assert out.shape == (2, 2, 6)
        out.sum().backward()
        assert head.embedding.weight.grad[1:4].any(1).all()
        assert not head.embedding.weight.grad[[0, 4, 5]].any()
    plain = MarkovHead(6, 3)
    torch.nn.init.normal_(plain.out.weight)
    assert torch.equal(plain(previous, hidden)[0, 0], plain(previous, hidden + 1)[1, 1])
