"""What a publish consists of: tensors, their order, and where their bytes lie in the buckets.

A source declares `TensorSpec`s, `plan.build_manifest` lays them out, both sides address bytes by the result. A
`Manifest` is metadata only and versioned JSON on the wire; `digest` identifies it, so it is planned, sent and routed
once and cached from then on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.errors import ManifestError

__all__ = ["TARGET", "Bucket", "Manifest", "Segment", "TensorSpec", "dtype_from_name", "dtype_name"]

SCHEMA_VERSION = 1
TARGET = "target"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises:
        ManifestError: not a dtype of this torch.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"manifest names dtype {name!r}, which torch {torch.__version__} does not have")
    return dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One published tensor.

    `role` is `"target"` or the name of a draft (`"draft"`, `"mtp"`, ...); (`role`, `name`) is unique in a publish.
    `name` is the Hugging Face name in the source's published layout. Tensors that carry the same `group` are loaded
    as one by engines (q/k/v, gate/up, one MTP layer, one whole draft) and share a bucket where they fit.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    role: str = TARGET
    group: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def key(self) -> tuple[str, str]:
        return (self.role, self.name)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "role": self.role,
            "group": self.group,
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> TensorSpec:
        return cls(
            name=obj["name"],
            dtype=dtype_from_name(obj["dtype"]),
            shape=tuple(obj["shape"]),
            role=obj["role"],
            group=obj["group"],
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """`nbytes` of tensor number `tensor`, from byte `tensor_offset` of it, at byte `bucket_offset` of its bucket.

    A tensor that fits lies in one segment. A larger one is split at multiples of its rows (elements, if it has one
    dimension); its segments follow each other in ascending `tensor_offset`, one bucket after the other.
    """

    tensor: int
    tensor_offset: int
    bucket_offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One transfer: `nbytes` (alignment padding included) sent by the sender of pipeline stage `stage`."""

    stage: int
    nbytes: int
    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole plan. `buckets` are in streaming order: all of stage 0, then all of stage 1, and so on.

    `tensors` are in streaming order too; `bucket_bytes` bounds every bucket. `base_version` is reserved for delta
    publishing and always None today.
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    num_stages: int
    base_version: int | None = None

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Unique bytes of the published tensors, without padding."""
        return sum(t.nbytes for t in self.tensors)

    @functools.cached_property
    def wire_bytes(self) -> int:
        """Bytes that one engine rank receives: payload plus alignment padding."""
        return sum(b.nbytes for b in self.buckets)

    @functools.cached_property
    def roles(self) -> frozenset[str]:
        return frozenset(t.role for t in self.tensors)

    @functools.cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the canonical JSON: equal plans, equal digests."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def stage_buckets(self, stage: int) -> list[int]:
        """Indices into `buckets` of one stage, in order."""
        return [i for i, b in enumerate(self.buckets) if b.stage == stage]

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "base_version": self.base_version,
                "bucket_bytes": self.bucket_bytes,
                "num_stages": self.num_stages,
                "tensors": [t.to_json() for t in self.tensors],
                "buckets": [
                    [b.stage, b.nbytes, [[s.tensor, s.tensor_offset, s.bucket_offset, s.nbytes] for s in b.segments]]
                    for b in self.buckets
                ],
            },
            separators=(",", ":"),
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Inverse of `to_json`.

        Raises:
            ManifestError: another schema version, or not a manifest.
        """
        try:
            obj = json.loads(text)
            version = obj["schema_version"]
            if version != SCHEMA_VERSION:
                raise ManifestError(
                    f"manifest has schema version {version}, this side reads {SCHEMA_VERSION}: "
                    "install the same weightsync version on trainer and engine"
                )
            buckets: Sequence[Any] = obj["buckets"]
            return cls(
                tensors=tuple(TensorSpec.from_json(t) for t in obj["tensors"]),
                buckets=tuple(
                    Bucket(
                        stage=stage,
                        nbytes=nbytes,
                        segments=tuple(
                            Segment(tensor=t, tensor_offset=to, bucket_offset=bo, nbytes=n) for t, to, bo, n in segments
                        ),
                    )
                    for stage, nbytes, segments in buckets
                ),
                bucket_bytes=obj["bucket_bytes"],
                num_stages=obj["num_stages"],
                base_version=obj["base_version"],
            )
        except (KeyError, TypeError, ValueError) as e:
            if isinstance(e, ManifestError):
                raise
            raise ManifestError(f"not a weightsync manifest: {type(e).__name__}: {e}") from e
