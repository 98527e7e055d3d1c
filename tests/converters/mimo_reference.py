"""MiMo in plain fp64, from the formulas of its model card: a Qwen2 decoder with MTP layers, on Hugging Face tensors.

A witness: it shares no code and no tensor layout with Megatron-Core or with our rules. MTP layer k (from 1) takes the
hidden state of depth k - 1 at position i and the embedding of token i + k:

    x = input_proj(concat(hidden_layernorm(hidden_i), token_layernorm(embedding(token_{i + k}))))
    hidden = final_layernorm(decoder_layer(x));  logits = lm_head(hidden)
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


def mimo_logits(tensors, config, tokens):
    """Logits of the main head, then of each MTP depth; depth k is valid up to position `seq - k`."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    eps = config["rms_norm_eps"]
    embeddings = t["model.embed_tokens.weight"]
    head = embeddings if config["tie_word_embeddings"] else t["lm_head.weight"]
    hidden = embeddings[tokens]
    for i in range(config["num_hidden_layers"]):
        hidden = decoder_layer(t, f"model.layers.{i}.", config, hidden)
    hidden = rms_norm(hidden, t["model.norm.weight"], eps)
    logits = [linear(hidden, head)]
    for k in range(config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.mtp_layers.{k}."
        ahead = torch.nn.functional.pad(tokens[:, k + 1 :], (0, k + 1))
        hidden = torch.cat(
            (
                rms_norm(hidden, t[prefix + "hidden_layernorm.weight"], eps),
                rms_norm(embeddings[ahead], t[prefix + "token_layernorm.weight"], eps),
            ),
            dim=-1,
        )
        hidden = decoder_layer(t, prefix, config, linear(hidden, t[prefix + "input_proj.weight"]))
        hidden = rms_norm(hidden, t[prefix + "final_layernorm.weight"], eps)
        logits.append(linear(hidden, head))
    return logits


def rms_norm(x, weight, eps):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def decoder_layer(t, prefix, config, x):
    eps = config["rms_norm_eps"]
    x = x + attention(t, prefix + "self_attn.", config, rms_norm(x, t[prefix + "input_layernorm.weight"], eps))
    y = rms_norm(x, t[prefix + "post_attention_layernorm.weight"], eps)
    gate, up = (linear(y, t[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + linear(silu(gate) * up, t[prefix + "mlp.down_proj.weight"])


def attention(t, prefix, config, x):
    batch, seq, _ = x.shape
    q, k, v = (
        linear(x, t[f"{prefix}{name}_proj.weight"], t[f"{prefix}{name}_proj.bias"])
        .view(batch, seq, -1, config["head_dim"])
        .transpose(1, 2)
        for name in "qkv"
    )
    q, k = rotate(q, config["rope_theta"]), rotate(k, config["rope_theta"])
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-1, -2) / config["head_dim"] ** 0.5
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return linear(out.transpose(1, 2).reshape(batch, seq, -1), t[prefix + "o_proj.weight"])


def rotate(x, theta):
    seq, dim = x.shape[-2:]
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(seq, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
