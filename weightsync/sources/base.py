"""The seam on the trainer side: what a publisher asks of whatever holds the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from weightsync.manifest import TensorSpec
from weightsync.timeline import Timeline

__all__ = ["Source"]


@runtime_checkable
class Source(Protocol):
    """Full (unsharded) tensors under Hugging Face names, one pipeline stage per stream, always in the same order.

    Every trainer rank holds one source object and makes the same calls in the same order (SPMD). Of the ranks of one
    pipeline stage exactly one is the sender; the others only take part in the gathers.
    """

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank, 0-based."""
        ...

    @property
    def num_stages(self) -> int: ...

    @property
    def is_sender(self) -> bool:
        """True on exactly one rank per stage."""
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """The tensors of this rank's stage in streaming order; metadata only, cached after the first call.

        Identical on every rank of the stage. May be collective on the first call, so every rank calls it.
        """
        ...

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        """On the sender: the tensors of `specs()` whose role is in `roles`, in that order, full and contiguous.

        On other ranks: drives the same collectives and yields nothing; it must be exhausted all the same. A yielded
        tensor is valid until the next one is asked for. Time goes into `timeline` as phases `gather` and `convert`.

        Raises:
            ManifestError: the weights no longer match `specs()`.
        """
        ...
