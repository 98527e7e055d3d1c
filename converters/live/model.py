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

__all__ = ["LiveTensor", "collect", "expert_layer", "is_expert", "shifted", "sync_params"]

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
# TEGroupedMLP, SequentialMLP and GroupedMLP; the last holds all local experts in one tensor.
_EXPERT = re.compile(
    r"^(?P<experts>.*\.mlp\.experts)\."
    r"(?:(?P<fc>linear_fc[12])\.(?P<kind>weight|bias)\d+|local_experts\.\d+\.(?P<fc_>linear_fc[12])\.(?P<kind_>weight|bias)"
    r"|(?P<all>weight[12]))$"
)
_DDP_HOOK = "DistributedDataParallel._make_forward_pre_hook"


@dataclasses.dataclass(frozen=True, slots=True)
class LiveTensor:
    """This rank's part of Megatron tensor `name`, sharded along `dim` (None: every rank holds all of it).

    An `expert`'s name has the number that it has among this rank's, and it is sharded over the expert side's ranks.
    """

    name: str
    tensor: torch.Tensor
    dim: int | None
    expert: bool = False

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

    Experts are numbered among this rank's own. A router's expert bias that a half-precision wrapper has rounded is put
    back to fp32 first, as Megatron does before its next forward pass.

    Raises:
        LiveModelError: a parameter that does not hold its values as they are (fp8, offloaded, sharded by FSDP).
        MappingError: two tensors with one canonical name.
    """
    found: dict[str, LiveTensor] = {}
    for chunk in chunks:
        model = _wrappers(chunk)[-1]
        _restore_expert_bias(model)
        for live_name, tensor in _tensors(model):
            for live in _live_tensors(model, live_name, tensor, rules):
                if live.name in found:
                    raise MappingError(f"{live.name} is in the model twice on this rank: are chunks listed twice?")
                found[live.name] = live
    devices = {t.tensor.device for t in found.values()}
    if len(devices) > 1:
        raise LiveModelError(
            f"parameters lie on {sorted(map(str, devices))}: load offloaded parameters back before a publish"
        )
    return found


_CANONICAL_EXPERT = re.compile(r"^(.*\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")


def is_expert(name: str) -> bool:
    """Whether canonical `name` is of one expert among many."""
    return _CANONICAL_EXPERT.match(name) is not None


def expert_layer(name: str) -> str:
    """What the names of the same tensor of all experts of a layer share."""
    match = _CANONICAL_EXPERT.match(name)
    assert match is not None, name
    return match[1]


def shifted(name: str, by: int) -> str:
    """The name of the expert that comes `by` after that of `name`."""
    match = _CANONICAL_EXPERT.match(name)
    assert match is not None, name
    return f"{match[1]}{int(match[2]) + by}"


def _restore_expert_bias(model: torch.nn.Module) -> None:
    for module in model.modules():
        bias = module._buffers.get("expert_bias")
        if bias is not None and bias.dtype != torch.float32:
            module._buffers["expert_bias"] = bias.float()


def _live_tensors(model: torch.nn.Module, live_name: str, tensor: Any, rules: RuleSet) -> Iterator[LiveTensor]:
    """What a parameter or buffer holds: one Megatron tensor, or one for each expert."""
    name = _global_name(model, live_name)
    expert = _EXPERT.match(name)
    _refuse_unreadable(name, tensor, expert is not None)
    values = tensor.detach()
    if expert is None:
        yield LiveTensor(rules.canonical(name), values, _dim(model, live_name, tensor))
    elif expert["all"] is None:
        linear, kind = expert["fc"] or expert["fc_"], expert["kind"] or expert["kind_"]
        # Attributes of grouped experts say dimension 0 for both layers, whatever they are.
        dim = 0 if linear == "linear_fc1" else 1 if kind == "weight" else None
        yield LiveTensor(rules.canonical(name), values, dim, expert=True)
    else:
        # GroupedMLP multiplies from the other side: each expert's matrix is stored as its transpose.
        count = int(cast("Any", model.get_submodule(live_name.rpartition(".")[0])).num_local_experts)
        hidden = values.shape[0] if expert["all"] == "weight1" else values.shape[1]
        linear, dim, shape = ("fc1", 0, (hidden, -1)) if expert["all"] == "weight1" else ("fc2", 1, (-1, hidden))
        for number, stored in enumerate(values.view(count, *shape)):
            local = f"{expert['experts']}.linear_{linear}.weight{number}"
            yield LiveTensor(rules.canonical(local), stored.t(), dim, expert=True)


def _dim(model: torch.nn.Module, live_name: str, tensor: Any) -> int | None:
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    owner = model.get_submodule(live_name.rpartition(".")[0])
    if getattr(owner, "parallel_mode", "") is None:
        # Transformer Engine marks the weights of its duplicated layers as sharded too.
        return None
    # Some parameters (of delta nets) only say that they are sharded: it is along the first dimension.
    return int(getattr(tensor, "partition_dim", 0))


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


def _refuse_unreadable(name: str, tensor: torch.Tensor, expert: bool) -> None:
    dtype = tensor.dtype
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        reason = f"is a {type(tensor).__name__}: fp8 and FSDP parameters do not hold the full weight as they are"
    elif dtype.is_floating_point and dtype.itemsize == 1:
        reason = f"is {dtype}: an fp8 parameter means nothing without its scales"
    elif tensor.device.type == "meta" or (tensor.numel() and not tensor.untyped_storage().nbytes()):
        reason = "has no storage: it is offloaded, load it back before a publish"
    elif not getattr(tensor, "allreduce", True) and not expert:
        reason = "is expert-parallel, but no known kind of experts holds it"
    else:
        return
    raise LiveModelError(f"{name} {reason}")
