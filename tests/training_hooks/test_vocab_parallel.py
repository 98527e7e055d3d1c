"""The vocabulary-parallel kernel against plain torch; on several ranks see `test_megatron_ranks`."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from training_hooks.errors import SettingsError
from training_hooks.vocab_parallel import row_losses

F = torch.nn.functional


def _case(rows=7, vocab=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(rows, vocab, generator=generator, dtype=dtype) * 3
    teacher = torch.randn(rows, vocab, generator=generator, dtype=dtype) * 3
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    mask = torch.rand(rows, generator=generator) > 0.3
    weights = torch.rand(3, rows, generator=generator, dtype=dtype)
    return draft.requires_grad_(True), teacher, labels, mask, weights


def _plain(draft, teacher, labels, mask, weights):
    """The same weighted sum in plain torch, over supervised rows alone."""
    if mask.all():
        d, t = draft, teacher
    else:
        d, t = draft[mask], teacher[mask]
    p, q = t.softmax(-1), d.softmax(-1)
    hard = F.cross_entropy(d, labels[mask], reduction="none")
    soft = -(p * d.log_softmax(-1)).sum(-1)
    l1 = (p - q).abs().sum(-1)
    parts = {"hard": hard, "soft": soft, "l1": l1, "accept": torch.minimum(p, q).sum(-1)}
    return sum((w[mask] * x).sum() for w, x in zip(weights, (hard, soft, l1), strict=True)), parts


def _ours(draft, teacher, labels, mask, weights, **kwargs):
    out = row_losses(draft, mask, labels=labels, teacher_logits=teacher, **kwargs)
    return (weights[0] * out.hard + weights[1] * out.soft + weights[2] * out.l1).sum(), out


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_losses_and_gradients_equal_plain_torch_for_every_chunk_size(chunk_bytes):
    case = _case()
    draft, mask = case[0], case[3]
    want, parts = _plain(*case)
    (want_grad,) = torch.autograd.grad(want, draft)
    got, out = _ours(*case, chunk_bytes=chunk_bytes)
    (got_grad,) = torch.autograd.grad(got, draft)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-12, atol=1e-13)
    for name, values in parts.items():
        torch.testing.assert_close(getattr(out, name)[mask], values, rtol=1e-12, atol=1e-13)
        assert not getattr(out, name)[~mask].any()
    top = case[0].argmax(-1) == case[2]
    assert torch.equal(out.correct, top & mask)


def test_without_labels_correct_means_agreement_with_the_teachers_top_token():
    draft, teacher, _, mask, _ = _case(rows=64, vocab=3)
    out = row_losses(draft, mask, teacher_logits=teacher)
    assert out.hard is None
    assert torch.equal(out.correct, (draft.argmax(-1) == teacher.argmax(-1)) & mask)


def test_gradcheck():
    draft, teacher, labels, mask, _ = _case(rows=4, vocab=5)

    def run(z):
        out = row_losses(z, mask, labels=labels, teacher_logits=teacher, chunk_bytes=300)
        return out.hard, out.soft, out.l1

    assert torch.autograd.gradcheck(run, (draft,))
    assert torch.autograd.gradcheck(lambda z: row_losses(z, mask, labels=labels).hard, (draft,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_stands_in_unsupervised_rows_changes_nothing_bit_for_bit(dtype):
    draft, teacher, labels, mask, weights = _case(dtype=dtype)
    weights = weights.float() if dtype == torch.bfloat16 else weights
    clean, out = _ours(draft, teacher, labels, mask, weights)
    (clean_grad,) = torch.autograd.grad(clean, draft)
    poison = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype)
    bad = draft.detach().clone()
    bad_teacher, bad_labels, bad_weights = teacher.clone(), labels.clone(), weights.clone()
    for i, row in enumerate((~mask).nonzero()[:, 0].tolist()):
        bad[row] = poison[i % 3]
        bad_teacher[row, : i + 1] = poison[(i + 1) % 3]
        bad_labels[row] = (-100, 10**9, -1)[i % 3]
    bad.requires_grad_(True)
    poisoned, out_bad = _ours(bad, bad_teacher, bad_labels, mask, bad_weights)
    (grad,) = torch.autograd.grad(poisoned, bad)
    assert torch.equal(poisoned, clean)
    assert torch.equal(grad, clean_grad)
    assert not grad[~mask].any()
    assert torch.equal(out_bad.accept, out.accept)


def test_disjoint_distributions_have_distance_two_and_accept_nothing():
    draft = torch.tensor([[50.0, 50.0, -50.0, -50.0]], dtype=torch.float64)
    out = row_losses(draft, torch.ones(1, dtype=torch.bool), teacher_logits=draft.flip(-1))
    assert out.l1.item() == pytest.approx(2.0, abs=1e-12)
    assert out.accept.item() == pytest.approx(0.0, abs=1e-12)
    same = row_losses(draft, torch.ones(1, dtype=torch.bool), teacher_logits=draft)
    assert (same.l1.item(), same.accept.item()) == (0.0, 1.0)


def test_acceptance_counts_what_the_teacher_gives_to_tokens_that_the_draft_does_not_have():
    draft, teacher, _, mask, _ = _case(vocab=12)
    own = slice(2, 9)  # the draft's part of the teacher's vocabulary
    log_mass = teacher[:, own].logsumexp(-1) - teacher.logsumexp(-1)
    out = row_losses(draft[:, own], mask, teacher_logits=teacher[:, own], teacher_log_mass=log_mass)
    want = torch.minimum(teacher.softmax(-1)[:, own], draft[:, own].softmax(-1)).sum(-1)
    torch.testing.assert_close(out.accept[mask], want[mask], rtol=1e-12, atol=1e-14)


def test_no_rows_and_no_supervised_rows_give_zero():
    draft, teacher, labels, mask, weights = _case()
    loss, out = _ours(draft, teacher, labels, torch.zeros_like(mask), weights)
    loss.backward()
    assert loss == 0
    assert not draft.grad.any()
    assert not out.correct.any()
    empty = row_losses(draft[:0], mask[:0], labels=labels[:0])
    assert empty.hard.shape == (0,)


def test_shapes_of_rows_are_kept():
    draft, teacher, labels, mask, _ = _case(rows=6)
    out = row_losses(
        draft.view(2, 3, -1), mask.view(2, 3), labels=labels.view(2, 3), teacher_logits=teacher.view(2, 3, -1)
    )
    assert {x.shape for x in (out.hard, out.soft, out.l1, out.accept, out.correct)} == {(2, 3)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.full((7,), 11)}, "label 11 is outside of the vocabulary of 11"),
        ({"labels": torch.full((7,), -100)}, "label -100 is outside"),
        ({"labels": torch.zeros(6, dtype=torch.int64)}, "labels has shape"),
        ({"teacher_logits": torch.zeros(7, 11, requires_grad=True)}, "detach"),
        ({"labels": None}, "nothing to compare"),
    ],
)
def test_wrong_inputs_are_refused(change, words):
    draft, _, labels, _, _ = _case()
    with pytest.raises(SettingsError, match=words):
        row_losses(draft, torch.ones(7, dtype=torch.bool), **{"labels": labels, **change})


class _LiveBytes(TorchDispatchMode):
    """Peak bytes of the storages that operations made and that still live."""

    def __init__(self, *inputs):
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                size = tensor.untyped_storage().nbytes()
                self._seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(tensor.untyped_storage(), self._free, key, size)
        return out

    def _free(self, key, size):
        self._seen.discard(key)
        self.live -= size


def _peak(run, draft, teacher):
    """(peak bytes of temporaries beside the gradient, seconds)."""
    with _LiveBytes(draft, teacher) as meter:
        start = time.perf_counter()
        loss = run()
        (grad,) = torch.autograd.grad(loss, draft)
        seconds = time.perf_counter() - start
    return meter.peak - grad.untyped_storage().nbytes(), seconds


def test_temporaries_of_the_chunked_path_stay_within_their_bound_and_far_below_the_plain_one(capsys):
    """Rows and vocabulary in the proportion of training (many rows of a long vocabulary), scaled down to a CPU test."""
    rows, vocab, bound = 512, 8192, 1 << 20
    draft, teacher, labels, _, weights = _case(rows, vocab, torch.float32)
    mask = torch.ones(rows, dtype=torch.bool)
    plain, plain_s = _peak(lambda: _plain(draft, teacher, labels, mask, weights)[0], draft, teacher)
    ours, ours_s = _peak(lambda: _ours(draft, teacher, labels, mask, weights, chunk_bytes=bound)[0], draft, teacher)
    with capsys.disabled():
        print(
            f"\nkernel temporaries at {rows} x {vocab} float32: plain {plain >> 10} kB, chunked {ours >> 10} kB "
            f"({plain / ours:.1f}x less), time ratio {ours_s / plain_s:.2f}"
        )
    per_row = 4 * rows * 40  # a few dozen scalars of every row
    assert ours <= bound + per_row
    assert plain / ours >= 4.9
