"""The modules of a vLLM worker as their weight loaders expect them, without memory spent or a weight touched.

vLLM transforms weights after loading (the CPU backend packs linear layers and empties their `weight`, quantisation
repacks), so a loader cannot be asked what it does with a live module. vLLM keeps, for its layerwise reload, what every
tensor was before; `load_format` puts tensors of that kind in place, in reserved memory that is never touched, so that
`weightsync.engine.routing` can route and prove coverage by dry runs as for any other engine.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

import torch
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

from weightsync.engine.regions import Region
from weightsync.errors import RoutingError

__all__ = ["distinct_layers", "load_format"]

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)

_Tied = dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor]


def distinct_layers(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Every submodule of `modules` once: target and draft share some."""
    return list({id(layer): layer for module in modules for layer in module.modules()}.values())


@contextlib.contextmanager
def load_format(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, every layer of `modules` has the tensors that loaders expect; nothing may be written to them.

    Parameters that are one memory in the live module (tied ones) are one memory here, too.

    Raises:
        RoutingError: a reload is in progress.
    """
    layers = distinct_layers(modules)
    if busy := [type(layer).__name__ for layer in layers if get_layerwise_info(layer).can_load()]:
        raise RoutingError(f"a weight reload of this engine is unfinished ({busy[0]}): finish it, or publish again")
    saved = []
    tied: _Tied = {}
    try:
        for layer in layers:
            hidden = set(layer._non_persistent_buffers_set)
            saved.append((layer, dict(vars(layer)), dict(layer._parameters), dict(layer._buffers), hidden))
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for was, now in ((saved[-1][2], layer._parameters), (saved[-1][3], layer._buffers)):
                for name, tensor in now.items():
                    if tensor is not None and tensor.is_meta:
                        now[name] = _reserve(tensor, was.get(name), tied)  # type: ignore[assignment]
        yield
    finally:
        for layer, attributes, parameters, buffers, hidden in saved:
            vars(layer).clear()
            vars(layer).update(attributes)
            for now, was in ((layer._parameters, parameters), (layer._buffers, buffers)):
                now.clear()
                now.update(was)  # type: ignore[arg-type]
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(hidden)


def _reserve(meta: torch.Tensor, live: torch.Tensor | None, tied: _Tied) -> torch.Tensor:
    """A tensor like `meta` (class and attributes too) in memory of its own, or in that of the live tensor's twin."""
    if live is None or live.numel() == 0 or live.is_meta:
        return _like(meta, _reserved(meta))
    key = (live.data_ptr(), tuple(meta.size()), meta.dtype)
    if key not in tied:
        tied[key] = _reserved(meta)
    return _like(meta, tied[key])


def _reserved(meta: torch.Tensor) -> torch.Tensor:
    if meta.numel() == 0:
        return torch.empty(meta.size(), dtype=meta.dtype, device="cpu")
    nbytes = Region.of(0, tuple(meta.size()), meta.stride()).stop * meta.dtype.itemsize
    memory = mmap.mmap(-1, nbytes, flags=_FLAGS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(meta.dtype).as_strided(meta.size(), meta.stride())


def _like(meta: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    tensor = memory.detach()
    tensor.__class__ = meta.__class__
    tensor.__dict__ = meta.__dict__.copy()
    if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
        # Left there by an earlier reload; between reloads it drops what it is given.
        tensor.weight_loader = _get_original_loader(tensor)  # type: ignore[attr-defined]
    return tensor
