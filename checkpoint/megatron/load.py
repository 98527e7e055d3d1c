"""Fill a Megatron `sharded_state_dict` from a folder: each rank reads what it asks for, and waits for nobody."""

from __future__ import annotations

import io
import math
from typing import Any

import torch

from checkpoint.errors import CoverageError, FormatError, LoadError
from checkpoint.format.folder import TorchDistReader
from checkpoint.format.unpickle import Foreign
from checkpoint.megatron.probe import require_core

__all__ = ["load_sharded", "read_object", "requested_keys"]


def requested_keys(sharded_state_dict: dict[str, Any]) -> set[str]:
    """Keys of all tensors and objects that a state dict asks for (objects with their shard)."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    sharded, _, _ = _prepare(sharded_state_dict)
    return {p.key if isinstance(p, ShardedTensor) else p.unique_key for p in nested_values(sharded)}


def _prepare(sharded_state_dict: dict[str, Any]) -> tuple[Any, Any, Any]:
    require_core()
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    sharded, nonpersistent, factories = load_preprocess(sharded_state_dict)
    sharded, _ = extract_sharded_base(sharded)
    return sharded, nonpersistent, factories


def load_sharded(
    sharded_state_dict: dict[str, Any], folder: TorchDistReader, *, trusted: bool = False
) -> dict[str, Any]:
    """The state dict with data, as `megatron.core.dist_checkpointing.load` returns it; tensors are filled in place.

    Args:
        sharded_state_dict: built for loading; left as it is.
        trusted: unpickle objects and common state for real. Otherwise nothing is executed, and a requested object of a
            class that is not plain data is an error.

    Raises:
        CoverageError: the folder lacks something that is asked for, or has it in another shape.
        FormatError: a damaged file, or an object that needs `trusted`.
        LoadError: the optimizer is a chain of another length than the one that was saved; nothing is filled.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges

    common = _trusted(folder.read_common_record()) if trusted else folder.common()
    _check_chain(sharded_state_dict.get("optimizer"), common.get("optimizer"), folder)
    sharded, nonpersistent, factories = _prepare(sharded_state_dict)

    def fill(part: Any) -> Any:
        if isinstance(part, ShardedTensor):
            return _read_tensor(part, folder)
        return read_object(part.unique_key, folder, trusted)

    dict_list_map_inplace(fill, sharded)
    merge(common, nonpersistent)
    merge(common, sharded)
    loaded = apply_factory_merges(common, factories)
    assert isinstance(loaded, dict)
    return loaded


def _check_chain(asked: Any, saved: Any, folder: TorchDistReader) -> None:
    """Megatron-Core 0.16.1 merges chains of different lengths, and fails later on a key of neither (KeyError)."""
    if not asked or not saved:
        return  # weights only; or a rank without parameters
    got, expected = _chain(saved), _chain(asked)
    if bool(got) == bool(expected) and got <= expected:
        return
    raise LoadError(
        f"the optimizer in {folder.path} is {_count(got)}, the one to be loaded is {_count(expected)}: Megatron-Core "
        "gives experts an optimizer of their own where expert parallelism splits them (EP > 1), and loads neither the "
        "state of two into one nor of one into two. Load in a layout with as many (keep EP > 1, or EP 1), or weights "
        'only: contents=("model",), which is a state dict without "optimizer"'
    )


def _chain(state: Any) -> set[int]:
    """Numbers of a chain's optimizers; none for a single one, whose state is not numbered."""
    numbered = isinstance(state, dict) and all(isinstance(k, int) and isinstance(v, dict) for k, v in state.items())
    return set(state) if numbered else set()


def _count(chain: set[int]) -> str:
    return f"a chain of {len(chain)}" if chain else "a single one"


def _trusted(record: bytes) -> Any:
    return torch.load(io.BytesIO(record), map_location="cpu", weights_only=False)


def _read_tensor(part: Any, folder: TorchDistReader) -> torch.Tensor:
    entry = folder.index.tensors.get(part.key)
    if entry is None:
        raise CoverageError(f"{folder.path} has no tensor {part.key!r}, which the model asks for")
    shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    if len(entry.shape) != len(shape) or (
        tuple(entry.shape) != tuple(part.global_shape) and not part.allow_shape_mismatch
    ):
        raise CoverageError(
            f"{part.key} is {tuple(entry.shape)} in {folder.path}, the model asks for {tuple(part.global_shape)}"
        )
    data = part.data if part.data is not None else torch.empty(part.local_shape, dtype=part.dtype)
    # Padded vocabularies: what the checkpoint does not have keeps its value.
    box = [max(min(o + n, size) - o, 0) for o, n, size in zip(part.global_offset, shape, entry.shape, strict=True)]
    if not math.prod(box):
        return data
    target = data.detach().view(shape)[tuple(slice(0, n) for n in box)]
    target.copy_(folder.read(part.key, part.global_offset, box))
    return data


def read_object(key: str, folder: TorchDistReader, trusted: bool) -> Any:
    """An object of a folder. Raises FormatError: it is no plain data, and not `trusted`."""
    name, _, part = key.partition("/shard_")
    others = [k.partition("/shard_")[2] for k in folder.index.objects if k.startswith(f"{name}/shard_")]
    if key not in folder.index.objects and others:
        raise CoverageError(
            f"{folder.path} has {name!r} as a grid of {_grid(others[0])} parts, the model asks for {_grid(part)}: such "
            "an object is bound to the layout that saved it; leave it out of the request (`allow_unused`), or load "
            "in that layout"
        )
    if trusted:
        values = _trusted(folder.read_record(key))
    else:
        values = folder.read_object(key)
        if (kind := _foreign(values)) is not None:
            raise FormatError(
                f"object {key!r} of {folder.path} is or holds a {kind}, which is not plain data: if the file is yours, "
                "load with trusted=True"
            )
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def _grid(part: str) -> str:
    """Of "0.1_2.2": "2 x 2"."""
    return part.rpartition("_")[2].replace(".", " x ")


def _foreign(value: Any) -> str | None:
    if isinstance(value, Foreign):
        return value.path
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((name for part in parts if (name := _foreign(part)) is not None), None)
