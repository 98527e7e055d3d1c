"""Where a Transformers decoder, plain or under FSDP2, has the states that a drafter reads.

Called once after the model is built and sharded; the counterpart of `training_hooks.megatron.capture`. Every rank runs
samples of its own through whole layers, so each is a replica of one rank: `Exchange(store, 0, 1, replica=rank, ...)`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from training_hooks.capture import HiddenCapture, LayerRef, RowForm
from training_hooks.errors import CaptureError

__all__ = ["capture_from_hf"]


def capture_from_hf(model: torch.nn.Module, layers: Iterable[LayerRef]) -> HiddenCapture:
    """A capture of `layers` of a decoder with `embed_tokens`, `layers` and `norm`, as Llama's and its relatives'.

    Raises:
        CaptureError: no such decoder, more than one, or a reference beyond its layers.
    """
    found = [m for m in model.modules() if all(hasattr(m, name) for name in ("embed_tokens", "layers", "norm"))]
    if len(found) != 1:
        raise CaptureError(
            f"{len(found)} modules of {type(model).__name__} have embed_tokens, layers and norm: pass the decoder, or "
            "give HiddenCapture the modules yourself"
        )
    decoder = found[0]
    points: dict[LayerRef, torch.nn.Module] = {
        LayerRef("input_to", 0): decoder.get_submodule("embed_tokens"),
        LayerRef("final_norm"): decoder.get_submodule("norm"),
    }
    for index, layer in enumerate(decoder.get_submodule("layers").children()):
        points[LayerRef("output_of", index)] = layer
    wanted = {ref.canonical for ref in layers}
    if beyond := sorted(wanted - set(points)):
        raise CaptureError(f"the model has {len(points) - 2} layers, there is no {beyond[0]}")
    return HiddenCapture({ref: points[ref] for ref in wanted}, RowForm(sequence_first=False))
