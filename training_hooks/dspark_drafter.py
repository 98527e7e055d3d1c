"""A plain DSpark drafter: one pass drafts a whole block behind an anchor, a Markov head links its tokens.

    drafter = DSparkDrafter(DSparkConfig(...))
    DrafterTrainer(drafter, ...)                             # training_hooks.drafter
    ids, confidence = drafter.draft(features, token, embedding, head)
    drafter.save(folder)                                     # config.json (dspark_version), model.safetensors

The anchor a is the last known token; the target's states are known of the positions before it. Entry 0 of the block
reads the embedding of token a, the others a learned mask embedding; all entries see the states before a, and one
another. Entry k drafts token a + k + 1 through the target's own head, plus the Markov head's bias from the token before
it: teacher forced in training, the one just drafted in decoding. The folder's layout is our own, with a version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from training_hooks.capture import LayerRef
from training_hooks.drafter import Batch, DrafterTraining, LossOf
from training_hooks.dspark import (
    DSparkLoss,
    GatedMarkovHead,
    MarkovHead,
    RNNHead,
    block_targets,
    dspark_loss,
    sample_anchors,
)
from training_hooks.errors import SettingsError
from training_hooks.layers import Attention, DrafterShape, Mlp, Norm, load_folder, save_folder, softmax
from training_hooks.losses import DraftLoss

__all__ = ["DSparkConfig", "DSparkDrafter"]

ARCHITECTURE, VERSION = "DSparkDraftModel", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkConfig(DrafterShape):
    """Shape of a drafter. `block`: tokens per pass. `markov`: kind of its Markov head, of rank `markov_rank`."""

    num_layers: int
    block: int = 7
    markov: Literal["vanilla", "gated", "rnn"] = "gated"
    markov_rank: int = 64

    def __post_init__(self) -> None:
        DrafterShape.__post_init__(self)  # `super()` does not know a class with slots: it is made twice
        if self.markov not in ("vanilla", "gated", "rnn"):
            raise SettingsError(f"markov is {self.markov!r}: expected 'vanilla', 'gated' or 'rnn'")
        if min(self.block, self.num_layers, self.markov_rank) < 1:
            raise SettingsError("block, num_layers and markov_rank must be positive")

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json."""
        fields, own = self.shape_json("target_layer_ids")
        own |= {"block_size": self.block, "markov_head": self.markov, "markov_rank": self.markov_rank}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "dspark",
            "dspark_version": VERSION,
            "num_hidden_layers": self.num_layers,
            **fields,
            "dspark_config": own,
        }

    @staticmethod
    def from_json(obj: Mapping[str, Any]) -> DSparkConfig:
        """Inverse of `to_json`.

        Raises:
            SettingsError: another version of the layout, or layer ids without their convention.
        """
        if obj.get("dspark_version") != VERSION:
            raise SettingsError(
                f"config.json says dspark_version {obj.get('dspark_version')!r}, this library reads {VERSION}: save "
                "the drafter with the same release"
            )
        shape, own = DrafterShape.shape_of(obj, "dspark_config", "target_layer_ids"), obj["dspark_config"]
        return DSparkConfig(
            num_layers=obj["num_hidden_layers"],
            block=own["block_size"],
            markov=own["markov_head"],
            markov_rank=own["markov_rank"],
            **shape,
        )


class _Attention(Attention):
    def forward(
        self, x: torch.Tensor, context: torch.Tensor, rows: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """`x` [n, block, h]; `context` [b, s, h]; `rows`, `anchors` int64 [n]: whose positions before a block sees."""
        columns = context.shape[1]
        own = (anchors[:, None] + torch.arange(x.shape[1], device=x.device))[:, None]
        every = torch.arange(columns, device=x.device)
        q, (k, v) = self.queries(x, own), self.keys_values(x, own)
        context_k, context_v = (part[rows] for part in self.keys_values(context, every))
        seen = every < anchors[:, None, None, None]
        scores = torch.cat(
            [(q @ context_k.transpose(-1, -2)).masked_fill(~seen, float("-inf")), q @ k.transpose(-1, -2)], -1
        )
        weights = softmax(scores / math.sqrt(self.shape.head_dim))
        return self.merge(weights[..., :columns] @ context_v + weights[..., columns:] @ v)


class _Layer(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        self.self_attn = _Attention(config, size)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = Mlp(size, config.intermediate_size)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, rows: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rows, anchors)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Stack(nn.Module):
    """Only for the names: `model.layers.N`."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))


class DSparkDrafter(nn.Module):
    """The drafter of a target whose embedding and output head it uses, without holding them."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.layers) * size, size, bias=False)
        self.hidden_norm = Norm(size, eps)
        self.mask_embedding = nn.Parameter(torch.randn(size) * 0.02)
        self.model = _Stack(config)
        self.norm = Norm(size, eps)
        self.markov_head: MarkovHead
        if config.markov == "vanilla":
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
        else:
            kind = GatedMarkovHead if config.markov == "gated" else RNNHead
            self.markov_head = kind(config.vocab_size, config.markov_rank, size)
        self.confidence_head = nn.Linear(size, 1)

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        return self.config.layers

    def blocks(
        self, features: torch.Tensor, rows: torch.Tensor, anchors: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor:
        """States [n, block, h] of n blocks, for the head, the Markov head and the confidence head.

        Args:
            features: [b, s, k h], the target's states; of a block's row only the positions before its anchor are read.
            rows, anchors: int64 [n]. embedded: [n, h], the embedding of the token at each anchor.
        """
        context = self.hidden_norm(self.fc(features))
        masks = self.mask_embedding.expand(len(rows), self.config.block - 1, -1)
        x = torch.cat([embedded[:, None], masks], 1)
        for layer in self.model.layers:
            x = layer(x, context, rows, anchors)
        out: torch.Tensor = self.norm(x)
        return out

    def objective(self, batch: Batch, embedding: torch.Tensor, head: torch.Tensor, training: DrafterTraining) -> LossOf:
        """See `training_hooks.drafter.Drafter`; the loss is `DSparkLoss`, over `training.anchors` blocks per sample,
        drawn anew for every update."""
        config = training.loss or DSparkLoss()
        if not isinstance(config, DSparkLoss):
            raise SettingsError(f"a DSpark drafter is trained with DSparkLoss, not {type(config).__name__}")
        features, block = batch.features.to(head.dtype), self.config.block
        teacher = batch.final.to(head.dtype) @ head.T

        def loss() -> DraftLoss:
            parts, rows, anchors, keep = [], [], [], []
            for i, (tokens, supervised) in enumerate(zip(batch.tokens, batch.supervised, strict=True)):
                own = sample_anchors(supervised, count=training.anchors, block=block)
                kept = torch.ones(len(own), dtype=torch.bool)
                if i == 0 and not len(own):
                    # A rank without any anchor takes part in the sums all the same, with a block that does not count.
                    own, kept = own.new_zeros(1), torch.zeros(1, dtype=torch.bool)
                parts.append(block_targets(tokens, supervised, own, block=block, keep=kept))
                rows.append(torch.full_like(own, i))
                anchors.append(own)
                keep.append(kept)
            row, anchor = torch.cat(rows), torch.cat(anchors)
            hidden = self.blocks(features, row, anchor, functional.embedding(batch.tokens[row, anchor], embedding))
            previous = torch.cat([p.previous for p in parts])
            return dspark_loss(
                hidden @ head.T + self.markov_head(previous, hidden),
                teacher[row[:, None], torch.cat([p.teacher_position for p in parts])],
                torch.cat([p.labels for p in parts]),
                torch.cat([p.mask for p in parts]),
                config,
                confidence_logits=self.confidence_head(hidden)[..., 0] if config.confidence else None,
                block_keep_mask=torch.cat(keep),
            )

        return loss

    @torch.no_grad()
    def draft(
        self, features: torch.Tensor, token: int, embedding: torch.Tensor, head: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [block], [block]): tokens drafted greedily behind `token`, and the predicted probability that each is
        accepted. `features` [n, k h]: the target's states at the n positions before it."""
        zero = torch.zeros(1, dtype=torch.int64)
        states = features[None] if len(features) else features.new_zeros(1, 1, features.shape[1])
        hidden = self.blocks(states, zero, zero + len(features), embedding[token][None])
        logits, ids = hidden @ head.T, [token]
        for k in range(self.config.block):
            bias = self.markov_head(torch.tensor([ids]), hidden[:, : k + 1])
            ids.append(int((logits[0, k] + bias[0, k]).argmax()))
        return torch.tensor(ids[1:]), torch.sigmoid(self.confidence_head(hidden)[0, :, 0])

    def save(self, folder: str | Path) -> None:
        """config.json and model.safetensors in `folder` (made if need be)."""
        save_folder(folder, self.config.to_json(), self.state_dict())

    @staticmethod
    def load(folder: str | Path) -> DSparkDrafter:
        """Inverse of `save`.

        Raises:
            SettingsError: another version of the layout.
        """
        config, tensors = load_folder(folder)
        drafter = DSparkDrafter(DSparkConfig.from_json(config)).to(tensors["fc.weight"].dtype)
        drafter.load_state_dict(tensors)
        return drafter
