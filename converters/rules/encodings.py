"""Quantised storage: a weight that a Hugging Face folder keeps as several tensors, decoded on the way to Megatron.

One way: Megatron trains the decoded weight, and what goes back to Hugging Face is that weight, unquantised. So a
decoding stands before a mapping's op, not inside it, and tables need not know of it. This is the one declared cast.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import torch

from converters.errors import ConfigMismatch, MappingError
from converters.rules.config import ModelConfig

__all__ = ["BlockScales", "Encoding", "MxFp4", "fp8_blocks", "mxfp4"]


class Encoding(abc.ABC):
    """How a family's folder may store weight `name` in encoded form."""

    __slots__ = ()

    @abc.abstractmethod
    def stored(self, name: str) -> tuple[str, ...]:
        """The names under which an encoded `name` is stored (`name` itself may be one of them)."""

    @abc.abstractmethod
    def decode(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The weight, from the tensors of `stored(name)` in that order."""

    def decode_part(self, part: torch.Tensor, others: tuple[torch.Tensor, ...], row: int, column: int) -> torch.Tensor:
        """What `decode` gives for a rectangle of the first stored tensor that starts at (`row`, `column`).

        `others` are the further stored tensors, whole. Only where `in_parts`.
        """
        raise NotImplementedError

    @property
    def in_parts(self) -> bool:
        """Whether rectangles of a matrix can be decoded by themselves."""
        return False

    def rows_together(self, shape: Sequence[int]) -> int:
        """How many rows (dimension 0) of a weight of `shape` can be decoded without the others.

        Their part of each stored tensor is its share of that tensor's rows.
        """
        return 1 if len(shape) > 2 else shape[0]


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

    def rows_together(self, shape: Sequence[int]) -> int:
        return self.block[0] if len(shape) == 2 else 1

    def decode(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        weight, scale = tensors
        rows, columns = weight.shape[-2:]
        want = (*weight.shape[:-2], -(-rows // self.block[0]), -(-columns // self.block[1]))
        if tuple(scale.shape) != want:
            raise MappingError(
                f"scales of shape {tuple(scale.shape)} for a weight of shape {tuple(weight.shape)}: "
                f"expected {want} with blocks of {self.block[0]} x {self.block[1]}"
            )
        if rows % self.block[0] == 0 and columns % self.block[1] == 0:
            # The same products without a copy of each scale for every element: twice as fast.
            blocks = weight.float().unflatten(-1, (-1, self.block[1])).unflatten(-3, (-1, self.block[0]))
            decoded: torch.Tensor = blocks.mul_(scale.float()[..., :, None, :, None]).to(self.dtype)
            return decoded.reshape(weight.shape)
        spread = scale.float().repeat_interleave(self.block[0], -2)[..., :rows, :]
        spread = spread.repeat_interleave(self.block[1], -1)[..., :columns]
        return (weight.float() * spread).to(self.dtype)

    @property
    def in_parts(self) -> bool:
        return True

    def decode_part(self, part: torch.Tensor, others: tuple[torch.Tensor, ...], row: int, column: int) -> torch.Tensor:
        (scale,) = others
        rows, columns = (
            torch.arange(start, start + length) // block
            for start, length, block in zip((row, column), part.shape, self.block, strict=True)
        )
        return (part.float() * scale.float()[rows][:, columns]).to(self.dtype)


def fp8_blocks(config: ModelConfig) -> Encoding | None:
    """The encoding of a folder whose config declares block-scaled fp8 weights, else None.

    Raises:
        ConfigMismatch: the declared block or the dtype to decode to is not one.
    """
    quantisation = config.get("quantization_config") or {}
    block = quantisation.get("weight_block_size")
    if quantisation.get("quant_method") != "fp8" or block is None:
        return None
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigMismatch(f"config has dtype {name!r}, which torch does not know")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise ConfigMismatch(f"config has weight_block_size {block!r}, expected two positive integers")
    return BlockScales(block=(block[0], block[1]), dtype=dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class MxFp4(Encoding):
    """`_blocks` uint8 [..., rows, n, 16], two E2M1 values a byte, the low half first; `_scales` uint8 [..., rows, n].

    A scale is the power of two `scale - 127` for the 32 values of a block. The stored matrix is the transpose of the
    one that a bfloat16 folder holds, and that one is what decoding gives: [..., n * 32, rows].
    """

    dtype: torch.dtype = torch.bfloat16

    def stored(self, name: str) -> tuple[str, ...]:
        return (name + "_blocks", name + "_scales")

    def decode(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        blocks, scales = tensors
        if blocks.dim() < 3 or blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8:
            raise MappingError(
                f"MXFP4 blocks {blocks.dtype} {tuple(blocks.shape)} beside scales {tuple(scales.shape)}: expected "
                "uint8 [..., rows, n, 16] beside [..., rows, n]"
            )
        table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), dtype=self.dtype, device=blocks.device)
        low, high = (table[part.int()] for part in (blocks & 15, blocks >> 4))
        values = torch.stack((low, high), -1).flatten(-2)
        # Exact: a product with a power of two only moves the exponent.
        return torch.ldexp(values, (scales.int() - 127).unsqueeze(-1)).to(self.dtype).flatten(-2).mT


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(config: ModelConfig) -> Encoding | None:
    """The encoding of a folder whose config declares MXFP4 experts, else None."""
    return MxFp4() if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4" else None
