"""AReaL publishes through `weightsync` and saves through `checkpoint`: a training engine for its own trainer.

    # in your training script, with a copy of this file beside it; nothing of the package is edited
    from areal_hooks import WeightSyncTrainer  # in the place of areal's PPOTrainer
    with WeightSyncTrainer(config, train_dataset=...) as trainer: trainer.train(...)

with `actor.weight_update_mode=disk`, in which AReaL opens no process group of its own, and a Megatron actor. Settings
are class attributes of `WeightSyncActor`: derive from it, and name your class in a trainer of your own.

AReaL calls, on every training rank: `connect_engine` once (and again when it recovers), then per step `update_weights`,
`set_version` and, now and then, `save`; `load` when it recovers. Under its single controller these calls come from
`WeightSyncController` in the driver, which also tells the ranks where the servers are.

Source-checked against the commit in examples/interfaces/areal.json (`python -m examples.check_hooks areal PATH`), run
against stand-ins that have its interface (tests/examples); AReaL itself never ran here.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from areal import PPOTrainer
from areal.engine.megatron_engine import MegatronPPOActor
from areal.trainer.ppo.actor import PPOActorController
from areal.utils.network import format_hostport, gethostip

from checkpoint import Checkpointer, Retention, SaveConfig
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
"""The format of optimizer states that `checkpoint` saves; AReaL itself names none. Passed as a copy: Megatron-Core puts
process groups into what it is given."""


class WeightSyncActor(MegatronPPOActor):
    """AReaL's Megatron actor with another way to update weights and to save."""

    control: Callable[..., EngineControl] = SglangControl
    """Client of a server: SGLang with the bridge in it; `HttpControl` for a vLLM that runs by docs/guides/vllm.md."""
    api_key_env: str | None = None
    """Environment variable of rank 0 with the servers' key; AReaL starts its own servers without one."""
    publish: dict[str, Any] = {"transport": "nccl", "pause_mode": "abort"}  # noqa: RUF012 - replaced, not changed
    """Fields of `PublishConfig`. `abort`: AReaL sends requests that were cut off again, with what they have so far."""
    saves = SaveConfig(retention=Retention(keep_last=2), on_failure="raise")

    _publisher: Publisher | None = None
    _checkpointer: Checkpointer | None = None
    _servers: tuple[str, ...] = ()

    def use_servers(self, addresses: list[str]) -> None:
        """Called by `WeightSyncController`: `host:port` of each server."""
        self._servers = tuple(addresses)

    def connect_engine(self, engine: Any, meta: Any) -> None:
        if meta.type != "disk":
            raise ConfigError(
                f"actor.weight_update_mode is {meta.type!r}: with WeightSyncActor set it to 'disk', in which AReaL "
                "opens no process group of its own"
            )
        super().connect_engine(engine, meta)
        self._close_publisher()
        # Without a controller the engine is AReaL's client of the servers, and knows them.
        servers = self._servers or tuple(engine._engine.addresses)
        key = os.environ[self.api_key_env] if self.api_key_env else None
        controls = [type(self).control(f"http://{server}", api_key=key) for server in servers]
        # The address is of this rank's own host; the run's name is the same on all, and when it connects again.
        run_id = f"areal-{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}"
        config = PublishConfig(**{"bind_host": gethostip(), "run_id": run_id, **self.publish})
        hf_config = json.loads((Path(self.config.path) / "config.json").read_text())
        source = MegatronSource(list(self.model), hf_config)
        self._publisher = Publisher(source, controls if dist.get_rank() == 0 else [], config)
        atexit.register(self._publisher.close)

    def update_weights(self, meta: Any) -> None:
        """Every rank; nothing is written to `meta.path`."""
        self._check_rollout_engine_connected()
        if self._publisher is None:
            raise ConfigError("update_weights before connect_engine")
        version = self.get_version() + 1 if meta.version is None else meta.version
        with self._offload_aware_context():
            # AReaL says when weights have changed: after it recovers, it counts from an older step again.
            self._publisher.publish(version, force=True)

    def save(self, meta: Any) -> None:
        """AReaL's recover checkpoints (`dcp`); returns when it is committed: AReaL writes next what to recover to.

        Raises:
            SaveError: it was not; names rank, host and phase.
        """
        if meta.weight_format != "dcp":
            super().save(meta)
            return
        checkpointer = self._saver(meta.path)
        with self._offload_aware_context():
            state = self.checkpointer.generate_state_dict(with_optimizer=False)
            if meta.with_optim:
                state["optimizer"] = optimizer_state(self.optimizer, state, metadata=dict(METADATA))
                state["lr_scheduler"] = self.lr_scheduler.state_dict()
            checkpointer.save(self.get_version(), state, content_metadata=METADATA)
        checkpointer.wait()

    def load(self, meta: Any) -> None:
        """The newest checkpoint below `meta.path` that is whole on every rank.

        Raises:
            LoadError: there is none, with the reason of each.
        """
        if meta.weight_format != "dcp":
            super().load(meta)
            return
        checkpointer = self._saver(meta.path)
        with self._offload_aware_context():
            wanted = self.checkpointer.generate_state_dict(with_optimizer=False)
            if meta.with_optim:
                wanted["optimizer"] = self.optimizer.sharded_state_dict(
                    wanted, is_loading=True, metadata=dict(METADATA)
                )
                wanted["lr_scheduler"] = self.lr_scheduler.state_dict()
            # The generators' states are numpy's: this folder is the trainer's own.
            state = checkpointer.load(wanted, trusted=True).state
            for i, chunk in enumerate(self.model):
                chunk.load_state_dict(state["model" if len(self.model) == 1 else f"model{i}"])
            if meta.with_optim:
                self.optimizer.load_state_dict(state["optimizer"])
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])
            self.checkpointer.load_rng_states(state["rng_state"])

    def destroy(self) -> None:
        self._close_publisher()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        super().destroy()

    def _saver(self, root: str) -> Checkpointer:
        if self._checkpointer is not None and self._checkpointer.root != Path(root).absolute():
            raise ConfigError(f"saves go to {self._checkpointer.root}, as the first did; {root} is another folder")
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                root,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                config=self.saves,
                bind_host=gethostip(),
            )
        return self._checkpointer

    def _close_publisher(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            atexit.unregister(publisher.close)
            publisher.close()

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> WeightSyncController:
        if config._version == "v2":
            raise ConfigError("actor._version is 'v2': WeightSyncActor knows AReaL's first controller only")
        return WeightSyncController(train_engine=cls, config=config, scheduler=scheduler)


class WeightSyncController(PPOActorController):
    """AReaL's controller of the actor's ranks; they see a callback in the place of the servers."""

    def connect_engine(self, rollout: Any, meta: Any) -> None:
        self._custom_function_call("use_servers", [format_hostport(s.host, s.port) for s in rollout.server_infos])
        super().connect_engine(rollout, meta)


class WeightSyncTrainer(PPOTrainer):
    """AReaL's PPO trainer, whose actor is `actor_class`; its other engines are AReaL's own."""

    actor_class = WeightSyncActor

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        if actor_config is not self.config.actor or alloc.backend != "megatron":
            return super()._create_train_engine(actor_config, alloc)
        if self.scheduler is not None:
            actor = self.actor_class.as_controller(actor_config, self.scheduler)
        else:
            actor = self.actor_class(config=actor_config)
        actor.create_process_group(parallel_strategy=alloc.parallel)
        return actor
