"""The drafts: a MiMo-style MTP head that shares embedding and head with its target, and an EAGLE3 drafter.

Both predict token i+2 from the target's features at position i and token i+1, and chain on their own states from there.
`speculative.py` calls `prepare` on true features, `forward`, then `propose`; runners call `load_weights` and, when all
tensors are in, `refresh_derived`. Sharing is by the very `Parameter`, so loading the target loads the draft's view too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from weightsync.embedded.config import ModelConfig
from weightsync.embedded.kv import KVCache, Rotary
from weightsync.embedded.layers import ReplicatedLinear, RMSNorm, VocabParallel
from weightsync.embedded.loading import NameTable
from weightsync.embedded.model import MLP, Attention, DecoderLayer, Step, Target

__all__ = ["Draft", "Eagle3Draft", "MtpDraft", "aux_layers"]


def aux_layers(draft: ModelConfig, num_target_layers: int) -> tuple[int, ...]:
    """The target layers whose input an EAGLE3 drafter reads: its config's, or 2, half and the third last."""
    chosen = draft.aux_layers or (2, num_target_layers // 2, num_target_layers - 3)
    return tuple(min(max(i, 0), num_target_layers - 1) for i in chosen)


class Draft(Protocol):
    """What speculative decoding asks of a draft."""

    def new_cache(self) -> KVCache: ...

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        """The target's `Output.features` -> states that `forward` takes."""
        ...

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens i+1 and states i, `[n]` and `[n, H]`, at positions `cache.length ..`.

        Returns what `logits` reads and the states to chain on, both `[n, H]`.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of the draft's vocabulary -> ids of the target's."""
        ...


class MtpLayer(nn.Module):
    """One MTP layer: `input_proj` over cat([hidden, embedding]), a decoder layer, a final norm."""

    def __init__(self, config: ModelConfig, target: Target) -> None:
        super().__init__()
        size, eps, dtype, device = config.hidden_size, config.rms_norm_eps, target.dtype, target.device
        self.token_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.hidden_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.input_proj = ReplicatedLinear(2 * size, size, dtype=dtype, device=device)
        self.final_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mtp_block = DecoderLayer(config, target.tp, dtype=dtype, device=device)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        x = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embeds)), dim=-1)
        out: torch.Tensor = self.final_layernorm(self.mtp_block(self.input_proj(x), 0, step))
        return out


class MtpModel(nn.Module):
    def __init__(self, config: ModelConfig, target: Target) -> None:
        super().__init__()
        self.embed_tokens = target.model.embed_tokens
        self.mtp_layers = nn.ModuleList(MtpLayer(config, target) for _ in range(config.num_mtp_layers))


class MtpDraft(nn.Module):
    """The MTP head of `target`, whose embedding and output layer it shares. Roles: its own and the target's."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.config = target.config
        self._target_tp, self._dtype, self._device = target.tp, target.dtype, target.device
        self.model = MtpModel(target.config, target)
        self.lm_head = target.lm_head
        self._rotary = Rotary(target.config, target.device)
        # MTP layers, embedding and head of the common checkpoint; the target's layers are none of its business.
        self._names = NameTable(
            self,
            skip=("lm_head.",) if target.config.tie_word_embeddings else (),
            remap=(
                (
                    r"(mtp_layers\.\d+\.)((?:self_attn|mlp|input_layernorm|post_attention_layernorm)\.)",
                    r"\1mtp_block.\2",
                ),
            ),
            strict=False,
        )

    def new_cache(self) -> KVCache:
        heads = max(1, self.config.num_kv_heads // self._target_tp.size)
        return KVCache(1, heads, self.config.head_dim, dtype=self._dtype, device=self._device)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return features

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, states: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        step = Step(tokens.shape[0], cache, self._rotary, self._dtype, self._device)
        hidden = self.model.mtp_layers[0](self.model.embed_tokens(tokens), states, step)
        cache.advance(tokens.shape[0])
        return hidden, hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(hidden)

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As `Target.load_weights`, but names that it does not know are passed over, as engines' MTP loaders do."""
        return self._names.load(pairs)

    def refresh_derived(self) -> None:
        """Nothing here is derived from weights."""


class Eagle3Layer(nn.Module):
    def __init__(self, config: ModelConfig, target: Target) -> None:
        super().__init__()
        size, eps, dtype, device = config.hidden_size, config.rms_norm_eps, target.dtype, target.device
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, target.tp, in_size=2 * size, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, target.tp, dtype=dtype, device=device)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        x = hidden + self.self_attn(x, 0, step)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Model(nn.Module):
    def __init__(self, config: ModelConfig, target: Target, *, own_embedding: bool) -> None:
        super().__init__()
        size, dtype, device = config.hidden_size, target.dtype, target.device
        self.embed_tokens = (
            VocabParallel(config.vocab_size, size, target.tp, dtype=dtype, device=device)
            if own_embedding
            else target.model.embed_tokens
        )
        width = config.target_hidden_size or size
        self.fc = ReplicatedLinear(3 * width, size, dtype=dtype, device=device)
        self.midlayer = Eagle3Layer(config, target)
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)


class Eagle3Draft(nn.Module):
    """An EAGLE3 drafter with an output layer over its own vocabulary. Its role is its own alone.

    `d2t` maps draft ids to target ids as an offset; `hot_token_id` = arange + d2t is derived from it. `t2d`, the mask
    of target ids that it can draft, is held to check `d2t` against it.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    hot_token_id: torch.Tensor

    def __init__(self, config: ModelConfig, target: Target, *, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        self._target_tp, self._dtype, self._device = target.tp, target.dtype, target.device
        self.model = Eagle3Model(config, target, own_embedding=own_embedding)
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = VocabParallel(rows, config.hidden_size, target.tp, dtype=target.dtype, device=target.device)
        ids = torch.arange(rows, device=target.device)
        self.register_buffer("d2t", torch.zeros_like(ids))
        self.register_buffer(
            "t2d", torch.zeros(config.vocab_size, dtype=torch.bool, device=target.device), persistent=False
        )
        self.register_buffer("hot_token_id", ids, persistent=False)
        self._rotary = Rotary(config, target.device)
        # Both dialects, with and without "model.": like real EAGLE3 loaders this takes a target's `model.layers.0.*`
        # and `lm_head.weight` for its own, which is why tensors are routed by role and not by name.
        self._names = NameTable(
            self,
            skip=("rotary_emb.inv_freq", "hot_token_id"),
            remap=(
                (r"^(?:model\.)?(?:midlayer|layers\.0)\.", "model.midlayer."),
                (r"^(?:model\.)?(fc|norm|embed_tokens)\.", r"model.\1."),
            ),
            strict=False,
        )

    def new_cache(self) -> KVCache:
        heads = max(1, self.config.num_kv_heads // self._target_tp.size)
        return KVCache(1, heads, self.config.head_dim, dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model.fc(features)
        return states

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, states: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        step = Step(tokens.shape[0], cache, self._rotary, self._dtype, self._device)
        chained = self.model.midlayer(self.model.embed_tokens(tokens), states, step)
        cache.advance(tokens.shape[0])
        return self.model.norm(chained), chained

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(hidden)

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hot_token_id[ids]

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As `Target.load_weights`; names that it does not know are passed over."""
        return self._names.load(pairs)

    def refresh_derived(self) -> None:
        """Recompute `hot_token_id` in place (a captured graph may hold it).

        Raises:
            ValueError: `d2t` leaves the target's vocabulary, or `t2d` was loaded and does not agree with it.
        """
        ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        if bool(((ids < 0) | (ids >= self.config.vocab_size)).any()):
            raise ValueError(f"d2t maps draft ids outside the target's vocabulary of {self.config.vocab_size}")
        known = int(self.t2d.sum())
        if known and (known != len(ids) or not bool(self.t2d[ids].all())):
            raise ValueError(f"t2d marks {known} target ids, d2t maps {len(ids)} draft ids, and they do not agree")
        self.hot_token_id.copy_(ids)
