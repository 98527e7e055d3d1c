"""The target: a Llama-like decoder (Llama, Qwen2, Qwen3, the decoder of MiMo) for one sequence at a time.

`DecoderLayer` is shared with the drafts. `Target.forward` is called by `speculative.py` on the thread that owns the
model, `Target.load_weights` by its runner; parameters are named as in real engines (`qkv_proj`, `gate_up_proj` fused).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from weightsync.embedded.config import ModelConfig
from weightsync.embedded.kv import KVCache, Rotary
from weightsync.embedded.layers import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallel,
)
from weightsync.embedded.loading import NameTable
from weightsync.embedded.parallel import SINGLE, TpGroup

__all__ = ["Attention", "DecoderLayer", "Output", "Step", "Target"]


class Step:
    """What every layer of one forward pass shares: rotary factors, causal mask, the cache. `n` new positions."""

    def __init__(self, n: int, cache: KVCache, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> None:
        self.cache = cache
        self.cos, self.sin = rotary.at(cache.length, n, dtype)
        self.mask = None
        if n > 1:
            ones = torch.ones(n, cache.length + n, dtype=torch.bool, device=device)
            self.mask = ones.tril(diagonal=cache.length)


class Attention(nn.Module):
    """`in_size` is the width of the input of `qkv_proj`; EAGLE3 reads twice the hidden size."""

    def __init__(
        self, config: ModelConfig, tp: TpGroup, *, in_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            in_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.qkv_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, tp, dtype=dtype, device=device
        )
        norm = config.qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device) if norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device) if norm else None

    def forward(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = Rotary.rotate(q, step.cos, step.sin), Rotary.rotate(k, step.cos, step.sin)
        keys, values = step.cache.append(layer, k, v)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=step.mask,
            enable_gqa=True,
        )
        x = self.o_proj(out[0].transpose(0, 1).flatten(1))
        return x


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, (size, size), tp, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(size, config.hidden_size, tp, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        x = self.down_proj(functional.silu(gate) * up)
        return x


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        eps, size = config.rms_norm_eps, config.hidden_size
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, tp, in_size=size, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, tp, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), layer, step)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Of one forward pass over n tokens: `hidden` after the final norm and `features` for the draft, `[n, ...]`."""

    hidden: torch.Tensor
    features: torch.Tensor


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = VocabParallel(config.vocab_size, config.hidden_size, tp, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, tp, dtype=dtype, device=device) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)


class Target(nn.Module):
    """The whole target of one engine rank, weights zero until loaded.

    `capture` lists the layers whose input becomes `Output.features` (for EAGLE3), side by side in layer order, a layer
    named twice twice; without it the features are the final hidden states (for MTP).
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TpGroup = SINGLE,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        capture: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.dtype = dtype
        self.device = torch.device(device)
        self.capture = tuple(sorted(capture))
        self.model = Decoder(config, tp, dtype=dtype, device=self.device)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = VocabParallel(config.vocab_size, config.hidden_size, tp, dtype=dtype, device=self.device)
        self._rotary = Rotary(config, self.device)
        # As vLLM's and SGLang's: MTP tensors belong to the draft, and a tied head is not loaded twice.
        tied = ("lm_head.",) if config.tie_word_embeddings else ()
        self._names = NameTable(self, skip=("mtp_layers.", "rotary_emb.inv_freq", *tied))

    def new_cache(self) -> KVCache:
        heads = max(1, self.config.num_kv_heads // self.tp.size)
        return KVCache(self.config.num_layers, heads, self.config.head_dim, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, cache: KVCache) -> Output:
        """`tokens` `[n]` int64 at positions `cache.length ..`; the cache advances by n."""
        step = Step(tokens.shape[0], cache, self._rotary, self.dtype, self.device)
        x = self.model.embed_tokens(tokens)
        captured = []
        for i, layer in enumerate(self.model.layers):
            captured.extend([x] * self.capture.count(i))
            x = layer(x, i, step)
        cache.advance(tokens.shape[0])
        hidden = self.model.norm(x)
        return Output(hidden, torch.cat(captured, dim=-1) if captured else hidden)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden_size]` -> `[n, vocab_size]`, fp32."""
        return self.lm_head.logits(hidden)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy full tensors under Hugging Face names into this rank's shards; returns the names that were taken.

        Raises:
            KeyError: a name that this model does not know (MTP layers and, if tied, the head are skipped).
            ValueError: a tensor of another shape.
        """
        return self._names.load(pairs)
