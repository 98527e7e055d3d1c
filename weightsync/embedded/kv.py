"""Keys and values of one sequence, and the rotary positions that go into them."""

from __future__ import annotations

import math

import torch

from weightsync.embedded.config import ModelConfig

__all__ = ["KVCache", "Rotary"]


class KVCache:
    """`length` positions of every layer; `append` writes behind them, `advance` makes that permanent.

    Shapes per layer: `[capacity, kv_heads, head_dim]`; capacity doubles when it runs out.
    """

    def __init__(
        self, num_layers: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = 0
        shape = (2, num_layers, 0, kv_heads, head_dim)
        self._kv = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[n, kv_heads, head_dim]` behind `length`; returns all keys and values up to and with them."""
        end = self.length + k.shape[0]
        if end > self._kv.shape[2]:
            self._grow(end)
        self._kv[0, layer, self.length : end] = k
        self._kv[1, layer, self.length : end] = v
        return self._kv[0, layer, :end], self._kv[1, layer, :end]

    def advance(self, n: int) -> None:
        self.length += n

    def truncate(self, length: int) -> None:
        if length > self.length:
            raise ValueError(f"cannot truncate a KV cache of {self.length} positions to {length}")
        self.length = length

    def copy_prefix(self, length: int) -> KVCache:
        """A cache of its own with the first `length` positions."""
        if length > self.length:
            raise ValueError(f"a KV cache of {self.length} positions has no prefix of {length}")
        twin = object.__new__(KVCache)
        twin._kv = self._kv[:, :, :length].clone()
        twin.length = length
        return twin

    def _grow(self, end: int) -> None:
        shape = list(self._kv.shape)
        shape[2] = max(end, 2 * shape[2], 16)
        grown = self._kv.new_empty(shape)
        grown[:, :, : self.length] = self._kv[:, :, : self.length]
        self._kv = grown


class Rotary:
    """Rotary position embedding as Transformers computes it (half rotation), default or `llama3` frequencies."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        dim = config.head_dim
        freq = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        if config.rope_scaling is not None:
            scale = config.rope_scaling
            factor = float(scale["factor"])
            low, high = float(scale["low_freq_factor"]), float(scale["high_freq_factor"])
            original = float(scale["original_max_position_embeddings"])
            turns = original * freq / (2 * math.pi)
            blend = ((turns - low) / (high - low)).clamp(0, 1)
            freq = (1 - blend) * freq / factor + blend * freq
        self._freq = freq.to(device)

    def at(self, start: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, `[n, 1, head_dim]`, of positions `start .. start+n-1`."""
        positions = torch.arange(start, start + n, device=self._freq.device, dtype=torch.float32)
        angle = torch.outer(positions, self._freq).repeat(1, 2).unsqueeze(1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[n, heads, head_dim]`, rotated."""
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin
