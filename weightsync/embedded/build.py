"""From an `EngineConfig` to the loaded models and runners of one engine rank.

`worker.py` calls `plan_models` before it starts anything expensive (every wrong argument is refused there) and
`build_models` when its tensor-parallel group stands.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weightsync.embedded.config import ModelConfig, eagle3_config, resolve_config
from weightsync.embedded.drafts import Eagle3Draft, MtpDraft, aux_layers
from weightsync.embedded.loading import checkpoint_shapes, folder_names, init_random, load_folder
from weightsync.embedded.model import Target
from weightsync.embedded.parallel import TpGroup
from weightsync.embedded.speculative import Decoder
from weightsync.engine.runner import ModuleRunner
from weightsync.errors import ConfigError
from weightsync.manifest import dtype_from_name

__all__ = ["ModelPlan", "build_models", "make_runners", "plan_models"]

_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """What to build: shapes, and the folders that the weights come from (None: random)."""

    target: ModelConfig
    draft: ModelConfig | None
    """Of an EAGLE3 drafter."""
    mtp: bool
    folder: Path | None
    draft_folder: Path | None
    own_embedding: bool
    dtype: torch.dtype


def plan_models(
    model: str | Path | Mapping[str, Any], draft: str | Path | Mapping[str, Any] | None, dtype: str, tp: int
) -> ModelPlan:
    """Check an engine's model arguments (see `engine.EngineConfig`).

    Raises:
        ConfigError: unknown shape or folder, a draft that does not fit, a TP size that does not divide the heads.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(_DTYPES)}")
    target = resolve_config(model)
    folder = _folder(model)
    if target.is_eagle3:
        raise ConfigError("model is an EAGLE3 drafter: pass it as draft=, and its target as model=")
    if tp not in (1, 2) or target.num_heads % tp or target.intermediate_size % tp:
        raise ConfigError(f"tp={tp}: expected 1 or 2, a divisor of {target.num_heads} heads")
    mtp = draft == "mtp"
    draft_config = None
    own_embedding = False
    if mtp and not target.num_mtp_layers:
        if folder is not None:
            raise ConfigError(f"draft='mtp': {folder} has no MTP layers (num_nextn_predict_layers in its config.json)")
        target = dataclasses.replace(target, num_mtp_layers=1)
    elif draft is not None and not mtp:
        draft_config = eagle3_config(target) if draft == "eagle3" else resolve_config(draft)
        if not draft_config.is_eagle3:
            raise ConfigError(f"draft {str(draft)!r} is a {draft_config.family} model, expected an EAGLE3 drafter")
        sizes = (draft_config.vocab_size, draft_config.hidden_size, draft_config.target_hidden_size)
        if sizes != (target.vocab_size, target.hidden_size, target.hidden_size):
            raise ConfigError(
                f"draft: vocabulary, hidden size and target hidden size are {sizes}, the target's vocabulary is "
                f"{target.vocab_size} and its hidden size {target.hidden_size}"
            )
    draft_folder = None if draft is None or draft in ("mtp", "eagle3") else _folder(draft)
    if draft_folder is not None:
        own_embedding = any(name.endswith("embed_tokens.weight") for name in folder_names(draft_folder))
    return ModelPlan(
        target=target,
        draft=draft_config,
        mtp=mtp,
        folder=folder,
        draft_folder=draft_folder,
        own_embedding=own_embedding,
        dtype=dtype_from_name(dtype),
    )


def build_models(plan: ModelPlan, tp: TpGroup, *, device: torch.device, seed: int) -> Decoder:
    """Build and load the models of one rank.

    Raises:
        ConfigError: a folder that is incomplete or does not fit.
    """
    capture = aux_layers(plan.draft, plan.target.num_layers) if plan.draft is not None else ()
    target = Target(plan.target, tp, dtype=plan.dtype, device=device, capture=capture)
    draft: MtpDraft | Eagle3Draft | None = None
    if plan.mtp:
        draft = MtpDraft(target)
    elif plan.draft is not None:
        draft = Eagle3Draft(plan.draft, target, own_embedding=plan.own_embedding)
    needed = checkpoint_shapes(plan.target)
    if plan.folder is None:
        init_random(target, seed=seed, rank=tp.rank)
        if draft is not None:
            init_random(draft, seed=seed, rank=tp.rank)
    elif isinstance(draft, MtpDraft):
        load_folder(plan.folder, {"target": target, "draft": draft}, needed)
    else:
        load_folder(plan.folder, {"target": target}, {"target": needed["target"]})
    if plan.draft is not None and plan.draft_folder is not None and draft is not None:
        names = set(checkpoint_shapes(plan.draft)["draft"]) - {"t2d"}
        load_folder(plan.draft_folder, {"draft": draft}, {"draft": names}, canonical=_eagle3_name)
    if draft is not None:
        draft.refresh_derived()
    return Decoder(target, draft)


def make_runners(decoder: Decoder) -> list[ModuleRunner]:
    """The runners of one rank: the target, and the draft with the roles that fit its kind."""
    runners = [ModuleRunner("target", decoder.target, roles=("target",))]
    draft = decoder.draft
    if isinstance(draft, MtpDraft):
        runners.append(ModuleRunner("draft[0]", draft, roles=("draft", "target"), on_finish=draft.refresh_derived))
    elif isinstance(draft, Eagle3Draft):
        runners.append(ModuleRunner("draft[0]", draft, roles=("draft",), on_finish=draft.refresh_derived))
    return runners


def _folder(model: str | Path | Mapping[str, Any]) -> Path | None:
    if isinstance(model, Mapping):
        return None
    path = Path(model)
    return path if (path / "config.json").is_file() else None


def _eagle3_name(name: str) -> str:
    """The spelling of `checkpoint_shapes` for either dialect of an EAGLE3 checkpoint."""
    return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))
