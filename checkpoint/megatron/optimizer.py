"""The `fully_reshardable` format of Megatron's distributed optimizer, without gathering anything.

Stock Megatron-Core gathers each buffer on every data-parallel rank (or on one) to cut it into whole parameters, before
the save has even begun. Here each data-parallel rank describes the flat slice that it owns as boxes of the parameter:
at most 2*ndim - 1 of them. Keys, shapes and values on disk are those of the stock format; only the shards are finer,
which its reader does not mind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from checkpoint.errors import ConfigError
from checkpoint.megatron.probe import require_core, require_optimizer

__all__ = ["boxes", "optimizer_state"]

Box = tuple[tuple[int, ...], tuple[int, ...], int]


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The elements [start, end) of a row-major tensor as boxes: (offset, shape, flat index of the first element).

    Each box is contiguous in the tensor; together they cover the range once, in order.
    """
    if start >= end:
        return []
    if not shape:
        return [((), (), start)]
    if len(shape) == 1:
        return [((start,), (end - start,), start)]
    inner = math.prod(shape[1:])
    found: list[Box] = []

    def in_row(row: int, low: int, high: int) -> None:
        base = row * inner
        found.extend(((row, *o), (1, *s), base + flat) for o, s, flat in boxes(shape[1:], low - base, high - base))

    first, last = start // inner, end // inner  # `last` is the row that holds `end`, if that is inside of one
    if first == last:
        in_row(first, start, end)
        return found
    if start % inner:
        in_row(first, start, (first + 1) * inner)
        first += 1
    if last > first:
        rest = (0,) * (len(shape) - 1)
        found.append(((first, *rest), (last - first, *shape[1:]), first * inner))
    if end % inner:
        in_row(last, last * inner, end)
    return found


def optimizer_state(
    optimizer: Any, model_state: Mapping[str, Any], *, metadata: Mapping[str, Any] | None = None
) -> Any:
    """What `optimizer.sharded_state_dict(model_state)` gives for saving, without a collective.

    Args:
        optimizer: a Megatron optimizer, also a chain of several. Distributed ones are described as `fully_reshardable`;
            others need no gather and describe themselves.
        model_state: the model's sharded state dict, built with the live parameters as data (as Megatron does).
        metadata: as in Megatron; `chained_optim_avoid_prefix` is read.

    Raises:
        ConfigError: the model state misses a parameter, or splits one in a way that is not contiguous.
    """
    require_core()
    chain = getattr(optimizer, "chained_optimizers", None)
    if chain is None:
        return _single(optimizer, model_state, metadata)
    if len(chain) == 1:
        return _single(chain[0], model_state, metadata)
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    optimizer._synchronize_steps()
    result = {}
    for i, part in enumerate(chain):
        state = _single(part, model_state, metadata)
        if not (metadata or {}).get("chained_optim_avoid_prefix", False):
            add_prefix_for_sharding(state, f"chained_{i}.")
        result[i] = state
    return result


def _single(optimizer: Any, model_state: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> Any:
    if not hasattr(optimizer, "gbuf_ranges"):
        return optimizer.sharded_state_dict(model_state, metadata=dict(metadata or {}))
    require_optimizer(optimizer)
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    described, _ = extract_matching_values(model_state, lambda v: isinstance(v, (ShardedTensor, ShardedTensorFactory)))
    by_parameter = {id(part.data): part for part in nested_values(described)}
    pieces: list[Any] = []
    for parameter, start, end in _owned(optimizer):
        part = by_parameter.get(id(parameter))
        if part is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is not in the model's state: build it with the live "
                "parameters as data (state_dict(keep_vars=True))"
            )
        for name, tensor in optimizer._get_main_param_and_optimizer_states(parameter).items():
            # The step is kept in the parameter groups; Transformer Engine keeps flags beside its tensors.
            if name != "step" and isinstance(tensor, torch.Tensor):
                pieces += _pieces(part, name, tensor.detach().view(-1), start, end, optimizer)
    state = optimizer.state_dict()
    state["param_state"] = dict(enumerate(pieces))
    state["param_state_sharding_type"] = "fully_reshardable"
    return state


def _owned(optimizer: Any) -> Iterator[tuple[Any, int, int]]:
    """(parameter, first element, end) of what this data-parallel rank holds."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, owned in bucket["param_map"].items():
                    yield parameter, owned["param"].start, owned["param"].end


def _pieces(part: Any, name: str, flat: torch.Tensor, start: int, end: int, optimizer: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if flat.numel() != end - start:
        raise ConfigError(f"{part.key}: {name} has {flat.numel()} elements, this rank owns {end - start}")
    subs = [part]
    if isinstance(part, ShardedTensorFactory):
        # On no device: only where the parts begin in the parameter is asked for.
        blank = torch.empty(part.data.shape, dtype=part.data.dtype, device="meta")
        subs = list(nested_values(dataclasses.replace(part, data=blank).build()))
    for sub in subs:
        if not sub.data.is_contiguous():
            raise ConfigError(
                f"{sub.key} is not a contiguous part of its parameter: its optimizer state cannot be split"
            )
        base = sub.data.storage_offset() if sub is not part else 0
        low, high = max(start, base), min(end, base + sub.data.numel())
        leading = sub.prepend_axis_num
        replica = sub.replica_id if isinstance(sub.replica_id, tuple) else (sub.replica_id,)
        # The last part of the replica id numbers data-parallel copies; this slice has none.
        replica = (*replica[:-1], getattr(optimizer, "distributed_optimizer_instance_id", 0))
        for offset, shape, first in boxes(tuple(sub.data.shape), low - base, high - base):
            begin = first + base - start
            data = flat[begin : begin + math.prod(shape)].view((1,) * leading + shape)
            place = tuple(a + b for a, b in zip(sub.global_offset, (0,) * leading + offset, strict=True))
            yield ShardedTensor(
                f"optimizer.state.{name}.{sub.key}",
                data,
                data.dtype,
                tuple(data.shape),
                sub.global_shape,
                place,
                None,
                replica,
            )
