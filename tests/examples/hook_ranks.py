"""What training ranks do in the tests of slime's and AReaL's adapters: real model, publisher and checkpoints, stand-ins
of the trainers (`stand_ins/`) around them."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STAND_INS = Path(__file__).parent / "stand_ins"
HF_CONFIG = {
    "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "attention_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip


def adapters(rank: int, world_size: int, engine: str, root: str) -> dict[str, Any]:
    """Publishes and saves as slime does, then as AReaL does; leaves `root/hf`, the model at the end."""
    sys.path.insert(0, str(STAND_INS))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    from converters.live import write_hf_folder
    from weightsync.bench.megatron import build_model, make_optimizer, train_step

    chunks = build_model(HF_CONFIG, tp=world_size, ddp={})
    optimizer = make_optimizer(chunks)
    built = (chunks, optimizer, _scheduler(optimizer))

    def train(step: int) -> None:
        train_step(chunks, optimizer, step=step)

    def weights() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in chunks[0].named_parameters()}

    found = {
        "slime": _slime(rank, world_size, engine, root, built, train, weights),
        "areal": _areal(rank, engine, root, built, train, weights),
    }
    write_hf_folder(chunks, Path(root, "hf"), HF_CONFIG)
    return found


def _scheduler(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=100,
        lr_decay_style="constant", start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
    )  # fmt: skip


def _slime(rank: int, world_size: int, engine: str, root: str, built: Any, train: Any, weights: Any) -> dict[str, Any]:
    import ray
    from megatron.core import dist_checkpointing
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    from examples import slime_hooks as hooks
    from weightsync.engine.control import HttpControl
    from weightsync.errors import ConfigError

    # The embedded engine, which has a key, in the place of an SGLang server.
    hooks.WeightUpdater.control = functools.partial(HttpControl, api_key=os.environ["TEST_KEY"])
    args = argparse.Namespace(
        rank=rank, built=built, hf_checkpoint=root, save=f"{root}/slime", debug_rollout_only=False, colocate=True,
        offload_train=False, offload_rollout=False, update_weight_mode="full", update_weight_transport="nccl",
        async_save=False, save_hf=None, no_save_optim=False, no_save_rng=False,
        weightsync={"deadline_s": 60},
        weightsync_checkpoint={"keep_last": 2, "on_failure": "raise"},
    )  # fmt: skip
    actor = hooks.WeightSyncActor(world_size, rank, "127.0.0.1", 1)
    refused = ""
    try:
        actor.init(args, "actor")
    except ConfigError as e:
        refused = str(e)
    args.colocate = False
    first = actor.init(args, "actor")
    # slime's arguments are pickled with the checkpoint; the model in these is the test's.
    del args.built

    def told(new: int) -> Any:
        # A second node of an engine has no server.
        handles = [ray.Handle(SGLangEngine(url)) for url in (engine, None)]
        return ray.Handle(
            SimpleNamespace(get_updatable_engines_and_lock=lambda: (handles, None, new, None, None, None))
        )

    metrics = []
    for step, new in enumerate([1, 0, 1], 1):  # at the third, slime has recovered an engine
        train(step)
        actor.set_rollout_manager(told(new))
        actor.update_weights()
        metrics.append(actor.train_actor())
    actor.save_model(3)
    saved = weights()
    train(4)
    actor.save_model(4, force_sync=True)
    committed = Path(args.save, "latest_checkpointed_iteration.txt").read_text()

    # Stock Megatron-Core, which slime resumes by.
    chunk, optimizer, _ = built
    chunk = chunk[0].module
    wanted = {"model": chunk.sharded_state_dict(metadata=dict(hooks.METADATA)), "rng_state": hooks.rng_state()}
    wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=dict(hooks.METADATA))
    folder = str(Path(args.save, "iter_0000003"))
    state = dist_checkpointing.load(wanted, folder, strict=dist_checkpointing.validation.StrictHandling.RAISE_ALL)
    chunk.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # slime's `sleep`
    actor.sleep()
    return {
        "first": first,
        "refused": refused,
        "versions": [m.get("weightsync/version") for m in metrics],
        "engines": [m.get("weightsync/engines_committed") for m in metrics],
        "committed": committed,
        "loaded": all(torch.equal(saved[name], p) for name, p in weights().items()),
        "common": (state["iteration"], state["checkpoint_version"], hasattr(state["args"], "rank"), state["args"].save),
        "scheduler": state["opt_param_scheduler"]["max_lr"],
        "metadata": dist_checkpointing.load_content_metadata(folder) == hooks.METADATA,
    }


def _areal(rank: int, engine: str, root: str, built: Any, train: Any, weights: Any) -> dict[str, Any]:
    from areal.api.io_struct import LocalInfServerInfo, SaveLoadMeta, WeightUpdateMeta

    from examples import areal_hooks as hooks
    from weightsync.engine.control import HttpControl
    from weightsync.errors import ConfigError

    class Actor(hooks.WeightSyncActor):
        control = HttpControl
        api_key_env = "TEST_KEY"
        publish = {"deadline_s": 60, "takeover": True}  # noqa: RUF012 - from the run of slime's test

    class Trainer(hooks.WeightSyncTrainer):
        actor_class = Actor

    alloc = SimpleNamespace(backend="megatron", parallel=None)
    config = SimpleNamespace(actor=SimpleNamespace(_version="v1", path=root, built=built), alloc=alloc)
    host, _, port = engine.removeprefix("http://").rpartition(":")
    rollout = SimpleNamespace(callback_addr="", server_infos=[LocalInfServerInfo(host=host, port=int(port))])
    refused = ""
    try:
        Trainer(config, rollout, WeightUpdateMeta(type="xccl"), scheduler=object())
    except ConfigError as e:
        refused = str(e)
    meta = WeightUpdateMeta(type="disk", path=f"{root}/never")
    # Under AReaL's single controller.
    trainer = Trainer(config, rollout, meta, scheduler=object())
    train(5)
    trainer.train(6)
    actor = trainer.actor.engine
    recover = SaveLoadMeta(path=f"{root}/areal", weight_format="dcp", with_optim=True)
    actor.save(recover)
    committed = Path(root, "areal", "latest_checkpointed_iteration.txt").read_text()
    saved = weights()
    train(6)
    changed = any(not torch.equal(saved[name], p) for name, p in weights().items())
    torch.manual_seed(rank)
    actor.load(recover)
    loaded = all(torch.equal(saved[name], p) for name, p in weights().items())
    elsewhere = own_format = ""
    try:
        actor.save(SaveLoadMeta(path=f"{root}/other", weight_format="dcp", with_optim=True))
    except ConfigError as e:
        elsewhere = str(e)
    try:
        actor.save(SaveLoadMeta(path=f"{root}/areal-hf", weight_format="hf", with_optim=False))
    except AttributeError as e:  # AReaL's own `save`, which this stand-in's checkpointer does not serve
        own_format = str(e)
    actor.destroy()

    # Every rank for itself, as under torchrun: AReaL's client knows the servers.
    client = SimpleNamespace(_engine=SimpleNamespace(addresses=[f"{host}:{port}"]))
    trainer = Trainer(config, client, meta)
    trainer.train(7)
    trainer.actor.destroy()
    return {
        "refused": refused,
        "version": actor.get_version(),
        "committed": committed,
        "changed": changed,
        "loaded": loaded,
        "elsewhere": elsewhere,
        "own_format": own_format,
        "wrote": Path(root, "never").exists(),
    }


def write_config(root: Path) -> None:
    (root / "config.json").write_text(json.dumps(HF_CONFIG))
