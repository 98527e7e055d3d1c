"""verl's Megatron checkpoints, saved and loaded by this package: `CheckpointManager` takes the place of verl's.

verl imports this module where its config says so, on every worker, before it builds its engine:

    actor_rollout_ref.model.external_lib: checkpoint.trainers.verl
    actor_rollout_ref.actor.megatron.use_dist_checkpointing: True
    actor_rollout_ref.actor.checkpoint:
        async_save: True
        mbridge_config: {weightsync: {root: "${trainer.default_local_dir}"}}    # verl's free-form dict

and its `MegatronEngine` builds the manager of this module. Order of calls, on every worker: the constructor (the only
use of a process group, but for what verl's own helpers do; it ends what an earlier run left, and corrects verl's
tracker before verl reads it),
`load_checkpoint`, then `save_checkpoint` as often as verl likes. State dicts are verl's, but for the distributed
optimizer's, which is described without being gathered. Weights in Hugging Face's format go through verl's bridge.

Written against verl 0.9.1 (tested); `verl_folders` says what lies where.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import verl.workers.engine.megatron.transformer_impl as engine
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
from verl.utils.fs import is_non_local, local_mkdir_safe
from verl.utils.megatron_utils import get_hf_model_checkpoint_path

from checkpoint.checkpointer import Checkpointer
from checkpoint.config import SaveConfig
from checkpoint.errors import ConfigError, LoadError, SaveError
from checkpoint.events import SaveHandle
from checkpoint.layout import committed_steps
from checkpoint.megatron import optimizer_state
from checkpoint.retention import Retention
from checkpoint.trainers.verl_folders import RunFolders

__all__ = ["CheckpointManager"]

log = logging.getLogger("checkpoint")

WHERE = "checkpoint.mbridge_config.weightsync"
LOOK_EVERY_S = 0.1
_PLACE = ("bind_host", "advertise_host", "port_range")
_OWN = ("root", "shards", "last_step", "keep_every", *_PLACE)
_SAVE = tuple(field.name for field in dataclasses.fields(SaveConfig) if field.name != "retention")


class CheckpointManager(MegatronCheckpointManager):  # type: ignore[misc]  # verl is not installed where types are checked
    """See the module. Takes what verl's `MegatronCheckpointManager` takes.

    `checkpoint_config.mbridge_config["weightsync"]` has `root` (verl's `trainer.default_local_dir`), and optionally:
    `shards` (folder of what is committed, for instance on a disk of each node; `root`/shards), `last_step` (the save of
    this step and of later ones is waited for), `keep_every` (steps that retention leaves), `bind_host` (of rank 0's
    store; the launcher's MASTER_ADDR), `advertise_host`, `port_range`, and fields of `SaveConfig`.

    Raises:
        ConfigError: an option that cannot work, or one of verl's that is not served; says which.
        WriterLost: as `Checkpointer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self._options()
        self._refuse()
        root = Path(options["root"]).absolute()
        self._folders = RunFolders(
            root=root, shards=Path(options.get("shards") or root / "shards").absolute(), role=self.role
        )
        self._async = bool(self.checkpoint_config.get("async_save", False))
        self._last_step = int(options.get("last_step") or 0)
        self._keep_every = options.get("keep_every")
        try:
            config = SaveConfig(**{name: value for name, value in options.items() if name in _SAVE})
        except ConfigError as e:
            raise ConfigError(f"{WHERE}: {e}") from e
        self._checkpointer = Checkpointer(
            self._folders.own,
            rank=self.rank,
            world_size=self.world_size,
            config=config,
            bind_host=options.get("bind_host") or os.environ.get("MASTER_ADDR", "127.0.0.1"),
            advertise_host=options.get("advertise_host"),
            port_range=tuple(options["port_range"]) if options.get("port_range") else None,
        )
        self._follower: threading.Thread | None = None
        self._trouble: Exception | None = None
        self._closing = threading.Event()
        atexit.register(self.close)
        if self.rank == 0:
            self._folders.settle()
            log.warning(
                "verl's Megatron checkpoints of role %s are saved by `checkpoint` to %s", self.role, self._folders.own
            )
        # In supervised training every rank reads the tracker for itself.
        dist.barrier()

    def _options(self) -> Mapping[str, Any]:
        given = (getattr(self.checkpoint_config, "mbridge_config", None) or {}).get("weightsync")
        if not given or not given.get("root"):
            raise ConfigError(
                f"{WHERE}.root is missing: model.external_lib has verl's checkpoints saved by `checkpoint`, which has "
                f"to know the run's folder; add +{WHERE}.root='${{trainer.default_local_dir}}' below actor (and critic)"
            )
        if unknown := sorted(set(given) - {*_OWN, *_SAVE}):
            raise ConfigError(f"{WHERE}: unknown {unknown}, expected some of {sorted((*_OWN, *_SAVE))}")
        return dict(given)

    def _refuse(self) -> None:
        """What verl can be told to do and this manager does not."""
        wrong = {
            "megatron.use_megatron_fsdp=True (its state is DTensors)": self.use_megatron_fsdp,
            "LoRA (model.lora): adapters go through Megatron-Bridge": self.peft_cls is not None,
            "checkpoint.save_lora_only=True (verl's own Megatron manager ignores it)": self.should_save_lora_only,
        }
        if refused := [name for name, found in wrong.items() if found]:
            raise ConfigError(f"not served: {'; '.join(refused)}. Leave model.external_lib out, or change the setting")
        known = {"model", "optimizer", "extra", "hf_model"}
        for name, contents in (("save", self.checkpoint_save_contents), ("load", self.checkpoint_load_contents)):
            if unknown := sorted(set(contents) - known):
                raise ConfigError(f"checkpoint.{name}_contents has {unknown}, expected some of {sorted(known)}")

    # -- save ----------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save what `save_contents` names; with `async_save` return once it is staged.

        Weights in Hugging Face's format are written by verl's bridge before anything is staged, so that a committed
        step has them; that part blocks. Without `async_save`, and from `last_step` on, wait for the commit.

        Raises:
            SaveError: it was waited for and not committed, or too many saves before it failed.
            ConfigError: a path that is not below `root`, `hdfs_path`, or newer steps are committed already.
        """
        if hdfs_path is not None:
            raise ConfigError(f"trainer.default_hdfs_dir is not served: use {WHERE}.durable_url (any fsspec URL)")
        step = self._folders.step_of(local_path, global_step)
        self._finish_follower()
        self._folders.check_foreign(local_path)
        if newer := [s for s in committed_steps(self._folders.own) if s > step]:
            raise ConfigError(
                f"step {step} is to be saved, but {self._folders.own} holds newer ones, {newer}: retention and resume "
                "go by the newest. Set another trainer.default_local_dir (trainer.resume_from_path may name this one), "
                "or move those away"
            )
        self.previous_global_step = step
        local_path = local_mkdir_safe(local_path)
        if self.should_save_hf_model:
            self._save_hf_config_and_tokenizer(local_path)
            dist.barrier()
            self._save_model_as_hf_via_bridge(get_hf_model_checkpoint_path(local_path))
        if self.should_save_extra:
            self._save_transformer_config(local_path)
        metadata, parts = self._metadata(), []
        state: dict[str, Any] = {"iteration": step}
        model = {}
        if self.should_save_dist_ckpt_model or self.should_save_optimizer:
            model = self._build_model_sharded_state_dict(metadata)
        if self.should_save_dist_ckpt_model:
            state.update(model)
            parts.append("model")
        if self.should_save_optimizer:
            state["optimizer"] = optimizer_state(self.optimizer, model, metadata=metadata)
            if self.lr_scheduler is not None:
                state["lr_scheduler"] = self.lr_scheduler.state_dict()
            parts.append("optimizer")
        if self.should_save_extra:
            state["rng_state"] = self.get_rng_state()
            parts.append("extra")
        keep = self._folders.retention(max_ckpt_to_keep, self._keep_every)
        handle = self._checkpointer.save(step, state, content_metadata=metadata, retention=keep)
        if self._async and not 0 < self._last_step <= step:
            if self.rank == 0:
                self._follower = threading.Thread(
                    target=self._follow, args=(handle, local_path, parts, keep), name="checkpoint-verl", daemon=True
                )
                self._follower.start()
            return
        self._checkpointer.wait()
        if handle.state != "committed":
            raise SaveError(f"step {step} was not committed: {handle.error}")
        if self.rank == 0:
            self._publish(handle, local_path, parts, keep)

    def _metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self._build_sharded_state_dict_metadata()
        if "distrib_optim_sharding_type" in metadata:
            # Whatever verl's config says: it loads in every layout, and costs no gather here.
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
            metadata.setdefault("distrib_optim_fully_reshardable_mem_efficient", False)
        return metadata

    def _follow(self, handle: SaveHandle, local_path: str, parts: list[str], keep: Retention) -> None:
        """The thread of a save on rank 0: verl has no call by which its workers could be told of a commit."""
        while not handle.done:
            if self._closing.wait(LOOK_EVERY_S):
                return
        try:
            if handle.state == "committed":
                self._publish(handle, local_path, parts, keep)
        except Exception as e:  # noqa: BLE001 - raised by the next call of the training thread
            self._trouble = e

    def _publish(self, handle: SaveHandle, local_path: str, parts: list[str], keep: Retention) -> None:
        step, path = handle.step, str(handle.path)
        manifest = self._build_checkpoint_manifest(local_path, step, bool(parts))
        manifest = {**manifest, "saved_by": "checkpoint", "committed": path}
        self._folders.publish(local_path, step, parts, manifest, keep)
        if self._async:
            self._folders.move_tracker(step)  # otherwise verl's driver does

    def _finish_follower(self) -> None:
        """Wait for the save before this one; raise what its thread could not."""
        self._checkpointer.wait()
        if self._follower is not None:
            self._follower.join()
            self._follower = None
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    # -- load ----------------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load what `load_contents` names from the committed step that verl's path means, and no other.

        verl's driver has taken its step number and its dataloader's state from the path: another step would not fit.
        A checkpoint of verl's own manager is loaded by that.

        Raises:
            LoadError: the step is not committed, or damaged everywhere; says which are there.
        """
        if is_non_local(str(local_path)) or hdfs_path is not None:
            raise ConfigError(f"{local_path}: hdfs paths are not served; use {WHERE}.durable_url (any fsspec URL)")
        step = self._folders.step_of(local_path)
        source = self._folders.source(local_path)
        self._finish_follower()
        if self._folders.foreign(local_path):
            log.warning("%s was saved by verl's own manager, which loads it", local_path)
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        metadata, contents = self._metadata(), []
        state: dict[str, Any] = {}
        model = {}
        if self.should_load_dist_ckpt_model or self.should_load_optimizer:
            model = self._build_model_sharded_state_dict(metadata)
        if self.should_load_dist_ckpt_model:
            state.update(model)
            contents.append("model")
        if self.should_load_optimizer:
            state.update(self._build_optimizer_state_dict(model, metadata, is_loading=True))
            contents.append("optimizer")
        if self.should_load_extra:
            state.update(self._build_extra_state_dict())
            contents.append("rng")
        loaded = self._read(local_path, source, step, state, contents)
        if self.should_load_dist_ckpt_model:
            for number, chunk in enumerate(self.model):
                if len(self.model) > 1:
                    engine.mpu.set_virtual_pipeline_model_parallel_rank(number)
                chunk.load_state_dict(loaded["model" if len(self.model) == 1 else f"model{number}"], strict=True)
        elif self.should_load_hf_model:
            self._load_model_as_hf_via_bridge(get_hf_model_checkpoint_path(local_path))
        if self.should_load_optimizer:
            self.optimizer.load_state_dict(loaded["optimizer"])
            if self.use_checkpoint_opt_param_scheduler and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(loaded["lr_scheduler"])
        if self.should_load_extra:
            self.load_rng_states(_as_list(loaded["rng_state"]))

    def _read(
        self, local_path: str, source: Path, step: int, state: dict[str, Any], contents: list[str]
    ) -> dict[str, Any]:
        if not contents and step in committed_steps(source):
            return {}  # weights in Hugging Face's format alone
        durable = [str(source)] if source != self._folders.own else []
        try:
            result = self._checkpointer.load(state, step=step, durable=durable, contents=contents or ("rng",))
        except LoadError as e:
            there = committed_steps(source)
            why = str(e) if step in there else "this step was never committed, or is removed"
            older = [s for s in there if s < step]
            resume = f"trainer.resume_mode=resume_path trainer.resume_from_path={self._folders.root}/global_step_"
            raise LoadError(
                f"{local_path}: {why}; committed in {source} are {there or 'no steps'}. verl's driver has counted on "
                f"step {step}, so no other one is taken: "
                + (f"{resume}{older[-1]}" if older else "start anew with trainer.resume_mode=disable")
            ) from e
        for reason in result.passed_over if self.rank == 0 else ():
            log.warning("%s", reason)
        return result.state

    def close(self) -> None:
        """Let the save in flight end, and its step become visible to verl. Runs by itself when the process exits."""
        atexit.unregister(self.close)
        try:
            self._finish_follower()
        finally:
            self._closing.set()
            self._checkpointer.close()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _take_place() -> None:
    """Have verl's engine build this manager.

    Raises:
        ConfigError: its own one is not what this module was written against.
    """
    wanted = {"checkpoint_config", "role", "optimizer_scheduler", "use_dist_checkpointing", "bridge", "peft_cls"}
    built = [
        "_build_model_sharded_state_dict", "_build_optimizer_state_dict", "_build_extra_state_dict", "get_rng_state",
        "_build_sharded_state_dict_metadata", "_build_checkpoint_manifest", "_save_transformer_config",
    ]  # fmt: skip
    missing = sorted(wanted - set(inspect.signature(MegatronCheckpointManager).parameters))
    missing += [name for name in built if not hasattr(MegatronCheckpointManager, name)]
    if getattr(engine, "MegatronCheckpointManager", None) not in (MegatronCheckpointManager, CheckpointManager):
        missing.append("verl.workers.engine.megatron.transformer_impl.MegatronCheckpointManager")
    if missing:
        raise ConfigError(f"this verl has no {', '.join(missing)}: 0.9.1 was tested, another adapter is needed")
    engine.MegatronCheckpointManager = CheckpointManager


_take_place()
