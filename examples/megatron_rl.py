"""A plain Megatron-Core RL loop on the CPU: rollouts, MTP training, a publish per step, checkpoints, resume.

    torchrun --standalone --nproc-per-node 2 -m examples.megatron_rl --folder /tmp/run --steps 8
    torchrun --standalone --nproc-per-node 2 -m examples.megatron_rl --folder /tmp/run --steps 12     # goes on at 8

`train` is what a trainer of one's own needs around its step, in the order in which it runs: engine, hook, checkpointer,
publisher; then rollout -> train -> publish -> save. The rest of the file is a toy to do it with: the engine is the
embedded one, and the reward is 1 for every token that follows the one before it by a fixed rule. The policy learns from
the engine's own rollouts, each token of which is labelled with what the rule would have said there. So the reward of
the next rollouts rises only if the engine has got the new weights, and the draft is accepted only if it has too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from checkpoint import Checkpointer, Retention, SaveConfig
from checkpoint.errors import LoadError
from checkpoint.layout import committed_steps
from checkpoint.megatron import optimizer_state
from training_hooks import Alignment, Layout, mtp_targets, row_losses
from training_hooks.megatron import MTPConfig, check_mtp_settings, install_mtp
from weightsync.bench.megatron import build_model, cpu_runtime, make_optimizer
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.publisher import PublishConfig, Publisher
from weightsync.sources.megatron import MegatronSource

VOCAB_SIZE, ROWS, COLUMNS, PROMPT, MICRO_BATCHES = 64, 8, 16, 2, 2
HF_CONFIG = {
    "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "attention_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip


def train(folder: str, steps: int, save_every: int) -> None:
    """Every rank runs this; `folder` takes the checkpoints, and a run that finds some goes on from the newest."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = build_model(HF_CONFIG, tp=world_size, ddp={})
    check_mtp_settings(chunks[0].config, depths=1)
    optimizer = make_optimizer(chunks, lr=3e-3)
    model = chunks[0].module  # without its data-parallel wrapper, whose state has other names
    prompts = Prompts()

    with contextlib.ExitStack() as stack:
        # Rank 0 talks to the engines. Real ones run as servers: HttpControl("http://host:port", api_key=...).
        engine = stack.enter_context(launch(ENGINE)) if rank == 0 else None
        hook = install_mtp(chunks, MTPConfig(scale=0.3))
        stack.callback(hook.remove)
        saves = SaveConfig(retention=Retention(keep_last=2), on_failure="raise")
        checkpointer = stack.enter_context(Checkpointer(folder, rank=rank, world_size=world_size, config=saves))
        checkpointer.register("prompts", save=prompts.state, load=prompts.restore, shared=True)
        publisher = stack.enter_context(
            Publisher(MegatronSource(chunks, HF_CONFIG), [engine.control()] if engine else [], PublishConfig())
        )

        first = resume(checkpointer, model, optimizer) + 1
        publisher.publish(first - 1)  # whatever the engine started with
        for step in range(first, steps + 1):
            rollouts = generate(engine, prompts.next())
            policy_loss = update(chunks, optimizer, hook, step, rollouts["tokens"])
            report = publisher.publish(step)
            if step % save_every == 0 or step == steps:
                checkpointer.save(step, state_of(model, optimizer, step))
            checkpointer.poll()  # reads a flag; raises if a save failed
            if rank == 0:
                print(
                    f"step {step:3}  reward {rollouts['reward']:.2f}  acceptance {rollouts['acceptance']:.2f}  "
                    f"policy loss {policy_loss:.3f}  mtp loss {hook.metrics()['mtp_loss/depth_1']:.3f}  "
                    f"published {report.version}: {report.outcome}",
                    flush=True,
                )
    # The checkpointer's end waits for the last save to be committed.
    if rank == 0:
        print(f"checkpoints in {folder}: steps {committed_steps(folder)}")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def state_of(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    """What is saved, and what a load fills: sharded state dicts of the model and of the optimizer."""
    weights = model.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer_state(optimizer, weights), "iteration": step}


def resume(checkpointer: Checkpointer, model: Any, optimizer: Any) -> int:
    """Load the newest checkpoint that is whole on every rank; returns its step, 0 if there is none."""
    if not committed_steps(checkpointer.root):
        return 0
    weights = model.sharded_state_dict()
    wanted = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True), "iteration": 0}
    result = checkpointer.load(wanted)
    model.load_state_dict(result.state["model"])
    optimizer.load_state_dict(result.state["optimizer"])
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            # Without Transformer Engine, Megatron-Core gives all parameters one step tensor, and each counts it up.
            state["step"] = state["step"].clone()
    if dist.get_rank() == 0:
        print(f"resumed from step {result.step} ({result.tier})", flush=True)
    return result.step


# -- the toy -----------------------------------------------------------------------------------------------------------


ENGINE = EngineConfig(model=HF_CONFIG, draft="mtp", dtype="float32")


def rule(token: torch.Tensor) -> torch.Tensor:
    return (5 * token + 3) % VOCAB_SIZE


class Prompts:
    """A dataloader; its position is saved and restored with the rest."""

    def __init__(self) -> None:
        self._served = 0

    def next(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._served)
        self._served += 1
        return torch.randint(0, VOCAB_SIZE, (ROWS * MICRO_BATCHES, PROMPT), generator=generator).tolist()

    def state(self) -> int:
        return self._served

    def restore(self, served: int) -> None:
        self._served = served


def generate(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Rank 0 asks the engine; every rank gets tokens [rollouts, COLUMNS], mean reward, acceptance."""
    shared: list[Any] = [None]
    if engine is not None:
        answer = engine.generate(prompts, max_tokens=COLUMNS - PROMPT)
        shared = [(answer["tokens"], answer["acceptance"])]
    dist.broadcast_object_list(shared, src=0)
    responses, acceptance = shared[0]
    tokens = torch.tensor([prompt + response for prompt, response in zip(prompts, responses, strict=True)])
    right = tokens[:, PROMPT:] == rule(tokens[:, PROMPT - 1 : -1])
    return {"tokens": tokens, "reward": right.float().mean().item(), "acceptance": acceptance}


def update(chunks: list[Any], optimizer: Any, hook: Any, step: int, rollouts: torch.Tensor) -> float:
    """One optimizer step on the policy's loss and the MTP layers' beside it; returns the policy's loss."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    group = parallel_state.get_tensor_model_parallel_group()
    causal = torch.ones(1, 1, COLUMNS, COLUMNS, dtype=torch.bool).triu(1)
    positions = torch.arange(COLUMNS).expand(ROWS, -1)
    response = (torch.arange(COLUMNS) >= PROMPT).expand(ROWS, -1)
    layout = Layout.padded([COLUMNS] * ROWS, COLUMNS)
    batches = [
        # The draft learns to say what the policy says: the tokens of the rollout.
        (tokens, mtp_targets(tokens, response, layout=layout, depths=1, mask_alignment=Alignment.TOKEN))
        for tokens in rollouts.split(ROWS)
    ]

    def forward_step(iterator: Any, model: Any) -> Any:
        tokens, targets = next(iterator)
        with hook.micro_batch(targets):
            logits = model(tokens, positions, causal)  # logits, although the MTP layers are trained

        def policy_loss(logits: torch.Tensor) -> Any:
            losses = row_losses(logits[:, :-1], response[:, 1:], labels=rule(tokens[:, :-1]), group=group)
            loss = losses.hard.sum() / response[:, 1:].sum()
            return loss, {"policy": loss.item()}

        return logits, policy_loss

    with cpu_runtime():
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        with hook.step([targets for _, targets in batches], index=step):
            results = get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(batches), model=chunks[0],
                num_microbatches=MICRO_BATCHES, seq_length=COLUMNS, micro_batch_size=ROWS, forward_only=False,
            )  # fmt: skip
        optimizer.step()
    return sum(r["policy"] for r in results) / MICRO_BATCHES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="where checkpoints go, and where a run goes on from")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, earlier runs' included (default 8)")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints (default 4)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --standalone --nproc-per-node 2 -m examples.megatron_rl ...")
    warnings.filterwarnings("ignore", module="megatron")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(args.folder, args.steps, args.save_every)
    except LoadError as e:
        print(f"megatron_rl: {e}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
