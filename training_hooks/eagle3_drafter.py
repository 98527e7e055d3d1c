"""A plain EAGLE3 drafter: one layer that reads three states of its target and drafts token by token.

    drafter = Eagle3Drafter(Eagle3Config(...), d2t)
    DrafterTrainer(drafter, ...)                             # training_hooks.drafter
    drafter.save(folder)                                     # Hugging Face layout: config.json, model.safetensors

Parameters carry their Hugging Face names. The unroll is what speculative decoding does: step 0 reads the target's
features under a causal mask, a later step reads the draft's own output and sees, besides the features' keys, those of
its own chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from training_hooks.capture import LayerRef
from training_hooks.drafter import Batch, DrafterTraining, LossOf
from training_hooks.eagle3 import DraftVocabulary, Eagle3Loss, eagle3_loss
from training_hooks.errors import SettingsError
from training_hooks.layers import Attention, DrafterShape, Mlp, Norm, load_folder, save_folder, softmax
from training_hooks.losses import DraftLoss

__all__ = ["Eagle3Config", "Eagle3Drafter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config(DrafterShape):
    """Shape of a drafter; it reads three states of its target."""

    draft_vocab_size: int
    layers: tuple[LayerRef, LayerRef, LayerRef]

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json."""
        fields, own = self.shape_json("eagle_aux_hidden_state_layer_ids")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.hidden_size,
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            **fields,
            "eagle_config": own,
        }

    @staticmethod
    def from_json(obj: Mapping[str, Any]) -> Eagle3Config:
        """Inverse of `to_json`.

        Raises:
            SettingsError: layer ids without their convention.
        """
        shape = DrafterShape.shape_of(obj, "eagle_config", "eagle_aux_hidden_state_layer_ids")
        return Eagle3Config(draft_vocab_size=obj["draft_vocab_size"], **shape)


class _Attention(Attention):
    def forward(self, x: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """`x` [b, s, 2h]; `past` are keys and values of earlier steps, of which this one is appended."""
        columns = x.shape[1]
        # Row t of step i stands for position t + i.
        positions = torch.arange(columns, device=x.device) + len(past)
        q = self.queries(x, positions)
        past.append(self.keys_values(x, positions))
        first = q @ past[0][0].transpose(-1, -2)
        causal = torch.ones(columns, columns, dtype=torch.bool, device=x.device).tril()
        own = [(q * keys).sum(-1, keepdim=True) for keys, _ in past[1:]]
        scores = torch.cat([first.masked_fill(~causal, float("-inf")), *own], -1) / math.sqrt(self.shape.head_dim)
        weights = softmax(scores)
        out = weights[..., :columns] @ past[0][1]
        for i, (_, values) in enumerate(past[1:]):
            out = out + weights[..., columns + i, None] * values
        return self.merge(out)


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        self.hidden_norm = Norm(size, eps)
        self.self_attn = _Attention(config, 2 * size)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = Mlp(size, config.intermediate_size)

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
        self.layers = config.layers
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
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

    def objective(self, batch: Batch, embedding: torch.Tensor, head: torch.Tensor, training: DrafterTraining) -> LossOf:
        """See `training_hooks.drafter.Drafter`; the loss is `Eagle3Loss`, over `training.steps` steps."""
        config = training.loss or Eagle3Loss()
        if not isinstance(config, Eagle3Loss):
            raise SettingsError(f"an EAGLE3 drafter is trained with Eagle3Loss, not {type(config).__name__}")
        targets, dtype = batch.targets(training.steps), head.dtype
        vocabulary = DraftVocabulary(self.d2t, self.config.vocab_size)
        teacher, log_mass = vocabulary.teacher(batch.final.to(dtype) @ head.T)
        embedded = [functional.embedding(ids, embedding) for ids in targets.input_ids]

        def loss() -> DraftLoss:
            logits = self.unroll(batch.features.to(dtype), embedded)
            return eagle3_loss(logits, teacher, targets, config, teacher_log_mass=log_mass)

        return loss

    def save(self, folder: str | Path) -> None:
        """config.json and model.safetensors in `folder` (made if need be), names as engines load them."""
        save_folder(folder, self.config.to_json(), self.state_dict())

    @staticmethod
    def load(folder: str | Path) -> Eagle3Drafter:
        """Inverse of `save`."""
        config, tensors = load_folder(folder)
        drafter = Eagle3Drafter(Eagle3Config.from_json(config), tensors["d2t"]).to(tensors["fc.weight"].dtype)
        drafter.load_state_dict(tensors)
        return drafter
