"""What a Megatron-Core model offers to the MTP hook, and which settings cannot hold together with it.

Called by `install_mtp` on live modules, and by trainers (`check_mtp_settings`) before they build a model. Features are
probed, versions are not compared: forks carry the version of what they forked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from training_hooks.errors import HookError, SettingsError

__all__ = ["INSTALLED", "MTPModel", "check_mtp_settings", "find_models"]

INSTALLED = "training_hooks_mtp"
"""Attribute of a method that the hook put in place of the model's own."""

_POSTPROCESS_NEEDS = {"hidden_states", "mtp_in_postprocess", "labels"}
_LAYER_NEEDS = {"embedding", "hidden_states"}

# Field of the config -> why MTP training cannot go with it.
_CONFLICTS = {
    "defer_embedding_wgrad_compute": "it queues activations of the output head, which every MTP depth calls once more",
    "overlap_moe_expert_parallel_comm": "its schedule calls the layers itself and bypasses the model's forward",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPModel:
    """One language model inside a chunk. `layers` is empty where this chunk holds no MTP layers."""

    module: Any
    layers: tuple[Any, ...]
    returns_padding_mask: bool
    """`_get_embeddings` returns (ids, positions, padding mask, embedding, hidden) instead of four values."""
    has_positional_checkpoint: bool
    """`_checkpointed_forward` hands every argument to the checkpoint as if it were a tensor (0.16.1)."""


def check_mtp_settings(config: Any, *, depths: int, lm_head_chunk_size: int | None = None) -> None:
    """Refuse what cannot train `depths` MTP layers, before a model is built from `config` (a `TransformerConfig`).

    `lm_head_chunk_size`: the trainer's setting of a chunked head loss, if it has one: such a loss keeps the output head
    out of the model, and with it the logits of the MTP layers.

    Raises:
        SettingsError: says which settings contradict each other.
    """
    have = getattr(config, "mtp_num_layers", None) or 0
    if have != depths:
        raise SettingsError(
            f"MTP training of {depths} layers was asked for, but the config builds {have} (mtp_num_layers): a "
            "checkpoint or bridge that strips MTP layers from the config would train nothing"
        )
    if lm_head_chunk_size:
        raise SettingsError(
            f"a chunked head loss (chunk size {lm_head_chunk_size}) takes the output head out of the model: MTP depths "
            "need it there, turn one of the two off"
        )
    for field, why in _CONFLICTS.items():
        if getattr(config, field, False):
            raise SettingsError(f"{field} does not work with MTP training: {why}; turn it off")


def find_models(chunks: Iterable[Any]) -> list[MTPModel]:
    """The language models in `chunks` (wrapped or not, multimodal or not), in order.

    Raises:
        HookError: none found, or their code lacks what the hook needs.
        SettingsError: no MTP layers are configured, or they sit on a stage without the output head.
    """
    found = [
        _probe(module)
        for chunk in chunks
        for module in chunk.modules()
        if callable(getattr(module, "_postprocess", None)) and hasattr(module, "mtp_process")
    ]
    if not found:
        raise HookError(
            "no language model with MTP support in these chunks: pass the list of Megatron GPT model chunks"
        )
    for model in found:
        config = model.module.config
        check_mtp_settings(config, depths=getattr(config, "mtp_num_layers", None) or 1)
        if model.layers and not model.module.post_process:
            raise SettingsError(
                "the MTP layers are on a pipeline stage without the output head: place them on the last stage"
            )
    return found


def _probe(module: Any) -> MTPModel:
    if hasattr(module._postprocess, INSTALLED):
        raise HookError("MTP training is installed in this model already: remove the first hook")
    needs = _POSTPROCESS_NEEDS - set(inspect.signature(module._postprocess).parameters)
    if needs:
        raise HookError(f"{type(module).__name__}._postprocess takes no {sorted(needs)}: this Megatron-Core is unknown")
    layers = tuple(module.mtp.layers) if module.mtp_process else ()
    embeddings: set[str] = set()
    positional = False
    for layer in layers:
        embeddings = set(inspect.signature(layer._get_embeddings).parameters)
        if _LAYER_NEEDS - embeddings:
            raise HookError(f"{type(layer).__name__}._get_embeddings takes {sorted(embeddings)}: unknown Megatron-Core")
        kinds = [p.kind for p in inspect.signature(layer._checkpointed_forward).parameters.values()]
        positional = kinds[1:] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    return MTPModel(
        module=module,
        layers=layers,
        returns_padding_mask="padding_mask" in embeddings,
        has_positional_checkpoint=positional,
    )
