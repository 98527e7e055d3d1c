"""Weights whose greedy tokens are known beforehand, so that a wrong or stale weight shows as tokens and acceptance.

Residual branches end in zero matrices, so a hidden state is the embedding of its own token and the next token is a
function of the current one, whatever the parallelism and the dtype; everything else is random, so that digests differ.
The function depends on the seed, and so does the draft that predicts it: a draft of one seed beside a target of another
is accepted about never. Used by tests, the demo and `weightsync bench`.

    untied                permutation of the vocabulary
    tied                  one token `a` after every token but itself, `b` after `a`
    with an EAGLE3 draft  one token `a` after every token (its chain sees the same target state at every step)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from weightsync.embedded.config import ModelConfig, eagle3_config
from weightsync.embedded.loading import checkpoint_shapes, generator_for
from weightsync.errors import ConfigError

__all__ = ["DraftKind", "known_argmax", "known_next", "write_hf_folder"]

DraftKind = Literal["mtp", "eagle3"]


class _Facts:
    """What target and draft of one seed have in common."""

    def __init__(self, config: ModelConfig, seed: int, draft: DraftKind | None) -> None:
        g = torch.Generator().manual_seed(seed)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.direction = _signs((hidden,), g)
        # Walsh functions: orthogonal, so that a draft of one seed is blind to a target of another. Random signs would
        # often be right by chance.
        period = hidden & -hidden
        self.scale = _walsh(1 + seed % max(period - 1, 1), hidden)
        self.a, self.b = (17 + 31 * seed) % vocab, (29 + 31 * seed) % vocab
        self.constant = draft == "eagle3"
        self.permute = not config.tie_word_embeddings and not self.constant
        if config.tie_word_embeddings and self.constant:
            self.scale = torch.ones(hidden)  # with one matrix for both, only then is `a` its own successor
        self.permutation = torch.randperm(vocab, generator=g) if self.permute else None


def known_next(config: ModelConfig, *, seed: int, draft: DraftKind | None = None) -> torch.Tensor:
    """`[vocab_size]`: the token that `known_argmax` weights of the same arguments generate after each token."""
    facts = _Facts(config, seed, draft)
    if facts.permutation is not None:
        return facts.permutation
    following = torch.full((config.vocab_size,), facts.a)
    if not facts.constant:
        following[facts.a] = facts.b
    return following


def known_argmax(
    config: ModelConfig,
    *,
    seed: int,
    draft: DraftKind | None = None,
    good_draft: bool = True,
    draft_config: ModelConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, dict[str, torch.Tensor]]:
    """role -> Hugging Face name -> full tensor, complete (the names of `checkpoint_shapes`).

    Args:
        config: of the target; with `draft="mtp"` it must have an MTP layer, with another `draft` its MTP layers are
            left out.
        seed: chooses the function and everything else.
        draft: role `draft` too. Acceptance is 1.0 with `good_draft`, 0.0 without or with a draft of another seed.
        draft_config: of the EAGLE3 drafter, default `eagle3_config(config)`.

    Raises:
        ConfigError: `draft="mtp"` and a config without MTP layer.
    """
    if draft == "mtp" and not config.num_mtp_layers:
        raise ConfigError("known_argmax(draft='mtp') needs a config with num_mtp_layers=1")
    facts = _Facts(config, seed, draft)
    shapes = checkpoint_shapes(config)
    out = {"target": {n: _filler(n, s, seed, dtype) for n, s in shapes["target"].items()}}
    out["target"] |= {n: t.to(dtype) for n, t in _target(config, facts, seed).items()}
    if draft == "mtp":
        out["draft"] = {n: _filler(n, s, seed, dtype) for n, s in shapes["draft"].items()}
        out["draft"] |= {n: t.to(dtype) for n, t in _mtp(config, facts, good_draft).items()}
    elif draft == "eagle3":
        draft_config = draft_config or eagle3_config(config)
        shapes = checkpoint_shapes(draft_config)
        out["draft"] = {n: _filler(n, s, seed, dtype) for n, s in shapes["draft"].items()}
        special = _eagle3(draft_config, facts, seed, good_draft)
        out["draft"] |= {n: t.to(dtype) if t.is_floating_point() else t for n, t in special.items()}
    return out


def write_hf_folder(
    folder: str | Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, shard_bytes: int | None = None
) -> Path:
    """Write `config.json` and safetensors; with `shard_bytes`, several files and an index. Returns the folder."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    obj: dict[str, Any] = config.to_hf()
    if len(dtypes) == 1:
        obj["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(obj, indent=1))
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shard_bytes is not None and shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder


def _filler(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """What does not reach the logits: zero at the end of residual branches, random elsewhere."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros(shape, dtype=dtype)
    if name.endswith("norm.weight"):
        return torch.empty(shape, dtype=dtype).uniform_(0.5, 1.5, generator=generator_for(name, seed))
    if len(shape) == 1 and not name.endswith("bias"):
        return torch.zeros(0)  # d2t, t2d: replaced by the caller
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return torch.zeros(0)
    return torch.empty(shape, dtype=dtype).uniform_(-0.3, 0.3, generator=generator_for(name, seed))


def _walsh(k: int, n: int) -> torch.Tensor:
    """`[n]` of +1 and -1: the parity of the bits that position and `k` share."""
    bits = torch.arange(n) & k
    for shift in (32, 16, 8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    return 1.0 - 2.0 * (bits & 1).float()


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator).float().mul_(2).sub_(1)


def _target(config: ModelConfig, facts: _Facts, seed: int) -> dict[str, torch.Tensor]:
    rows, hidden = config.vocab_size, config.hidden_size
    g = generator_for("embed_tokens", seed)
    out = {"model.norm.weight": facts.scale}
    if facts.permutation is not None:
        # Rows of signs: the product of two is largest with itself, and exactly zero under another seed's scale.
        out["model.embed_tokens.weight"] = embed = _signs((rows, hidden), g)
        head = torch.empty_like(embed)
        head[facts.permutation] = embed
        out["lm_head.weight"] = head.mul_(facts.scale)
        return out
    out["model.embed_tokens.weight"] = embed = torch.randn(rows, hidden, generator=g).mul_(0.1).add_(facts.direction)
    aim = 3 * facts.scale * facts.direction
    if config.tie_word_embeddings:
        embed[facts.a] = aim
        if not facts.constant:
            embed[facts.b] = 3 * facts.direction
        return out
    head = torch.randn(rows, hidden, generator=g).mul_(0.3)
    head[facts.a] = aim
    out["lm_head.weight"] = head
    return out


def _mtp(config: ModelConfig, facts: _Facts, good: bool) -> dict[str, torch.Tensor]:
    hidden = config.hidden_size
    prefix = "model.mtp_layers.0."
    take = torch.zeros(hidden, 2 * hidden)
    # Columns are [hidden, embedding]. A bad draft looks the other way, so it never proposes the right token.
    take[:, hidden:] = torch.eye(hidden) * (1.0 if good else -1.0)
    return {
        f"{prefix}input_proj.weight": take,
        f"{prefix}token_layernorm.weight": torch.ones(hidden),
        f"{prefix}final_layernorm.weight": facts.scale,
    }


def _eagle3(config: ModelConfig, facts: _Facts, seed: int, good: bool) -> dict[str, torch.Tensor]:
    hidden, vocab = config.hidden_size, config.vocab_size
    rows = config.draft_vocab_size or vocab
    g = generator_for("draft_vocabulary", seed)
    others = torch.randperm(vocab, generator=g)
    ids = torch.cat((torch.tensor([facts.a]), others[others != facts.a]))[:rows].sort().values
    head = torch.randn(rows, hidden, generator=g).mul_(0.3)
    head[ids == facts.a] = 3 * facts.scale * facts.direction * (1.0 if good else -1.0)
    take = torch.zeros(hidden, 3 * (config.target_hidden_size or hidden))
    take[:, :hidden] = torch.eye(hidden, config.target_hidden_size or hidden)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return {
        "fc.weight": take,
        "norm.weight": facts.scale,
        "lm_head.weight": head,
        "d2t": ids - torch.arange(rows),
        "t2d": t2d,
    }
