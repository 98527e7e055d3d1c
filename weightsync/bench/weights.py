"""What the bench's trainer publishes: made-up weights whose tokens are known, or a Hugging Face folder.

`harness` asks `model_configs` for the shapes, trainer ranks ask `load` for tensors by role and `nudge` them before each
publish, so that every publish moves other bytes than the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from weightsync.bench.config import BenchConfig
from weightsync.bench.servers import servable
from weightsync.embedded.config import ModelConfig, eagle3_config, resolve_config
from weightsync.embedded.known import known_argmax
from weightsync.embedded.loading import read_folder
from weightsync.errors import ConfigError
from weightsync.manifest import TARGET

__all__ = ["DRAFT", "dtype_of", "load", "model_configs", "nudge"]

DRAFT = "draft"
_MTP_FAMILIES = ("mimo",)
"""Families that Megatron's rules know with MTP layers."""


def model_configs(config: BenchConfig) -> tuple[ModelConfig, ModelConfig | None]:
    """The target (with an MTP layer, if that is the draft), and the EAGLE3 drafter, if that is.

    Raises:
        ConfigError: unknown model, or a folder without the draft asked for.
    """
    target = resolve_config(config.model)
    if config.draft == "mtp" and not target.num_mtp_layers:
        if config.folder is not None:
            raise ConfigError(f"--draft mtp: {config.model!r} has no MTP layers (num_nextn_predict_layers)")
        target = dataclasses.replace(target, num_mtp_layers=1)
    if config.draft != "mtp":
        target = dataclasses.replace(target, num_mtp_layers=0)
    if config.trainer.kind == "megatron" and config.draft == "mtp" and target.family not in _MTP_FAMILIES:
        # Same sizes, MiMo's layers (Qwen2's with MTP): no trainer's rules know Qwen3 with MTP layers.
        target = dataclasses.replace(target, family=_MTP_FAMILIES[0])
    if config.engine != "embedded" and config.folder is None:
        target = servable(config.engine, config.draft, target)
    stages = config.trainer.pp
    if target.num_layers % stages:
        if config.folder is not None:
            raise ConfigError(
                f"--trainer pp={stages}: the {target.num_layers} layers of {config.model!r} do not divide"
            )
        # A built-in shape of a handful of layers may be made one longer: its weights are made up anyway.
        target = dataclasses.replace(target, num_layers=-(-target.num_layers // stages) * stages)
    for tp in (config.trainer.tp, config.engine_tp):
        if target.num_kv_heads % tp:
            raise ConfigError(
                f"tensor parallel size {tp}: the {target.num_kv_heads} KV heads of {config.model!r} do not divide"
            )
    return target, eagle3_config(target) if config.draft == "eagle3" else None


def load(config: BenchConfig, *, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """role -> Hugging Face name -> full tensor, complete. A folder has no EAGLE3 drafter: it gets a made-up one.

    Raises:
        ConfigError: the folder cannot be read.
    """
    target, eagle3 = model_configs(config)
    kind = None if config.draft == "none" else config.draft
    if config.folder is None:
        dtype = dtype_of(config)
        return known_argmax(target, seed=seed, draft=kind, draft_config=eagle3, dtype=dtype)  # type: ignore[arg-type]
    out: dict[str, dict[str, torch.Tensor]] = {TARGET: {}}
    for name, tensor in read_folder(config.folder):
        role = DRAFT if ".mtp_layers." in name else TARGET
        if role == TARGET or kind == "mtp":
            out.setdefault(role, {})[name] = tensor
    if target.tie_word_embeddings:
        out[TARGET].pop("lm_head.weight", None)
    if eagle3 is not None:
        made_up = known_argmax(target, seed=seed, draft="eagle3", draft_config=eagle3, dtype=dtype_of(config))
        out[DRAFT] = made_up[DRAFT]
    return out


def dtype_of(config: BenchConfig) -> torch.dtype:
    """Of made-up weights bfloat16 (SGLang on a CPU: float32), of a folder that of its first floating-point tensor."""
    if config.folder is None:
        return torch.float32 if config.engine == "sglang" and not torch.cuda.is_available() else torch.bfloat16
    return next((t.dtype for _, t in read_folder(config.folder) if t.is_floating_point()), torch.bfloat16)


def nudge(tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Give one matrix of attention, which does not reach the tokens of made-up weights, new values in place."""
    name = next(n for n in tensors if n.endswith(("q_proj.weight", "linear_qkv.weight")))
    with torch.no_grad():
        tensors[name].fill_(version % 128 / 1024)
