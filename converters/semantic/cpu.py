"""Lets stock Megatron-Core 0.16.1 run where there is no CUDA: verification, bench, demo and tests only.

Megatron-Core computes nothing on the CPU that it would not compute on a GPU, but it asks for the device by name:
`torch.cuda.current_device()`, `device="cuda"`, `.cuda()`, `tensor.type() == "torch.cuda.FloatTensor"`, streams and
`synchronize()`. `cpu_runtime` answers these with the CPU for the length of a `with` block and then puts everything
back, so nothing leaks into the code under test (or into its timings). With CUDA present it does nothing at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

__all__ = ["cpu_runtime"]


class _Stream:
    """Work on the CPU is done when the call returns: there is nothing to order or to wait for."""

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> _Stream:
        return self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False


class _CudaMeansCpu(TorchFunctionMode):
    """Maps devices named in torch calls; every other call passes unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer and the gradient clip tell dtypes apart by comparing these strings.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _cuda_attributes() -> dict[str, Any]:
    return {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *args, **kwargs: None,
        "manual_seed": torch.manual_seed,
        "current_stream": lambda *args, **kwargs: _Stream(),
        "default_stream": lambda *args, **kwargs: _Stream(),
        "Stream": lambda *args, **kwargs: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
    }


def _without_cuda_kernels() -> list[tuple[Any, str, Any]]:
    """What mixtures of experts, delta nets and latent attention take from CUDA libraries: (module, name, stand-in)."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import experts, moe_utils, token_dispatcher

    from converters.semantic import layers

    out: list[tuple[Any, str, Any]] = [
        # A tensor of the "GPU" is one of the CPU already, but the dispatcher asks for an array.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_host),
        (multi_latent_attention, "TELinear", layers.DuplicatedLinear),
        (experts.gg, "assert_grouped_gemm_is_available", lambda: None),
    ]
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 looks at the name without having defined it where Transformer Engine is missing.
        out.append((moe_utils, "te_general_gemm", None))
    if not gated_delta_net.HAVE_FLA:
        # In deterministic mode it runs its own torch kernel; of the library only a norm is used.
        out += [(gated_delta_net, "HAVE_FLA", True), (gated_delta_net, "l2norm", layers.l2norm)]
    return out


def _as_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_over_gloo() -> list[tuple[Any, str, Any]]:
    """Experts that are tensor parallel gather and scatter runs of tokens of different lengths, which gloo refuses."""
    plain_gather, plain_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(out: list[torch.Tensor], x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({len(part) for part in out}) == 1 or async_op:
            return plain_gather(out, x, group=group, async_op=async_op)
        longest = max(len(part) for part in out)
        padded = [x.new_zeros(longest, *x.shape[1:]) for _ in out]
        mine = x.new_zeros(longest, *x.shape[1:])
        mine[: len(x)] = x
        plain_gather(padded, mine, group=group)
        for part, found in zip(out, padded, strict=True):
            part.copy_(found[: len(part)])
        return None

    def reduce_scatter(out: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> Any:
        if len({len(part) for part in parts}) == 1:
            return plain_scatter(out, parts, group=group)
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=group)
        out.copy_(whole.split([len(part) for part in parts])[dist.get_rank(group)])
        return None

    return [(dist, "all_gather", all_gather), (dist, "reduce_scatter", reduce_scatter)]


_ABSENT = object()


@contextlib.contextmanager
def _replaced(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    saved = [(owner, name, getattr(owner, name, _ABSENT)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(saved):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_depth = 0


@contextlib.contextmanager
def cpu_runtime() -> Iterator[None]:
    """Within the block Megatron-Core's `cuda` means the CPU. Nests; a no-op where CUDA is available."""
    global _depth
    if torch.cuda.is_available() or _depth:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    _depth += 1
    try:
        with (
            _replaced([(torch.cuda, name, value) for name, value in _cuda_attributes().items()]),
            _replaced(_uneven_over_gloo()),
            _CudaMeansCpu(),
            # After the others: importing Megatron-Core's modules asks for the device too.
            _replaced(_without_cuda_kernels()),
            # Eager: Megatron-Core compiles small helpers, which on a CPU costs minutes of C++ for a model of a few kB.
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        _depth -= 1
