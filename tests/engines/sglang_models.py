"""Models for a real SGLang whose greedy tokens follow from their seed, as folders and as a source; float32.

Version v's weights have seed v. The tokens of a prompt tell which version generates, and acceptance whether the draft
is of the same one: 1.0 if it is, about 0 if not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.engines.folders import write_known
from weightsync.embedded.config import ModelConfig, eagle3_config, resolve_config
from weightsync.embedded.known import known_argmax, known_next
from weightsync.sources.state_dict import StateDictSource

PROMPT = [3, 4, 5]
VERSIONS = (1, 2, 3)
"""Whose tokens `token-map` has in its map."""

# mtp; token-map: likewise, with a map of hot tokens; eagle3; standalone: a small model of its own, with the same names
_ARGMAX = {"mtp": "mtp", "token-map": "mtp", "eagle3": "eagle3", "standalone": None}


def config(draft: str) -> ModelConfig:
    if _ARGMAX[draft] == "mtp":
        return resolve_config("tiny")
    if draft == "standalone":
        return resolve_config("tiny-llama")
    # An EAGLE3 drafter reads the inputs of three layers, of which SGLang cannot take the first one's.
    return dataclasses.replace(resolve_config("tiny-llama"), num_layers=4)


@functools.lru_cache(maxsize=8)
def weights(draft: str, version: int) -> dict[str, dict[str, torch.Tensor]]:
    """Role -> name -> tensor; `bfloat16` weights would generate wrong tokens under Triton's interpreter."""
    kind: Any = _ARGMAX[draft]
    out = known_argmax(config(draft), seed=version, draft=kind, dtype=torch.float32)
    if draft == "standalone":
        out["draft"] = known_argmax(_small(config(draft)), seed=version, dtype=torch.float32)["target"]
    return out


def _small(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, num_layers=1)


def expected(draft: str, version: int, n: int) -> list[int]:
    """What the target of `version` continues `PROMPT` with, from the definition of its weights alone."""
    kind: Any = _ARGMAX[draft]
    follows = known_next(config(draft), seed=version, draft=kind)
    tokens = [PROMPT[-1]]
    for _ in range(n):
        tokens.append(int(follows[tokens[-1]]))
    return tokens[1:]


def write_folders(folder: Path, draft: str, version: int) -> list[str]:
    """Write `version` as SGLang loads it from disk; returns the launch options that name it."""
    tensors, target = weights(draft, version), config(draft)
    options = ["--model-path", str(folder / "target"), "--speculative-num-steps", "1"]
    options += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
    if draft == "standalone":
        write_known(folder / "target", target, tensors["target"])
        write_known(folder / "draft", _small(target), tensors["draft"])
        return [
            *options,
            "--speculative-algorithm",
            "STANDALONE",
            "--speculative-draft-model-path",
            str(folder / "draft"),
        ]
    if draft == "token-map":
        hot = {t for v in VERSIONS for t in (*PROMPT, *expected(draft, v, 40))}
        torch.save(sorted(hot, reverse=True), folder / "hot.pt")
        options += ["--speculative-token-map", str(folder / "hot.pt")]
    if draft in ("mtp", "token-map"):
        # Transformers has no configuration class for MiMo, which is Qwen2 with an MTP layer.
        write_known(folder / "target", target, tensors["target"] | tensors["draft"], model_type="qwen2")
        return [*options, "--speculative-algorithm", "NEXTN"]
    write_known(folder / "target", target, tensors["target"])
    write_known(
        folder / "draft",
        eagle3_config(target),
        tensors["draft"],
        model_type="llama",
        architectures=["LlamaForCausalLMEagle3"],
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    )
    return [*options, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder / "draft")]


class Weights(StateDictSource):
    """The weights of `version`; `changes` replaces tensors by name."""

    def __init__(self, draft: str, version: int, changes: Mapping[str, torch.Tensor] | None = None) -> None:
        def role(name: str) -> dict[str, torch.Tensor]:
            tensors = weights(draft, version)[name]
            return tensors | {n: t for n, t in (changes or {}).items() if n in tensors}

        super().__init__(lambda: role("target"), drafts={"draft": lambda: role("draft")})
