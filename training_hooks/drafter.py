"""Trains a drafter on captured states: optimizer, schedule, clip and a hook that publishes. Not a framework.

    trainer = DrafterTrainer(drafter, embedding=embed_weight, head=lm_head_weight, publish=push)
    metrics = trainer.step(merged, tokens, supervised)       # after `Exchange.merge`, on the ranks that train the draft

Drafters (`eagle3_drafter`, `dspark_drafter`, or any module with their two members) say what their loss is. The target's
embedding and head are frozen replicas with storage of their own: training a draft can never write into its target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from training_hooks.alignment import Alignment, Layout, MTPTargets, mtp_targets
from training_hooks.capture import LayerRef, Rows
from training_hooks.dspark import DSparkLoss
from training_hooks.eagle3 import Eagle3Loss
from training_hooks.errors import CaptureError, SettingsError
from training_hooks.losses import DraftLoss

__all__ = ["Batch", "Drafter", "DrafterTrainer", "DrafterTraining", "LossOf"]

LossOf: TypeAlias = Callable[[], DraftLoss]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterTraining:
    """`updates`: optimizer steps per call, on the same rows. `warmup`: optimizer steps. `loss`: of the drafter's own
    kind, None for its defaults. `steps`: length of an EAGLE3 unroll. `anchors`: DSpark's blocks per sample and update,
    at most."""

    lr: float = 1e-4
    weight_decay: float = 0.0
    max_norm: float = 1.0
    warmup: int = 0
    updates: int = 1
    loss: Eagle3Loss | DSparkLoss | None = None
    steps: int = 3
    anchors: int = 512

    def __post_init__(self) -> None:
        counts = (self.steps, self.updates, self.anchors)
        if self.lr <= 0 or self.max_norm <= 0 or min(counts) < 1 or self.warmup < 0:
            raise SettingsError("lr, max_norm, steps, updates and anchors must be positive, warmup not negative")


class Batch:
    """Captured rows as right-padded sequences: `features` [b, s, k h] (k layers side by side), `final` [b, s, h],
    `tokens` int64 and `supervised` bool [b, s], `lengths` of the sequences.

    Raises:
        CaptureError: rows and tokens do not fit.
    """

    def __init__(
        self,
        captured: Mapping[LayerRef, Rows],
        tokens: Mapping[int, torch.Tensor],
        supervised: Mapping[int, torch.Tensor],
        layers: Sequence[LayerRef],
    ) -> None:
        samples = sorted(tokens)
        self.lengths = [len(tokens[k]) for k in samples]
        wanted = [[k, i] for k, n in zip(samples, self.lengths, strict=True) for i in range(n)]
        refs = [ref.canonical for ref in (*layers, LayerRef("final_norm"))]
        for ref in refs:
            if ref not in captured or captured[ref].keys.tolist() != wanted:
                raise CaptureError(
                    f"captured rows of {ref} are not those of samples {samples[:5]}, every position in order: capture "
                    "whole sequences, and pass the tokens of the same step"
                )
        places = torch.tensor([[row, i] for row, n in enumerate(self.lengths) for i in range(n)])
        shape = (len(samples), max(self.lengths))

        def padded(values: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(*shape, *values.shape[1:], dtype=values.dtype)
            out[places[:, 0], places[:, 1]] = values
            return out

        *features, self.final = (padded(captured[ref].values) for ref in refs)
        self.features = torch.cat(features, -1)
        self.tokens = padded(torch.cat([tokens[k] for k in samples]))
        self.supervised = padded(torch.cat([supervised[k].bool() for k in samples]))

    def targets(self, steps: int) -> MTPTargets:
        """Of drafting token by token, `steps` of them behind every row."""
        return mtp_targets(
            self.tokens,
            self.supervised,
            layout=Layout.padded(self.lengths, self.tokens.shape[1]),
            depths=steps,
            mask_alignment=Alignment.TOKEN,
        )


class Drafter(Protocol):
    """What a trainer asks of a drafter, which is a `torch.nn.Module` besides."""

    @property
    def layers(self) -> Sequence[LayerRef]:
        """The target's states that it reads, low to high."""
        ...

    def objective(self, batch: Batch, embedding: torch.Tensor, head: torch.Tensor, training: DrafterTraining) -> LossOf:
        """The loss on `batch` as a function of the current parameters; what does not depend on them is done here.

        Raises:
            SettingsError: `training` is for another kind of drafter.
        """
        ...


class DrafterTrainer:
    """Optimizer, schedule and clip around a drafter. `embedding` and `head`: the target's, [vocabulary, h], copied.
    `group`: ranks that each train on other samples; gradients and token counts are summed over them. `publish`: called
    with the drafter at the end of every step.
    """

    def __init__(
        self,
        drafter: nn.Module,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        config: DrafterTraining | None = None,
        group: dist.ProcessGroup | None = None,
        publish: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.drafter, self.config, self._group, self._publish = drafter, config or DrafterTraining(), group, publish
        self._kind: Drafter = drafter  # type: ignore[assignment]  # the same object, by its other face
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        warmup = self.config.warmup
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / (warmup + 1)))
        self.refresh(embedding, head)

    def refresh(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Copy the target's embedding and head anew, after the target was trained."""
        self._embedding = embedding.detach().clone()
        self._head = head.detach().clone()

    def step(
        self,
        captured: Mapping[LayerRef, Rows],
        tokens: Mapping[int, torch.Tensor],
        supervised: Mapping[int, torch.Tensor],
    ) -> dict[str, float]:
        """`updates` optimizer steps on whole sequences, then `publish`; the metrics of the last of them.

        Args:
            captured: from `Exchange.merge`, the drafter's layers and `final_norm`, every position of each sample.
            tokens: int64 [n] by sample. supervised: bool [n] by sample, token by token.

        Raises:
            CaptureError: rows and tokens do not fit.
        """
        batch = Batch(captured, tokens, supervised, self._kind.layers)
        loss = self._kind.objective(batch, self._embedding, self._head, self.config)
        metrics: dict[str, float] = {}
        for _ in range(self.config.updates):
            metrics = self._update(loss())
        if self._publish is not None:
            self._publish(self.drafter)
        return metrics

    def _update(self, loss: DraftLoss) -> dict[str, float]:
        """One optimizer step with the gradient of the mean over all ranks of the group."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.numerator.backward()
        total = loss.tokens.clone()
        pairs = torch.stack(list(loss.report.values()))
        # A parameter that this rank's samples did not reach has a gradient elsewhere, and every rank sums alike.
        gradients = []
        for parameter in self.drafter.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if self._group is not None:
            for tensor in (total, pairs, *gradients):
                dist.all_reduce(tensor, group=self._group)
        for gradient in gradients:
            gradient.div_(total.clamp(min=1))
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_norm)
        self.optimizer.step()
        self._schedule.step()
        means = (pairs[:, 0] / pairs[:, 1].clamp(min=1)).tolist()
        return {**dict(zip(loss.report, means, strict=True)), "drafter_norm": float(norm), "tokens": float(total)}
