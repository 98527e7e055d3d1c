"""Two checkpoints, tensor by tensor: which are missing, of another shape or dtype, and which differ by how much.

Of two Hugging Face folders tensors have their names; of two Megatron checkpoints the canonical ones of weights, so
layouts and specs do not matter; of one of each, the Megatron side goes through the rules first. `ckpt diff` prints it.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from converters.errors import FolderError
from converters.families import rules_for
from converters.offline import check, places
from converters.offline.keys import is_optimizer
from converters.offline.layout import Layout, leaf
from converters.offline.mapping import Decoded, DtypePolicy, megatron_weights, to_hf
from converters.offline.move import Budget, Values
from converters.offline.remote import place
from converters.offline.sources import HfSource

__all__ = ["CompareReport", "compare"]


@dataclasses.dataclass(kw_only=True, slots=True)
class CompareReport:
    """`different` has elements that differ in their bits, and the largest distance as numbers."""

    first: str
    second: str
    names: str
    """Whose names are used: "hf" or "mcore"."""
    num_equal: int = 0
    only_first: list[str] = dataclasses.field(default_factory=list)
    only_second: list[str] = dataclasses.field(default_factory=list)
    shapes: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    different: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    values_compared: bool = True

    @property
    def same(self) -> bool:
        return not (self.only_first or self.only_second or self.shapes or self.dtypes or self.different)

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, "same": self.same, **dataclasses.asdict(self)}


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    headers: bool = False,
    max_memory_bytes: int = 512 << 20,
    workers: int = 2,
) -> CompareReport:
    """Compare two checkpoints on either side; `headers` alone without reading data.

    Raises:
        FolderError: one of them is none, or is damaged.
        MappingError: a Megatron checkpoint does not fit its rules (only where the other is a Hugging Face folder).
    """
    sources = [places.open_source(place(p)) for p in (first, second)]
    try:
        for path, source in zip((first, second), sources, strict=True):
            if found := places.problems(source):
                raise FolderError(f"{os.fspath(path)}: {'; '.join(found[:3])}")
        names = "hf" if any(isinstance(s, HfSource) for s in sources) else "mcore"
        sides = [_tensors(s, names, other) for s, other in zip(sources, reversed(sources), strict=True)]
        return _compare(
            CompareReport(first=os.fspath(first), second=os.fspath(second), names=names),
            sides,
            [Values(s, {}) for s in sources],
            None if headers else Budget(max_memory_bytes=max_memory_bytes, workers=workers),
        )
    finally:
        for source in sources:
            source.close()


def _tensors(source: places.AnySource, names: str, other: places.AnySource) -> dict[str, Layout]:
    if isinstance(source, HfSource):
        return {name: leaf(name, *header) for name, header in source.headers.items()}
    weights = {key: header for key, header in source.headers.items() if not is_optimizer(key)}
    if names == "mcore":
        return megatron_weights(weights, None)
    assert isinstance(other, HfSource)
    config = other.folder.config
    assert config is not None  # its absence is a problem
    rules = rules_for(config, list(other.headers))
    mapped = to_hf(source.headers, rules, policy=DtypePolicy(), what=str(source.path))
    return {name: output.layout for name, output in mapped.tensors.items()}


def _compare(
    report: CompareReport, sides: list[dict[str, Layout]], values: list[Values], budget: Budget | None
) -> CompareReport:
    a, b = sides
    report.only_first = [name for name in a if name not in b]
    report.only_second = [name for name in b if name not in a]
    pairs = []
    for name in a:
        if name not in b:
            continue
        if a[name].shape != b[name].shape:
            report.shapes[name] = [list(a[name].shape), list(b[name].shape)]
            continue
        if a[name].dtype != b[name].dtype:
            report.dtypes[name] = [str(t.dtype).removeprefix("torch.") for t in (a[name], b[name])]
        dtype = a[name].dtype if a[name].dtype == b[name].dtype else _wider(a[name].dtype, b[name].dtype)
        pairs.append(check.Pair(name=name, first=a[name], second=b[name], dtype=dtype))
    if budget is None:
        report.values_compared = False
        return report
    nothing: dict[str, Decoded] = {}
    found = check.differences(pairs, values[0], values[1], nothing, budget)
    report.different = [dataclasses.asdict(d) for d in found]
    report.num_equal = len(pairs) - len({d.name for d in found} | report.dtypes.keys())
    return report


def _wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    # One-byte floats are not promoted with others by torch.
    one_byte = any(d.is_floating_point and d.itemsize == 1 for d in (a, b))
    return torch.float32 if one_byte else torch.promote_types(a, b)
