"""Hugging Face tensors into a live, sharded Megatron-Core model: each rank reads only the bytes of its own shards.

`load_hf_folder` reads a folder, `load_tensors` takes full tensors in memory; both once per rank, no communication.
Which parts of the Hugging Face tensors a shard consists of is found by running the rule's operation on the numbers of
their lines (a line: all dimensions but the last) in place of their values, so there is no second description of a
layout. Operations that mix columns (MiMo's input_proj, gpt-oss's experts) or values (shifted norms) can't be followed
that way; their tensors are read whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from converters.errors import FolderError, LiveModelError, MappingError
from converters.families import rules_for
from converters.hf_folder import StoredTensor, read_folder
from converters.live.groups import ParallelGroups
from converters.live.model import LiveTensor, collect, expert_layer, shifted
from converters.rules import RuleSet, TensorMapping, account
from converters.rules.ops import Chain, Copies, Op

__all__ = ["LoadReport", "load_hf_folder", "load_tensors"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one rank loaded: Megatron tensors, the bytes read for them, and which of them had to be read whole."""

    tensors: tuple[str, ...]
    read_bytes: int
    read_whole: tuple[str, ...]


def load_hf_folder(
    chunks: Sequence[Any], path: str | os.PathLike[str], *, groups: ParallelGroups | None = None
) -> LoadReport:
    """Fill this rank's `chunks` (bare or wrapped) from the Hugging Face folder at `path`.

    Values are cast to the parameters' dtypes; rows that only pad the vocabulary become zero. An optimizer that keeps
    its own copy of the parameters must be told afterwards (Megatron: `optimizer.reload_model_params()`).

    Raises:
        FolderError: the folder is not sound, or cannot be read.
        UnsupportedFamilyError, ConfigMismatch: no rules for its config.
        MappingError: names or shapes do not fit the rules.
        LiveModelError: the model has tensors that the folder does not fill, or parameters that cannot be written.
    """
    folder = read_folder(Path(path))
    if folder.problems or folder.config is None:
        raise FolderError(f"{path}: {'; '.join(folder.problems)}")
    rules = rules_for(folder.config, folder.tensors)
    account(rules, folder.tensors).check(f"folder {path}")
    with _Folder(folder.path, folder.tensors) as source:
        _, report = _load(chunks, rules, source, groups)
    return report


def load_tensors(
    chunks: Sequence[Any],
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    groups: ParallelGroups | None = None,
) -> dict[str, torch.Tensor]:
    """Fill this rank's `chunks` from full Hugging Face `tensors`; returns its own tensors by canonical Megatron name.

    Experts have the number that they have in the whole model.

    Raises: as `load_hf_folder`, but for FolderError.
    """
    live, _ = _load(chunks, rules_for(hf_config, tensors), _Memory(tensors), groups)
    return {name: t.tensor for name, t in live.items()}


class _Source(Protocol):
    """Where full tensors are; `lines` reads `count` of them from `first` on, columns [start, stop)."""

    read_bytes: int

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def lines(self, name: str, first: int, count: int, start: int, stop: int) -> torch.Tensor: ...

    def whole(self, name: str) -> torch.Tensor: ...


@torch.no_grad()
def _load(
    chunks: Sequence[Any], rules: RuleSet, source: _Source, groups: ParallelGroups | None
) -> tuple[dict[str, LiveTensor], LoadReport]:
    groups = ParallelGroups.from_megatron() if groups is None else groups
    live = _numbered(collect(chunks, rules), groups)
    wanted: dict[str, list[str]] = {}
    for name in live:
        wanted.setdefault(rules.mcore_copies.get(name, name), []).append(name)
    whole: list[str] = []
    left = set(live)
    names = source.names()
    for mapping in rules.mappings():
        mine = [name for name in mapping.mcore if name in wanted]
        if not mine or (mapping.optional and not any(n in names for n in mapping.hf_sources(names))):
            continue
        parts = _Parts(mapping, source, names)
        whole += mine if parts.lines is None else []
        for name in mine:
            for target in wanted[name]:
                _fill(live[target], parts, name, groups)
                left.discard(target)
    if left:
        raise LiveModelError(f"no Hugging Face tensor fills {len(left)} tensors of the model, e.g. {sorted(left)[:3]}")
    return live, LoadReport(tensors=tuple(live), read_bytes=source.read_bytes, read_whole=tuple(whole))


def _numbered(live: Mapping[str, LiveTensor], groups: ParallelGroups) -> dict[str, LiveTensor]:
    """Experts under their numbers in the whole model."""
    counts: dict[str, int] = {}
    for name, tensor in live.items():
        if tensor.expert:
            counts[expert_layer(name)] = counts.get(expert_layer(name), 0) + 1
    return {
        shifted(name, groups.ep_rank * counts[expert_layer(name)]) if tensor.expert else name: tensor
        for name, tensor in live.items()
    }


def _fill(live: LiveTensor, parts: _Parts, name: str, groups: ParallelGroups) -> None:
    rank, size = (groups.etp_rank, groups.etp_size) if live.expert else (groups.tp_rank, groups.tp_size)
    value = parts.shard(name, live, rank, size)
    have, want = tuple(value.shape), tuple(live.tensor.shape)
    fits = len(have) == len(want) and all(h <= w for h, w in zip(have, want, strict=True))
    # Only the rows of a vocabulary are ever padded.
    if not fits or have[1:] != want[1:] or (have != want and not name.startswith(("embedding.", "output_layer."))):
        raise MappingError(f"{name}: this rank's part of the folder has shape {have}, its parameter {want}")
    if have != want:
        live.tensor.zero_()
    live.tensor[: have[0]].copy_(value) if have else live.tensor.copy_(value)


class _Parts:
    """The Megatron tensors of one mapping, of which shards are asked for.

    `lines` are their line numbers among those of all Hugging Face tensors of the mapping; None if they can't be told.
    """

    def __init__(self, mapping: TensorMapping, source: _Source, names: frozenset[str]) -> None:
        self._mapping = mapping
        self._source = source
        self._names = names
        self._op, self._hf = _without_copies(mapping)
        self._full: dict[str, torch.Tensor] | None = None
        self._starts: list[int] = []
        self.lines: dict[str, torch.Tensor] | None = None if self._must_be_whole() else self._trace()

    def shard(self, name: str, live: LiveTensor, rank: int, size: int) -> torch.Tensor:
        """The part of `name` that rank `rank` of `size` holds."""
        dim = live.dim if size > 1 else None
        blocks = self._mapping.blocks(name)
        if self.lines is None:
            if self._full is None:
                stored = self._mapping.hf_sources(self._names)
                self._full = self._mapping.to_mcore({s: self._source.whole(s) for s in stored})
            return _cut(self._full[name], dim, blocks, live.tensor.shape, rank, size)
        lines = self.lines[name]
        columns = self._source.shape(self._hf[0])[-1] if live.tensor.dim() > 1 else 1
        start, stop = 0, columns
        if dim is not None and dim == live.tensor.dim() - 1 and dim > 0:
            width = live.tensor.shape[dim]
            if columns != width * size:
                raise MappingError(f"{name}: {columns} columns over {size} ranks, the parameter has {width}")
            start, stop = rank * width, (rank + 1) * width
        else:
            lines = _cut(lines, dim, blocks, live.tensor.shape, rank, size)
        values = [self._read(*run, start, stop) for run in self._runs(lines.flatten())]
        shape = (*lines.shape[:-1], stop - start) if live.tensor.dim() > 1 else tuple(lines.shape)
        if not values:
            return live.tensor.new_empty(shape)
        return torch.cat(values).reshape(shape)

    def _must_be_whole(self) -> bool:
        encoding = self._mapping.encoding
        if encoding is None or not any(self._encoded(name) for name in self._hf):
            return False
        return not encoding.in_parts or any(len(self._source.shape(name)) != 2 for name in self._hf)

    def _encoded(self, name: str) -> bool:
        encoding = self._mapping.encoding
        return encoding is not None and all(s in self._names for s in encoding.stored(name))

    def _trace(self) -> dict[str, torch.Tensor] | None:
        tensors: list[torch.Tensor] = []
        self._starts = [0]
        for name in self._hf:
            shape = self._source.shape(name)
            if not shape:
                return None
            leading = (*shape[:-1], 1) if len(shape) > 1 else shape
            start = self._starts[-1]
            tensors.append(torch.arange(start, start + math.prod(leading)).view(leading))
            self._starts.append(start + math.prod(leading))
        try:
            results = self._op.to_mcore(tuple(tensors))
        except MappingError:
            return None
        # A result whose last dimension is not that of its sources has its columns elsewhere (transposed).
        # Nor are numbers that come out as something else (shifted, rounded) numbers of lines.
        if any(r.dtype != torch.int64 for r in results):
            return None
        matrices = tensors[0].dim() > 1
        if any(r.dim() != 1 and r.shape[-1] != 1 for r in results) or any((r.dim() > 1) != matrices for r in results):
            return None
        if len({self._source.shape(name)[-1] for name in self._hf}) > 1 and matrices:
            return None
        return dict(zip(self._mapping.mcore, results, strict=True))

    def _runs(self, lines: torch.Tensor) -> Iterator[tuple[str, int, int]]:
        """(tensor, first line, count) of consecutive lines."""
        numbers = lines.tolist()
        at = 0
        while at < len(numbers):
            which = max(k for k, start in enumerate(self._starts[:-1]) if start <= numbers[at])
            end = at + 1
            while (
                end < len(numbers) and numbers[end] == numbers[end - 1] + 1 and numbers[end] < self._starts[which + 1]
            ):
                end += 1
            yield self._hf[which], numbers[at] - self._starts[which], end - at
            at = end

    def _read(self, name: str, first: int, count: int, start: int, stop: int) -> torch.Tensor:
        encoding = self._mapping.encoding
        part = self._source.lines(name, first, count, start, stop)
        if encoding is not None and self._encoded(name):
            others = tuple(self._source.whole(s) for s in encoding.stored(name)[1:])
            return encoding.decode_part(part, others, first, start)
        if part.dtype.itemsize == 1 and part.dtype.is_floating_point:
            raise MappingError(f"{name} is {part.dtype} and has no scales: the weight cannot be decoded")
        return part


def _without_copies(mapping: TensorMapping) -> tuple[Op, tuple[str, ...]]:
    """The operation on the first of several names of one tensor: the others repeat it."""
    if isinstance(mapping.op, Chain) and isinstance(mapping.op.ops[0], Copies):
        return Chain(mapping.op.ops[1:]), mapping.hf[:1]
    return mapping.op, mapping.hf


def _cut(
    full: torch.Tensor, dim: int | None, blocks: Sequence[int], want: Sequence[int], rank: int, size: int
) -> torch.Tensor:
    """The part of one rank; `blocks` of rows (gate and up) are sharded one by one, padding is nobody's."""
    if dim is None:
        return full
    if dim == 0 and blocks:
        return torch.cat([b.narrow(0, rank * (len(b) // size), len(b) // size) for b in full.split(list(blocks))])
    start = min(rank * want[dim], full.shape[dim])
    return full.narrow(dim, start, min(want[dim], full.shape[dim] - start))


class _Memory:
    """Full tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.read_bytes = 0

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def lines(self, name: str, first: int, count: int, start: int, stop: int) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)[first : first + count, start:stop]

    def whole(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class _Folder:
    """Tensors in safetensors files, read by range; a context that closes them."""

    def __init__(self, path: Path, stored: Mapping[str, StoredTensor]) -> None:
        self._path = path
        self._stored = stored
        self._files: dict[str, int] = {}
        self._open = contextlib.ExitStack()
        self._kept: tuple[str, torch.Tensor] | None = None
        self.read_bytes = 0

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def lines(self, name: str, first: int, count: int, start: int, stop: int) -> torch.Tensor:
        tensor = self._stored[name]
        size = tensor.dtype.itemsize
        width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        out = torch.empty((count, stop - start), dtype=tensor.dtype)
        buffer = out.view(-1).view(torch.uint8).numpy().data
        offset = tensor.offset + (first * width + start) * size
        if stop - start == width:
            self._read(tensor, buffer, offset)
        else:
            length = (stop - start) * size
            for line in range(count):
                self._read(tensor, buffer[line * length : (line + 1) * length], offset + line * width * size)
        return out

    def whole(self, name: str) -> torch.Tensor:
        # Scales are asked for once for each run of lines of their weight.
        if self._kept is None or self._kept[0] != name:
            tensor = self._stored[name]
            out = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._read(tensor, out.view(-1).view(torch.uint8).numpy().data, tensor.offset)
            self._kept = (name, out)
        return self._kept[1]

    def _read(self, tensor: StoredTensor, buffer: memoryview, offset: int) -> None:
        if tensor.file not in self._files:
            path = self._path / tensor.file
            try:
                self._files[tensor.file] = os.open(path, os.O_RDONLY)
            except OSError as e:
                raise FolderError(f"{path} cannot be read: {e.strerror}") from e
            self._open.callback(os.close, self._files[tensor.file])
        done = 0
        while done < len(buffer):
            got = os.preadv(self._files[tensor.file], [buffer[done:]], offset + done)
            if got == 0:
                raise FolderError(f"{self._path / tensor.file} ended within {tensor.name}: was it changed?")
            done += got
        self.read_bytes += len(buffer)
