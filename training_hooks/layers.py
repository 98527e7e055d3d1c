"""The parts that drafters are made of, and how one is kept in a folder in Hugging Face layout.

Plain torch, small: what the drafters of `eagle3_drafter` and `dspark_drafter` have in common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from training_hooks.capture import LayerRef
from training_hooks.errors import SettingsError

__all__ = ["Attention", "DrafterShape", "Mlp", "Norm", "load_folder", "rotate", "save_folder", "softmax"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    """What the configurations of drafters have in common. `layers`: the states of the target that one reads, low to
    high."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerRef, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if not self.layers or any(ref.kind == "final_norm" for ref in self.layers):
            raise SettingsError("a drafter reads inputs or outputs of layers; the final norm is the teacher's")
        if self.num_heads % self.num_kv_heads:
            raise SettingsError(f"{self.num_heads} heads do not divide into {self.num_kv_heads} groups")

    def shape_json(self, ids_name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of config.json, and those of its section for the kind of drafter: layer ids, under `ids_name`.

        The ids are of inputs, as engines count, and say so.
        """
        ids = [ref.canonical.index + (ref.canonical.kind == "output_of") for ref in self.layers]
        fields = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
        }
        return fields, {ids_name: ids, "layer_id_convention": "input_to"}

    @staticmethod
    def shape_of(obj: Mapping[str, Any], section: str, ids_name: str) -> dict[str, Any]:
        """Arguments of the constructor: inverse of `shape_json`.

        Raises:
            SettingsError: layer ids without their convention.
        """
        own = obj.get(section) or {}
        kind = own.get("layer_id_convention")
        if kind not in ("input_to", "output_of"):
            raise SettingsError(
                f"config.json says {kind!r} for {section}.layer_id_convention: add 'input_to' or 'output_of', "
                "whichever its layer ids follow"
            )
        return {
            "vocab_size": obj["vocab_size"],
            "hidden_size": obj["hidden_size"],
            "intermediate_size": obj["intermediate_size"],
            "num_heads": obj["num_attention_heads"],
            "num_kv_heads": obj["num_key_value_heads"],
            "head_dim": obj["head_dim"],
            "layers": tuple(LayerRef(kind, i) for i in own[ids_name]),
            "rms_norm_eps": obj["rms_norm_eps"],
            "rope_theta": obj["rope_theta"],
        }


class Attention(nn.Module):
    """Projections of Llama's grouped-query attention, reading `input_size`; what attends to what is its subclass's."""

    def __init__(self, shape: DrafterShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(input_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, head_dim] of `x` [b, s, input_size], rotated."""
        return rotate(self._heads(self.q_proj, x), positions, self.shape.rope_theta)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `queries`, each repeated for the heads of its group."""
        groups = self.shape.num_heads // self.shape.num_kv_heads
        keys = rotate(self._heads(self.k_proj, x), positions, self.shape.rope_theta)
        return keys.repeat_interleave(groups, 1), self._heads(self.v_proj, x).repeat_interleave(groups, 1)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden_size] of what the heads [b, heads, s, head_dim] saw."""
        out: torch.Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out

    def _heads(self, projection: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = projection(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        return out


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
