"""Two ranks with verl's own checkpoint manager and ours, real Megatron-Core models and optimizers: `main`.

Runs in verl's environment. Real: verl's manager, configs, import hook, `MegatronEngine.save_checkpoint` and
`load_checkpoint`, its `find_latest_ckpt_path`; Megatron-Core with the distributed optimizer and its schedule; mbridge.
Replaced, as there is no CUDA: the device (`cpu_runtime`), and the rest of `MegatronEngine`, which asks for GPUs. Each
rank gives a dict of what it found; `main` prints both as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.support.ranks import spawn_ranks
from tests.trainers.outcome import error_of

HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def make(steps, seed):
    """(chunks, optimizer, schedule) after some steps of training."""
    from megatron.core import tensor_parallel
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from weightsync.bench.megatron import build_model, make_optimizer

    chunks = build_model(HF, dtype=torch.bfloat16, ddp={"use_distributed_optimizer": True}, seed=seed)
    optimizer = make_optimizer(chunks)
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = 1e-2, 0.0  # as an OptimizerConfig with min_lr gives
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=20, lr_decay_style="linear",
        start_wd=0.0, end_wd=0.0, wd_incr_steps=20, wd_incr_style="constant",
    )  # fmt: skip
    # On the CPU there is no generator per device, but verl's manager loads none but a filled tracker.
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.kept = {"model-parallel-rng": torch.full((8,), seed, dtype=torch.uint8)}
    tracker.get_states, tracker.set_states = lambda: dict(tracker.kept), lambda states: tracker.kept.update(states)
    trainer = chunks, optimizer, schedule
    for step in range(steps):
        train(trainer, step)
    if not steps:
        # Where Transformer Engine is missing, Megatron-Core wants a state before it can describe one.
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part._init_optimizer_states_with_dummy_values()
    return trainer


def train(trainer, step):
    from weightsync.bench.megatron import train_step

    chunks, optimizer, schedule = trainer
    loss = train_step(chunks, optimizer, step=step)
    schedule.step(1)
    return loss


def manager(cls, trainer, root, *, given=None, save=("model", "optimizer", "extra"), load=None, **kwargs):
    """As `MegatronEngine.initialize` builds it."""
    from omegaconf import OmegaConf
    from transformers import LlamaConfig
    from verl.workers.config import McoreCheckpointConfig

    options = {"root": str(root), "deadline_s": 40, **(given or {})} if root is not None else {}
    lora = kwargs.pop("save_lora_only", False)
    config = McoreCheckpointConfig(
        save_contents=list(save),
        load_contents=list(load or save),
        async_save=kwargs.pop("async_save", False),
        save_lora_only=lora,
        mbridge_config={"weightsync": options} if options else {},
    )
    fully = kwargs.pop("fully_reshardable", False)
    megatron = {"dist_ckpt_optim_fully_reshardable": fully, "distrib_optim_fully_reshardable_mem_efficient": False}
    hf_config = LlamaConfig(**{k: v for k, v in HF.items() if k not in ("architectures", "model_type")})
    return cls(**{
        "config": OmegaConf.create({"model": {"path": "none"}, "megatron": megatron}),
        "checkpoint_config": config,
        "model_config": hf_config,
        "transformer_config": trainer[0][0].config,
        "role": "actor",
        "model": trainer[0],
        "arch": "LlamaForCausalLM",
        "hf_config": hf_config,
        "param_dtype": torch.bfloat16,
        "share_embeddings_and_output_weights": False,
        "processing_class": None,
        "optimizer": trainer[1],
        "optimizer_scheduler": trainer[2],
        "use_distributed_optimizer": True,
        "use_checkpoint_opt_param_scheduler": True,
        "use_dist_checkpointing": True,
        **kwargs,
    })  # fmt: skip


def engine_of(checkpoint_manager):
    """verl's engine, of which only saving and loading is used."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
    engine.module = checkpoint_manager.model
    engine._is_offload_param = engine._is_offload_optimizer = False
    engine.checkpoint_mananager = checkpoint_manager
    return engine


def snapshot(trainer):
    """Copies of everything that a resumed run must have, by name."""
    from megatron.core import tensor_parallel
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from tests.checkpoint.megatron_ranks import Trainer, state_dict

    chunks, optimizer, schedule = trainer
    state = state_dict(Trainer(chunks, optimizer), fmt="fully_reshardable", ours=True, rng=False)
    apply_factories(state)
    found = {
        f"{part.key}@{part.global_offset}": part.data.clone()
        for part in nested_values(state)
        if isinstance(part, ShardedTensor)
    }
    found["schedule"] = torch.tensor([schedule.num_steps, optimizer.param_groups[0]["lr"]], dtype=torch.float64)
    found["rng"] = torch.cat([torch.get_rng_state(), torch.tensor([random.getstate()[1][0] % 251], dtype=torch.uint8)])
    found["tracker"] = tensor_parallel.get_cuda_rng_tracker().kept["model-parallel-rng"].clone()
    found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    return found


def differs(trainer, gold):
    now = snapshot(trainer)
    return sorted(
        k for k in gold.keys() | now.keys() if k not in now or k not in gold or not torch.equal(now[k], gold[k])
    )


def scramble(seed=99):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def until(true, what, seconds=40):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def ranks(rank, world_size, folder):
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401 - before the shim: it imports Transformers

    from tests.checkpoint.megatron_ranks import megatron

    try:
        with megatron():
            return life(rank, Path(folder))
    except Exception:  # noqa: BLE001
        # Without this the other rank waits in a collective and hides the reason.
        traceback.print_exc()
        os._exit(1)


def life(rank, folder):
    import torch.distributed as dist
    import verl.workers.engine.megatron.transformer_impl as engine
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager as Stock
    from verl.utils.import_utils import import_external_libs

    from tests.checkpoint.megatron_ranks import own_steps

    import_external_libs("checkpoint.trainers.verl")  # what HFModelConfig does with model.external_lib
    ours = engine.MegatronCheckpointManager
    found = {"class": f"{ours.__module__}.{ours.__qualname__}", "replaces": issubclass(ours, Stock)}
    root = folder / "run"
    tracker = root / "latest_checkpointed_iteration.txt"
    trainer = make(1, seed=0)

    def path(step):
        return str(root / f"global_step_{step}" / "actor")

    def driver(step):
        """What verl's driver does after the workers have saved."""
        if rank == 0:
            (root / f"global_step_{step}" / "data.pt").write_bytes(b"state of a dataloader")
        dist.barrier()

    # -- asynchronous saves, retention, the last one waited for
    scramble(1)
    first = manager(ours, trainer, root, async_save=True, given={"last_step": 4})
    worker = engine_of(first)
    gold, blocked = {}, {}
    for step in (1, 2, 3, 4):
        train(trainer, step)
        gold[step] = snapshot(trainer)
        began = time.monotonic()
        worker.save_checkpoint(path(step), None, step, max_ckpt_to_keep=2)
        blocked[step] = time.monotonic() - began
        driver(step)
        if step == 4:
            found["last"] = tracker.read_text()
        until(lambda: tracker.exists() and tracker.read_text() == str(step), f"the tracker never named {step}")  # noqa: B023
        dist.barrier()

    def kept(*steps):
        """Writers delete after their word of the commit."""
        wanted = [f"iter_{step:07d}" for step in steps]
        until(lambda: sorted(p.name for p in (root / "shards" / "actor").glob("iter_*")) == wanted, f"not {wanted}")

    kept(3, 4)
    found["folders"] = sorted(str(p.relative_to(root)) for p in root.glob("global_step_*/*"))
    found["manifest"] = json.loads((Path(path(4)) / "ckpt_contents.json").read_text())
    found["link"] = os.readlink(Path(path(4)) / "model" / "dist_ckpt")

    # -- a save that fails moves nothing
    if rank == 1:
        os.kill(first._checkpointer.writer_pid, signal.SIGSTOP)
    dist.barrier()
    first._last_step = 0
    worker.save_checkpoint(path(5), None, 5, max_ckpt_to_keep=2)
    driver(5)
    if rank == 1:
        os.kill(first._checkpointer.writer_pid, signal.SIGKILL)
    handle = first._checkpointer.wait()
    found["failed"] = [handle.state, handle.error]
    found["tracker after a failed save"] = tracker.read_text()
    dist.barrier()
    first.close()
    if rank == 0:
        tracker.write_text("5")  # as verl's trainer for supervised training leaves it
    dist.barrier()

    # -- the next life: the tracker is corrected before verl's driver reads it, the state is that of step 4
    trainer = make(0, seed=7)
    second = manager(ours, trainer, root)
    dist.barrier()
    latest = find_latest_ckpt_path(str(root))
    found["resumed from"] = os.path.basename(latest)
    found["uncommitted"] = error_of(second.load_checkpoint, path(5))
    scramble()
    engine_of(second).load_checkpoint(os.path.join(latest, "actor"))
    found["differs"] = differs(trainer, gold[4])
    found["compared"] = len(gold[4])

    # -- verl's own manager loads what was committed, and ours what it saved
    stock_trainer = make(0, seed=8)
    scramble()
    # One after the other: loading weights takes the parameters out of the shards that it describes this format with.
    for contents in (("model",), ("optimizer", "extra")):
        stock = manager(Stock, stock_trainer, None, load=contents)
        stock.load_checkpoint(path(4))
    found["differs in verl's own"] = differs(stock_trainer, gold[4])
    for _, optimizer, _ in (trainer, stock_trainer):
        own_steps(SimpleNamespace(optimizer=optimizer))
    losses = [train(t, 5) for t in (trainer, stock_trainer)]
    found["losses"] = losses
    gold["stock"] = snapshot(stock_trainer)
    # What the guide says of verl's own manager: it cannot load both at once, of its own files either.
    whole = manager(Stock, stock_trainer, None, fully_reshardable=True)
    whole.save_checkpoint(str(folder / "whole" / "global_step_6" / "actor"), None, 6)
    found["verl's own, both at once"] = error_of(
        whole.load_checkpoint, str(folder / "whole" / "global_step_6" / "actor")
    )
    trainer[2].num_steps = 0  # Megatron's schedule counts what it loads on top of what it has
    stock.save_checkpoint(str(folder / "stock" / "global_step_6" / "actor"), None, 6)
    scramble()
    second.load_checkpoint(str(folder / "stock" / "global_step_6" / "actor"))
    found["differs from verl's own"] = differs(trainer, gold["stock"])

    # -- synchronous, for which verl's driver moves the tracker; refusals
    found["refused paths"] = [
        error_of(second.save_checkpoint, str(folder / "elsewhere" / "global_step_6" / "actor"), None, 6),
        error_of(second.save_checkpoint, path(6), "hdfs://x", 6),
        error_of(second.save_checkpoint, path(3), None, 3),
        error_of(second.load_checkpoint, "hdfs://x/global_step_4/actor"),
        error_of(second.load_checkpoint, str(folder / "nothing" / "global_step_4" / "actor")),
    ]
    second.save_checkpoint(path(6), None, 6, max_ckpt_to_keep=1)
    dist.barrier()
    kept(6)
    found["tracker is the driver's"] = tracker.read_text()
    second.close()
    found["refused"] = [
        error_of(manager, ours, trainer, None),
        error_of(manager, ours, trainer, root, given={"rooot": 1}),
        error_of(manager, ours, trainer, root, given={"deadline_s": -1}),
        error_of(manager, ours, trainer, root, use_megatron_fsdp=True),
        error_of(manager, ours, trainer, root, peft_cls=object(), bridge=object()),
        error_of(manager, ours, trainer, root, save_lora_only=True),
        error_of(manager, ours, trainer, root, save=("model", "optimiser")),
    ]
    dist.barrier()
    found.update(hugging_face(ours, folder))
    return found


def hugging_face(ours, folder):
    """Weights by verl's bridge, as its defaults have it; from another run's folder into a new one."""
    from verl.utils.model import load_mcore_dist_weights

    trainer = make(0, seed=9)
    load_mcore_dist_weights(trainer[0], str(folder / "converted" / "release"))
    converted = [parameter.clone() for parameter in trainer[0][0].parameters()]
    bridge = bridge_of(trainer)
    for parameter in trainer[0][0].parameters():
        parameter.data.fill_(7.0)
    bridge.load_weights(trainer[0], str(folder / "hf"))
    same = [torch.equal(a, b) for a, b in zip(converted, trainer[0][0].parameters(), strict=True)]
    trainer[1].reload_model_params()
    train(trainer, 0)
    scramble(3)
    gold, how = (
        snapshot(trainer),
        {"use_dist_checkpointing": False, "save": ("model", "hf_model", "optimizer", "extra")},
    )
    path = folder / "hf_run" / "global_step_1" / "actor"
    first = manager(ours, trainer, folder / "hf_run", bridge=bridge, **how)
    first.save_checkpoint(str(path), None, 1)
    first.close()
    trainer = make(0, seed=10)
    second = manager(ours, trainer, folder / "next_run", bridge=bridge_of(trainer), **how)
    second.bridge.load_weights(trainer[0], str(folder / "hf"))
    scramble()
    second.load_checkpoint(str(path))
    second.close()
    return {
        "first weights": same,
        "differs in Hugging Face's format": differs(trainer, gold),
        "hf files": sorted(p.name for p in (path / "model" / "huggingface").iterdir()),
        "hf parts": sorted(str(p.relative_to(path)) for p in path.glob("*/dist_ckpt")),
    }


def bridge_of(trainer):
    from mbridge import AutoBridge
    from transformers import LlamaConfig

    bridge = AutoBridge.from_config(LlamaConfig(**HF), dtype=torch.bfloat16)
    bridge.make_vocab_size_divisible_by = 8
    bridge.vocab_size = HF["vocab_size"]
    bridge.padded_vocab_size = trainer[0][0].module.module.vocab_size
    return bridge


def main():
    from transformers import LlamaConfig, LlamaForCausalLM

    from converters.cli import main as ckpt

    folder = Path(sys.argv[1])
    LlamaForCausalLM(LlamaConfig(**HF)).to(torch.bfloat16).save_pretrained(folder / "hf")
    assert ckpt(["convert", str(folder / "hf"), str(folder / "converted")]) == 0
    print(json.dumps(spawn_ranks(ranks, 2, args=(sys.argv[1],), gloo=True, deadline_s=110)), flush=True)


if __name__ == "__main__":
    main()
