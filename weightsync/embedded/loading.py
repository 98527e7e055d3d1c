"""From Hugging Face names to parameters: the name tables of `load_weights`, and folders on disk.

`NameTable` is what `Target`, `MtpDraft` and `Eagle3Draft` load through, whoever calls (a receiver's runner, a dry
run of the router, `load_folder` when an engine starts).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from weightsync.embedded.config import ModelConfig
from weightsync.embedded.layers import Weight, copy_full
from weightsync.errors import ConfigError

__all__ = ["NameTable", "checkpoint_shapes", "folder_names", "init_random", "load_folder", "read_folder"]

# checkpoint name part -> (fused parameter, shard id)
_STACKED: Mapping[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


# Of random numbers drawn, then repeated: a large model starts in a tenth of the time. Prime, so that no two rows agree.
_BLOCK = 1_000_003


class NameTable:
    """Which parameter of `module` a checkpoint name loads, in the manner of engines' `load_weights`.

    `skip`: substrings of names that are passed over in silence. `remap`: (regular expression, replacement) pairs tried
    in order, the first that matches applies. `strict` False passes unknown names over, True raises KeyError.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        skip: tuple[str, ...] = (),
        remap: tuple[tuple[str, str], ...] = (),
        strict: bool = True,
    ) -> None:
        self._module = module
        self._skip = skip
        self._remap = tuple((re.compile(pattern), to) for pattern, to in remap)
        self._strict = strict
        self._tensors: dict[str, torch.Tensor] | None = None

    @torch.no_grad()
    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if self._tensors is None:
            self._tensors = dict(self._module.named_parameters(remove_duplicate=False))
            self._tensors |= dict(self._module.named_buffers(remove_duplicate=False))
        taken = set()
        for name, tensor in pairs:
            if any(part in name for part in self._skip):
                continue
            param_name, shard_id = self._find(name)
            param = self._tensors.get(param_name)
            if param is None:
                if self._strict:
                    raise KeyError(f"{type(self._module).__name__} has no parameter for {name!r}")
                continue
            loader = param.weight_loader if isinstance(param, Weight) else copy_full
            try:
                loader(param, tensor, shard_id)
            except ValueError as e:
                raise ValueError(f"{name}: {e}") from e
            taken.add(name)
        return taken

    def _find(self, name: str) -> tuple[str, str | int | None]:
        for pattern, to in self._remap:
            name, count = pattern.subn(to, name)
            if count:
                break
        parts = name.split(".")
        if len(parts) > 1 and parts[-2] in _STACKED:
            parts[-2], shard_id = _STACKED[parts[-2]]
            return ".".join(parts), shard_id
        return name, None


def _layer_shapes(config: ModelConfig, prefix: str, qkv_in: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, size = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    for part, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"{prefix}.self_attn.{part}_proj.weight", (rows, qkv_in)
        if config.qkv_bias:
            yield f"{prefix}.self_attn.{part}_proj.bias", (rows,)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, q)
    if config.qk_norm:
        yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield f"{prefix}.mlp.gate_proj.weight", (size, hidden)
    yield f"{prefix}.mlp.up_proj.weight", (size, hidden)
    yield f"{prefix}.mlp.down_proj.weight", (hidden, size)


def checkpoint_shapes(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """role -> Hugging Face name -> full shape, in the order of a checkpoint; complete.

    A target has role `target` and, for its MTP layers, `draft`. An EAGLE3 drafter has only `draft`, without the
    embedding (it shares its target's, though a checkpoint may carry one); its `d2t` is int64 and its
    `t2d` bool, all else float.
    """
    hidden = config.hidden_size
    draft: dict[str, tuple[int, ...]] = {}
    if config.is_eagle3:
        width = config.target_hidden_size or hidden
        rows = config.draft_vocab_size or config.vocab_size
        draft["fc.weight"] = (hidden, 3 * width)
        draft["midlayer.hidden_norm.weight"] = (hidden,)
        draft |= dict(_layer_shapes(config, "midlayer", 2 * hidden))
        draft |= {"norm.weight": (hidden,), "lm_head.weight": (rows, hidden)}
        draft |= {"d2t": (rows,), "t2d": (config.vocab_size,)}
        return {"draft": draft}
    target: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        target |= dict(_layer_shapes(config, f"model.layers.{i}", hidden))
    target["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        target["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_mtp_layers):
        prefix = f"model.mtp_layers.{i}"
        draft |= {f"{prefix}.token_layernorm.weight": (hidden,), f"{prefix}.hidden_layernorm.weight": (hidden,)}
        draft[f"{prefix}.input_proj.weight"] = (hidden, 2 * hidden)
        draft |= dict(_layer_shapes(config, prefix, hidden))
        draft[f"{prefix}.final_layernorm.weight"] = (hidden,)
    return {"target": target, "draft": draft} if draft else {"target": target}


def read_folder(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every safetensors file of a Hugging Face folder, one tensor in memory at a time.

    Raises:
        ConfigError: no safetensors in it, or an index that names a file or a tensor that is not there.
    """
    from safetensors import safe_open

    files, weight_map = _files(Path(folder))
    seen = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                seen.add(key)
                yield key, file.get_tensor(key)
    lost = sorted(set(weight_map) - seen)
    if lost:
        raise ConfigError(f"the index of {folder} names {len(lost)} tensors that no file holds, first {lost[0]}")


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] = {}
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no safetensors files")
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{index} names {path.name}, which is not in the folder")
    return files, weight_map


def folder_names(folder: str | Path) -> set[str]:
    """Names of the tensors of a Hugging Face folder, from headers alone. Raises as `read_folder`."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in _files(Path(folder))[0]:
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def load_folder(
    folder: str | Path,
    models: Mapping[str, nn.Module],
    needed: Mapping[str, Iterable[str]],
    *,
    canonical: Callable[[str], str] = str,
) -> None:
    """Load a folder into `models` (one pass, every model is offered every tensor) and check that nothing is missing.

    `needed` names, per model, the checkpoint tensors without which it would serve leftovers, spelt as `canonical`
    spells the names of the folder.

    Raises:
        ConfigError: a tensor is missing, unknown or misshapen.
    """
    taken: dict[str, set[str]] = {name: set() for name in models}
    for name, tensor in read_folder(folder):
        for key, model in models.items():
            try:
                taken[key] |= model.load_weights([(name, tensor)])  # type: ignore[operator]
            except (KeyError, ValueError) as e:
                raise ConfigError(f"{folder} does not fit the {key}: {e.args[0]}") from e
    for key, names in needed.items():
        lost = sorted(set(names) - {canonical(name) for name in taken[key]})
        if lost:
            raise ConfigError(f"{folder} lacks {len(lost)} tensors of the {key}, the first is {lost[0]}")


def init_random(module: nn.Module, *, seed: int, rank: int = 0) -> None:
    """Random weights in place: norms 1, biases 0, matrices N(0, 0.02), replicated ones the same on every rank.

    Sharded matrices differ from the shards of another TP size: use `known.py` or a folder where that matters.
    """
    with torch.no_grad():
        for name, param in module.named_parameters():
            if param.dim() == 1:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            sharded = isinstance(param, Weight) and param.shard_dim is not None
            generator = generator_for(name, seed, rank if sharded else 0)
            flat = param.view(-1)
            block = torch.empty(min(_BLOCK, len(flat)), dtype=param.dtype).normal_(0.0, 0.02, generator=generator)
            for start in range(0, len(flat), _BLOCK):
                part = flat[start : start + _BLOCK]
                part.copy_(block[: len(part)])


def generator_for(*what: str | int) -> torch.Generator:
    """A generator for a named thing, the same in every process; torch uses 32 bits of a seed, so it gets a checksum."""
    return torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))
