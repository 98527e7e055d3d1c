"""Every error that `training_hooks` raises.

    TrainingHookError
    ├── AlignmentError      (ValueError)   labels, masks or layouts that cannot be aligned as they are described
    ├── SettingsError       (ValueError)   settings that cannot hold together, found before anything is changed
    ├── HookError           (RuntimeError) a hook used out of order, or a model that it does not fit
    ├── GuardError          (RuntimeError) training had another effect than it should: parameters that did not move,
    │                                      or a backbone that an auxiliary loss reached
    └── CaptureError        (RuntimeError) captured rows that are missing, doubled or of another step

Messages say what went wrong, where (rank, depth, sample), what was got and expected, and the next step.
"""

from __future__ import annotations

__all__ = ["AlignmentError", "CaptureError", "GuardError", "HookError", "SettingsError", "TrainingHookError"]


class TrainingHookError(Exception):
    """Root of everything that `training_hooks` raises on purpose."""


class AlignmentError(TrainingHookError, ValueError):
    """Labels, masks or a layout that cannot be aligned as described; nothing was computed."""


class SettingsError(TrainingHookError, ValueError):
    """Settings that cannot hold together; nothing was changed."""


class HookError(TrainingHookError, RuntimeError):
    """A hook used out of order, or a model that it does not fit; the model is as it was."""


class GuardError(TrainingHookError, RuntimeError):
    """Training had another effect than it should have: weights are as the optimizer left them."""


class CaptureError(TrainingHookError, RuntimeError):
    """Captured rows are missing, doubled or of another step; raised on every rank, nothing is handed on."""
