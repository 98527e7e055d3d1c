"""Did training do what it should? MTP parameters moved, and the MTP loss never reached the backbone.

A trainer takes a `fingerprint` before and after an optimizer step and calls `require_moved`; `check_isolation` is for a
step whose main loss was multiplied by zero, in a test or once at start. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from training_hooks.errors import GuardError

__all__ = ["check_isolation", "fingerprint", "require_moved"]


@torch.no_grad()
def fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[float, float]]:
    """Two float64 sums of every tensor, by name: equal tensors have equal ones, and a change of any element shows."""
    out = {}
    for name, tensor in named:
        values = tensor.detach().double().flatten()
        # A plain sum alone would miss two elements that were exchanged.
        weights = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device).remainder_(8191)
        out[name] = (float(values.sum()), float((values * weights).sum()))
    return out


def require_moved(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> None:
    """Raise GuardError naming the parameters that an optimizer step left as they were."""
    if before.keys() != after.keys():
        raise GuardError(f"other parameters than before: {sorted(before.keys() ^ after.keys())[:5]}")
    still = [name for name in before if before[name] == after[name]]
    if still:
        raise GuardError(
            f"{len(still)} of {len(before)} parameters did not change in this step, e.g. {still[:3]}: are they in the "
            "optimizer, does their learning rate differ from zero, do they get gradients?"
        )


def check_isolation(named: Iterable[tuple[str, torch.nn.Parameter]], *, auxiliary_prefix: str = "mtp.") -> None:
    """After a backward pass whose main loss was multiplied by zero: only auxiliary parameters may have gradients.

    Gradients are read from `main_grad` (Megatron's buffers) where there is one, else from `grad`.

    Raises:
        GuardError: names parameters that the auxiliary loss reached, or auxiliary ones that it did not.
    """
    reached, dead = [], []
    for name, parameter in named:
        grad = getattr(parameter, "main_grad", None)
        grad = parameter.grad if grad is None else grad
        is_zero = grad is None or not bool(grad.count_nonzero())
        if f".{name}".find(f".{auxiliary_prefix}") >= 0:
            if is_zero:
                dead.append(name)
        elif not is_zero:
            reached.append(name)
    if reached:
        raise GuardError(f"the auxiliary loss reaches {len(reached)} parameters of the backbone, e.g. {reached[:3]}")
    if dead:
        raise GuardError(f"{len(dead)} auxiliary parameters got no gradient, e.g. {dead[:3]}")
