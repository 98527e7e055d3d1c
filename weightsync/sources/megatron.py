"""A live Megatron-Core model as a source: what `converters.live` exports, in the shape that a publisher asks for.

Owns the draft role's name and the errors; the walk, the gathers and the names are the exporter's. Every trainer rank
makes one `MegatronSource` after the model is built, on the same chunks that it trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from converters.errors import ConverterError, LiveModelError
from converters.families import rules_for
from converters.live import LiveExporter, ParallelGroups
from converters.live.exporter import GATHER_BYTES
from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.manifest import TARGET, TensorSpec
from weightsync.timeline import Timeline

__all__ = ["MegatronSource"]


class MegatronSource:
    """Publishes a Megatron-Core model under the Hugging Face names of `hf_config` (the parsed config.json).

    `model_chunks` are this rank's, in order, bare or in Megatron's wrappers; with `overlap_param_gather` they must be
    the data parallel wrappers, whose parameters are brought up to date before every stream. MTP layers carry the role
    `draft_role`; `include_mtp=False` leaves them out. Tensors come in the parameters' own dtypes. One sender per
    pipeline stage: the first tensor and data parallel rank. `gather_bytes` bounds a bucket of tensor-parallel shards,
    of which the sender holds two; a larger tensor travels alone.

    `groups` default to those of `megatron.core.parallel_state`.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        hf_config: Mapping[str, Any],
        *,
        draft_role: str = "draft",
        include_mtp: bool = True,
        gather_bytes: int = GATHER_BYTES,
        groups: ParallelGroups | None = None,
    ) -> None:
        if draft_role == TARGET:
            raise ConfigError(f"draft_role is {TARGET!r}, the role of the model itself: choose another name")
        if gather_bytes < 1:
            raise ConfigError(f"gather_bytes is {gather_bytes}, expected a positive number of bytes")
        with _translated():
            self._exporter = LiveExporter(
                model_chunks,
                rules_for(hf_config),
                groups=groups,
                roles=None if include_mtp else frozenset({TARGET}),
                gather_bytes=gather_bytes,
            )
        self._draft_role = draft_role
        self._specs: tuple[TensorSpec, ...] | None = None

    @property
    def stage(self) -> int:
        return self._exporter.groups.stage

    @property
    def num_stages(self) -> int:
        return self._exporter.groups.num_stages

    @property
    def is_sender(self) -> bool:
        return self._exporter.groups.is_sender

    @property
    def buffer_bytes(self) -> int:
        """Memory that this rank keeps for gathers from one publish to the next."""
        return self._exporter.buffer_bytes

    def specs(self) -> Sequence[TensorSpec]:
        """The tensors of this rank's stage; collective on the first call.

        Raises:
            ManifestError: model and config do not fit: tensors unknown, missing or of a wrong shape.
            UnsupportedError: parameters that cannot be published as they are (offloaded, fp8, sharded by FSDP).
        """
        if self._specs is None:
            with _translated():
                tensors = self._exporter.tensors()
            self._specs = tuple(
                TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, role=self._role(t.role), group=t.group)
                for t in tensors
            )
        return self._specs

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        """See `Source.stream`. A sender's iterator that is closed early finishes its gathers first.

        Raises:
            ManifestError: parameters were added, removed, reshaped or cast since `specs()`.
            UnsupportedError: parameters that cannot be published as they are (offloaded, fp8, sharded by FSDP).
        """
        wanted = frozenset(rule_role for rule_role in (TARGET, "draft") if self._role(rule_role) in roles)
        with _translated(), contextlib.closing(self._exporter.export(roles=wanted, span=timeline.span)) as tensors:
            for _, tensor in tensors:
                yield tensor

    def _role(self, rule_role: str) -> str:
        return TARGET if rule_role == TARGET else self._draft_role


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except LiveModelError as e:
        raise UnsupportedError(str(e)) from e
    except ConverterError as e:
        raise ManifestError(str(e)) from e
