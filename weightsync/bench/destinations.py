"""Engine-like destinations of the bench's lanes: parameters fused and sharded as engines keep them, in one storage.

`lanes` builds one per receiver; `limit` copies into its storage, `peers` load tensors, and rows of tensors, into it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from weightsync.errors import ManifestError
from weightsync.manifest import TensorSpec

__all__ = ["Destinations", "Rows", "shards"]

_ALIGN = 64
_COLUMN = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_VOCAB = {"embed_tokens", "lm_head"}
_ROW = {"o_proj", "down_proj"}
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


def _module_of(name: str) -> tuple[str, str]:
    """`model.layers.0.self_attn.q_proj.weight` -> (`model.layers.0.self_attn`, `q_proj`)."""
    path, _, _ = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    return parent, module


def shards(spec: TensorSpec, tp_rank: int, tp_size: int) -> tuple[int, int, int]:
    """(dim, start, length) of one tensor-parallel rank's part of a tensor; a replicated one is all of dim 0."""
    _, module = _module_of(spec.name)
    if module in _VOCAB:  # engines pad the vocabulary, so the last rank may hold fewer rows
        length = -(-spec.shape[0] // tp_size)
        start = min(tp_rank * length, spec.shape[0])
        return 0, start, min(length, spec.shape[0] - start)
    dim = 0 if module in _COLUMN else 1 if module in _ROW and len(spec.shape) > 1 else None
    if dim is None or not spec.shape:
        return 0, 0, spec.shape[0] if spec.shape else 1
    length, rest = divmod(spec.shape[dim], tp_size)
    if rest:
        raise ManifestError(f"{spec.name}: dimension {dim} of {spec.shape} is not divisible by engine TP {tp_size}")
    return dim, tp_rank * length, length


class Destinations:
    """Parameters of one engine rank, fused as engines fuse them, all in one storage.

    `load` copies the rank's shard of a full tensor into its place: what an engine's `load_weights` comes to.
    """

    def __init__(self, specs: Sequence[TensorSpec], *, tp_rank: int, tp_size: int, device: torch.device) -> None:
        self._shard: dict[tuple[str, str], tuple[int, int, int]] = {}
        parts: dict[tuple[str, str], list[tuple[TensorSpec, tuple[int, ...]]]] = {}
        for spec in specs:
            dim, start, length = shards(spec, tp_rank, tp_size)
            self._shard[spec.key] = (dim, start, length)
            shape = tuple(length if d == dim else n for d, n in enumerate(spec.shape))
            parent, module = _module_of(spec.name)
            leaf = spec.name.rpartition(".")[2]
            fused = f"{parent}.{_FUSED[module]}.{leaf}" if module in _FUSED else spec.name
            parts.setdefault((spec.role, fused), []).append((spec, shape))
        offsets, end = {}, 0
        for key, members in parts.items():
            offsets[key] = end
            size = sum(math.prod(shape) * spec.dtype.itemsize for spec, shape in members)
            end = -(-(end + size) // _ALIGN) * _ALIGN
        self.storage = torch.zeros(end, dtype=torch.uint8, device=device)
        self.nbytes = 0
        """Bytes that are loaded: those of the parameters, without the alignment between them."""
        self.views: dict[tuple[str, str], torch.Tensor] = {}
        for key, members in parts.items():
            at = offsets[key]
            for spec, shape in members:
                size = math.prod(shape) * spec.dtype.itemsize
                self.views[spec.key] = self.storage[at : at + size].view(spec.dtype).view(shape)
                at += size
                self.nbytes += size

    def load(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        """`tensor` is full (unsharded), of the spec's shape."""
        dim, start, length = self._shard[spec.key]
        self.views[spec.key].copy_(tensor.narrow(dim, start, length) if spec.shape else tensor)

    def load_rows(self, spec: TensorSpec, first_row: int, rows: torch.Tensor) -> None:
        """`rows` are full rows of the tensor from `first_row` on: what of them is this rank's goes to its place."""
        dim, start, length = self._shard[spec.key]
        if dim:
            self.views[spec.key][first_row : first_row + rows.shape[0]].copy_(rows.narrow(dim, start, length))
            return
        low, high = max(first_row, start), min(first_row + rows.shape[0], start + length)
        if low < high:
            self.views[spec.key][low - start : high - start].copy_(rows[low - first_row : high - first_row])

    def mismatches(self, value: int) -> list[str]:
        """Names of tensors of which some byte is not `value`."""
        wrong = []
        for (role, name), view in self.views.items():
            raw = view.reshape(-1).view(torch.uint8)
            if raw.numel() and (int(raw.min()), int(raw.max())) != (value, value):
                wrong.append(f"{role}:{name}")
        return wrong


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows `first` to `last` (exclusive) of a tensor: what a chunk of a ring consists of."""

    spec: TensorSpec
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.last - self.first, *self.spec.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.spec.dtype.itemsize
