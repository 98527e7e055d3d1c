"""The parts that drafters are made of, and how one is kept in a folder in Hugging Face layout.

Plain torch, small: what the drafters of `eagle3_drafter` and `dspark_drafter` have in common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Mlp", "Norm", "load_folder", "rotate", "save_folder", "softmax"]


class Norm(nn.Module):
    """RMS norm, computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Mlp(nn.Module):
    """Gated MLP, as Llama's."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding (halves, not pairs) of `x` [..., n, head_dim] at `positions` [n] or [..., n]."""
    dim = x.shape[-1]
    inverse = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim)
    angles = positions[..., None].float() * inverse
    angles = torch.cat([angles, angles], -1)
    low, high = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-high, low], -1) * angles.sin().to(x.dtype)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Over the last axis, in float32 at least, in the dtype of `scores`."""
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=wide).to(scores.dtype)


def save_folder(folder: str | Path, config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
    """config.json and model.safetensors in `folder` (made if need be)."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")


def load_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config, state) of a folder that `save_folder` wrote."""
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config, load_file(Path(folder) / "model.safetensors")
