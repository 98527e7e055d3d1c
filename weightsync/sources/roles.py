"""From bare Hugging Face names to roles and groups, for sources that are handed tensors and know nothing of the model.

`RoleRules.specs` turns (name, dtype, shape) into `TensorSpec`s, `in_load_order` sorts them so that what engines load as
one stands together. The tables are the whole knowledge: which names belong to an MTP layer, which projections engines
fuse. (The Megatron source takes both from its converter rules instead.)
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from weightsync.errors import ConfigError
from weightsync.manifest import TARGET, TensorSpec

__all__ = ["RoleRules", "in_load_order"]

# Spellings of MTP layers inside a checkpoint: everything that matches is the draft, the match is the layer.
MTP_PREFIXES = (
    r"model\.mtp_layers\.\d+\.",  # MiMo
    r"(?:model\.)?mtp\.layers\.\d+\.",
    r"(?:model\.)?mtp\.",  # Qwen3-Next and Qwen3.5: norms and projection beside `mtp.layers`
)
# DeepSeek and GLM append MTP layers to the decoder's; only these tensors tell them from decoder layers.
APPENDED_MTP = re.compile(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm|shared_head)\.")
DECODER_LAYER = re.compile(r"model\.layers\.(\d+)\.")

# Last module of a name -> the module that engines fuse it into. Weights, biases and scales of one go together.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "q_a_proj": "qkv_a_proj",
    "kv_a_proj_with_mqa": "qkv_a_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}

_MTP = re.compile("|".join(MTP_PREFIXES))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoleRules:
    """What role a name has, and with which others it is loaded.

    MTP layers get the role `draft_role`, everything else is the target. Where MTP layers are appended to the decoder
    (`model.layers.{num_hidden_layers + i}`), they are told by tensors that only they have, or by `num_hidden_layers`.
    `roles` overrides all of it: `fnmatch` pattern -> role, the first match counts.
    """

    draft_role: str = "draft"
    num_hidden_layers: int | None = None
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.draft_role or self.draft_role == TARGET:
            raise ConfigError(f"draft_role is {self.draft_role!r}, expected a name other than {TARGET!r}")
        if self.num_hidden_layers is not None and self.num_hidden_layers < 1:
            raise ConfigError(f"num_hidden_layers is {self.num_hidden_layers}, expected at least 1")

    def specs(
        self, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], *, role: str | None = None
    ) -> list[TensorSpec]:
        """Specs of all tensors of one model, in their order. `role` gives all of them one (a drafter's folder)."""
        tensors = list(tensors)
        appended = {m[1] for name, _, _ in tensors if (m := APPENDED_MTP.match(name))}
        specs = []
        for name, dtype, shape in tensors:
            layer = self._mtp_layer(name, appended)
            own_role = role or self._role(name, layer)
            group = _group(own_role, layer, name)
            specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, role=own_role, group=group))
        return specs

    def _mtp_layer(self, name: str, appended: set[str]) -> str | None:
        if match := _MTP.match(name):
            return match[0]
        if match := DECODER_LAYER.match(name):
            beyond = self.num_hidden_layers is not None and int(match[1]) >= self.num_hidden_layers
            if beyond or match[1] in appended:
                return match[0]
        return None

    def _role(self, name: str, layer: str | None) -> str:
        for pattern, role in self.roles.items():
            if fnmatch.fnmatchcase(name, pattern):
                return role
        return TARGET if layer is None else self.draft_role


def _group(role: str, layer: str | None, name: str) -> str | None:
    """`draft/model.mtp_layers.0/self_attn.qkv_proj`: a whole draft, one of its layers, what is one parameter there."""
    path = [] if role == TARGET else [role]
    if layer is not None:
        path.append(layer.rstrip("."))
    modules = name.split(".")
    # The parameter's own name is last (`weight`, `bias`, `weight_scale`), its module before it.
    if len(modules) > 1 and (fused := FUSED.get(modules[-2])):
        path.append(".".join([*modules[:-2], fused]))
    return "/".join(path) or None


def in_load_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """`specs` with the members of every role and group (and of every prefix of it) brought to the first of them.

    Sorted names separate `k_proj` from `q_proj`; this joins them, and moves little else.
    """
    first: dict[tuple[str, ...], int] = {}
    paths = [_path(spec) for spec in specs]
    for i, path in enumerate(paths):
        for depth in range(1, len(path) + 1):
            first.setdefault(path[:depth], i)
    order = sorted(range(len(specs)), key=lambda i: [*(first[paths[i][:d]] for d in range(1, len(paths[i]) + 1)), i])
    return [specs[i] for i in order]


def _path(spec: TensorSpec) -> tuple[str, ...]:
    if spec.group:
        return (spec.role, *spec.group.split("/"))
    return (spec.role,)
