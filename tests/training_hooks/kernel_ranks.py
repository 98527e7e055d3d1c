"""The vocabulary-parallel kernel on the ranks of the default group against the whole vocabulary in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from training_hooks.vocab_parallel import row_losses


def _weighted(logits, teacher, labels, mask, weights, group, chunk_bytes):
    out = row_losses(logits, mask, labels=labels, teacher_logits=teacher, group=group, chunk_bytes=chunk_bytes)
    return (weights[0] * out.hard + weights[1] * out.soft + weights[2] * out.l1).sum(), out


def check(rank):
    """Largest differences of values and gradients; ranks use other chunk sizes, which must not matter."""
    size, rows, vocab = dist.get_world_size(), 9, 16
    generator = torch.Generator().manual_seed(3)
    full, teacher = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    mask = torch.rand(rows, generator=generator) > 0.3
    weights = torch.rand(3, rows, generator=generator, dtype=torch.float64)
    whole = full.clone().requires_grad_(True)
    want, want_out = _weighted(whole, teacher, labels, mask, weights, None, 1 << 20)
    want.backward()
    part = full.chunk(size, 1)[rank].clone().requires_grad_(True)
    own_teacher = teacher.chunk(size, 1)[rank]
    got, out = _weighted(part, own_teacher, labels, mask, weights, dist.group.WORLD, 400 * (rank + 1))
    got.backward()
    poisoned = part.detach().clone()
    poisoned[~mask] = float("nan")
    poisoned.requires_grad_(True)
    poisoned_labels = torch.where(mask, labels, -100)
    same, _ = _weighted(poisoned, own_teacher, poisoned_labels, mask, weights, dist.group.WORLD, 400)
    same.backward()
    return {
        "value": abs(got.item() - want.item()),
        "grad": (part.grad - whole.grad.chunk(size, 1)[rank]).abs().max().item(),
        "accept": (out.accept - want_out.accept).abs().max().item(),
        "correct": torch.equal(out.correct, want_out.correct),
        "poison": torch.equal(same, got) and torch.equal(poisoned.grad, part.grad),
    }
