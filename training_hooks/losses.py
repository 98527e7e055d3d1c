"""What every drafter loss returns, and how a trainer takes it.

A loss is a sum that nobody has divided yet, the count that it is to be divided by over the whole step (all data and
context parallel ranks, all micro-batches), and pairs of [numerator, denominator] for reports: so that uneven
micro-batches average to the global mean. `megatron_loss` hands it to Megatron's schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training_hooks.errors import SettingsError

__all__ = ["DraftLoss", "accepted_length", "megatron_loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLoss:
    """`numerator`: scalar with a gradient. `tokens`: scalar, what the sum over the step is divided by. `report`: name
    -> [numerator, denominator], a tensor of two; add over everything, then divide."""

    numerator: torch.Tensor
    tokens: torch.Tensor
    report: Mapping[str, torch.Tensor]


def megatron_loss(loss: DraftLoss, config: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The triple that Megatron's schedule expects of a loss function; `config` is the model's.

    Raises:
        SettingsError: `calculate_per_token_loss` is off: Megatron would divide each micro-batch by its own tokens,
            which is a mean of means.
    """
    if not getattr(config, "calculate_per_token_loss", False):
        raise SettingsError(
            "calculate_per_token_loss is off: micro-batches would be averaged one by one, whatever they hold: set it"
        )
    if loss.tokens.is_floating_point():
        raise SettingsError(
            "Megatron counts tokens as integers, but this loss is divided by a sum of weights: "
            "choose denominator='tokens'"
        )
    return loss.numerator, loss.tokens, dict(loss.report)


def accepted_length(accept: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """[sum of expected tokens per decoding step, number of chains]: 1 + sum_k prod_(j <= k) accept_j of every chain.

    The 1 is the target's own token. `accept[k]` and `masks[k]` are of draft token k + 1, all of one shape, element i of
    each belonging to chain i. Chains that are not supervised at their first token do not count; one ends at its first
    unsupervised token.
    """
    alive = masks[0].to(accept[0].dtype)
    total = alive.clone()
    for rate, mask in zip(accept, masks, strict=True):
        alive = alive * torch.where(mask, rate, 0)
        total = total + alive
    return torch.stack([total.sum(), masks[0].sum().to(total.dtype)]).detach()
