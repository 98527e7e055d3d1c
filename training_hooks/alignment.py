"""Which token each position of a batch predicts at each depth, decided once, before anything is sliced.

Owns the layouts (padded rows or packed sequences), the two conventions of labels and masks, and the split over context
parallel ranks. A trainer calls `mtp_targets` for every micro-batch, on every rank that holds the MTP layers, with the
full (unsliced) batch, and gives the result to the MTP hook. Pure tensor arithmetic: no process group, no model.

Let `x[i]` be tokens and `r[i]` whether token i is supervised. At depth d (1-based) position i reads the embedding of
`x[i + d]` and predicts `x[i + d + 1]`, supervised where `r[i + d + 1]`. Both must lie in the sequence of position i.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from training_hooks.errors import AlignmentError

__all__ = ["Alignment", "CpSplit", "Layout", "MTPTargets", "mtp_targets"]


class Alignment(enum.Enum):
    """What element i of a labels or mask tensor speaks of."""

    TOKEN = "token"  # noqa: S105 - no password
    """Token i itself: labels are `input_ids`, a mask marks supervised tokens."""
    NEXT_TOKEN = "next_token"  # noqa: S105 - no password
    """Token i + 1: labels are already shifted by one, and so is the mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where sequences lie in a batch of `rows` x `columns`; built by `padded` or `packed`.

    `spans` are (row, start, length, room): `length` real tokens from `start` on, `room` columns with its padding.
    """

    rows: int
    columns: int
    spans: tuple[tuple[int, int, int, int], ...]
    is_packed: bool

    @staticmethod
    def padded(lengths: Sequence[int], columns: int, *, documents: Sequence[Sequence[int]] | None = None) -> Layout:
        """BSHD: one right-padded sequence per row. `documents` are the lengths of the documents of each row, if a row
        holds several; nothing is predicted across their borders.

        Raises:
            AlignmentError: a length exceeds the row, or documents do not add up to it.
        """
        spans = []
        for row, length in enumerate(int(n) for n in lengths):
            if not 0 <= length <= columns:
                raise AlignmentError(f"row {row} has length {length}, but rows have {columns} columns: check `lengths`")
            parts = [length] if documents is None else [int(n) for n in documents[row]]
            if sum(parts) != length or any(n < 0 for n in parts):
                raise AlignmentError(f"row {row}: documents {parts} do not add up to its length {length}")
            start = 0
            for part in parts:
                spans.append((row, start, part, part))
                start += part
        return Layout(rows=len(lengths), columns=columns, spans=tuple(spans), is_packed=False)

    @staticmethod
    def packed(cu_seqlens: Sequence[int], cu_seqlens_padded: Sequence[int] | None = None) -> Layout:
        """THD: sequences one after another in a single row. `cu_seqlens` count real tokens, `cu_seqlens_padded` the
        columns that they take; without the latter, nothing is padded.

        Raises:
            AlignmentError: the two do not describe the same sequences.
        """
        real = [int(n) for n in cu_seqlens]
        room = real if cu_seqlens_padded is None else [int(n) for n in cu_seqlens_padded]
        if len(real) != len(room) or len(real) < 2 or real[0] != 0 or room[0] != 0:
            raise AlignmentError(
                f"cu_seqlens {real} and cu_seqlens_padded {room} must both start with 0 and have one entry per "
                "sequence and one more"
            )
        spans = []
        for k in range(len(real) - 1):
            length, space = real[k + 1] - real[k], room[k + 1] - room[k]
            if not 0 <= length <= space:
                raise AlignmentError(f"sequence {k} has {length} tokens in {space} columns: are the two lists swapped?")
            spans.append((0, room[k], length, space))
        return Layout(rows=1, columns=room[-1], spans=tuple(spans), is_packed=True)

    def remaining(self) -> torch.Tensor:
        """int64 [rows, columns]: tokens of its sequence from this position on, itself included; 0 on padding."""
        out = torch.zeros(self.rows, self.columns, dtype=torch.int64)
        for row, start, length, _ in self.spans:
            out[row, start : start + length] = torch.arange(length, 0, -1)
        return out

    def keys(self) -> torch.Tensor:
        """int64 [rows, columns, 2]: (number of the sequence in `spans`, position in it); (-1, -1) on padding."""
        out = torch.full((self.rows, self.columns, 2), -1, dtype=torch.int64)
        for index, (row, start, length, _) in enumerate(self.spans):
            out[row, start : start + length, 0] = index
            out[row, start : start + length, 1] = torch.arange(length)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class CpSplit:
    """How context parallel rank `rank` of `size` gets its columns.

    `zigzag` is Megatron's: a row, or each packed sequence with its padding, is cut into `2 * size` chunks, of which a
    rank holds `rank` and `2 * size - 1 - rank`. `contiguous` cuts the whole row into `size` parts. `columns` states the
    columns of this rank explicitly, for a model that slices by itself and tells how.
    """

    size: int = 1
    rank: int = 0
    scheme: Literal["zigzag", "contiguous"] = "zigzag"
    columns: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise AlignmentError(f"context parallel rank {self.rank} of {self.size} does not exist")
        if self.scheme not in ("zigzag", "contiguous"):
            raise AlignmentError(f"unknown context parallel scheme {self.scheme!r}: choose 'zigzag' or 'contiguous'")

    def local_columns(self, layout: Layout) -> torch.Tensor:
        """int64 [local columns]: which columns of `layout` this rank holds, in its order.

        Raises:
            AlignmentError: lengths do not divide, or the explicit columns lie outside of the layout.
        """
        if self.columns is not None:
            columns = self.columns.to("cpu", torch.int64)
            if columns.dim() != 1 or (columns.numel() and not 0 <= int(columns.min()) <= int(columns.max())):
                raise AlignmentError("explicit context parallel columns must be a vector of non-negative integers")
            if columns.numel() and int(columns.max()) >= layout.columns:
                raise AlignmentError(
                    f"explicit column {int(columns.max())} lies outside of the {layout.columns} columns of the batch"
                )
            return columns
        if self.size == 1:
            return torch.arange(layout.columns)
        if self.scheme == "contiguous":
            if layout.columns % self.size:
                raise AlignmentError(
                    f"{layout.columns} columns do not divide by context parallel size {self.size}: pad them"
                )
            width = layout.columns // self.size
            return torch.arange(self.rank * width, (self.rank + 1) * width)
        blocks = [(start, room) for _, start, _, room in layout.spans] if layout.is_packed else [(0, layout.columns)]
        out = []
        for start, room in blocks:
            if room % (2 * self.size):
                raise AlignmentError(
                    f"{room} columns from column {start} on do not divide into 2 * {self.size} CP chunks: "
                    + ("pad each sequence, and pass cu_seqlens_padded" if layout.is_packed else "pad the rows")
                )
            width = room // (2 * self.size)
            out += [
                torch.arange(start + chunk * width, start + (chunk + 1) * width)
                for chunk in (self.rank, 2 * self.size - 1 - self.rank)
            ]
        return torch.cat(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPTargets:
    """One micro-batch as one context parallel rank sees it; index d - 1 belongs to depth d.

    `input_ids`: int64 [depths, rows, local columns], tokens whose embeddings depth d reads, 0 where there is none;
    `labels`: int64, same shape, valid where `mask` (bool, same shape) is set, 0 elsewhere; `position_ids`: int64
    [depths, rows, local columns]; `counts`: supervised positions of this rank per depth.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    position_ids: torch.Tensor
    counts: tuple[int, ...]

    @property
    def depths(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str) -> MTPTargets:
        """The same targets with their tensors on `device`."""
        return MTPTargets(
            input_ids=self.input_ids.to(device),
            labels=self.labels.to(device),
            mask=self.mask.to(device),
            position_ids=self.position_ids.to(device),
            counts=self.counts,
        )


def mtp_targets(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    layout: Layout,
    depths: int,
    mask_alignment: Alignment,
    labels: torch.Tensor | None = None,
    labels_alignment: Alignment = Alignment.TOKEN,
    cp: CpSplit | None = None,
    media_mask: torch.Tensor | None = None,
) -> MTPTargets:
    """Targets of depths 1 to `depths` for this rank's columns of a full batch.

    Args:
        input_ids: [rows, columns] tokens of the whole batch, before any context parallel slicing.
        loss_mask: [rows, columns] of bool, 0 or 1; what it marks is said by `mask_alignment`, never guessed.
        layout: where the sequences lie.
        depths: how many MTP layers there are.
        mask_alignment: whether mask element i speaks of token i or of token i + 1.
        labels: [rows, columns]; without them, the labels are `input_ids`.
        labels_alignment: as `mask_alignment`, for `labels`. The last position of a sequence may then have a label,
            which is a token beyond `input_ids`.
        cp: this rank's share of the columns; default: all of them.
        media_mask: [rows, columns] bool, tokens that stand for an image or a sound: never a target.

    Raises:
        AlignmentError: shapes that do not fit, weights in place of a mask, supervised padding, a multimodal batch under
            context parallelism without the columns of its slice.
    """
    cp = cp or CpSplit()
    shape = (layout.rows, layout.columns)
    for name, tensor in (("input_ids", input_ids), ("loss_mask", loss_mask), ("labels", labels), ("media", media_mask)):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise AlignmentError(
                f"{name} has shape {tuple(tensor.shape)}, but the layout has {shape}: pass the full batch, before "
                "context parallel slicing"
            )
    if depths < 1:
        raise AlignmentError(f"depths is {depths}: a model without MTP layers has no MTP targets")
    if not isinstance(mask_alignment, Alignment) or not isinstance(labels_alignment, Alignment):
        raise AlignmentError("say what masks and labels speak of: Alignment.TOKEN or Alignment.NEXT_TOKEN")
    if media_mask is not None and cp.size > 1 and cp.columns is None:
        raise AlignmentError(
            "a multimodal model slices its merged sequence by itself under context parallelism: pass the columns that "
            "this rank holds as CpSplit(columns=...), they cannot be derived from the text layout"
        )
    device = input_ids.device
    supervised = loss_mask.bool()
    if not torch.equal(supervised.to(loss_mask.dtype), loss_mask):
        raise AlignmentError("loss_mask has values other than 0 and 1: weights are no mask, scale the loss instead")
    remaining = layout.remaining().to(device)
    stray = int((supervised & (remaining == 0)).sum())
    if stray:
        raise AlignmentError(f"loss_mask supervises {stray} positions of padding: clear them, or correct the layout")
    if media_mask is not None:
        media = media_mask.bool()
        # The mask may speak of the next token, the media mask always speaks of the token itself.
        supervised = supervised & ~(
            media if mask_alignment is Alignment.TOKEN else _shifted(media, 1) & (remaining > 1)
        )

    columns = cp.local_columns(layout).to(device)
    values = input_ids if labels is None else labels
    if labels is None:
        labels_alignment = Alignment.TOKEN
    per_depth = []
    positions = layout.keys()[..., 1].to(device)
    for depth in range(1, depths + 1):
        # A tensor that speaks of the next token is ahead by one already.
        label_shift = depth + (labels_alignment is Alignment.TOKEN)
        mask_shift = depth + (mask_alignment is Alignment.TOKEN)
        mask = _shifted(supervised, mask_shift) & (remaining > max(label_shift, mask_shift))
        read = remaining > depth
        parts = (
            torch.where(read, _shifted(input_ids, depth), 0),
            torch.where(mask, _shifted(values, label_shift), 0),
            mask,
            torch.where(read, positions + depth, 0),
        )
        per_depth.append([part.index_select(1, columns) for part in parts])
    ids, targets, masks, position_ids = (torch.stack(parts) for parts in zip(*per_depth, strict=True))
    return MTPTargets(
        input_ids=ids,
        labels=targets,
        mask=masks,
        position_ids=position_ids,
        counts=tuple(int(n) for n in masks.flatten(1).sum(1)),
    )


def _shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Element i becomes element i + by; the end is zero (callers mask it, and borders, by `remaining`)."""
    out = torch.zeros_like(tensor)
    if by < tensor.shape[1]:
        out[:, : tensor.shape[1] - by] = tensor[:, by:]
    return out
