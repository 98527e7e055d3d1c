"""Sizes of the parallel groups of a trainer, and Megatron-Core's conditions on them, said before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from converters.errors import TopologyError
from converters.families import rules_for
from converters.families.moe import expert_size, num_experts

__all__ = ["Topology"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """`etp` None is `tp`, as in Megatron. What is left of the world is data parallel, for experts by itself."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    sequence_parallel: bool = False

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def check(self, world: int, hf_config: Mapping[str, Any] | None = None) -> None:
        """Raises TopologyError with all that does not fit: sizes and `world`, and sizes and the model, where given.

        Megatron asks that the dense and the expert side each divide the world: TP * PP * CP and EP * ETP * PP. There is
        no rule that EP * ETP be the world, or any multiple of TP.
        """
        problems = list(self._of_world(world))
        if hf_config is not None and not problems:
            problems += self._of_model(hf_config)
        if problems:
            raise TopologyError(f"{self.describe()} on {world} ranks: {'; '.join(problems)}")

    def describe(self) -> str:
        text = f"TP{self.tp} PP{self.pp} CP{self.cp} EP{self.ep} ETP{self.expert_tp}"
        return f"{text} VPP{self.vpp}" if self.vpp else text

    def _of_world(self, world: int) -> Iterator[str]:
        sizes = {
            "TP": self.tp,
            "PP": self.pp,
            "CP": self.cp,
            "EP": self.ep,
            "ETP": self.expert_tp,
            "VPP": self.vpp or 1,
        }
        if bad := [f"{name} = {size}" for name, size in sizes.items() if size < 1]:
            yield f"{', '.join(bad)}: expected at least 1"
            return
        if world % (dense := self.tp * self.pp * self.cp):
            yield f"the world is no multiple of TP * PP * CP = {dense}"
        if world % (sparse := self.ep * self.expert_tp * self.pp):
            yield f"the world is no multiple of EP * ETP * PP = {sparse}"
        if self.vpp and self.pp == 1:
            yield f"VPP = {self.vpp} needs PP > 1"

    def _of_model(self, hf_config: Mapping[str, Any]) -> Iterator[str]:
        rules = rules_for(hf_config)
        config = rules.config
        layers, chunks = config.integer("num_hidden_layers"), self.pp * (self.vpp or 1)
        if layers % chunks:
            yield f"{layers} layers are no multiple of PP * VPP = {chunks}"
        latent = any("linear_kv_down_proj" in name for m in rules.mappings() for name in m.mcore)
        heads, groups = config.heads, config.heads if latent else config.groups
        if heads % self.tp:
            yield f"{heads} attention heads are no multiple of TP = {self.tp}"
        if groups % self.tp and self.tp % groups:
            yield f"{groups} key/value heads and TP = {self.tp}: one must be a multiple of the other"
        if (size := config.get("intermediate_size") or 0) % self.tp:
            yield f"intermediate size {size} is no multiple of TP = {self.tp}"
        has_experts = any("router.weight" in name for m in rules.mappings() for name in m.mcore)
        if not has_experts:
            if self.ep > 1:
                yield f"EP = {self.ep}, but the {rules.family} model has no experts"
            return
        if num_experts(config) % self.ep:
            yield f"{num_experts(config)} experts are no multiple of EP = {self.ep}"
        if expert_size(config) % self.expert_tp:
            yield f"experts of size {expert_size(config)} are no multiple of ETP = {self.expert_tp}"
        if self.tp > 1 and not self.sequence_parallel:
            yield f"experts with TP = {self.tp} need sequence parallelism: Megatron refuses to train without"
