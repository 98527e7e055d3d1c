"""The updater whose place the adapter's takes; annotations are names only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ray.actor import ActorHandle


class UpdateWeightFromDistributed:
    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[ActorHandle],
        rollout_engine_lock: ActorHandle,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, object]] | None = None,
    ) -> None:
        raise AssertionError("slime's own updater was asked")

    def disconnect_rollout_engines(self) -> None:
        raise AssertionError("slime's own updater was asked")

    def update_weights(self) -> None:
        raise AssertionError("slime's own updater was asked")

    def pop_metrics(self) -> dict[str, float]:
        raise AssertionError("slime's own updater was asked")
