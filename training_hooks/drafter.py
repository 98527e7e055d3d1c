"""A plain EAGLE3 drafter and one training step on captured states: enough to co-train a draft, not a framework.

    drafter = Eagle3Drafter(Eagle3Config(...), d2t)
    trainer = DrafterTrainer(drafter, embedding=embed_weight, head=lm_head_weight, publish=push)
    metrics = trainer.step(merged, tokens, supervised)       # after `Exchange.merge`, on the ranks that train the draft
    drafter.save(folder)                                     # Hugging Face layout: config.json, model.safetensors

Parameters carry their Hugging Face names. The unroll is what speculative decoding does: step 0 reads the target's
features under a causal mask, a later step reads the draft's own output and sees, besides the features' keys, those of
its own chain. The target's embedding and head are frozen replicas with storage of their own: training a draft can never
write into its target.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from training_hooks.alignment import Alignment, Layout, MTPTargets, mtp_targets
from training_hooks.capture import LayerRef, Rows
from training_hooks.eagle3 import DraftVocabulary, Eagle3Loss, eagle3_loss
from training_hooks.errors import CaptureError, SettingsError

__all__ = ["DrafterTrainer", "DrafterTraining", "Eagle3Config", "Eagle3Drafter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config:
    """Shape of a drafter. `layers`: the three states of the target that it reads, low to high."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerRef, LayerRef, LayerRef]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if any(ref.kind == "final_norm" for ref in self.layers):
            raise SettingsError("a drafter reads inputs or outputs of layers; the final norm is the teacher's")
        if self.num_heads % self.num_kv_heads:
            raise SettingsError(f"{self.num_heads} heads do not divide into {self.num_kv_heads} groups")

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json. Layer ids are of inputs, as engines count, and say so."""
        ids = [ref.canonical.index + (ref.canonical.kind == "output_of") for ref in self.layers]
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "layer_id_convention": "input_to"},
        }

    @staticmethod
    def from_json(obj: Mapping[str, Any]) -> Eagle3Config:
        """Inverse of `to_json`.

        Raises:
            SettingsError: layer ids without their convention.
        """
        eagle = obj.get("eagle_config") or {}
        kind = eagle.get("layer_id_convention")
        if kind not in ("input_to", "output_of"):
            raise SettingsError(
                f"config.json says {kind!r} for eagle_config.layer_id_convention: add 'input_to' or 'output_of', "
                "whichever its layer ids follow"
            )
        first, second, third = (LayerRef(kind, i) for i in eagle["eagle_aux_hidden_state_layer_ids"])
        return Eagle3Config(
            vocab_size=obj["vocab_size"],
            draft_vocab_size=obj["draft_vocab_size"],
            hidden_size=obj["hidden_size"],
            intermediate_size=obj["intermediate_size"],
            num_heads=obj["num_attention_heads"],
            num_kv_heads=obj["num_key_value_heads"],
            head_dim=obj["head_dim"],
            layers=(first, second, third),
            rms_norm_eps=obj["rms_norm_eps"],
            rope_theta=obj["rope_theta"],
        )


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.q_proj = nn.Linear(2 * size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, size, bias=False)

    def forward(self, x: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """`x` [b, s, 2h]; `past` are keys and values of earlier steps, of which this one is appended."""
        step, columns, dim = len(past), x.shape[1], self.config.head_dim
        q, k, v = (part(x).unflatten(-1, (-1, dim)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = self._rotary(step, columns, x)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = self.config.num_heads // self.config.num_kv_heads
        past.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        first = q @ past[0][0].transpose(-1, -2)
        causal = torch.ones(columns, columns, dtype=torch.bool, device=x.device).tril()
        own = [(q * keys).sum(-1, keepdim=True) for keys, _ in past[1:]]
        scores = torch.cat([first.masked_fill(~causal, float("-inf")), *own], -1) / math.sqrt(dim)
        weights = scores.softmax(-1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).to(x.dtype)
        out = weights[..., :columns] @ past[0][1]
        for i, (_, values) in enumerate(past[1:]):
            out = out + weights[..., columns + i, None] * values
        result: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _rotary(self, step: int, columns: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row t of step i stands for position t + i."""
        dim = self.config.head_dim
        inverse = self.config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim)
        angles = (torch.arange(columns, dtype=torch.float32, device=x.device) + step)[:, None] * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = _Norm(size, eps)
        self.hidden_norm = _Norm(size, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(size, eps)
        self.mlp = _Mlp(config)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        x = hidden + self.self_attn(x, past)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Drafter(nn.Module):
    """One EAGLE3 layer with its own output layer; `d2t` int64 [draft vocabulary] are offsets."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config, d2t: torch.Tensor) -> None:
        super().__init__()
        if d2t.numel() != config.draft_vocab_size:
            raise SettingsError(f"d2t has {d2t.numel()} entries, the draft vocabulary {config.draft_vocab_size}")
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", d2t.clone())
        self.register_buffer("t2d", DraftVocabulary(d2t, config.vocab_size).t2d)

    def unroll(self, features: torch.Tensor, embedded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Logits of every step, each [b, s, draft vocabulary].

        Args:
            features: [b, s, 3h], the target's states at every position, one right-padded sequence per row.
            embedded: per step i, embeddings [b, s, h] of the tokens i + 1 later than the row's.
        """
        hidden, out = self.fc(features), []
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in embedded:
            hidden = self.midlayer(step, hidden, past)
            out.append(self.lm_head(self.norm(hidden)))
        return out

    def save(self, folder: str | Path) -> None:
        """config.json and model.safetensors in `folder` (made if need be), names as engines load them."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "model.safetensors")

    @staticmethod
    def load(folder: str | Path) -> Eagle3Drafter:
        """Inverse of `save`."""
        from safetensors.torch import load_file

        config = Eagle3Config.from_json(json.loads((Path(folder) / "config.json").read_text()))
        tensors = load_file(Path(folder) / "model.safetensors")
        drafter = Eagle3Drafter(config, tensors["d2t"]).to(tensors["fc.weight"].dtype)
        drafter.load_state_dict(tensors)
        return drafter


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterTraining:
    """`steps`: length of the unroll. `every`: train and publish at every n-th call. `warmup`: optimizer steps."""

    lr: float = 1e-4
    weight_decay: float = 0.0
    max_norm: float = 1.0
    warmup: int = 0
    steps: int = 3
    every: int = 1
    loss: Eagle3Loss = field(default_factory=Eagle3Loss)

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.max_norm <= 0 or self.steps < 1 or self.every < 1 or self.warmup < 0:
            raise SettingsError("lr, max_norm, steps and every must be positive, warmup not negative")


class DrafterTrainer:
    """Optimizer, schedule and clip around a drafter. `embedding` and `head`: the target's, [vocabulary, h], copied.
    `group`: ranks that each train on other samples; gradients and token counts are summed over them. `publish`: called
    with the drafter after every optimizer step.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        config: DrafterTraining | None = None,
        group: dist.ProcessGroup | None = None,
        publish: Callable[[Eagle3Drafter], object] | None = None,
    ) -> None:
        self.drafter, self.config, self._group, self._publish = drafter, config or DrafterTraining(), group, publish
        self._vocabulary = DraftVocabulary(drafter.d2t, drafter.config.vocab_size)
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        warmup = self.config.warmup
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / (warmup + 1)))
        self._calls = 0
        self.refresh(embedding, head)

    def refresh(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Copy the target's embedding and head anew, after the target was trained."""
        self._embedding = embedding.detach().clone()
        self._head = head.detach().clone()

    def step(
        self,
        captured: Mapping[LayerRef, Rows],
        tokens: Mapping[int, torch.Tensor],
        supervised: Mapping[int, torch.Tensor],
    ) -> dict[str, float]:
        """One optimizer step on whole sequences; {} where `every` skips it.

        Args:
            captured: from `Exchange.merge`, the drafter's three layers and `final_norm`, every position of each sample.
            tokens: int64 [n] by sample. supervised: bool [n] by sample, token by token.

        Raises:
            CaptureError: rows and tokens do not fit.
        """
        self._calls += 1
        if (self._calls - 1) % self.config.every:
            return {}
        batch = _Batch(captured, tokens, supervised, self.drafter.config.layers, self.config.steps)
        dtype = self._head.dtype
        teacher, log_mass = self._vocabulary.teacher(batch.final.to(dtype) @ self._head.T)
        embedded = [functional.embedding(ids, self._embedding) for ids in batch.targets.input_ids]
        logits = self.drafter.unroll(batch.features.to(dtype), embedded)
        loss = eagle3_loss(logits, teacher, batch.targets, self.config.loss, teacher_log_mass=log_mass)
        self.optimizer.zero_grad(set_to_none=True)
        loss.numerator.backward()
        total = loss.tokens.clone()
        pairs = torch.stack(list(loss.report.values()))
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        if self._group is not None:
            for tensor in (total, pairs, *gradients):
                dist.all_reduce(tensor, group=self._group)
        for gradient in gradients:
            gradient.div_(total.clamp(min=1))
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_norm)
        self.optimizer.step()
        self._schedule.step()
        if self._publish is not None:
            self._publish(self.drafter)
        means = (pairs[:, 0] / pairs[:, 1].clamp(min=1)).tolist()
        return {**dict(zip(loss.report, means, strict=True)), "drafter_norm": float(norm), "tokens": float(total)}


class _Batch:
    """Captured rows as right-padded sequences: `features` [b, s, 3h], `final` [b, s, h], `targets` of the unroll."""

    features: torch.Tensor
    final: torch.Tensor
    targets: MTPTargets

    def __init__(
        self,
        captured: Mapping[LayerRef, Rows],
        tokens: Mapping[int, torch.Tensor],
        supervised: Mapping[int, torch.Tensor],
        layers: Sequence[LayerRef],
        steps: int,
    ) -> None:
        samples = sorted(tokens)
        lengths = [len(tokens[k]) for k in samples]
        wanted = [[k, i] for k, n in zip(samples, lengths, strict=True) for i in range(n)]
        refs = [ref.canonical for ref in (*layers, LayerRef("final_norm"))]
        for ref in refs:
            if ref not in captured or captured[ref].keys.tolist() != wanted:
                raise CaptureError(
                    f"captured rows of {ref} are not those of samples {samples[:5]}, every position in order: capture "
                    "whole sequences, and pass the tokens of the same step"
                )
        places = torch.tensor([[row, i] for row, n in enumerate(lengths) for i in range(n)])
        shape = (len(samples), max(lengths))

        def padded(values: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(*shape, *values.shape[1:], dtype=values.dtype)
            out[places[:, 0], places[:, 1]] = values
            return out

        *features, self.final = (padded(captured[ref].values) for ref in refs)
        self.features = torch.cat(features, -1)
        self.targets = mtp_targets(
            padded(torch.cat([tokens[k] for k in samples])),
            padded(torch.cat([supervised[k].bool() for k in samples])),
            layout=Layout.padded(lengths, shape[1]),
            depths=steps,
            mask_alignment=Alignment.TOKEN,
        )
