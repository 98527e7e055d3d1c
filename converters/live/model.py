"""What a live Megatron-Core model holds on this rank: canonical names, shard dimensions, and what cannot be exported.

`sync_params` first, then `collect`; both before every export, since optimizers and offloading change parameters in
place between two of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from converters.errors import LiveModelError, MappingError
from converters.rules import RuleSet

__all__ = ["LiveTensor", "collect", "sync_params"]

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
_DDP_HOOK = "DistributedDataParallel._make_forward_pre_hook"


@dataclasses.dataclass(frozen=True, slots=True)
class LiveTensor:
    """This rank's part of Megatron tensor `name`, sharded along `dim` (None: every rank holds all of it)."""

    name: str
    tensor: torch.Tensor
    dim: int | None

    @property
    def meta(self) -> tuple[str, tuple[int, ...], torch.dtype, int | None]:
        return (self.name, tuple(self.tensor.shape), self.tensor.dtype, self.dim)


def sync_params(chunks: Sequence[Any]) -> None:
    """Brings parameters up to date with the last optimizer step; collective over data parallel ranks.

    With `overlap_param_gather` a rank's `step()` writes only its own part of the parameters, and the rest arrives
    during the next forward pass. Whether that has happened cannot be told from outside, so it is forced.

    Raises:
        LiveModelError: the parameters are gathered that way, but the wrapper that can be told to do it is not given.
    """
    for chunk in chunks:
        for wrapper in _wrappers(chunk):
            if getattr(getattr(wrapper, "ddp_config", None), "overlap_param_gather", False):
                wrapper.start_param_sync(force_sync=True)
                break
        else:
            hooks = (hook for module in chunk.modules() for hook in module._forward_pre_hooks.values())
            if any(getattr(hook, "__qualname__", "").startswith(_DDP_HOOK) for hook in hooks):
                raise LiveModelError(
                    "the model's parameters are gathered during its forward pass (overlap_param_gather), so they are "
                    "stale after an optimizer step: give the DistributedDataParallel chunks, not the model inside"
                )


def collect(chunks: Sequence[Any], rules: RuleSet) -> dict[str, LiveTensor]:
    """Parameters and persistent buffers of this rank's chunks by canonical name, with global layer numbers.

    Raises:
        LiveModelError: a parameter that does not hold its values as they are (fp8, offloaded, sharded by FSDP, expert
            parallel).
        MappingError: two tensors with one canonical name.
    """
    found: dict[str, LiveTensor] = {}
    for chunk in chunks:
        model = _wrappers(chunk)[-1]
        for live_name, tensor in _tensors(model):
            name = rules.canonical(_global_name(model, live_name))
            _refuse_unreadable(name, tensor)
            if name in found:
                raise MappingError(f"{name} is in the model twice on this rank: are the same chunks listed twice?")
            parallel = getattr(tensor, "tensor_model_parallel", False)
            found[name] = LiveTensor(name, tensor.detach(), int(tensor.partition_dim) if parallel else None)
    devices = {t.tensor.device for t in found.values()}
    if len(devices) > 1:
        raise LiveModelError(
            f"parameters lie on {sorted(map(str, devices))}: load offloaded parameters back before a publish"
        )
    return found


def _wrappers(chunk: Any) -> list[Any]:
    """`chunk` and what it wraps, outermost first: data parallel and half precision wrappers, then the model."""
    out = [chunk]
    while isinstance(getattr(out[-1], "module", None), torch.nn.Module):
        out.append(out[-1].module)
    return out


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Not persistent: derived or scratch, no weight.
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _global_name(model: torch.nn.Module, name: str) -> str:
    """A chunk numbers its layers from 0; each layer knows its number in the whole model, from 1."""
    match = _LAYER.match(name)
    if match is None:
        return name
    block, index = match.groups()
    number = int(cast("Any", model.get_submodule(f"{block}.layers.{index}")).layer_number)
    return f"{block}.layers.{number - 1}.{name[match.end() :]}"


def _refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    dtype = tensor.dtype
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        reason = f"is a {type(tensor).__name__}: fp8 and FSDP parameters do not hold the full weight as they are"
    elif dtype.is_floating_point and dtype.itemsize == 1:
        reason = f"is {dtype}: an fp8 parameter means nothing without its scales"
    elif tensor.device.type == "meta" or (tensor.numel() and not tensor.untyped_storage().nbytes()):
        reason = "has no storage: it is offloaded, load it back before a publish"
    elif not getattr(tensor, "allreduce", True):
        reason = "is an expert-parallel parameter: expert parallelism is not exported yet"
    else:
        return
    raise LiveModelError(f"{name} {reason}")
