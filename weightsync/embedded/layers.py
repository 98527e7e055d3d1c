"""Layers that hold and load weights as real engines' layers do: fused, sharded by tensor parallelism, copied in place.

Every parameter is a `Weight` with a `weight_loader(param, full_tensor, shard_id)` that narrows the full Hugging Face
tensor to this rank's rows or columns and copies it into a view of the parameter. Nothing else ever writes weights, and
no loader looks at values: a router may run it dry under a `TorchDispatchMode` to learn which bytes go where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from weightsync.embedded.parallel import TpGroup

__all__ = [
    "ColumnParallelLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RowParallelLinear",
    "VocabParallel",
    "Weight",
    "copy_full",
]

Loader = Callable[[torch.Tensor, torch.Tensor, "str | int | None"], None]


class Weight(nn.Parameter):
    """A parameter that knows how to load itself. `shard_dim` is None if every rank holds all of it."""

    weight_loader: Loader
    shard_dim: int | None


def make_weight(
    shape: Sequence[int],
    loader: Loader,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard_dim: int | None = None,
) -> Weight:
    weight = Weight(torch.zeros(tuple(shape), dtype=dtype, device=device), requires_grad=False)
    weight.weight_loader = loader
    weight.shard_dim = shard_dim
    return weight


def _check(param: torch.Tensor, got: torch.Tensor, expected: Sequence[int]) -> None:
    if tuple(got.shape) != tuple(expected):
        raise ValueError(
            f"loaded tensor has shape {tuple(got.shape)}, expected {tuple(expected)}, of which a parameter of shape "
            f"{tuple(param.shape)} holds this rank's part"
        )


def copy_full(param: torch.Tensor, loaded: torch.Tensor, shard_id: str | int | None = None) -> None:
    """The loader of whatever is whole on every rank: norms, replicated projections, buffers."""
    _check(param, loaded, param.shape)
    param.copy_(loaded)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_weight((size,), copy_full, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class ReplicatedLinear(nn.Module):
    def __init__(self, in_size: int, out_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = make_weight((out_size, in_size), copy_full, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class ColumnParallelLinear(nn.Module):
    """Several projections of one input stacked by rows (`gate_up_proj`); rank r holds the r-th part of each.

    `out_sizes` are the full rows of each projection; `shard_id` is its index.
    """

    def __init__(
        self, in_size: int, out_sizes: Sequence[int], tp: TpGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        for size in out_sizes:
            if size % tp.size:
                raise ValueError(f"{size} rows cannot be split over {tp.size} engine ranks")
        self.in_size = in_size
        self.tp = tp
        self.rows = [size // tp.size for size in out_sizes]
        self.weight = make_weight((sum(self.rows), in_size), self._load, dtype=dtype, device=device, shard_dim=0)

    def _load(self, param: torch.Tensor, loaded: torch.Tensor, shard_id: str | int | None) -> None:
        assert isinstance(shard_id, int)
        rows = self.rows[shard_id]
        _check(param, loaded, (rows * self.tp.size, self.in_size))
        param.narrow(0, sum(self.rows[:shard_id]), rows).copy_(loaded.narrow(0, rows * self.tp.rank, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class QKVParallelLinear(nn.Module):
    """`qkv_proj`: this rank's query heads, then its key heads, then its value heads.

    With fewer KV heads than ranks, each KV head is replicated on `tp.size / num_kv_heads` consecutive ranks.
    """

    def __init__(
        self,
        in_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        tp: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        if num_heads % tp.size or max(num_kv_heads, tp.size) % min(num_kv_heads, tp.size):
            raise ValueError(
                f"{num_heads} query and {num_kv_heads} KV heads cannot be split over {tp.size} engine ranks"
            )
        self.num_heads = num_heads // tp.size
        self.num_kv_heads = max(1, num_kv_heads // tp.size)
        replicas = max(1, tp.size // num_kv_heads)
        q, kv = self.num_heads * head_dim, self.num_kv_heads * head_dim
        # shard id -> (first row here, rows, first row of the full tensor, full rows)
        self.parts = {
            "q": (0, q, q * tp.rank, num_heads * head_dim),
            "k": (q, kv, kv * (tp.rank // replicas), num_kv_heads * head_dim),
            "v": (q + kv, kv, kv * (tp.rank // replicas), num_kv_heads * head_dim),
        }
        self.sizes = [q, kv, kv]
        self.in_size = in_size
        rows = q + 2 * kv
        self.weight = make_weight((rows, in_size), self._load, dtype=dtype, device=device, shard_dim=0)
        self.bias = make_weight((rows,), self._load, dtype=dtype, device=device, shard_dim=0) if bias else None

    def _load(self, param: torch.Tensor, loaded: torch.Tensor, shard_id: str | int | None) -> None:
        assert isinstance(shard_id, str)
        here, rows, start, full = self.parts[shard_id]
        _check(param, loaded, (full, *param.shape[1:]))
        param.narrow(0, here, rows).copy_(loaded.narrow(0, start, rows))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = functional.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        return q, k, v


class RowParallelLinear(nn.Module):
    """`o_proj`, `down_proj`: rank r holds the r-th part of the columns, the outputs are summed over the ranks."""

    def __init__(self, in_size: int, out_size: int, tp: TpGroup, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if in_size % tp.size:
            raise ValueError(f"{in_size} columns cannot be split over {tp.size} engine ranks")
        self.tp = tp
        self.full = (out_size, in_size)
        self.columns = in_size // tp.size
        self.weight = make_weight((out_size, self.columns), self._load, dtype=dtype, device=device, shard_dim=1)

    def _load(self, param: torch.Tensor, loaded: torch.Tensor, shard_id: str | int | None) -> None:
        _check(param, loaded, self.full)
        param.copy_(loaded.narrow(1, self.columns * self.tp.rank, self.columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(functional.linear(x, self.weight))


class VocabParallel(nn.Module):
    """Rows of the vocabulary split over the ranks: an embedding (`forward`) and an output layer (`logits`).

    The vocabulary is padded to a multiple of the ranks; the loader takes the unpadded tensor and zeroes the padding.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TpGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.tp = tp
        self.rows = -(-vocab_size // tp.size)
        self.first = self.rows * tp.rank
        self.weight = make_weight((self.rows, hidden_size), self._load, dtype=dtype, device=device, shard_dim=0)

    def _load(self, param: torch.Tensor, loaded: torch.Tensor, shard_id: str | int | None) -> None:
        _check(param, loaded, (self.vocab_size, self.hidden_size))
        rows = max(0, min(self.rows, self.vocab_size - self.first))
        param.narrow(0, 0, rows).copy_(loaded.narrow(0, min(self.first, self.vocab_size), rows))
        if rows < self.rows:
            param.narrow(0, rows, self.rows - rows).fill_(0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return functional.embedding(tokens, self.weight)
        local = tokens - self.first
        outside = (local < 0) | (local >= self.rows)
        x = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return self.tp.all_reduce(x.masked_fill_(outside.unsqueeze(-1), 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden_size] -> [n, vocab_size]` in fp32, the same on every rank."""
        local = functional.linear(hidden, self.weight).float()
        return self.tp.all_gather(local)[:, : self.vocab_size]
