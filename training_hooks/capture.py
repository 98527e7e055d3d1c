"""Hidden states of a target model, row by row, under the key (sample, position).

    capture = HiddenCapture(points, form)                 # nothing is hooked yet
    with capture.active():                                # hooks exist only in here
        with capture.micro_batch(keys):                   # one forward pass, keys of this rank's columns
            model(...)
    rows = exchange.merge(capture.take(), ...)            # training_hooks.exchange

Keys make order irrelevant: micro-batches may be permuted or regrouped, sequences packed or padded, sharded over
tensor, sequence and context parallel ranks; the merge is a scatter by key that checks that every row came exactly once.
`LayerRef` says which convention an id follows: one that is off by one only shows as a draft that nobody accepts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from training_hooks.alignment import CpSplit, Layout
from training_hooks.errors import CaptureError, SettingsError

__all__ = ["HiddenCapture", "LayerRef", "RowForm", "Rows", "row_keys"]


@dataclass(frozen=True, order=True, slots=True)
class LayerRef:
    """A state of the residual stream: `LayerRef("input_to", i)`, `("output_of", i)`, decoder layers from 0 on, or
    `("final_norm", 0)`. The input to layer i is the output of layer i - 1; `canonical` makes them equal.

    Raises:
        SettingsError: a bare id, an unknown kind or a negative index.
    """

    kind: Literal["input_to", "output_of", "final_norm"]
    index: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("input_to", "output_of", "final_norm"):
            raise SettingsError(
                f"layer reference of kind {self.kind!r}: say 'input_to', 'output_of' or 'final_norm': "
                "engines and trainers number layers differently"
            )
        if self.index < 0 or (self.kind == "final_norm" and self.index):
            raise SettingsError(f"layer reference {self.kind} {self.index} does not exist")

    @property
    def canonical(self) -> LayerRef:
        """`output_of` for what is also an output; `("input_to", 0)` is the embedding."""
        if self.kind == "input_to" and self.index > 0:
            return LayerRef("output_of", self.index - 1)
        return self

    def __str__(self) -> str:
        return self.kind if self.kind == "final_norm" else f"{self.kind}_{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowForm:
    """How the hidden states of this rank lie: [columns, rows, h] or [rows, columns, h], and, under sequence
    parallelism, which of `sp_size` equal parts of the columns `sp_rank` holds. `contributes`: whether this rank's rows
    count, when its tensor parallel peers hold the same ones."""

    sequence_first: bool = True
    sp_rank: int = 0
    sp_size: int = 1
    contributes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Captured rows of one layer: `keys` int64 [n, 2] (sample, position), `values` [n, h] on the CPU."""

    keys: torch.Tensor
    values: torch.Tensor


def row_keys(
    layout: Layout,
    samples: Sequence[int],
    *,
    cp: CpSplit | None = None,
    select: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [rows, local columns, 2]: (sample, position) of every column of this rank, (-1, -1) where nothing is kept.

    `samples`: the sample number of each sequence of `layout`. `select`: bool [rows, columns], positions to keep.

    Raises:
        CaptureError: sample numbers do not fit the layout.
    """
    if len(samples) != len(layout.spans) or len(set(samples)) != len(samples) or min(samples, default=0) < 0:
        raise CaptureError(
            f"{len(samples)} sample numbers for {len(layout.spans)} sequences: give each sequence a number of its "
            "own, 0 or more"
        )
    keys = layout.keys()
    numbers = torch.tensor([*samples, -1], dtype=torch.int64)  # index -1 is padding
    keys[..., 0] = numbers[keys[..., 0]]
    if select is not None:
        keys[~select.bool().cpu()] = -1
    return keys.index_select(1, (cp or CpSplit()).local_columns(layout))


class HiddenCapture:
    """Records the outputs of `points` (reference -> module whose output it is) while active; see the module's text."""

    def __init__(self, points: Mapping[LayerRef, torch.nn.Module], form: RowForm | None = None) -> None:
        self._points = {ref.canonical: module for ref, module in points.items()}
        self._form = form or RowForm()
        self._keys: torch.Tensor | None = None
        self._active = False
        self._seen: set[LayerRef] = set()
        self._parts: dict[LayerRef, list[Rows]] = {}

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        """What this rank records, canonical and sorted."""
        return tuple(sorted(self._points))

    @contextlib.contextmanager
    def active(self) -> Iterator[HiddenCapture]:
        """Hooks exist inside this block only; an exception drops what was recorded."""
        if self._active:
            raise CaptureError("capture is active already: blocks do not nest")
        self._active = True
        handles: list[Any] = []
        try:
            handles.extend(m.register_forward_hook(self._make_hook(ref)) for ref, m in self._points.items())
            yield self
        except BaseException:
            self._parts.clear()
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._active = False
            self._keys = None

    @contextlib.contextmanager
    def micro_batch(self, keys: torch.Tensor) -> Iterator[None]:
        """Around one forward pass; `keys` from `row_keys`. Passes outside of such a block are not recorded, so neither
        reference passes nor recomputation in the backward pass are.

        Raises:
            CaptureError: outside of `active`, or a hooked module ran twice.
        """
        if not self._active:
            raise CaptureError("micro_batch outside of active(): nothing is hooked")
        self._keys = keys
        self._seen = set()
        try:
            yield
        finally:
            self._keys = None

    def take(self) -> dict[LayerRef, Rows]:
        """What was recorded since the last call, by canonical reference; layers without rows have empty ones."""
        out = {ref: _join(self._parts.get(ref, [])) for ref in self.layers}
        self._parts.clear()
        return out

    def _make_hook(self, ref: LayerRef) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if self._keys is None:
                return
            if ref in self._seen:
                raise CaptureError(
                    f"{ref} ran twice in one micro-batch: capture one forward pass per micro_batch block"
                )
            self._seen.add(ref)
            if self._form.contributes:
                hidden = output[0] if isinstance(output, tuple) else output
                self._parts.setdefault(ref, []).append(self._rows(ref, hidden.detach(), self._keys))

        return hook

    def _rows(self, ref: LayerRef, hidden: torch.Tensor, keys: torch.Tensor) -> Rows:
        if self._form.sequence_first:
            keys = keys.transpose(0, 1)
        axis = 0 if self._form.sequence_first else 1
        width = keys.shape[axis] // self._form.sp_size
        keys = keys.narrow(axis, self._form.sp_rank * width, width)
        if hidden.shape[:2] != keys.shape[:2]:
            raise CaptureError(
                f"{ref} gave states of shape {tuple(hidden.shape)}, but the keys describe {tuple(keys.shape[:2])}: "
                "other layout, context parallel split or sequence parallel part?"
            )
        keep = keys[..., 0] >= 0
        return Rows(keys=keys[keep].cpu(), values=hidden[keep.to(hidden.device)].cpu())


def _join(parts: Sequence[Rows]) -> Rows:
    if not parts:
        return Rows(keys=torch.zeros(0, 2, dtype=torch.int64), values=torch.zeros(0, 0))
    return Rows(keys=torch.cat([p.keys for p in parts]), values=torch.cat([p.values for p in parts]))
