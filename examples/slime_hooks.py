"""slime publishes through `weightsync` and saves through `checkpoint`: an actor class for its own seam, `actor_cls`.

    # in your copy of slime's train.py, with a copy of this file beside it; nothing of the package is edited
    from slime_hooks import WeightSyncActor
    actor_model, critic_model = create_training_models(args, pgs, rollout_manager, actor_cls=WeightSyncActor)

Settings come from `--custom-config-path`, whose keys slime puts into its arguments: `weightsync` (fields of
`PublishConfig`) and, if saves are to be ours too, `weightsync_checkpoint` (fields of `SaveConfig`, and `keep_last`).

slime calls, on every training rank: `init` once; then per rollout `train`, `save_model` now and then, and
`update_weights`, which calls `connect_rollout_engines` of the updater when engines are new, and its `update_weights`.

Source-checked against the commit in examples/interfaces/slime.json (`python -m examples.check_hooks slime PATH`), run
against stand-ins that have its interface (tests/examples); slime itself never ran here.
"""

from __future__ import annotations

import argparse
import atexit
import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from slime.backends.megatron_utils.actor import MegatronTrainRayActor

from checkpoint import Checkpointer, Retention, SaveConfig
from checkpoint.errors import SaveError
from checkpoint.megatron import optimizer_state
from weightsync.engine.base import EngineControl
from weightsync.engines.sglang.control import SglangControl
from weightsync.errors import ConfigError
from weightsync.publisher import PublishConfig, Publisher
from weightsync.sources.megatron import MegatronSource

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What Megatron-LM reads back from a checkpoint to build the state that it loads into, as it writes it itself with
`--dist-ckpt-optim-fully-reshardable`. Passed as a copy: Megatron-Core puts process groups into what it is given."""


class WeightSyncActor(MegatronTrainRayActor):
    """slime's training actor with another weight updater and, if asked for, another saver."""

    checkpointer: Checkpointer | None = None

    def init(
        self, args: argparse.Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False
    ) -> int | None:
        check(args)
        first_rollout: int | None = super().init(args, role, with_ref, with_opd_teacher)
        if role == "actor" and not args.debug_rollout_only:
            self.weight_updater = WeightUpdater(args, self.model, run_id=f"slime-{self.master_addr}-{self.master_port}")
            self.weight_updater.weight_version = getattr(args, "update_weight_start_version", 0)
        return first_rollout

    def update_weights(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.poll()  # reads a flag; logs, or raises with on_failure="raise", if a save failed
        super().update_weights()

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Returns when the state is staged; slime's last save (`force_sync`) when it is committed.

        slime resumes from what was committed last, by its own loader: `latest_checkpointed_iteration.txt` is not moved
        before that, and the files are Megatron's.
        """
        settings = getattr(self.args, "weightsync_checkpoint", None)
        if settings is None or self.role != "actor":
            super().save_model(rollout_id, force_sync)
            return
        if self.checkpointer is None:
            options = dict(settings)
            retention = Retention(keep_last=options.pop("keep_last", None))
            self.checkpointer = Checkpointer(
                self.args.save,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                config=SaveConfig(retention=retention, **options),
                bind_host=ray.util.get_node_ip_address(),
            )
            atexit.register(self.checkpointer.close)
        state = state_of(self.args, self.model, self.optimizer, self.opt_param_scheduler, rollout_id)
        handle = self.checkpointer.save(rollout_id, state, content_metadata=METADATA)
        if force_sync:
            self.checkpointer.wait()
            if handle.state != "committed":
                raise SaveError(f"slime's last save, of rollout {rollout_id}, was not committed: {handle.error}")


class WeightUpdater:
    """In the place of slime's `UpdateWeightFromDistributed`: the same calls, one `Publisher` behind them."""

    control: Callable[[str], EngineControl] = SglangControl
    """Client of an engine: slime's are SGLang servers with the bridge in them (docs/guides/sglang.md), and no key."""

    def __init__(self, args: argparse.Namespace, model: Sequence[torch.nn.Module], *, run_id: str) -> None:
        # The address is of this rank's own host; the run's name is the same on all, and after engines were recovered.
        options = {"bind_host": ray.util.get_node_ip_address(), "run_id": run_id}
        self._config = PublishConfig(**{**options, **(getattr(args, "weightsync", None) or {})})
        self._hf_config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
        self._model = model
        self._publisher: Publisher | None = None
        self._metrics: dict[str, float] = {}
        self.weight_version = 0

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Any] | None = None,
    ) -> None:
        """slime has started engines, at first or again: every rank builds the publisher (one broadcast)."""
        self.disconnect_rollout_engines()
        controls = []
        if dist.get_rank() == 0:
            # The servers themselves, not slime's router: nodes of one engine but the first have no server.
            urls = ray.get([engine.get_url.remote() for engine in rollout_engines])
            controls = [type(self).control(url) for url in urls if url is not None]
        self._publisher = Publisher(MegatronSource(self._model, self._hf_config), controls, self._config)
        atexit.register(self._publisher.close)

    def disconnect_rollout_engines(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            atexit.unregister(publisher.close)
            publisher.close()

    def update_weights(self) -> None:
        """Every rank. slime says when weights have changed: `force`, since it counts versions anew after a resume."""
        if self._publisher is None:
            raise ConfigError("update_weights before connect_rollout_engines: slime has told of no engine yet")
        self.weight_version += 1
        report = self._publisher.publish(self.weight_version, force=True)
        self._metrics = report.metrics()

    def pop_metrics(self) -> dict[str, float]:
        """slime logs them with the rollout's."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def check(args: argparse.Namespace) -> None:
    """Refuse what this adapter does not serve, before any GPU is taken.

    Raises:
        ConfigError: options of slime's, with what to set instead.
    """
    wanted: dict[str, Any] = {
        "colocate": False,
        "offload_train": False,  # parameters are paged out when slime updates, and its process groups are gone
        "offload_rollout": False,
        "update_weight_mode": "full",
        "update_weight_transport": "nccl",
    }
    if getattr(args, "weightsync_checkpoint", None) is not None:
        wanted |= {
            "async_save": False,
            "save_hf": None,
        }  # `ckpt convert` writes a Hugging Face folder from a committed step
    wrong = {name: getattr(args, name) for name, value in wanted.items() if getattr(args, name) != value}
    if wrong:
        raise ConfigError(f"slime runs with {wrong}: WeightSyncActor needs { {name: wanted[name] for name in wrong} }")


def state_of(
    args: argparse.Namespace, model: Sequence[Any], optimizer: Any, scheduler: Any, iteration: int
) -> dict[str, Any]:
    """What Megatron-LM's own loader (`megatron.training.checkpointing.load_checkpoint`) asks a checkpoint for."""
    saved = copy.copy(args)
    for name in ("rank", "local_rank"):  # of this rank alone: the common state is the same on all
        vars(saved).pop(name, None)
    state: dict[str, Any] = {
        "args": saved,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
    }
    for i, chunk in enumerate(model):
        module = getattr(chunk, "module", chunk)  # without its data-parallel wrapper, whose names differ
        state["model" if len(model) == 1 else f"model{i}"] = module.sharded_state_dict(metadata=dict(METADATA))
    if optimizer is not None and not args.no_save_optim:
        state["optimizer"] = optimizer_state(optimizer, state, metadata=dict(METADATA))
        state["opt_param_scheduler"] = scheduler.state_dict()
    if not args.no_save_rng:
        state["rng_state"] = rng_state()
    return state


def rng_state() -> ShardedObject:
    """One object per (pipeline, tensor) rank, as Megatron-LM keeps it."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return ShardedObject(
        "rng_state",
        [state],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
