"""What this package needs of Megatron-Core, found by features and not by versions.

`require_core` is called before anything of Megatron-Core is used. Tested with 0.16.1; the development branch (core
0.20.0.dev, d98e8a64 of 2026-08-22) was read: every name of the table exists there with the same meaning. What moved in
between (`strategies.base`, the asynchronous strategies, `common.pt` as an entry of its own) is not used here: files are
written and read by `checkpoint.format`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from checkpoint.errors import ConfigError

__all__ = ["require_core", "require_optimizer"]

_BASE = "megatron.core.dist_checkpointing"
NAMES = {
    "dict_utils": ("dict_list_map_inplace", "extract_matching_values", "merge", "nested_values"),
    "mapping": (
        "LocalNonpersistentObject",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
        "apply_factory_merges",
        "is_main_replica",
    ),
    "state_dict_utils": ("load_preprocess", "save_preprocess"),
    "utils": ("add_prefix_for_sharding", "extract_sharded_base"),
}


@functools.cache
def require_core() -> None:
    """Raises ConfigError: Megatron-Core is missing, or lacks what is used of it."""
    missing = []
    for module, names in NAMES.items():
        try:
            found: Any = importlib.import_module(f"{_BASE}.{module}")
        except ImportError as e:
            raise ConfigError(f"saving and loading Megatron states needs {_BASE}.{module}: {e}") from e
        missing += [f"{_BASE}.{module}.{name}" for name in names if not hasattr(found, name)]
    if missing:
        version = getattr(importlib.import_module("megatron.core"), "__version__", "unknown")
        raise ConfigError(
            f"Megatron-Core {version} has no {', '.join(missing)}: 0.16.1 was tested, another adapter is needed"
        )


def require_optimizer(optimizer: Any) -> None:
    """That a distributed optimizer's state can be described without a collective.

    Raises:
        ConfigError: names the feature that is missing, or not supported.
    """
    where = type(optimizer).__name__
    for name in ("_get_main_param_and_optimizer_states", "gbuf_ranges", "state_dict"):
        if not hasattr(optimizer, name):
            raise ConfigError(f"{where} has no {name}: use Megatron's own sharded_state_dict, which gathers")
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        raise ConfigError(f"{where} runs under Megatron-FSDP, whose state is DTensors: not supported")
    config, inner = getattr(optimizer, "config", None), getattr(optimizer, "optimizer", None)
    aware = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    hybrid = type(inner).__name__ == "HybridDeviceOptimizer"
    if aware and not hybrid and not hasattr(inner, "get_unscaled_state"):
        raise ConfigError(
            f"the precision-aware {where} keeps its state in a {type(inner).__name__} without get_unscaled_state, by "
            "which Megatron-Core reads it: use the optimizer that Megatron-Core asks for here (Transformer Engine's "
            "FusedAdam) in a version that has it, or set use_precision_aware_optimizer=False"
        )
