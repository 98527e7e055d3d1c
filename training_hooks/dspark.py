"""The DSpark objective: blocks of draft tokens behind anchors, cross entropy, total variation and a confidence head.

Anchors are positions a whose token and next token are supervised; block entry k (0-based) drafts token a + k + 1 from
the draft's state, compared with the target's distribution at a + k. `sample_anchors` chooses them within the columns of
one rank (blocks never leave a context parallel chunk), `block_targets` says what every entry predicts and whether it
counts, `dspark_loss` is the loss over blocks, and the heads (`MarkovHead`, gated, or with a state that runs along the
block) add what the previous token says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from training_hooks.errors import AlignmentError, SettingsError
from training_hooks.losses import DraftLoss, accepted_length
from training_hooks.vocab_parallel import DEFAULT_CHUNK_BYTES, row_losses

__all__ = [
    "BlockTargets",
    "DSparkLoss",
    "GatedMarkovHead",
    "MarkovHead",
    "RNNHead",
    "block_targets",
    "dspark_loss",
    "sample_anchors",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkLoss:
    """Weights of the three terms, decay over block entries exp(-k / gamma) (None: none), and what the sum is divided
    by: `tokens` (supervised entries) or `weights` (their decay weights; the same alphas then give larger gradients)."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    gamma: float | None = 4.0
    denominator: Literal["tokens", "weights"] = "tokens"
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        if min(self.cross_entropy, self.total_variation, self.confidence) < 0:
            raise SettingsError("the weights of DSpark's terms must not be negative")
        if self.gamma is not None and self.gamma <= 0:
            raise SettingsError(f"gamma is {self.gamma}: it must be positive, or None for no decay")
        if self.denominator not in ("tokens", "weights"):
            raise SettingsError(f"unknown denominator {self.denominator!r}: choose 'tokens' or 'weights'")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTargets:
    """Of every block entry, [blocks, length]: `labels` (int64, 0 where not supervised), `previous` (int64, the token
    before), `teacher_position` (int64, a + k, clamped into the row) and `mask` (bool): supervised without a gap since
    the anchor."""

    labels: torch.Tensor
    previous: torch.Tensor
    teacher_position: torch.Tensor
    mask: torch.Tensor


def sample_anchors(
    supervised: torch.Tensor,
    *,
    count: int,
    block: int,
    borders: Sequence[tuple[int, int]] | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Up to `count` anchors, rising, of one row: `supervised` is bool [columns] by token.

    `borders` are (start, end) of the runs of neighbouring columns that this rank holds, e.g. the two chunks of a zigzag
    split; a block lies in one of them as a whole. Default: the whole row.

    Raises:
        AlignmentError: a run outside of the row.
    """
    columns = supervised.numel()
    eligible = torch.zeros(columns, dtype=torch.bool)
    for start, end in borders or [(0, columns)]:
        if not 0 <= start <= end <= columns:
            raise AlignmentError(f"run ({start}, {end}) lies outside of the {columns} columns of the row")
        # The first drafted token must be there; with borders given, the whole block.
        last = end - 1 if borders is None else end - block
        if last > start:
            own = supervised[start:end].cpu()
            eligible[start:last] = (own[:-1] & own[1:])[: last - start]
    candidates = eligible.nonzero()[:, 0]
    if candidates.numel() > count:
        candidates = candidates[torch.randperm(candidates.numel(), generator=generator)[:count]].sort().values
    return candidates.to(supervised.device)


def block_targets(
    tokens: torch.Tensor,
    supervised: torch.Tensor,
    anchors: torch.Tensor,
    *,
    block: int,
    keep: torch.Tensor | None = None,
) -> BlockTargets:
    """What `block` entries behind each anchor predict, in one row of `tokens` (int64 [columns]).

    `supervised`: bool [columns], by token. `keep`: bool [blocks], blocks that count (e.g. not padding of the anchor
    list). An entry counts only if all entries before it do.
    """
    columns = tokens.numel()
    offsets = torch.arange(block, device=tokens.device)
    position = anchors[:, None] + offsets  # of the teacher and the previous token
    label_at = position + 1
    inside = label_at < columns
    ok = inside & supervised[label_at.clamp(max=columns - 1)]
    if keep is not None:
        ok = ok & keep[:, None]
    mask = ok.long().cumprod(1).bool()
    position = position.clamp(max=columns - 1)
    return BlockTargets(
        labels=torch.where(mask, tokens[label_at.clamp(max=columns - 1)], 0),
        previous=torch.where(mask, tokens[position], 0),
        teacher_position=position,
        mask=mask,
    )


def dspark_loss(
    draft_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    eval_mask: torch.Tensor,
    config: DSparkLoss | None = None,
    *,
    confidence_logits: torch.Tensor | None = None,
    block_keep_mask: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> DraftLoss:
    """sum of w (a CE + b |p - q|_1 + c BCE(confidence, accept)), w = mask exp(-k / gamma).

    Args:
        draft_logits, teacher_logits: [blocks, length, local vocabulary]; the teacher's without gradient.
        labels: int64 [blocks, length].
        eval_mask: bool [blocks, length]; see `block_targets`.
        confidence_logits: [blocks, length], logit of the predicted acceptance; its target, 1 - |p - q|_1 / 2, has no
            gradient. Needed unless `config.confidence` is 0.
        block_keep_mask: bool [blocks], ANDed with `eval_mask`.
        group: ranks that shard the vocabulary.

    Raises:
        SettingsError: shapes do not fit or an input is missing.
    """
    config = config or DSparkLoss()
    if eval_mask.shape != draft_logits.shape[:-1]:
        raise SettingsError(f"eval_mask has shape {tuple(eval_mask.shape)}, expected {tuple(draft_logits.shape[:-1])}")
    if config.confidence and confidence_logits is None:
        raise SettingsError(
            "the confidence term has weight, but there are no confidence_logits: pass them or set it to 0"
        )
    mask = eval_mask if block_keep_mask is None else eval_mask & block_keep_mask[:, None]
    out = row_losses(
        draft_logits, mask, labels=labels, teacher_logits=teacher_logits, group=group, chunk_bytes=config.chunk_bytes
    )
    assert out.hard is not None
    assert out.l1 is not None
    assert out.accept is not None
    length = draft_logits.shape[1]
    decay = torch.ones(length, dtype=out.hard.dtype, device=out.hard.device)
    if config.gamma is not None:
        decay = torch.exp(-torch.arange(length, dtype=decay.dtype, device=decay.device) / config.gamma)
    weights = mask * decay
    terms = {"ce": (config.cross_entropy, out.hard), "l1": (config.total_variation, out.l1)}
    if confidence_logits is not None and config.confidence:
        # Replaced at the input: a non-finite logit times zero would still have a NaN gradient.
        logits = torch.where(mask, confidence_logits, 0).to(out.hard.dtype)
        bce = nn.functional.binary_cross_entropy_with_logits(logits, out.accept, reduction="none")
        terms["confidence"] = (config.confidence, torch.where(mask, bce, 0))
    numerator = torch.zeros((), dtype=out.hard.dtype, device=out.hard.device)
    report: dict[str, torch.Tensor] = {}
    count, weight = mask.sum(), weights.sum()
    for name, (factor, values) in terms.items():
        value = (weights * values).sum()
        numerator = numerator + factor * value
        report[f"dspark_{name}"] = torch.stack([value.detach().double(), weight.double()])
    report["dspark_accept"] = torch.stack([out.accept.sum().double(), count.double()])
    report["dspark_accept_length"] = accepted_length(list(out.accept.unbind(1)), list(mask.unbind(1))).double()
    for k in range(length):
        report[f"dspark_accept/position_{k}"] = torch.stack(
            [out.accept[:, k].sum().double(), mask[:, k].sum().double()]
        )
    tokens = count if config.denominator == "tokens" else weight
    return DraftLoss(numerator=numerator, tokens=tokens, report=report)


class MarkovHead(nn.Module):
    """Bias on the draft's logits from the token before: W2 W1[previous], of rank `rank`."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, rank)
        self.out = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(rank))
        nn.init.zeros_(self.out.weight)  # an untrained head changes nothing

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`previous` int64 [...] and `hidden` [..., hidden size] (not used here) -> [..., vocabulary]."""
        out: torch.Tensor = self.out(self.embedding(previous))
        return out


class GatedMarkovHead(MarkovHead):
    """As `MarkovHead`, the embedding gated by the draft's state: W2 (sigmoid(G [hidden; e]) * e)."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank)
        self.gate = nn.Linear(hidden_size + rank, rank, bias=False)

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(previous)
        gate = torch.sigmoid(self.gate(torch.cat([hidden, embedded], -1)))
        out: torch.Tensor = self.out(gate * embedded)
        return out


class RNNHead(MarkovHead):
    """As `MarkovHead`, with a state that runs along the block: [g, c, o] = J [s; e; hidden], the next state is
    sigmoid(g) s + (1 - sigmoid(g)) tanh(c), the bias W2 tanh(o). Inputs are [..., block length], from the anchor on."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank)
        self.joint = nn.Linear(2 * rank + hidden_size, 3 * rank, bias=False)

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(previous)
        state, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for e, h in zip(embedded.unbind(-2), hidden.unbind(-2), strict=True):
            gate, candidate, output = self.joint(torch.cat([state, e, h], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            outputs.append(torch.tanh(output))
        out: torch.Tensor = self.out(torch.stack(outputs, -2))
        return out
