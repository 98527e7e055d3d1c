"""The layout of a publish: which bytes of which tensor lie where in which bucket, and both ways of using it.

Before the first publish the coordinator calls `DtypePolicy.apply`, `scoped` and `build_manifest` with what the
sources of all stages declare; per publish a sender runs its source's stream through `BucketPacker.pack`, and a receiver
takes every bucket apart with `segments_of`. Nothing here knows transports, processes or engines.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from weightsync.errors import ConfigError, ManifestError
from weightsync.manifest import Bucket, Manifest, Segment, TensorSpec, dtype_name
from weightsync.timeline import Timeline

__all__ = ["BucketPacker", "DtypePolicy", "SegmentView", "build_manifest", "scoped", "segments_of"]

ALIGNMENT = 16
MIN_BUCKET_BYTES = 4096

_CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DtypePolicy:
    """What dtype a tensor is published in. By default its own.

    With `publish_dtype`, tensors of 16 bits and more per float are cast to it while they are packed, except those whose
    name matches one of the `fnmatch` patterns in `keep_fp32` (router biases that engines hold in fp32, say). Integers,
    bools (`d2t`, `t2d`) and 8-bit floats are never cast: the latter mean nothing without their scales.
    """

    publish_dtype: torch.dtype | None = None
    keep_fp32: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.publish_dtype is not None and self.publish_dtype not in _CASTABLE:
            names = sorted(dtype_name(d) for d in _CASTABLE)
            raise ConfigError(f"publish_dtype is {self.publish_dtype}, expected one of {names} or None")
        if isinstance(self.keep_fp32, str):
            raise ConfigError(f"keep_fp32 is the string {self.keep_fp32!r}, expected a sequence of patterns")

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Published dtype of a tensor that the source holds as `dtype`."""
        if self.publish_dtype is None or dtype not in _CASTABLE:
            return dtype
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keep_fp32):
            return dtype
        return self.publish_dtype

    def apply(self, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """`specs` of a source with the dtypes that go over the wire."""
        return [dataclasses.replace(s, dtype=self.dtype_of(s.name, s.dtype)) for s in specs]


def scoped(stages: Sequence[Sequence[TensorSpec]], roles: Collection[str]) -> list[list[TensorSpec]]:
    """`stages` without the tensors of other roles; order and number of stages stay."""
    return [[spec for spec in stage if spec.role in roles] for stage in stages]


def build_manifest(stages: Sequence[Sequence[TensorSpec]], *, bucket_bytes: int) -> Manifest:
    """Lay the tensors of all stages out in buckets, in the order given.

    Offsets are aligned to 16 bytes or the itemsize, whichever is more. A tensor that fits into a bucket is never
    split. Neighbours of one role and `group` share a bucket where they fit into one; a group may be a path
    (`"draft/0/qkv"`): where the whole does not fit, its longer prefixes are tried, so that a draft of many layers is
    kept together by layers, and a layer by projections. A larger tensor is split between rows (its first
    dimension), filling up the bucket that is open; if not even one row fits, all of it is split between elements.
    A tensor without elements has one segment of no bytes, so that receivers see it.

    Raises:
        ConfigError: `bucket_bytes` below 4096.
        ManifestError: no tensors, a (role, name) declared twice, a negative size or an empty name.
    """
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < MIN_BUCKET_BYTES:
        raise ConfigError(f"bucket_bytes is {bucket_bytes!r}, expected an int of at least {MIN_BUCKET_BYTES}")
    _check_specs(stages)
    tensors: list[TensorSpec] = []
    buckets: list[Bucket] = []
    for stage, specs in enumerate(stages):
        layout = _StageLayout(stage, bucket_bytes)
        layout.place(list(enumerate(specs, start=len(tensors))), depth=0)
        buckets += layout.close()
        tensors += specs
    return Manifest(tensors=tuple(tensors), buckets=tuple(buckets), bucket_bytes=bucket_bytes, num_stages=len(stages))


def _check_specs(stages: Sequence[Sequence[TensorSpec]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for stage, specs in enumerate(stages):
        for spec in specs:
            where = f"tensor {spec.name!r} (role {spec.role!r}, stage {stage})"
            if not spec.name or not spec.role:
                raise ManifestError(f"{where} has an empty name or role: engines could not route it")
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in spec.shape):
                raise ManifestError(f"{where} declares shape {spec.shape}: sizes must be non-negative ints")
            if spec.key in seen:
                raise ManifestError(
                    f"{where} is declared twice, first by stage {seen[spec.key]}: "
                    "publish it once, or give one of the two another role"
                )
            seen[spec.key] = stage
    if not seen:
        raise ManifestError("no tensor to publish: the sources declare none in this scope")


class _StageLayout:
    """The buckets of one stage while they are filled."""

    def __init__(self, stage: int, bucket_bytes: int) -> None:
        self.stage = stage
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        self.segments: list[Segment] = []
        self.used = 0

    def place(self, run: list[tuple[int, TensorSpec]], depth: int) -> None:
        """Place (index, spec) pairs that share a group up to `depth` parts of it, keeping longer prefixes together."""
        for prefix, items in itertools.groupby(run, lambda item: _group_prefix(item[1], depth + 1)):
            part = list(items)
            if len(part) == 1 or prefix is None:
                for index, spec in part:
                    self._place_one(index, spec)
                continue
            if self._end_of(part, self.used) > self.bucket_bytes:
                if self._end_of(part, 0) > self.bucket_bytes:
                    self.place(part, depth + 1)
                    continue
                self._next_bucket()
            for index, spec in part:
                self._append(index, 0, spec.nbytes, spec.dtype.itemsize)

    def close(self) -> list[Bucket]:
        self._next_bucket()
        return self.buckets

    def _place_one(self, index: int, spec: TensorSpec) -> None:
        itemsize = spec.dtype.itemsize
        if spec.nbytes <= self.bucket_bytes:
            if _align(self.used, itemsize) + spec.nbytes > self.bucket_bytes:
                self._next_bucket()
            self._append(index, 0, spec.nbytes, itemsize)
            return
        unit = _split_unit(spec, self.bucket_bytes)
        done = 0
        while done < spec.nbytes:
            room = (self.bucket_bytes - _align(self.used, itemsize)) // unit * unit
            if room <= 0:
                self._next_bucket()
                continue
            nbytes = min(room, spec.nbytes - done)
            self._append(index, done, nbytes, itemsize)
            done += nbytes

    def _append(self, index: int, tensor_offset: int, nbytes: int, itemsize: int) -> None:
        start = _align(self.used, itemsize)
        self.segments.append(Segment(tensor=index, tensor_offset=tensor_offset, bucket_offset=start, nbytes=nbytes))
        self.used = start + nbytes

    def _next_bucket(self) -> None:
        if self.segments:
            # Tensors without elements alone still need a bucket that a transport can send.
            nbytes = max(self.used, ALIGNMENT)
            self.buckets.append(Bucket(stage=self.stage, nbytes=nbytes, segments=tuple(self.segments)))
        self.segments = []
        self.used = 0

    def _end_of(self, run: Iterable[tuple[int, TensorSpec]], used: int) -> int:
        for _, spec in run:
            used = _align(used, spec.dtype.itemsize) + spec.nbytes
        return used


def _align(offset: int, itemsize: int) -> int:
    step = max(ALIGNMENT, itemsize)
    return -(-offset // step) * step


def _group_prefix(spec: TensorSpec, parts: int) -> tuple[str, ...] | None:
    """(role, first `parts` parts of the group), or None where the group has no more parts than that minus one."""
    path = spec.group.split("/") if spec.group else []
    return (spec.role, *path[:parts]) if len(path) >= parts else None


def _split_unit(spec: TensorSpec, bucket_bytes: int) -> int:
    """Bytes of a row where one fits into a bucket, else of an element."""
    row = spec.nbytes // spec.shape[0]
    return row if row <= bucket_bytes else spec.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentView:
    """What one segment of a received bucket holds, as a typed view of the bucket (no copy).

    `whole`: `view` is the tensor, of its declared shape. Otherwise a part of a tensor larger than a bucket: `view` is
    `[row_end - row_start, *shape[1:]]`, the rows from `row_start` on (of a one-dimensional tensor, its elements).
    `flat`: not even a row fits into a bucket; `view` is one-dimensional, and `row_start`, `row_end` count elements of
    the flattened tensor. All parts of one tensor are `flat` or none is.
    """

    tensor: int
    """Index into `manifest.tensors`."""
    view: torch.Tensor
    row_start: int
    row_end: int
    whole: bool
    flat: bool


def segments_of(manifest: Manifest, bucket_index: int, buffer: torch.Tensor) -> list[SegmentView]:
    """The contents of bucket `bucket_index`, in order. `buffer` is its uint8 bytes, or a longer buffer that starts so.

    Raises:
        ManifestError: `buffer` is shorter than the bucket.
    """
    bucket = manifest.buckets[bucket_index]
    if buffer.numel() < bucket.nbytes:
        raise ManifestError(f"bucket {bucket_index} has {bucket.nbytes} bytes, the buffer holds {buffer.numel()}")
    views = []
    for segment in bucket.segments:
        spec = manifest.tensors[segment.tensor]
        data = _typed(buffer, segment, spec)
        whole = segment.nbytes == spec.nbytes
        unit = spec.nbytes // spec.shape[0] if spec.shape and spec.nbytes else spec.dtype.itemsize
        flat = not whole and unit > manifest.bucket_bytes
        if whole:
            view, start, end = data.view(spec.shape), 0, spec.shape[0] if spec.shape else 1
        else:
            step = spec.dtype.itemsize if flat else unit
            start, end = segment.tensor_offset // step, (segment.tensor_offset + segment.nbytes) // step
            view = data if flat else data.view(end - start, *spec.shape[1:])
        views.append(
            SegmentView(tensor=segment.tensor, view=view, row_start=start, row_end=end, whole=whole, flat=flat)
        )
    return views


def _typed(buffer: torch.Tensor, segment: Segment, spec: TensorSpec) -> torch.Tensor:
    return buffer[segment.bucket_offset : segment.bucket_offset + segment.nbytes].view(spec.dtype)


class BucketPacker:
    """The sender's inner loop for one stage: a stream of tensors in, filled buckets out, one copy per byte.

    Tensors and buffers may be on any devices between which `Tensor.copy_` works. `policy` is the one that the manifest
    was planned with; casts happen in the copy.
    """

    def __init__(self, manifest: Manifest, stage: int, policy: DtypePolicy | None = None) -> None:
        self._manifest = manifest
        self._stage = stage
        self._policy = policy or DtypePolicy()
        self._segments: dict[int, list[tuple[int, Segment]]] = {}
        for bucket_index in manifest.stage_buckets(stage):
            for segment in manifest.buckets[bucket_index].segments:
                self._segments.setdefault(segment.tensor, []).append((bucket_index, segment))

    def pack(
        self,
        tensors: Iterator[torch.Tensor],
        acquire: Callable[[], torch.Tensor],
        send: Callable[[int, int], None],
        timeline: Timeline,
    ) -> None:
        """Pack all of `tensors` (those of the stage, in the manifest's order) and exhaust it.

        `acquire()` gives a uint8 buffer of at least the bucket's size, 16-byte aligned; `send(nbytes, bucket_index)`
        is called when the first `nbytes` of it are final, padding zeroed. Copies are timed as phase `pack`.

        Raises:
            ManifestError: a tensor too few or too many, or of another shape or dtype than declared.
        """
        current: int | None = None
        buffer = torch.empty(0, dtype=torch.uint8)
        filled = 0
        for index, (bucket_index, segment), tensor in self._pairs(tensors):
            if bucket_index != current:
                if current is not None:
                    self._send(buffer, filled, current, send)
                buffer, filled, current = acquire(), 0, bucket_index
            start = time.perf_counter()
            if segment.bucket_offset > filled:
                buffer[filled : segment.bucket_offset].zero_()
            self._copy(buffer, segment, tensor, index)
            filled = segment.bucket_offset + segment.nbytes
            timeline.add("pack", start, time.perf_counter(), segment.nbytes, bucket=bucket_index)
        if current is not None:
            self._send(buffer, filled, current, send)

    def _send(self, buffer: torch.Tensor, filled: int, bucket_index: int, send: Callable[[int, int], None]) -> None:
        nbytes = self._manifest.buckets[bucket_index].nbytes
        buffer[filled:nbytes].zero_()
        send(nbytes, bucket_index)

    def _pairs(self, tensors: Iterator[torch.Tensor]) -> Iterator[tuple[int, tuple[int, Segment], torch.Tensor]]:
        for index, segments in self._segments.items():
            tensor = next(tensors, None)
            spec = self._manifest.tensors[index]
            if tensor is None:
                raise ManifestError(
                    f"stage {self._stage}: the source's stream ended before {spec.name!r} (role {spec.role!r})"
                )
            self._check(tensor, spec)
            for placed in segments:
                yield index, placed, tensor
        surplus = next(tensors, None)
        if surplus is not None:
            raise ManifestError(
                f"stage {self._stage}: the source's stream goes on after the last planned tensor with one of shape "
                f"{tuple(surplus.shape)}: rebuild the publisher if the model has changed"
            )

    def _check(self, tensor: torch.Tensor, spec: TensorSpec) -> None:
        dtype = self._policy.dtype_of(spec.name, tensor.dtype)
        if tuple(tensor.shape) != spec.shape or dtype != spec.dtype:
            raise ManifestError(
                f"stage {self._stage}: the source sends {spec.name!r} (role {spec.role!r}) as "
                f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}, planned was {dtype_name(spec.dtype)} {spec.shape}"
            )

    def _copy(self, buffer: torch.Tensor, segment: Segment, tensor: torch.Tensor, index: int) -> None:
        spec = self._manifest.tensors[index]
        target = _typed(buffer, segment, spec)
        source = tensor.detach()
        if segment.nbytes == spec.nbytes:
            target.view(spec.shape).copy_(source)
        else:
            start = segment.tensor_offset // spec.dtype.itemsize
            target.copy_(source.reshape(-1)[start : start + target.numel()])
