"""SGLang's releases, by what the bridge can do in their scheduler processes and what of their internals it relies on.

`ROWS` and `PROBES` are the table of `weightsync.engines.capabilities`. The bridge reaches into the scheduler, so the
last row is closed: later releases are refused until somebody has looked, or the engine's environment opts in.
`INTERNALS` says what the bridge touches in a row's releases; `plugin.install` checks the patch point before it does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from weightsync.engines.capabilities import OPT_IN, Probe, Row, find_row
from weightsync.errors import UnsupportedError

__all__ = [
    "BACKEND",
    "INTERNALS",
    "NO_PARALLELISM",
    "PROBES",
    "ROWS",
    "STOCK",
    "Internals",
    "internals_for",
    "stock_row",
]

BACKEND = "weightsync"
"""What the bridge answers to in `init_weights_update_group(backend=...)`; other servers refuse the name at once."""

_SRT = "sglang/srt/"
_UPDATER = f"{_SRT}managers/scheduler_components/weight_updater.py"

PROBES: Mapping[str, Probe] = {
    "scheduler mixin": Probe(
        files=(f"{_SRT}managers/scheduler_update_weights_mixin.py",), texts=("class SchedulerUpdateWeightsMixin",)
    ),
    "updater manager": Probe(files=(_UPDATER,), texts=("class SchedulerWeightUpdaterManager",)),
    "external model package": Probe(files=(f"{_SRT}models/registry.py",), texts=("SGLANG_EXTERNAL_MODEL_PACKAGE",)),
    "plugins": Probe(files=(f"{_SRT}plugins/__init__.py",), texts=("def load_plugins(",)),
    "request intake": Probe(
        files=(f"{_SRT}managers/scheduler.py",), texts=("def process_input_requests(self, recv_reqs",)
    ),
    "retracting pause": Probe(files=(f"{_SRT}managers/scheduler.py",), texts=('== "retract"', '"retract")')),
    "mtp step filter": Probe(files=(f"{_SRT}model_loader/loader.py",), texts=("def _filter_mtp_weights(",)),
    "spec v1 workers": Probe(files=(f"{_SRT}speculative/eagle_worker.py",)),
    "spec v2 workers": Probe(files=(f"{_SRT}speculative/eagle_worker_v2.py",)),
    "own sessions": Probe(files=(_UPDATER,), texts=("def begin_weight_update(",)),
    "selector": Probe(files=(_UPDATER,), texts=("def _parse_runner_selector(",)),
}

_WIDENING = frozenset({(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.int32, torch.int64)})
"""Its loaders convert to whatever the parameter is. Only casts that keep every value are declared."""

_HOW = "a bridge in each scheduler process loads target and drafts from one receive"
_ALWAYS = frozenset({"external model package", "mtp step filter", "request intake", "retracting pause"})
_OLD = _ALWAYS | {"scheduler mixin"}
_NEW = _ALWAYS | {"updater manager", "plugins"}
_OWN = frozenset({"own sessions", "selector"})
_V2_FACT = frozenset({"spec v2 workers"})
_V1_FACTS = _V2_FACT | {"spec v1 workers"}
_COMMON: Mapping[str, Any] = {
    "drafts": ("mtp", "multi-layer mtp", "eagle", "eagle3", "standalone"),
    "no_draft": ("ngram",),
    "casts": _WIDENING,
}

ROWS: Sequence[Row] = (
    Row(
        first="0.5.10",
        below="0.5.11",
        evidence="tested",
        tested=("0.5.10.post1",),
        how=f"{_HOW}; SGLang's own distributed update reaches the target only",
        facts=_OLD | _V1_FACTS,
        relies_on=_OLD,
        **_COMMON,
    ),
    Row(
        first="0.5.11",
        below="0.5.13",
        evidence="source-checked",
        how=f"{_HOW}; SGLang's own distributed update reaches the target only",
        facts=_OLD | _V1_FACTS | {"plugins"},
        relies_on=_OLD | {"plugins"},
        **_COMMON,
    ),
    Row(
        first="0.5.13",
        below="0.5.21",
        evidence="source-checked",
        how=f"{_HOW}; SGLang's own distributed update reaches the target only",
        facts=_NEW | _V2_FACT,
        relies_on=_NEW,
        **_COMMON,
    ),
    Row(
        first="0.5.21",
        below="0.5.24",
        evidence="tested",
        tested=("0.5.23",),
        how=f"{_HOW}; SGLang's own sessions load both by name, and overwrite drafters that have names of the target",
        facts=_NEW | _V2_FACT | _OWN,
        relies_on=_NEW,
        **_COMMON,
    ),
)

STOCK = Row(
    first="0.5.21",
    below=None,
    evidence="tested",
    tested=("0.5.23",),
    how="SGLang's own sessions in its own group: each tensor is sent once, under the selector of its role",
    facts=_OWN,
    relies_on=_OWN,
    drafts=("mtp", "eagle", "eagle3", "standalone"),
    no_draft=("ngram",),
)
"""What its public API can do without anything of ours in the server (`stock`): open upward."""


def stock_row(version: str) -> Row:
    """Raises `UnsupportedError` for a release whose own distributed update never reaches a draft."""
    if not STOCK.holds(version):
        raise UnsupportedError(
            f"sglang {version}: its own distributed update never reaches a draft: start it with `python -m "
            f"weightsync.engines.sglang.launch`, or install {STOCK.versions}"
        )
    return STOCK


NO_PARALLELISM: Mapping[str, str] = {
    "pp_size": (
        "pipeline parallelism: stage s of tensor parallel rank t would be rank s * tp_size + t with its own layers, "
        "but stages take control requests one after the other, and would wait for each other in the data group"
    ),
    "dp_size": (
        "data parallelism: replicas behind one port are engines of their own, of which a request reaches one: start a "
        "server per replica and list them all"
    ),
    "enable_dp_attention": (
        "DP attention: ranks would be those of tensor parallelism, each group of tp_size / dp_size with a whole "
        "attention, but groups have queues and pauses of their own, and no real engine has shown that all rest at once"
    ),
    "ep_size": (
        "expert parallelism: ranks would be those of tensor parallelism, each with every tensor but other ranks' "
        "experts, and their union complete, but no real engine has shown it"
    ),
}
"""Server argument -> why it is refused, with the ranks that there would be and what each would hold."""

_V2_PATHS = {
    "EAGLEWorkerV2": "draft_worker.draft_runner",
    "MultiLayerEagleWorkerV2": "draft_worker.draft_runner_list",
    "NGRAMWorker": "",
    "StandaloneWorkerV2": "draft_worker.draft_runner",
}
_ALL_PATHS = {
    "EAGLEWorker": "draft_model_runner",
    "MultiLayerEagleWorker": "model_runner_list",
    "StandaloneWorker": "draft_model_runner",
    **_V2_PATHS,
}
_MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Internals:
    """What the bridge touches in the releases of one row."""

    row: Row
    seam: Literal["SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang.srt.plugins"]
    """How the bridge gets into the scheduler process."""
    patch_point: str
    """`module:class` whose `init_weights_update_group(self, recv_req)` it wraps."""
    draft_paths: Mapping[str, str]
    """Class of `scheduler.draft_worker` -> attribute path to its model runner or runners; empty: it has no model."""


_BY_FIRST: Mapping[
    str, tuple[Literal["SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang.srt.plugins"], str, Mapping[str, str]]
] = {
    "0.5.10": ("SGLANG_EXTERNAL_MODEL_PACKAGE", _MIXIN, _ALL_PATHS),
    "0.5.11": ("sglang.srt.plugins", _MIXIN, _ALL_PATHS),
    "0.5.13": ("sglang.srt.plugins", _MANAGER, _V2_PATHS),
    "0.5.21": ("sglang.srt.plugins", _MANAGER, _V2_PATHS),
}
INTERNALS: Sequence[Internals] = tuple(
    Internals(row=row, seam=seam, patch_point=point, draft_paths=paths)
    for row in ROWS
    for seam, point, paths in [_BY_FIRST[row.first]]
)


def internals_for(version: str) -> Internals:
    """What the bridge touches in this SGLang release.

    Raises:
        UnsupportedError: a release that the table refuses or does not know, and the opt-in is not set.
    """
    row = find_row("sglang", version, allow_untested=os.environ.get(OPT_IN) == "1")
    return next(i for i in INTERNALS if i.row is row)
