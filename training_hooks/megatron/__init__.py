"""Hooks into a live Megatron-Core model: multi-token prediction as an auxiliary loss, and its own gradient clip.

Megatron-Core is imported inside functions only, so that importing this package needs nothing but torch.
"""

from __future__ import annotations

from training_hooks.megatron.clip import MTPClip
from training_hooks.megatron.guards import check_isolation, fingerprint, require_moved
from training_hooks.megatron.mtp import MTPConfig, MTPHook, install_mtp
from training_hooks.megatron.probe import check_mtp_settings

__all__ = [
    "MTPClip",
    "MTPConfig",
    "MTPHook",
    "check_isolation",
    "check_mtp_settings",
    "fingerprint",
    "install_mtp",
    "require_moved",
]
