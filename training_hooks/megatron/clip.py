"""A gradient norm of their own for the MTP parameters, on Megatron-Core optimizers that know only one.

Stock 0.16.1 puts every gradient into one norm, so a large MTP gradient shrinks the policy's update. `MTPClip` splits
the parameters of a live optimizer into two groups while it is installed: the stock clip sees all but the MTP
parameters, and these are clipped by their own norm just before the update. Works on the instance, removable, and
collective exactly where the stock optimizer is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from training_hooks.errors import HookError, SettingsError

__all__ = ["MTPClip"]


class MTPClip:
    """`MTPClip(optimizer, hook.named_parameters(), max_norm=1.0)`; `.norm` is that of the last step; `.remove()`.

    Install it on every rank, also where `parameters` are empty: the norm is reduced over the optimizer's own group.

    Raises:
        SettingsError: `max_norm` is not positive, or this Megatron-Core has norm groups built in.
        HookError: parameters that the optimizer does not hold, or it is patched already.
    """

    def __init__(
        self, optimizer: Any, named_parameters: Sequence[tuple[str, torch.nn.Parameter]], *, max_norm: float
    ) -> None:
        from megatron.core.optimizer import optimizer as module

        if max_norm <= 0:
            raise SettingsError(f"max_norm is {max_norm}: it must be positive")
        if hasattr(module, "SEPARATE_GRAD_NORM_GROUPS"):
            raise SettingsError(
                "this Megatron-Core has norm groups of its own: set `parameter.grad_norm_group = 'mtp'` instead"
            )
        self.max_norm = max_norm
        self.norm: float | None = None
        self._optimizer = optimizer
        self._leaves = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        wanted = {id(p): name for name, p in named_parameters}
        self._own: list[list[torch.Tensor]] = []
        seen: set[int] = set()
        for leaf in self._leaves:
            pairs = _model_and_main(leaf)
            self._own.append([main for model, main in pairs if id(model) in wanted and main is not None])
            seen |= {id(model) for model, _ in pairs}
        missing = [name for key, name in wanted.items() if key not in seen]
        if missing and not _is_sharded(self._leaves):
            raise HookError(f"the optimizer does not hold {missing[:3]}: they would never be updated")
        if any("get_parameters" in vars(leaf) for leaf in self._leaves) or "step_with_ready_grads" in vars(optimizer):
            raise HookError("this optimizer is patched already: remove the first MTPClip")
        self._stock = [leaf.get_parameters for leaf in self._leaves]
        self._stock_step = optimizer.step_with_ready_grads
        for index, leaf in enumerate(self._leaves):
            leaf.get_parameters = lambda index=index: self._others(index)
        optimizer.step_with_ready_grads = self._step_with_ready_grads

    def remove(self) -> None:
        """Give the optimizer its own methods back. Idempotent."""
        for leaf in self._leaves:
            vars(leaf).pop("get_parameters", None)
        vars(self._optimizer).pop("step_with_ready_grads", None)

    def _others(self, index: int) -> list[Any]:
        own = {id(p) for p in self._own[index]}
        return [p for p in self._stock[index]() if id(p) not in own]

    @torch.no_grad()
    def _step_with_ready_grads(self) -> Any:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

        squares = 0.0
        for leaf, own in zip(self._leaves, self._own, strict=True):
            if getattr(leaf, "is_stub_optimizer", False):
                continue
            others = leaf.get_parameters
            leaf.get_parameters = lambda own=own: own
            try:
                grads = leaf.get_main_grads_for_grad_norm()
            finally:
                leaf.get_parameters = others
            norm = get_grad_norm_fp32(grads, grad_stats_parallel_group=leaf.get_grad_stats_parallel_group())
            squares += norm**2
        self.norm = math.sqrt(squares)
        for leaf, own in zip(self._leaves, self._own, strict=True):
            if own:
                decoupled = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(own, self.max_norm, self.norm, decoupled)
        return self._stock_step()


def _is_sharded(leaves: Sequence[Any]) -> bool:
    return any(hasattr(leaf, "shard_fp32_groups") for leaf in leaves)


def _model_and_main(leaf: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(parameter of the model, parameter that the optimizer updates for it on this rank) of one optimizer."""
    if hasattr(leaf, "shard_fp32_groups"):  # distributed optimizer
        groups = [
            (leaf.model_float16_groups, leaf.shard_fp32_from_float16_groups),
            (leaf.model_fp32_groups, leaf.shard_fp32_groups),
        ]
    elif hasattr(leaf, "float16_groups"):
        groups = [
            (leaf.float16_groups, leaf.fp32_from_float16_groups),
            (leaf.fp32_from_fp32_groups, leaf.fp32_from_fp32_groups),
        ]
    elif getattr(leaf, "is_stub_optimizer", False):
        groups = []
    else:
        parameters = leaf.get_parameters()
        groups = [([parameters], [parameters])]
    return [
        pair
        for models, mains in groups
        for model_group, main_group in zip(models, mains, strict=True)
        for pair in zip(model_group, main_group, strict=True)
    ]
