"""The process groups that an export needs, and this rank's part in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

__all__ = ["ParallelGroups"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups of this rank; None stands for a group of one.

    `tp` shards tensors, `pp` shards layers. `replica` numbers the ranks that hold the same shards (data and context
    parallel): only replica 0 takes part in gathers, and of its ranks the first of each `tp` group is the sender.
    """

    tp: Any = None
    pp: Any = None
    replica: int = 0

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """Those of `megatron.core.parallel_state`, which must be initialised."""
        from megatron.core import parallel_state

        return cls(
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )

    @property
    def tp_size(self) -> int:
        return _size(self.tp)

    @property
    def tp_rank(self) -> int:
        return _rank(self.tp)

    @property
    def stage(self) -> int:
        return _rank(self.pp)

    @property
    def num_stages(self) -> int:
        return _size(self.pp)

    @property
    def is_sender(self) -> bool:
        return self.replica == 0 and self.tp_rank == 0


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)
