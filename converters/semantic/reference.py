"""Decoders and their MTP layers in plain fp64, on Hugging Face tensors: the witness where Transformers has none.

It shares no code and no tensor layout with Megatron-Core, with Transformers or with the rules. MTP layer k (from 1)
takes the hidden state of depth k - 1 at position i, after its final norm, and the embedding of token i + k:

    x = join(norm(embedding(token_{i + k})), norm(hidden_i))
    hidden = final_norm(decoder_layer(x))
    logits = head(hidden)

`join` is the published order of each family: MiMo's input_proj has the hidden state first, all others the embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import linear, pad, silu, softplus

__all__ = ["has_reference", "reference_logits"]

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Mtp:
    """Names of an MTP layer: its own tensors under `prefix`, its decoder layer under `layer`; {i}, {j} as in tables."""

    prefix: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str
    hidden_first: bool = False
    count: str = "num_nextn_predict_layers"


_NUMBERED_ON = _Mtp(
    prefix="model.layers.{j}.",
    layer="model.layers.{j}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    join="eh_proj",
    final_norm="shared_head.norm",
)
_QWEN = _Mtp(
    prefix="mtp.",
    layer="mtp.layers.{i}.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    join="fc",
    final_norm="norm",
)
_MTP = {
    "mimo": _Mtp(
        prefix="model.mtp_layers.{i}.",
        layer="model.mtp_layers.{i}.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        join="input_proj",
        final_norm="final_layernorm",
        hidden_first=True,
    ),
    "deepseek_v3": _NUMBERED_ON,
    "glm4_moe": _NUMBERED_ON,
    "qwen3_next": _QWEN,
    "qwen3_5_moe_text": dataclasses.replace(_QWEN, count="mtp_num_hidden_layers"),
    "qwen3_5_text": dataclasses.replace(_QWEN, count="mtp_num_hidden_layers"),
}


def has_reference(config: Config) -> bool:
    """Whether `reference_logits` knows the model type."""
    return config.get("model_type") in _MTP


def reference_logits(tensors: Mapping[str, torch.Tensor], config: Config, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits [batch, seq, vocabulary] in fp64 of the main head, then of each MTP depth, for `tokens` [batch, seq].

    Depth k is valid up to position `seq - k`. `config` is a config.json, `tensors` those of its folder, unquantised.
    """
    model = _Model({name: tensor.double() for name, tensor in tensors.items()}, config)
    mtp = _MTP[config["model_type"]]
    hidden = model.embeddings[tokens]
    for i in range(config["num_hidden_layers"]):
        hidden = model.layer(f"model.layers.{i}.", hidden)
    hidden = model.norm("model.norm.weight", hidden)
    logits = [linear(hidden, model.head)]
    for i in range(config.get(mtp.count) or 0):
        at = {"i": i, "j": config["num_hidden_layers"] + i}
        prefix = mtp.prefix.format(**at)
        ahead = model.embeddings[pad(tokens[:, i + 1 :], (0, i + 1))]
        parts = [
            model.norm(f"{prefix}{mtp.embedding_norm}.weight", ahead),
            model.norm(f"{prefix}{mtp.hidden_norm}.weight", hidden),
        ]
        joined = torch.cat(parts[::-1] if mtp.hidden_first else parts, -1)
        hidden = model.layer(mtp.layer.format(**at), linear(joined, model.t[f"{prefix}{mtp.join}.weight"]))
        hidden = model.norm(f"{prefix}{mtp.final_norm}.weight", hidden)
        logits.append(linear(hidden, model.head))
    return logits


class _Model:
    """Layers whose kind is told by the tensors that they have."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: Config) -> None:
        self.t = tensors
        self.config = config
        self.embeddings = tensors["model.embed_tokens.weight"]
        self.head = self.embeddings if config.get("tie_word_embeddings") else tensors["lm_head.weight"]
        # Qwen3-Next and its successors store norms less one.
        self.norm_offset = 1.0 if str(config["model_type"]).startswith(("qwen3_next", "qwen3_5")) else 0.0

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._rms(x) * (self.t[name] + self.norm_offset)

    def _rms(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def layer(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(prefix + "input_layernorm.weight", x)
        if prefix + "linear_attn.out_proj.weight" in self.t:
            x = x + self.delta_net(prefix + "linear_attn.", y)
        elif prefix + "self_attn.kv_b_proj.weight" in self.t:
            x = x + self.latent_attention(prefix + "self_attn.", y)
        else:
            x = x + self.attention(prefix + "self_attn.", y)
        y = self.norm(prefix + "post_attention_layernorm.weight", x)
        sparse = prefix + "mlp.gate.weight" in self.t
        return x + (self.experts(prefix + "mlp.", y) if sparse else self.mlp(prefix + "mlp.", y))

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.t[name + ".weight"], self.t.get(name + ".bias"))

    def mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        return self.project(
            prefix + "down_proj", silu(self.project(prefix + "gate_proj", x)) * self.project(prefix + "up_proj", x)
        )

    def experts(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        chosen, weights = self.route(prefix, flat)
        out = torch.zeros_like(flat)
        for token in range(flat.shape[0]):
            for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                out[token] += weight * self.mlp(f"{prefix}experts.{expert}.", flat[token])
        if prefix + "shared_experts.up_proj.weight" in self.t:
            out = out + self.mlp(prefix + "shared_experts.", flat)
        if prefix + "shared_expert.up_proj.weight" in self.t:
            gate = torch.sigmoid(self.project(prefix + "shared_expert_gate", flat))
            out = out + gate * self.mlp(prefix + "shared_expert.", flat)
        return out.view_as(x)

    def route(self, prefix: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(experts, weights), each [tokens, k]."""
        logits = linear(x, self.t[prefix + "gate.weight"])
        k = self.config["num_experts_per_tok"]
        bias = self.t.get(prefix + "gate.e_score_correction_bias")
        if bias is None:
            weights, chosen = logits.softmax(-1).topk(k, -1)
            if self.config.get("norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return chosen, weights
        scores = torch.sigmoid(logits)
        preferred = scores + bias
        if (groups := self.config.get("n_group") or 1) > 1:
            grouped = preferred.unflatten(-1, (groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(self.config["topk_group"], -1).indices
            kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
            preferred = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        chosen = preferred.topk(k, -1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * self.config.get("routed_scaling_factor", 1.0)

    def attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        dim = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        q, k, v = (self.project(f"{prefix}{name}_proj", x) for name in "qkv")
        gate = None
        if q.shape[-1] == 2 * self.config["num_attention_heads"] * dim:
            q, gate = q.unflatten(-1, (-1, 2, dim)).unbind(-2)
        q, k, v = (y if y.dim() == 4 else y.unflatten(-1, (-1, dim)) for y in (q, k, v))
        if prefix + "q_norm.weight" in self.t:
            q, k = (self.norm(f"{prefix}{name}_norm.weight", y) for name, y in (("q", q), ("k", k)))
        rotated = int(dim * _rope(self.config, "partial_rotary_factor", 1.0))
        theta = _rope(self.config, "rope_theta", 10000.0)
        q, k = (torch.cat((_rotate_halves(y[..., :rotated], theta), y[..., rotated:]), -1) for y in (q, k))
        out = _attend(q, k, v)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.project(prefix + "o_proj", out.flatten(-2))

    def latent_attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        nope, rope, theta = c["qk_nope_head_dim"], c["qk_rope_head_dim"], _rope(c, "rope_theta", 10000.0)
        if c.get("q_lora_rank"):
            compressed = self.norm(prefix + "q_a_layernorm.weight", self.project(prefix + "q_a_proj", x))
            q = self.project(prefix + "q_b_proj", compressed)
        else:
            q = self.project(prefix + "q_proj", x)
        q = q.unflatten(-1, (-1, nope + rope))
        compressed, k_rope = self.project(prefix + "kv_a_proj_with_mqa", x).split((c["kv_lora_rank"], rope), -1)
        kv = self.project(prefix + "kv_b_proj", self.norm(prefix + "kv_a_layernorm.weight", compressed))
        k, v = kv.unflatten(-1, (-1, nope + c["v_head_dim"])).split((nope, c["v_head_dim"]), -1)
        k_rope = _rotate_pairs(k_rope.unsqueeze(-2), theta).expand(*k.shape[:-1], rope)
        q = torch.cat((q[..., :nope], _rotate_pairs(q[..., nope:], theta)), -1)
        return self.project(prefix + "o_proj", _attend(q, torch.cat((k, k_rope), -1), v).flatten(-2))

    def delta_net(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """The gated delta rule, token by token."""
        q, k, v, z, b, a = self._delta_inputs(prefix, x)
        kernel = self.t[prefix + "conv1d.weight"].squeeze(1)  # [channels, width]
        joined = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
        windows = pad(joined, (0, 0, kernel.shape[1] - 1, 0)).unfold(1, kernel.shape[1], 1)
        mixed = silu((windows * kernel).sum(-1)).split([y[0, 0].numel() for y in (q, k, v)], -1)
        q, k, v = (m.view_as(y) for m, y in zip(mixed, (q, k, v), strict=True))
        q, k = (y / torch.sqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        per_key = v.shape[2] // k.shape[2]
        q, k = (y.repeat_interleave(per_key, 2) for y in (q / q.shape[-1] ** 0.5, k))
        decay = torch.exp(-self.t[prefix + "A_log"].exp() * softplus(a + self.t[prefix + "dt_bias"]))
        state = torch.zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1], dtype=x.dtype)
        out = []
        for i in range(x.shape[1]):
            state = state * decay[:, i, :, None, None]
            error = v[:, i] - torch.einsum("bhkv,bhk->bhv", state, k[:, i])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], error * torch.sigmoid(b[:, i])[..., None])
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
        gated = self._rms(torch.stack(out, 1)) * self.t[prefix + "norm.weight"] * silu(z)
        return self.project(prefix + "out_proj", gated.flatten(2))

    def _delta_inputs(self, prefix: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k [batch, seq, key heads, size], v, z [batch, seq, value heads, size], b, a [batch, seq, value heads]."""
        c = self.config
        groups, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv, per = c["linear_key_head_dim"], c["linear_value_head_dim"], heads // groups
        if prefix + "in_proj_qkvz.weight" in self.t:
            qkvz = self.project(prefix + "in_proj_qkvz", x).unflatten(-1, (groups, -1))
            q, k, v, z = qkvz.split((dk, dk, per * dv, per * dv), -1)
            b, a = self.project(prefix + "in_proj_ba", x).unflatten(-1, (groups, -1)).split((per, per), -1)
        else:
            q, k, v = self.project(prefix + "in_proj_qkv", x).split((groups * dk, groups * dk, heads * dv), -1)
            q, k = (y.unflatten(-1, (groups, dk)) for y in (q, k))
            z, b, a = (self.project(prefix + "in_proj_" + name, x) for name in "zba")
        v, z = (y.reshape(*x.shape[:2], heads, dv) for y in (v, z))
        return q, k, v, z, b.reshape(*x.shape[:2], heads), a.reshape(*x.shape[:2], heads)


def _rope(config: Config, key: str, default: float) -> float:
    value = (config.get("rope_parameters") or {}).get(key, config.get(key))
    return default if value is None else float(value)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention; [batch, seq, heads, size] each, of k and v perhaps fewer heads."""
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights: torch.Tensor = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _angles(x: torch.Tensor, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [seq, 1, size / 2] for `x` [batch, seq, heads, size]."""
    frequency = theta ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequency
    return angle.cos(), angle.sin()


def _rotate_halves(x: torch.Tensor, theta: float) -> torch.Tensor:
    cos, sin = _angles(x, theta)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _rotate_pairs(x: torch.Tensor, theta: float) -> torch.Tensor:
    cos, sin = _angles(x, theta)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
