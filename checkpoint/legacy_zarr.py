"""Weights out of legacy `zarr` checkpoints of Megatron-Core, which no current Megatron-Core opens.

Such a folder has one zarr array per tensor (`<key>/.zarray` and chunk files). tensorstore reads boxes of them, but
reads a chunk file that is not there as zeros, without a word: so the chunks that a box needs are looked for first.
Tensors only: flattened optimizer shards of that time cannot be put together again.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint.errors import ConfigError, CoverageError, FormatError

__all__ = ["LegacyZarrReader"]

_DTYPES = {
    "<f4": torch.float32, "<f8": torch.float64, "<f2": torch.float16, "bfloat16": torch.bfloat16, "<i8": torch.int64,
    "<i4": torch.int32, "<i2": torch.int16, "|i1": torch.int8, "|u1": torch.uint8, "|b1": torch.bool,
}  # fmt: skip


class LegacyZarrReader:
    """Reads a folder whose `metadata.json` says `"sharded_backend": "zarr"`.

    `shapes` and `dtypes` by key.

    Raises:
        FormatError: another kind of folder, or a damaged array description.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            backend = json.loads((self.path / "metadata.json").read_text())["sharded_backend"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise FormatError(f"{path} has no readable metadata.json: not a Megatron checkpoint ({e})") from e
        if backend != "zarr":
            raise FormatError(
                f"{path} was saved as {backend!r}, expected 'zarr': use checkpoint.format.TorchDistReader"
            )
        self._arrays: dict[str, dict[str, Any]] = {}
        for file in sorted(self.path.glob("**/.zarray")):
            try:
                self._arrays[str(file.parent.relative_to(self.path))] = json.loads(file.read_text())
            except ValueError as e:
                raise FormatError(f"{file} is damaged ({e})") from e
        self.shapes = {key: tuple(a["shape"]) for key, a in self._arrays.items()}
        self.dtypes = {key: self._dtype(key, a["dtype"]) for key, a in self._arrays.items()}

    def _dtype(self, key: str, name: Any) -> torch.dtype:
        if name not in _DTYPES:
            raise FormatError(f"{self.path}/{key} has the dtype {name!r}, expected one of {sorted(_DTYPES)}")
        return _DTYPES[name]

    def missing_chunks(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> list[str]:
        """Files that the box needs and that are not there."""
        array = self._arrays[key]
        grid = [
            range(o // c, -(-(o + n) // c)) if n else range(0)
            for o, n, c in zip(offset, shape, array["chunks"], strict=True)
        ]
        separator = array.get("dimension_separator", ".")
        names = [separator.join(map(str, index)) or "0" for index in itertools.product(*grid)]
        return [name for name in names if not (self.path / key / name).exists()]

    def read(self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor or a box of it.

        Raises:
            CoverageError: no such key, a box outside of it, or chunk files are missing.
            ConfigError: tensorstore is not installed.
        """
        if key not in self._arrays:
            raise CoverageError(f"{self.path} has no tensor {key!r}: see `shapes` for those that it has")
        whole = self.shapes[key]
        offset = (0,) * len(whole) if offset is None else tuple(offset)
        shape = tuple(n - o for n, o in zip(whole, offset, strict=True)) if shape is None else tuple(shape)
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(offset, shape, whole, strict=True)):
            raise CoverageError(f"{key} has the shape {whole}: no box {shape} at {offset}")
        if missing := self.missing_chunks(key, offset, shape):
            raise CoverageError(
                f"{self.path}/{key} lacks {len(missing)} of its chunk files ({missing[:3]}): zeros would be read"
            )
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtypes[key])
        try:
            import tensorstore
        except ImportError as e:
            raise ConfigError(
                "zarr checkpoints need the package `tensorstore`: pip install 'weightsync[storage]'"
            ) from e
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(self.path / key)}}
        try:
            array = tensorstore.open(spec, open=True, read=True).result()
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            data = array[box].read().result()
        except ValueError as e:
            raise FormatError(f"{self.path}/{key} cannot be read: {str(e).splitlines()[0]}") from e
        if self.dtypes[key] == torch.bfloat16:
            return torch.from_numpy(data.view("int16").copy()).view(torch.bfloat16)
        return torch.from_numpy(data.copy())
