"""A state dict as a source: plain tensors, or the DTensors of FSDP2 and tensor-parallel trainers.

Owns what a state dict's entries mean (names without wrappers, tied tensors, roles) and that they stay as they were
planned; `weightsync.sources.dtensor` makes full tensors of shards. Every rank of the stage holds one `StateDictSource`.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, ManifestError
from weightsync.manifest import TARGET, TensorSpec, dtype_name
from weightsync.sources.dtensor import Held, MeshGather, describe
from weightsync.sources.roles import RoleRules, in_load_order
from weightsync.timeline import Timeline

__all__ = ["StateDict", "StateDictSource"]

StateDict = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]

GATHER_BYTES = 32 << 20
# Modules that wrappers put between a name's parts: DDP and FSDP1, torch.compile, activation checkpointing.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module"})
# What `state_dict()` holds beside weights: Transformer Engine keeps its fp8 metadata there.
EXTRA_STATE = ("*._extra_state",)


class StateDictSource:
    """Publishes a mapping of Hugging Face names to tensors, read anew for every publish.

    `state` is the mapping, or a callable that returns it (`model.state_dict`) where optimizers replace tensors instead
    of updating them. `drafts` maps role -> state of a drafter that is a model of its own (EAGLE3); MTP layers inside
    `state` get their role by `roles`. Names lose the modules that DDP, FSDP and torch.compile wrap in.

    `tied` decides on an entry that is the very memory of an earlier one of its role, as `lm_head.weight` is of a model
    with tied embeddings: `"drop"` it, as `save_pretrained` does and engines with tied embeddings expect; `"keep"` it
    for engines that hold both; or call it an `"error"`. Entries matching an `ignore` pattern are no weights.

    DTensors are gathered on the first rank of their mesh, `gather_bytes` (over all ranks) in a message, two messages in
    flight; a larger tensor travels alone. `group` are the ranks of this stage, its rank 0 the sender: needed only where
    tensors do not tell, that is for several meshes or for plain tensors on more ranks than stages.
    """

    def __init__(
        self,
        state: StateDict,
        *,
        drafts: Mapping[str, StateDict] | None = None,
        roles: RoleRules | None = None,
        tied: Literal["drop", "keep", "error"] = "drop",
        ignore: Sequence[str] = EXTRA_STATE,
        group: dist.ProcessGroup | None = None,
        gather_bytes: int = GATHER_BYTES,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        if tied not in ("drop", "keep", "error"):
            raise ConfigError(f"tied is {tied!r}, expected 'drop', 'keep' or 'error'")
        if gather_bytes < 1:
            raise ConfigError(f"gather_bytes is {gather_bytes}, expected a positive number of bytes")
        if not 0 <= stage < num_stages:
            raise ConfigError(f"stage is {stage} of {num_stages}, expected 0 <= stage < num_stages")
        if drafts and TARGET in drafts:
            raise ConfigError(f"drafts has the role {TARGET!r}: pass the target as `state`")
        self._states: list[tuple[str | None, StateDict]] = [(None, state), *(drafts or {}).items()]
        self._rules = roles or RoleRules()
        self._tied = tied
        self._ignore = tuple(ignore)
        self._stage = stage
        self._num_stages = num_stages
        self._ranks = MeshGather(group, num_stages, gather_bytes)
        self._joined = False
        self._specs: tuple[TensorSpec, ...] | None = None
        self._dropped: tuple[TensorSpec, ...] = ()

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def num_stages(self) -> int:
        return self._num_stages

    @property
    def is_sender(self) -> bool:
        if not self._joined:
            self._join(self._read())
        return self._ranks.is_sender

    @property
    def tied(self) -> tuple[TensorSpec, ...]:
        """The entries that `tied="drop"` left out; empty before `specs()`."""
        return self._dropped

    def specs(self) -> Sequence[TensorSpec]:
        """See `Source.specs`; collective on the first call if there are several ranks.

        Raises:
            ManifestError: entries that cannot be published, or other entries on another rank of the stage.
        """
        if self._specs is None:
            entries = self._read()
            if not self._joined:
                self._join(entries)
            self._check_ranks(list(entries))
            self._specs = tuple(in_load_order(self._untied(entries)))
        return self._specs

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        """See `Source.stream`. All ranks of the stage raise if one of them finds its entries changed."""
        specs = self.specs()
        problem: ManifestError | None = None
        entries: dict[TensorSpec, Held] = {}
        with timeline.span("gather"):
            try:
                entries = self._read()
                self._check_planned(entries)
            except ManifestError as e:
                problem = e
            self._ranks.agree(problem)
        yield from self._ranks.gather([entries[spec] for spec in specs if spec.role in roles], timeline)

    def _read(self) -> dict[TensorSpec, Held]:
        """What this rank holds now, in the order of the state dicts."""
        entries: dict[tuple[str, str], tuple[TensorSpec, Held]] = {}
        for role, state in self._states:
            held = self._read_one(state() if callable(state) else state)
            for spec in self._rules.specs(((name, h.value.dtype, h.shape) for name, h in held.items()), role=role):
                if spec.key in entries:
                    raise ManifestError(f"{spec.name!r} of role {spec.role!r} is in the state dict and in `drafts`")
                entries[spec.key] = (spec, held[spec.name])
        return dict(entries.values())

    def _read_one(self, state: Mapping[str, Any]) -> dict[str, Held]:
        held: dict[str, Held] = {}
        for key, value in state.items():
            name = ".".join(part for part in key.split(".") if part not in WRAPPERS)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore):
                continue
            if name in held:
                raise ManifestError(f"state dict entries {held[name].name!r} and {key!r} are both {name!r}")
            held[name] = describe(key, value)
        return held

    def _join(self, entries: Mapping[TensorSpec, Held]) -> None:
        self._ranks.join(list(entries.values()))
        self._joined = True

    def _check_ranks(self, specs: Sequence[TensorSpec]) -> None:
        """Every rank of the stage must hold the same entries, or the gathers would mix them up."""
        text = repr([(s.role, s.name, s.dtype, s.shape) for s in specs])
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        highest, lowest = self._ranks.maximum([number, -number])
        if highest != -lowest:
            raise ManifestError(
                f"the ranks of stage {self._stage} hold different entries (this one {len(specs)}): names, order, "
                "dtypes and shapes of their state dicts must be the same"
            )

    def _untied(self, entries: Mapping[TensorSpec, Held]) -> list[TensorSpec]:
        specs = list(entries)
        seen: dict[tuple[Any, ...], int] = {}
        tied_to = []
        for i, (spec, h) in enumerate(entries.items()):
            memory = (spec.role, h.local.data_ptr(), h.local.dtype, h.local.shape, h.local.stride())
            # A rank without rows of a tensor cannot tell; another one does.
            tied_to.append(seen.setdefault(memory, i) if h.local.numel() else i)
        tied_to = self._ranks.maximum([i - first for i, first in enumerate(tied_to)])
        tied = [i for i, distance in enumerate(tied_to) if distance]
        if tied and self._tied == "error":
            spec, first = specs[tied[0]], specs[tied[0] - tied_to[tied[0]]]
            raise ManifestError(
                f"{spec.name!r} is tied to {first.name!r} (role {spec.role!r}): tied='drop' leaves it out, tied='keep' "
                "publishes both"
            )
        if self._tied != "drop":
            return specs
        self._dropped = tuple(specs[i] for i in tied)
        return [spec for i, spec in enumerate(specs) if not tied_to[i]]

    def _check_planned(self, entries: Mapping[TensorSpec, Held]) -> None:
        planned = {spec.key: spec for spec in (*self.specs(), *self._dropped)}
        for spec in entries:
            if (was := planned.pop(spec.key, None)) is None:
                raise ManifestError(
                    f"{spec.name!r} (role {spec.role!r}) is new in the state dict: build a new publisher"
                )
            if was != spec:
                raise ManifestError(
                    f"{spec.name!r} (role {spec.role!r}) is now {dtype_name(spec.dtype)} {spec.shape}, planned was "
                    f"{dtype_name(was.dtype)} {was.shape}: build a new publisher"
                )
        for was in planned.values():
            raise ManifestError(
                f"{was.name!r} (role {was.role!r}) is no longer in the state dict: build a new publisher"
            )
