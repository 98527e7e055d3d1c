"""Draft losses and hidden-state capture for a Megatron-Core trainer, exact across TP, SP, PP and CP.

    alignment        which token each position predicts, decided before slicing
    vocab_parallel   losses, total variation and acceptance on vocabulary shards, in bounded memory
    eagle3, dspark   drafter objectives on top of it; `losses` is what they return
    drafter          trains a drafter on captured states; `eagle3_drafter` and `dspark_drafter` are plain ones
    capture          hidden states by (sample, position); `exchange` merges them over a replica's ranks
    hf               capture points of a Transformers decoder, e.g. under FSDP2
    handoff          one object per step for another process, without blocking an event loop
    megatron         hooks into a live model: MTP as an auxiliary loss, its clip group, guards, capture points

Needs only torch; Megatron-Core is imported inside the functions of `training_hooks.megatron`.
"""

from __future__ import annotations

from training_hooks.alignment import Alignment, CpSplit, Layout, MTPTargets, mtp_targets
from training_hooks.capture import HiddenCapture, LayerRef, row_keys
from training_hooks.errors import TrainingHookError
from training_hooks.exchange import Exchange
from training_hooks.losses import DraftLoss
from training_hooks.vocab_parallel import RowLosses, row_losses

__all__ = [
    "Alignment",
    "CpSplit",
    "DraftLoss",
    "Exchange",
    "HiddenCapture",
    "LayerRef",
    "Layout",
    "MTPTargets",
    "RowLosses",
    "TrainingHookError",
    "mtp_targets",
    "row_keys",
    "row_losses",
]
