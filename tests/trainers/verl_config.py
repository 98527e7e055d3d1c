"""Loads examples/verl_megatron.yaml as verl does, in verl's environment: `main` prints what came of it as JSON."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import warnings
from pathlib import Path

from tests.trainers.outcome import error_of

ROOT = Path(__file__).resolve().parents[2]


def main():
    warnings.simplefilter("ignore")
    from hydra import compose, initialize_config_dir, initialize_config_module
    from omegaconf import OmegaConf
    from transformers import LlamaConfig
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    model, run = sys.argv[1:]
    LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=1, hidden_size=32).save_pretrained(model)
    with initialize_config_dir(str(ROOT / "examples"), version_base=None):
        config = compose(
            "verl_megatron",
            overrides=[
                *(f"{role}.path={model}" for role in ("actor_rollout_ref.model", "critic.model")),
                *(f"+{role}.load_tokenizer=False" for role in ("actor_rollout_ref.model", "critic.model")),
                f"actor_rollout_ref.actor.megatron.dist_checkpointing_path={model}",
                f"trainer.default_local_dir={run}",
            ],
        )
    OmegaConf.resolve(config)  # as verl's task runner does, before anything reads it
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    parts = config.actor_rollout_ref
    actor, critic = omega_conf_to_dataclass(parts.actor), omega_conf_to_dataclass(config.critic)
    rollout = omega_conf_to_dataclass(parts.rollout)
    omega_conf_to_dataclass(parts.model)
    engine = sys.modules["verl.workers.engine.megatron.transformer_impl"]

    # Supervised training has another config, whose checkpoint class has to be told.
    with initialize_config_module("verl.trainer.config", version_base=None):
        sft = compose(
            "sft_trainer_engine",
            overrides=[
                "engine=megatron",
                "optim=megatron",
                f"trainer.default_local_dir={run}",
                "checkpoint._target_=verl.workers.config.McoreCheckpointConfig",
                "+checkpoint.async_save=True",
                "+checkpoint.mbridge_config.weightsync.root=${trainer.default_local_dir}",
            ],
        )
    supervised = omega_conf_to_dataclass(sft.checkpoint)

    print(
        json.dumps(
            {
                "manager": engine.MegatronCheckpointManager.__module__,
                "shards": [part.megatron.use_dist_checkpointing for part in (actor, critic)],
                "options": [options_of(engine, part.checkpoint) for part in (actor, critic)],
                "supervised": [supervised.async_save, options_of(engine, supervised)],
                "async": [part.checkpoint.async_save for part in (actor, critic)],
                **weights(config, rollout),
            }
        )
    )


def options_of(engine, checkpoint_config):
    """What the manager reads of verl's dataclass."""
    manager = engine.MegatronCheckpointManager.__new__(engine.MegatronCheckpointManager)
    manager.checkpoint_config = checkpoint_config
    return dict(manager._options())


def weights(config, rollout):
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs
    from verl.workers.rollout.base import get_rollout_class

    found = rollout.checkpoint_engine
    import_external_libs(found.custom_backend_module)
    kwargs = dict(found.engine_kwargs[found.backend])

    def engine(**more):
        bucket_size = found.update_weights_bucket_megabytes << 20
        return CheckpointEngineRegistry.new(found.backend, bucket_size=bucket_size, **{**kwargs, **more})

    ours = engine()
    adapter = get_rollout_class(rollout.name, rollout.mode)
    alone = ours.prepare()
    adapter(rollout, None, None, replica_rank=3)
    beside = ours.prepare()
    trainer = {**alone, "server": None}

    def rollout_with(**changes):
        changed = {**config.actor_rollout_ref.rollout, **changes}
        return adapter(type(rollout)(**{k: v for k, v in changed.items() if k != "_target_"}), None, None)

    # verl's own function, of a module that imports vLLM at its top.
    source = Path(inspect.getfile(type(rollout))).parents[1] / "rollout" / "vllm_rollout" / "utils.py"
    tree = ast.parse(source.read_text())
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "build_cli_args_from_config"]
    scope = {"Any": object, "json": json}
    exec(compile(ast.Module([function], []), str(source), "exec"), scope)
    return {
        "adapter": adapter.__module__,
        "server": [alone["server"], beside["server"]],
        "arguments": scope["build_cli_args_from_config"](dict(rollout.engine_kwargs["vllm"])),
        "refused": [
            error_of(rollout_with, free_cache_engine=True),
            error_of(adapter, rollout, None, object()),
            error_of(engine, engines="replica"),
            error_of(engine, engines=[]),
            error_of(engine, engines=[{"url": "http://x:1", "kind": "sglang"}], api_key_env="KEY"),
            error_of(type(ours).build_topology, 1, 1, [trainer, trainer]),
            error_of(ours.init_process_group, role="rollout", rank=0, world_size=1, engines=[{"url": "http://x:1"}]),
        ],
    }


if __name__ == "__main__":
    main()
