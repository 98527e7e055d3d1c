"""Train the MTP layers of a tiny Megatron-Core model beside a policy loss, on the CPU.

    python -m examples.train_mtp --steps 40                             # one process
    torchrun --standalone --nproc-per-node 2 -m examples.train_mtp      # tensor parallel over two

The "policy" learns prompts and responses that follow a fixed rule, with logits and a loss of its own, as an RL trainer
has them; the MTP layers learn to draft the same responses. Prints both losses and how often a draft token is right.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from training_hooks import Alignment, Layout, mtp_targets, row_losses
from training_hooks.megatron import MTPConfig, check_mtp_settings, fingerprint, install_mtp, require_moved
from weightsync.bench.megatron import build_model, cpu_runtime, make_optimizer

HF_CONFIG = {
    "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 2,
}  # fmt: skip
DEPTHS, COLUMNS, ROWS, MICRO_BATCHES, PROMPT = 2, 16, 4, 2, 4


def micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor, Layout]]:
    """(tokens [rows, columns], which of them are responses, where the sequences lie) of every micro-batch."""
    generator = torch.Generator().manual_seed(step)
    out = []
    for _ in range(MICRO_BATCHES):
        lengths = torch.randint(PROMPT + 4, COLUMNS + 1, (ROWS,), generator=generator).tolist()
        tokens = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
        tokens[:, 0] = torch.randint(0, 64, (ROWS,), generator=generator)
        for column in range(1, COLUMNS):
            tokens[:, column] = (5 * tokens[:, column - 1] + 3) % 64
        column = torch.arange(COLUMNS)
        real = column[None] < torch.tensor(lengths)[:, None]
        out.append((torch.where(real, tokens, 0), real & (column >= PROMPT), Layout.padded(lengths, COLUMNS)))
    return out


def train(steps: int) -> list[dict[str, float]]:
    """One dict of metrics per step."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tp = dist.get_world_size()
    chunks = build_model(HF_CONFIG, tp=tp, ddp={})
    check_mtp_settings(chunks[0].config, depths=DEPTHS)
    optimizer = make_optimizer(chunks, lr=3e-3)
    hook = install_mtp(chunks, MTPConfig(scale=0.1))
    group = parallel_state.get_tensor_model_parallel_group()
    causal = torch.ones(1, 1, COLUMNS, COLUMNS, dtype=torch.bool).triu(1)
    positions = torch.arange(COLUMNS).expand(ROWS, -1)
    history = []
    for step in range(steps):
        batches = []
        for tokens, response, layout in micro_batches(step):
            targets = mtp_targets(tokens, response, layout=layout, depths=DEPTHS, mask_alignment=Alignment.TOKEN)
            batches.append((tokens, response, targets))

        def forward_step(iterator, model):
            tokens, response, targets = next(iterator)
            with hook.micro_batch(targets):
                logits = model(tokens, positions, causal)  # logits, although MTP layers are trained

            def policy_loss(logits):
                # A policy gradient with advantage 1; an RL trainer has its own loss here.
                losses = row_losses(logits[:, :-1], response[:, 1:], labels=tokens[:, 1:], group=group)
                loss = losses.hard.sum() / response[:, 1:].sum()
                return loss, {"policy": loss.item()}

            return logits, policy_loss

        before = fingerprint(hook.named_parameters())
        with cpu_runtime():
            chunks[0].zero_grad_buffer()
            optimizer.zero_grad()
            with hook.step([targets for *_, targets in batches], index=step):
                results = get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iter(batches),
                    model=chunks[0],
                    num_microbatches=MICRO_BATCHES,
                    seq_length=COLUMNS,
                    micro_batch_size=ROWS,
                    forward_only=False,
                )
            optimizer.step()
        require_moved(before, fingerprint(hook.named_parameters()))
        history.append({"policy": sum(r["policy"] for r in results) / MICRO_BATCHES, **hook.metrics()})
    hook.remove()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default 30)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        history = train(steps)
        if dist.get_rank() == 0:
            print("step  policy  mtp 1  mtp 2  right 1  right 2  tokens/step")
            for step, m in enumerate(history):
                if step % 5 == 0 or step == steps - 1:
                    print(
                        f"{step:4}  {m['policy']:6.3f}  {m['mtp_loss/depth_1']:5.3f}  {m['mtp_loss/depth_2']:5.3f}  "
                        f"{m['mtp_accuracy/depth_1']:7.2f}  {m['mtp_accuracy/depth_2']:7.2f}  "
                        f"{m['mtp_accept_length']:11.2f}"
                    )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
