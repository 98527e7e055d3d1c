"""How a Megatron checkpoint spells a weight on disk: layouts, layer specs, split tensors, `_extra_state` entries.

A key of a `torch_dist` (or zarr) folder holds one weight, a part of one, or many stacked. `weights_of` reads all the
spellings there are; `Spelling` writes the one that a layout and a spec ask for:

    stacked     `decoder.layers.mlp.linear_fc2.weight` [layers, ...]: one key for all layers (and experts)
    per-layer   `decoder.layers.7.mlp.linear_fc2.weight`: experts stacked within their layer. Megatron reads it if
                `content_metadata` says `non_homogeneous_layers`, or if the model's layers differ
    singleton   per-layer, each expert and each half of a gated weight under a key of its own (`weight_w`, `weight_v`)

Weights have canonical names (`converters.rules.names`), but for a family's own spellings, which `RuleSet.canonical`
resolves.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from converters.errors import ConfigMismatch
from converters.rules.names import stacked_key

__all__ = [
    "LAYOUTS",
    "Layers",
    "Place",
    "Spec",
    "Spelling",
    "Stored",
    "fits_stacked",
    "is_optimizer",
    "layout_of",
    "weights_of",
]

Layers: TypeAlias = Literal["stacked", "per-layer", "singleton"]
Spec: TypeAlias = Literal["te", "local"]
LAYOUTS: tuple[Layers, ...] = ("stacked", "per-layer", "singleton")

_OPTIMIZER = re.compile(
    r"^(chained_\d+\.)?(optimizer|param_state|opt_param_scheduler|rng_state|rerun_state)\b|/optimizer"
)
_WRAPPERS = re.compile(r"^(?:model\.)?(?:module\.)*")
_LAYERED = re.compile(r"^((?:eagle_module\.)?decoder\.layers\.)(?!\d)")
_EXPERTS = re.compile(r"^(.*\.mlp\.experts\.)experts\.(linear_fc[12]\.(?:weight|bias))(_[wv])?$")
_EXPERT = re.compile(r"^(.*\.mlp\.experts\.)experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))(_[wv])?$")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_PARTS = {"in_proj": ("query", "key", "value", "z", "beta", "alpha"), "conv1d": ("query", "key", "value")}
_PART = re.compile(r"(.*\.(in_proj|conv1d)\.(?:weight|bias))\.(query|key|value|z|beta|alpha)")

# What a local-spec model calls a norm on disk where that is not the canonical name. Without latent attention Megatron
# maps the norms to the names of Transformer Engine's layers, also where experts follow.
_LOCAL = ((re.compile(r"\.pre_mlp_layernorm\."), ".mlp.linear_fc1.layer_norm_"),)
_LOCAL_MLA = (
    (re.compile(r"\.linear_(q|kv)_up_proj\.layer_norm_"), r".\1_layernorm."),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_"), ".pre_mlp_layernorm."),
)

_LINEAR = re.compile(
    r"\.(linear_qkv|linear_proj|linear_fc[12]|linear_q_proj|linear_(?:q|kv)_(?:down|up)_proj|eh_proj|in_proj|out_proj)"
    r"\.weight\d*$"
)
_NORM = re.compile(r"^(.*(?:layernorm|\.enorm|\.hnorm|\.out_norm))\.weight$")


class Stored(NamedTuple):
    """Elements `[start, start + prod(shape))` of `key` are (part `part` of) weight `name`."""

    name: str
    key: str
    start: int
    shape: tuple[int, ...]
    part: int


class Place(NamedTuple):
    """Rows `[first, stop)` of a weight are the box at `offset` of `key`, whose whole shape is `shape`.

    The box has as many leading sizes of 1 as `offset` has entries more than the weight has dimensions.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    first: int
    stop: int


def is_optimizer(key: str) -> bool:
    """Whether a key belongs to optimizer, scheduler or random number state."""
    return _OPTIMIZER.search(key) is not None


def weights_of(key: str, shape: Sequence[int]) -> Iterator[Stored]:
    """The weights that a key of `shape` holds."""
    name = _WRAPPERS.sub("", key)
    part = 0
    if half := _HALF.fullmatch(name):
        name, part = half[1], "wv".index(half[2])
    elif piece := _PART.fullmatch(name):
        name, part = piece[1], _PARTS[piece[2]].index(piece[3])
    layered = _LAYERED.match(name)
    stacked_experts = _EXPERTS.fullmatch(name)
    if one := _EXPERT.fullmatch(name):
        name = f"{one[1]}{one[3]}{one[2]}"
    leading = bool(layered) + bool(stacked_experts)
    if leading > len(shape):
        leading = 0  # not a stack after all: reported under its own name, as unmapped
    own = tuple(shape[leading:])
    for at, index in enumerate(itertools.product(*(range(n) for n in shape[:leading]))):
        spelled = name
        if leading and stacked_experts:
            spelled = f"{stacked_experts[1]}{stacked_experts[2]}{index[-1]}"
        if leading and layered:
            spelled = f"{layered[1]}{index[0]}.{spelled[len(layered[1]) :]}"
        yield Stored(spelled, key, at * math.prod(own), own, part)


class Spelling:
    """The keys that one layout and one spec have for the weights `names` of a model."""

    def __init__(self, names: Iterable[str], layers: Layers, spec: Spec) -> None:
        if layers not in LAYOUTS or spec not in ("te", "local"):
            raise ConfigMismatch(f"layout {layers!r}, spec {spec!r}: expected one of {', '.join(LAYOUTS)}; te or local")
        self.names = tuple(names)
        self.layers = layers
        latent = any(".linear_kv_down_proj." in name for name in self.names)
        self._spelling = () if spec == "te" else _LOCAL_MLA if latent else _LOCAL
        self._experts: dict[str, int] = {}
        self._num_layers = 0
        for name in self.names:
            key, index = self._key(name)
            if index and ".experts.experts." in key:
                stem = key.partition(".mlp.experts.")[0]
                self._experts[stem] = max(self._experts.get(stem, 0), index[-1] + 1)
            if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
                self._num_layers = max(self._num_layers, int(layer[1]) + 1)

    def places(self, name: str, shape: Sequence[int], blocks: Sequence[int]) -> list[Place]:
        """Where a weight goes, in the order of its rows; `blocks` as `Op.blocks` says."""
        suffixes: tuple[str, ...] = ("",)
        module = name.split(".")[-2]
        if module in _PARTS and len(blocks) == len(_PARTS[module]):
            suffixes = tuple(f".{part}" for part in _PARTS[module])
        elif self.layers == "singleton" and len(blocks) == 2 and module == "linear_fc1":
            suffixes = ("_w", "_v")
        key, index = self._key(name)
        sizes = self._sizes(key, index)
        rows = list(blocks) if len(suffixes) > 1 else list(shape[:1]) or [1]
        out, first = [], 0
        for suffix, count in zip(suffixes, rows, strict=True):
            own = (count, *shape[1:]) if shape else ()
            out.append(Place(key + suffix, (*sizes, *own), (*index, *(0 for _ in own)), first, first + count))
            first += count
        return out

    def extra_states(self, kind: str) -> list[str]:
        """Keys of the `_extra_state` entries that a model expects beside its weights, all of them empty.

        `kind` "linear": of every linear layer, as Megatron's own modules have; "te": also of attention and norms, as
        Transformer Engine's may have (more entries than a model asks for do no harm, fewer do); "none": no entries.
        """
        if kind not in ("linear", "none", "te"):
            raise ConfigMismatch(f"extra state {kind!r}, expected linear, te or none")
        weights: set[str] = set()  # one in each module, which says where the module is stacked
        for name in self.names if kind != "none" else ():
            if _LINEAR.search(name) or (kind == "te" and _NORM.match(name)):
                weights.add(name)
            if kind == "te" and name.endswith("self_attention.linear_proj.weight"):
                weights.add(name.replace("linear_proj", "core_attention"))
        out = set()
        for name in weights:
            key, index = self._key(name)
            at = ".".join(map(str, index)) or "0"
            of = ".".join(map(str, self._sizes(key, index))) or "1"
            out.add(f"{key.rpartition('.weight')[0]}._extra_state/shard_{at}_{of}")
        return sorted(out)

    def _key(self, name: str) -> tuple[str, tuple[int, ...]]:
        for pattern, replacement in self._spelling:
            name = pattern.sub(replacement, name)
        key, index = stacked_key(name)
        if self.layers == "stacked":
            return key, index
        if layer := re.match(r"decoder\.layers\.\d+\.", name):
            key, index = layer[0] + key.removeprefix("decoder.layers."), index[1:]
        if self.layers == "singleton" and index:
            at = key.rindex(".experts.") + len(".experts.")
            key, index = f"{key[:at]}{index[-1]}.{key[at:]}", ()
        return key, index

    def _sizes(self, key: str, index: Sequence[int]) -> tuple[int, ...]:
        experts = (self._experts[key.partition(".mlp.experts.")[0]],) if index and ".experts.experts." in key else ()
        return (*((self._num_layers,) if len(index) > len(experts) else ()), *experts)


def layout_of(keys: Iterable[str]) -> str:
    """The layout that a checkpoint's keys are in; "no decoder" if they do not tell."""
    names = [_WRAPPERS.sub("", key) for key in keys]
    if any(_HALF.fullmatch(name) or _EXPERT.fullmatch(name) for name in names):
        return "singleton"
    if any(_LAYERED.match(name) for name in names):
        return "stacked"
    return "per-layer" if any("decoder.layers." in name for name in names) else "no decoder"


def fits_stacked(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether all decoder layers have the same weights, so that each key can hold all of them."""
    by_layer: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if layer := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            by_layer.setdefault(layer[1], {})[layer[2]] = tuple(shape)
    found = list(by_layer.values())
    return all(layer == found[0] for layer in found) and sorted(map(int, by_layer)) == list(range(len(by_layer)))
