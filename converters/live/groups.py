"""The process groups that an export needs, and this rank's part in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from converters.errors import TopologyError

__all__ = ["ParallelGroups"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups of this rank; None stands for a group of one.

    `tp` shards tensors, `pp` shards layers. `replica` numbers the ranks that hold the same shards (data and context
    parallel): only replica 0 takes part in gathers, and of its ranks the first of each `tp` group is the sender.

    Experts have groups of their own: `expert` holds the `ep_size` shares of a stage's experts, each sharded over
    `etp_size` consecutive ranks; `expert_replica` numbers its copies. The sender is also the first rank of the first.
    """

    tp: Any = None
    pp: Any = None
    replica: int = 0
    expert: Any = None
    ep_size: int = 1
    etp_size: int = 1
    expert_replica: int = 0

    def __post_init__(self) -> None:
        if self.ep_size * self.etp_size != _size(self.expert):
            raise TopologyError(
                f"the expert group has {_size(self.expert)} ranks, expected EP{self.ep_size} x ETP{self.etp_size}"
            )
        if self.expert_size > 1 and self.is_sender and (self.expert_replica or _rank(self.expert)):
            raise TopologyError(
                f"the stage's first rank is number {_rank(self.expert)} of expert replica {self.expert_replica}: "
                "expected the first of replica 0, as Megatron's own group order has it"
            )

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """Those of `megatron.core.parallel_state`, which must be initialised."""
        from megatron.core import parallel_state

        return cls(
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
            expert=parallel_state.get_expert_tensor_and_model_parallel_group(),
            ep_size=parallel_state.get_expert_model_parallel_world_size(),
            etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
            expert_replica=parallel_state.get_expert_data_parallel_rank(),
        )

    def without_experts(self) -> ParallelGroups:
        """For a model that has none, whatever the trainer set up."""
        return dataclasses.replace(self, expert=None, ep_size=1, etp_size=1, expert_replica=0)

    @property
    def tp_size(self) -> int:
        return _size(self.tp)

    @property
    def tp_rank(self) -> int:
        return _rank(self.tp)

    @property
    def expert_size(self) -> int:
        """Ranks that hold a stage's experts together."""
        return self.ep_size * self.etp_size

    @property
    def ep_rank(self) -> int:
        return _rank(self.expert) // self.etp_size

    @property
    def etp_rank(self) -> int:
        return _rank(self.expert) % self.etp_size

    @property
    def takes_part(self) -> bool:
        """Whether this rank's shards travel, dense or experts'."""
        return self.replica == 0 or (self.expert_size > 1 and self.expert_replica == 0)

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
