"""Softmax statistics, cross entropies, total variation and acceptance on vocabulary shards, in bounded memory.

Every draft loss of this package (MTP, EAGLE3, DSpark) is a weighted sum of what `row_losses` returns. Each tensor
parallel rank passes its shard of the vocabulary; three all-reduces of a few scalars per row make the result that of the
whole vocabulary, and the backward pass needs none. Rows are worked off in chunks, and the backward pass recomputes each
chunk's softmax from two scalars per row, so that apart from the gradient no temporary has the size of the logits.

Rows outside of `mask` are replaced at the input: whatever stands there (NaN, Inf, an id out of range), losses and
gradients are bitwise the same, and their gradients are exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from training_hooks.errors import SettingsError

__all__ = ["DEFAULT_CHUNK_BYTES", "RowLosses", "row_losses"]

DEFAULT_CHUNK_BYTES = 32 << 20
"""Bound of one chunk's temporaries: about five tensors of [chunk rows, local vocabulary] in the dtype of the maths."""

_LIVE_TENSORS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLosses:
    """Per row, in float32 (float64 for float64 logits); zero outside of the mask; None where its input was not given.

    `hard`: -log q(label). `soft`: -sum_v p(v) log q(v), for p the teacher's distribution. `l1`: sum_v |p(v) - q(v)|,
    between 0 and 2. `accept` (no gradient): sum_v min(p(v), q(v)), the probability that speculative sampling accepts,
    with p times the teacher's mass where that is given.
    `correct` (no gradient, bool): the label, or the teacher's largest logit if there is no label, is among the
    draft's largest.
    """

    hard: torch.Tensor | None
    soft: torch.Tensor | None
    l1: torch.Tensor | None
    accept: torch.Tensor | None
    correct: torch.Tensor


def row_losses(
    logits: torch.Tensor,
    mask: torch.Tensor,
    *,
    labels: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None,
    teacher_log_mass: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> RowLosses:
    """The losses of every row of `logits` [..., local vocabulary] (the draft's; the only input that gets a gradient).

    Args:
        mask: bool [...], the supervised rows.
        labels: int64 [...], ids in the whole vocabulary; needed for `hard`.
        teacher_logits: same shape as `logits`; needed for `soft`, `l1` and `accept`.
        teacher_log_mass: [...], log of the probability that the teacher gives to this vocabulary as a whole, if the
            draft's is a part of the teacher's; only `accept` depends on it.
        group: ranks that hold the vocabulary, in order and in equal shards; None: this rank holds all of it.
        chunk_bytes: bound of the temporaries of one chunk, at least one row.

    Raises:
        SettingsError: shapes do not fit, a supervised label is outside of the vocabulary, or the teacher wants a
            gradient (detach it: a draft must not train its target).
    """
    rows, vocab = logits.shape[:-1], logits.shape[-1]
    if labels is None and teacher_logits is None:
        raise SettingsError("row_losses needs labels, teacher_logits or both: there is nothing to compare with")
    for name, tensor, shape in (
        ("mask", mask, rows),
        ("labels", labels, rows),
        ("teacher_logits", teacher_logits, logits.shape),
        ("teacher_log_mass", teacher_log_mass, rows),
    ):
        if tensor is not None and tensor.shape != shape:
            raise SettingsError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if teacher_logits is not None and teacher_logits.requires_grad:
        raise SettingsError("teacher_logits require a gradient: detach them, or the draft's loss trains its target")
    size = 1 if group is None else group.size()
    flat_mask = mask.reshape(-1).bool()
    flat_labels = None
    if labels is not None:
        flat_labels = torch.where(flat_mask, labels.reshape(-1), 0)
        if bool(((flat_labels < 0) | (flat_labels >= vocab * size)).any()):
            bad = int(flat_labels.min()) if bool((flat_labels < 0).any()) else int(flat_labels.max())
            raise SettingsError(f"supervised label {bad} is outside of the vocabulary of {vocab * size}: mask it")
    hard, soft, l1, accept, correct = _RowLosses.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, vocab),
        None if teacher_logits is None else teacher_logits.reshape(-1, vocab),
        None if teacher_log_mass is None else teacher_log_mass.detach().reshape(-1),
        flat_labels,
        flat_mask,
        None if size == 1 else group,
        chunk_bytes,
    )
    return RowLosses(
        hard=None if labels is None else hard.reshape(rows),
        soft=None if teacher_logits is None else soft.reshape(rows),
        l1=None if teacher_logits is None else l1.reshape(rows),
        accept=None if teacher_logits is None else accept.reshape(rows),
        correct=correct.reshape(rows),
    )


class _RowLosses(torch.autograd.Function):
    """Rows are [R, V]; everything per row is [R] in the dtype of the maths."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        teacher: torch.Tensor | None,
        log_mass: torch.Tensor | None,
        labels: torch.Tensor | None,
        mask: torch.Tensor,
        group: dist.ProcessGroup | None,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, ...]:
        start = 0 if group is None else group.rank() * logits.shape[1]
        sides = [logits] if teacher is None else [logits, teacher]
        top = torch.stack([_chunked_max(side, mask, chunk_bytes) for side in sides])
        _reduce(top, dist.ReduceOp.MAX, group)
        total = torch.zeros_like(top)
        for side, maximum, out in zip(sides, top, total, strict=True):
            for rows in _chunks(logits, chunk_bytes):
                z = _clean(side, mask, rows)
                out[rows] = z.sub_(maximum[rows, None]).exp_().sum(1)
        _reduce(total, dist.ReduceOp.SUM, group)
        lse = top + total.log()

        # Of each row: the label's logit, <p, z>, |p - q|_1, <q, sign(q - p)>, is the label (or top token) at the top,
        # sum of min(mass * p, q).
        sums = torch.zeros(6, logits.shape[0], dtype=top.dtype, device=logits.device)
        for rows in _chunks(logits, chunk_bytes):
            z = _clean(logits, mask, rows)
            if labels is not None:
                here, index = _local(labels[rows], start, logits.shape[1])
                value = z.gather(1, index[:, None])[:, 0]
                sums[0, rows] = torch.where(here, value, 0)
                sums[4, rows] = (here & (value >= top[0, rows])).to(top.dtype)
            if teacher is not None:
                zt = _clean(teacher, mask, rows)
                if labels is None:
                    at_top = (zt == top[1, rows, None]) & (z == top[0, rows, None])
                    sums[4, rows] = at_top.any(1).to(top.dtype)
                p = zt.sub_(lse[1, rows, None]).exp_()
                sums[1, rows] = torch.linalg.vecdot(p, z)
                q = z.sub_(lse[0, rows, None]).exp_()
                if log_mass is not None:
                    mass = torch.where(mask[rows], log_mass[rows], 0).to(p.dtype).exp_()
                    sums[5, rows] = torch.minimum(p * mass[:, None], q).sum(1)
                difference = torch.sub(q, p, out=p)
                sums[2, rows] = difference.abs().sum(1)
                sums[3, rows] = torch.linalg.vecdot(q, difference.sign_())
        _reduce(sums, dist.ReduceOp.SUM, group)
        hard = torch.where(mask, lse[0] - sums[0], 0)
        soft = torch.where(mask, lse[0] - sums[1], 0)
        l1 = torch.where(mask, sums[2], 0)
        accept = torch.where(mask, (1 - l1 / 2 if log_mass is None else sums[5]).clamp(0, 1), 0)
        correct = mask & (sums[4] > 0)
        ctx.save_for_backward(logits, teacher, labels, mask, lse, sums[3])
        ctx.start, ctx.chunk_bytes = start, chunk_bytes
        ctx.mark_non_differentiable(accept, correct)
        return hard, soft, l1, accept, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, teacher, labels, mask, lse, q_sign = ctx.saved_tensors
        # A weight that is not finite must not leak out of rows that nobody supervises.
        g_hard, g_soft, g_l1 = (torch.where(mask, g, 0) for g in grads[:3])
        out = torch.empty_like(logits)
        for rows in _chunks(logits, ctx.chunk_bytes):
            q = _clean(logits, mask, rows).sub_(lse[0, rows, None]).exp_()
            if teacher is None:
                grad = q.mul_(g_hard[rows, None])
            else:
                p = _clean(teacher, mask, rows).sub_(lse[1, rows, None]).exp_()
                # dL1/dz = q * (sign(q - p) - <q, sign(q - p)>), and d soft/dz = q - p, d hard/dz = q - onehot.
                grad = torch.sub(q, p).sign_().sub_(q_sign[rows, None]).mul_(g_l1[rows, None])
                grad.add_((g_hard + g_soft)[rows, None]).mul_(q).sub_(p.mul_(g_soft[rows, None]))
            if labels is not None:
                here, index = _local(labels[rows], ctx.start, logits.shape[1])
                grad.scatter_add_(1, index[:, None], torch.where(here, -g_hard[rows], 0)[:, None])
            out[rows] = grad.masked_fill_(~mask[rows, None], 0).to(out.dtype)
        return out, None, None, None, None, None, None


def _math_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(logits: torch.Tensor, chunk_bytes: int) -> Iterator[slice]:
    """Row slices whose temporaries stay within `chunk_bytes` (one row at least)."""
    per_row = _LIVE_TENSORS * logits.shape[1] * (8 if logits.dtype == torch.float64 else 4)
    step = max(1, chunk_bytes // max(per_row, 1))
    for first in range(0, logits.shape[0], step):
        yield slice(first, min(first + step, logits.shape[0]))


def _clean(side: torch.Tensor, mask: torch.Tensor, rows: slice) -> torch.Tensor:
    """A fresh copy of the rows in the dtype of the maths, unsupervised ones replaced by zeros."""
    part = side[rows]
    return torch.where(mask[rows, None], part, 0).to(_math_dtype(side))


def _chunked_max(side: torch.Tensor, mask: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    out = torch.empty(side.shape[0], dtype=_math_dtype(side), device=side.device)
    for rows in _chunks(side, chunk_bytes):
        out[rows] = _clean(side, mask, rows).amax(1)
    return out


def _local(labels: torch.Tensor, start: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each label lies in this shard, and its index there (0 if not)."""
    here = (labels >= start) & (labels < start + vocab)
    return here, torch.where(here, labels - start, 0)


def _reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
