"""Quantised storage: a weight that a Hugging Face folder keeps as several tensors, decoded on the way to Megatron.

One way: Megatron trains the decoded weight, and what goes back to Hugging Face is that weight, unquantised. So a
decoding stands before a mapping's op, not inside it, and tables need not know of it. This is the one declared cast.
"""

from __future__ import annotations

import abc
import dataclasses

import torch

from converters.errors import MappingError

__all__ = ["BlockScales", "Encoding"]


class Encoding(abc.ABC):
    """How a family's folder may store weight `name` in encoded form."""

    __slots__ = ()

    @abc.abstractmethod
    def stored(self, name: str) -> tuple[str, ...]:
        """The names under which an encoded `name` is stored (`name` itself may be one of them)."""

    @abc.abstractmethod
    def decode(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The weight, from the tensors of `stored(name)` in that order."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockScales(Encoding):
    """One scale for each `block` of the last two dimensions: `weight` in fp8 beside `weight_scale_inv` in fp32.

    The product is taken in fp32 and rounded once to `dtype`: rounding the scale first changes a fifth of the elements.
    """

    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    suffix: str = "_scale_inv"

    def stored(self, name: str) -> tuple[str, ...]:
        return (name, name + self.suffix)

    def decode(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        weight, scale = tensors
        rows, columns = weight.shape[-2:]
        want = (*weight.shape[:-2], -(-rows // self.block[0]), -(-columns // self.block[1]))
        if tuple(scale.shape) != want:
            raise MappingError(
                f"scales of shape {tuple(scale.shape)} for a weight of shape {tuple(weight.shape)}: "
                f"expected {want} with blocks of {self.block[0]} x {self.block[1]}"
            )
        spread = scale.float().repeat_interleave(self.block[0], -2)[..., :rows, :]
        spread = spread.repeat_interleave(self.block[1], -1)[..., :columns]
        return (weight.float() * spread).to(self.dtype)
