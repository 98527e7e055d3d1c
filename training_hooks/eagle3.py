"""The EAGLE3 objective: soft targets on the draft's vocabulary over an unroll of test-time-training steps.

Row t of a sequence pairs the target's features at t with the embedding of token t + 1 and drafts token t + 2; step i of
the unroll feeds the draft its own previous output and drafts token t + 2 + i. That is the alignment of MTP depth i + 1,
so masks come from `training_hooks.alignment.mtp_targets(depths=steps)`. The trainer runs the draft, one call a step,
and passes its logits here; rows must be whole sequences, not slices of context parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training_hooks.alignment import MTPTargets
from training_hooks.errors import SettingsError
from training_hooks.losses import DraftLoss, accepted_length
from training_hooks.vocab_parallel import DEFAULT_CHUNK_BYTES, row_losses

__all__ = ["DraftVocabulary", "Eagle3Loss", "eagle3_loss"]


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The draft's part of the target's vocabulary. `d2t`: int64 [draft vocabulary], OFFSETS: draft id i stands for
    target id `i + d2t[i]`.

    Raises:
        SettingsError: ids out of range or not strictly rising, as when `d2t` holds target ids.
    """

    d2t: torch.Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.numel() == 0 or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size or bool((ids.diff() <= 0).any()):
            raise SettingsError(
                f"d2t does not map {ids.numel()} draft ids to rising ids below {self.target_size}: it must hold "
                "offsets (target id - draft id), not target ids"
            )

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary]: the target id of every draft id."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    @property
    def t2d(self) -> torch.Tensor:
        """bool [target vocabulary]: which target ids the draft can say."""
        out = torch.zeros(self.target_size, dtype=torch.bool, device=self.d2t.device)
        out[self.target_ids] = True
        return out

    def teacher(self, target_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits on the draft's vocabulary [..., draft], log of the mass that the target gives it [...]), detached."""
        logits = target_logits.detach()
        own = logits.index_select(-1, self.target_ids)
        return own, own.double().logsumexp(-1) - logits.double().logsumexp(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Loss:
    """`decay`: weight of step i is `decay ** i`. `require_top1`: supervise only where the target's most likely token is
    one that the draft has."""

    decay: float = 0.8
    require_top1: bool = False
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise SettingsError(f"decay is {self.decay}: it must lie in (0, 1]")


def eagle3_loss(
    step_logits: Sequence[torch.Tensor],
    teacher_logits: torch.Tensor,
    targets: MTPTargets,
    config: Eagle3Loss | None = None,
    *,
    teacher_log_mass: torch.Tensor | None = None,
    top1_covered: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> DraftLoss:
    """sum_i decay^i sum_t -sum_v p(v | t + 1 + i) log q_i(v | t), p being the target's softmax on the draft vocabulary.

    Divide by `tokens`: supervised rows of all steps, unweighted.

    Args:
        step_logits: the draft's, per step [rows, columns, local draft vocabulary].
        teacher_logits: the target's at every position, same shape; see `DraftVocabulary.teacher`.
        targets: of `mtp_targets` with as many depths as steps.
        teacher_log_mass: [rows, columns], for the acceptance in the report.
        top1_covered: bool [rows, columns], whether the target's most likely token at a position is in the draft's
            vocabulary; needed with `require_top1`.
        group: ranks that shard the draft's vocabulary.

    Raises:
        SettingsError: steps and targets do not fit, or a needed input is missing.
    """
    config = config or Eagle3Loss()
    if len(step_logits) != targets.depths:
        raise SettingsError(f"{len(step_logits)} steps of logits, but targets of {targets.depths} depths")
    if config.require_top1 and top1_covered is None:
        raise SettingsError(
            "require_top1 needs top1_covered: whether the target's top token is in the draft vocabulary"
        )
    if teacher_logits.requires_grad:
        raise SettingsError("teacher_logits require a gradient: detach them, or the draft's loss trains its target")
    numerator: torch.Tensor | None = None
    report: dict[str, torch.Tensor] = {}
    rates, masks = [], []
    tokens = torch.zeros((), dtype=torch.int64, device=teacher_logits.device)
    for step, logits in enumerate(step_logits):
        mask = targets.mask[step]
        if config.require_top1 and top1_covered is not None:
            mask = mask & _later(top1_covered, step + 1)
        losses = row_losses(
            logits,
            mask,
            teacher_logits=_later(teacher_logits, step + 1),
            teacher_log_mass=None if teacher_log_mass is None else _later(teacher_log_mass, step + 1),
            group=group,
            chunk_bytes=config.chunk_bytes,
        )
        assert losses.soft is not None
        assert losses.accept is not None
        count = mask.sum()
        part = losses.soft.sum()
        numerator = config.decay**step * part if numerator is None else numerator + config.decay**step * part
        tokens = tokens + count
        rates.append(losses.accept)
        masks.append(mask)
        for name, value in (("loss", part), ("accept", losses.accept.sum()), ("top1", losses.correct.sum())):
            report[f"eagle3_{name}/step_{step}"] = torch.stack([value.detach().double(), count.double()])
    assert numerator is not None
    report["eagle3_accept_length"] = accepted_length(rates, masks).double()
    return DraftLoss(numerator=numerator, tokens=tokens, report=report)


def _later(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Element t becomes element t + by along columns; what runs over the border is masked by the targets."""
    return torch.roll(tensor, -by, 1)
