"""Models for a real vLLM whose greedy tokens follow from their seed, as folders and as sources.

Version v's weights have seed v. The tokens of a prompt tell which version generates, and acceptance whether the draft
is of the same one: 1.0 if it is, about 0 if not. Used by the tests, in pytest and in the engine's own environment.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from tests.engines.folders import write_known
from weightsync.embedded.config import ModelConfig, eagle3_config, resolve_config
from weightsync.embedded.known import known_argmax, known_next
from weightsync.sources.state_dict import StateDictSource

PROMPT = [3, 4, 5]
# vLLM's Qwen2 knows no head_dim of its own, and its attention on the CPU has none below 32.
SIZES = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
SPECULATION = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    "eagle": {"method": "eagle", "num_speculative_tokens": 2},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 2},
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
}


def config(draft: str) -> ModelConfig:
    """The target's shape. The one without a draft ties its output layer to the embedding."""
    shape = resolve_config("tiny" if draft == "mtp" else "tiny-llama")
    return dataclasses.replace(shape, **SIZES, tie_word_embeddings=draft == "ngram")


@functools.lru_cache(maxsize=8)
def weights(draft: str, version: int) -> dict[str, dict[str, torch.Tensor]]:
    """Role -> name -> tensor."""
    target = config(draft)
    if draft in ("mtp", "eagle3"):
        return known_argmax(target, seed=version, draft=draft)
    out = known_argmax(target, seed=version)
    if draft == "eagle":
        out["draft"] = _eagle(target, version, out["target"])
    return out


def _eagle(target: ModelConfig, seed: int, of_target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One decoder layer without residual branches; `fc` passes on the token's embedding, scaled as the target's norm.

    Embedding and output layer are the target's, so that what the draft proposes is what the target generates.
    """
    g = torch.Generator().manual_seed(seed)
    hidden, heads = target.hidden_size, target.num_heads * target.head_dim

    def noise(*shape: int) -> torch.Tensor:
        return torch.empty(shape).uniform_(-0.3, 0.3, generator=g).bfloat16()

    layer = {
        "self_attn.q_proj.weight": noise(heads, hidden),
        "self_attn.k_proj.weight": noise(heads, hidden),
        "self_attn.v_proj.weight": noise(heads, hidden),
        "self_attn.o_proj.weight": torch.zeros(hidden, heads).bfloat16(),
        "mlp.gate_proj.weight": noise(target.intermediate_size, hidden),
        "mlp.up_proj.weight": noise(target.intermediate_size, hidden),
        "mlp.down_proj.weight": torch.zeros(hidden, target.intermediate_size).bfloat16(),
        "post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
    }
    scale = torch.diag(of_target["model.norm.weight"].float()).bfloat16()
    fc = torch.cat([scale, torch.zeros(hidden, hidden).bfloat16()], 1)
    return {**{f"layers.0.{name}": t for name, t in layer.items()}, "fc.weight": fc}


def expected(draft: str, version: int, n: int, prompt: list[int] = PROMPT) -> list[int]:
    """What the target of `version` continues a prompt with, from the definition of its weights alone."""
    follows = known_next(config(draft), seed=version, draft=draft if draft in ("mtp", "eagle3") else None)
    tokens = [prompt[-1]]
    for _ in range(n):
        tokens.append(int(follows[tokens[-1]]))
    return tokens[1:]


def write_folders(folder: Path, draft: str, version: int) -> tuple[Path, dict[str, object]]:
    """Write `version` as vLLM loads it from disk. Returns the target's folder and the speculative config."""
    tensors, target = weights(draft, version), config(draft)
    speculation: dict[str, object] = dict(SPECULATION[draft])
    path = folder / "target"
    if draft == "mtp":
        # vLLM has no configuration class for MiMo.
        write_known(path, target, tensors["target"] | tensors["draft"], model_type="qwen2")
        return path, speculation
    write_known(path, target, tensors["target"])
    if "draft" in tensors:
        shape = eagle3_config(target) if draft == "eagle3" else dataclasses.replace(target, num_layers=1)
        name = "LlamaForCausalLMEagle3" if draft == "eagle3" else "EagleLlamaForCausalLM"
        write_known(folder / "draft", shape, tensors["draft"], architectures=[name])
        speculation["model"] = str(folder / "draft")
    return path, speculation


class Weights(StateDictSource):
    """The weights of `version`: `changed` replaces tensors, `dropped` leaves some out; `at[i]` is called before tensor
    number i is handed out."""

    def __init__(self, draft: str, version: int = 1) -> None:
        self.draft, self.version = draft, version
        self.changed: dict[tuple[str, str], torch.Tensor] = {}
        self.dropped: set[tuple[str, str]] = set()
        self.at: dict[int, object] = {}
        drafts = {"draft": lambda: self._role("draft")} if "draft" in weights(draft, version) else {}
        super().__init__(lambda: self._role("target"), drafts=drafts)

    def _role(self, role: str) -> dict[str, torch.Tensor]:
        mine = {name: t for (r, name), t in self.changed.items() if r == role}
        held = weights(self.draft, self.version)[role] | mine
        return {name: t for name, t in held.items() if (role, name) not in self.dropped}

    def stream(self, roles, timeline):  # type: ignore[no-untyped-def]
        for i, tensor in enumerate(super().stream(roles, timeline)):
            if i in self.at:
                self.at.pop(i)()  # type: ignore[operator]
            yield tensor
