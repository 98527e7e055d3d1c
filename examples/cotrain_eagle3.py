"""Co-train an EAGLE3 drafter with a target in a toy RL loop, and publish both after every step, on the CPU.

    python -m examples.cotrain_eagle3 --seeds 3

`train` is what every trainer rank runs (TP=2 x PP=2 with sequence parallelism, real Megatron-Core, MTP on). A step:

    rollouts    the engine answers random prompts with the weights that it was sent last, drafting with the drafter
    capture     the pass that RL trainers make for old log probabilities; the drafter's states are taken from it
    policy      updates of the target; its MTP layer is trained beside it
    drafter     updates on the captured states, then its `publish` hook: target and drafter, one publish

The world: token y after token x is rewarded if y = follows(x), a permutation drawn from the seed. Prompts are uniform,
so what a trained policy answers is uniform too: frequent tokens, which a drafter can learn from rows in any order, do
not exist, and only rows that belong to their position help. A second drafter, the control, gets the same rows
scrambled.

Prints accepted lengths (tokens per decoding pass of the target) and exits with 1 unless co-training raises them by 0.2,
the control stays within 0.05, and a model without sequence parallelism gives the same rows to 1e-5.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from examples.demo_ranks import RankFailed, Ranks, this_rank
from training_hooks import Alignment, Exchange, HiddenCapture, LayerRef, Layout, mtp_targets, row_keys, row_losses
from training_hooks.capture import Rows
from training_hooks.drafter import DrafterTrainer, DrafterTraining
from training_hooks.eagle3_drafter import Eagle3Config, Eagle3Drafter
from training_hooks.megatron import MTPConfig, fingerprint, install_mtp, require_moved
from training_hooks.megatron.capture import capture_from_megatron, replica_place, target_tables
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.engine.control import HttpControl
from weightsync.errors import WeightSyncError
from weightsync.manifest import TensorSpec
from weightsync.publisher import PublishConfig, Publisher
from weightsync.sources.megatron import MegatronSource
from weightsync.sources.roles import RoleRules, in_load_order
from weightsync.timeline import Timeline

TP, PP = 2, 2
VOCAB, HIDDEN, LAYERS = 48, 64, 4
HF_CONFIG = {
    "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
READS = (LayerRef("input_to", 1), LayerRef("input_to", 2), LayerRef("input_to", 3))
DRAFTER = Eagle3Config(
    vocab_size=VOCAB, draft_vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_heads=4, num_kv_heads=2,
    head_dim=16, layers=READS,
)  # fmt: skip
PROMPT, ANSWER, ROWS, MICRO_BATCHES = 6, 8, 16, 2
COLUMNS = PROMPT + ANSWER
UPDATES = 10
DRAFTED = 3
DEADLINE_S = 120.0
"""Of every wait."""


# -- the trainer: every rank runs this ---------------------------------------------------------------------------------


class WithDrafter:
    """The `Source` of a Megatron target and of a drafter that the first stage's sender trains."""

    def __init__(self, target: MegatronSource, drafter: Eagle3Drafter) -> None:
        self._target, self.drafter = target, drafter
        self._specs: Sequence[TensorSpec] | None = None

    @property
    def stage(self) -> int:
        return self._target.stage

    @property
    def num_stages(self) -> int:
        return self._target.num_stages

    @property
    def is_sender(self) -> bool:
        return self._target.is_sender

    def specs(self) -> Sequence[TensorSpec]:
        if self._specs is None:
            state = self.drafter.state_dict() if self.stage == 0 else {}
            shapes = ((name, t.dtype, tuple(t.shape)) for name, t in state.items())
            self._specs = (*self._target.specs(), *in_load_order(RoleRules().specs(shapes, role="draft")))
        return self._specs

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        yield from self._target.stream(roles, timeline)
        if self.is_sender:
            state = self.drafter.state_dict()
            yield from (state[s.name] for s in self.specs() if s.role == "draft" and s.role in roles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Answers of the engine: `tokens` by sample, the same on every rank."""

    tokens: torch.Tensor

    @property
    def layout(self) -> Layout:
        return Layout.padded([COLUMNS] * ROWS, COLUMNS)

    @property
    def supervised(self) -> torch.Tensor:
        return torch.arange(COLUMNS) >= PROMPT

    def micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens [rows, columns], keys of their states)."""
        for i, tokens in enumerate(self.tokens.split(ROWS)):
            yield tokens, row_keys(self.layout, range(i * ROWS, (i + 1) * ROWS))


class Trainer:
    """The target of one seed: its model, optimizer, MTP hook and capture."""

    def __init__(self, seed: int, *, sequence_parallel: bool = True) -> None:
        from megatron.core import parallel_state

        from weightsync.bench.megatron import build_model, make_optimizer

        self.chunks = build_model(HF_CONFIG, tp=TP, pp=PP, sequence_parallel=sequence_parallel, ddp={}, seed=100 * seed)
        self.optimizer = make_optimizer(self.chunks, lr=4e-3)
        self.hook = install_mtp(self.chunks, MTPConfig(scale=0.1))
        self.capture: HiddenCapture = capture_from_megatron(self.chunks, (*READS, LayerRef("final_norm")))
        self.follows = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
        self._tp = parallel_state.get_tensor_model_parallel_group()

    def states(self, batch: Batch, exchange: Exchange, step: int) -> dict[LayerRef, Rows] | None:
        """The pass for old log probabilities; its states on the collecting rank."""
        with self.capture.active(), torch.no_grad():
            self._schedule(list(batch.micro_batches()), self._observe)
        wanted = dict.fromkeys(range(len(batch.tokens)), COLUMNS)
        return exchange.merge(self.capture.take(), step=step, expected=wanted, layers=(*READS, LayerRef("final_norm")))

    def update(self, batch: Batch, index: int) -> dict[str, float]:
        """One optimizer step; mean reward and metrics of the MTP layer, on the last stage."""
        data = []
        for tokens, _ in batch.micro_batches():
            mask = batch.supervised.expand_as(tokens)
            targets = mtp_targets(tokens, mask, layout=batch.layout, depths=1, mask_alignment=Alignment.TOKEN)
            data.append((tokens, targets))
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        before = fingerprint(self.hook.named_parameters())
        with self.hook.step([targets for _, targets in data], index=index):
            results = self._schedule(data, self._learn)
        self.optimizer.step()
        if not self.hook.is_active:
            return {}
        require_moved(before, fingerprint(self.hook.named_parameters()))
        return {"reward": sum(r["reward"] for r in results) / len(results), **self.hook.metrics()}

    def _observe(self, iterator: Any, model: Any) -> Any:
        tokens, keys = next(iterator)
        with self.capture.micro_batch(keys):
            return self._forward(model, tokens), lambda logits: (logits.sum(), {})

    def _learn(self, iterator: Any, model: Any) -> Any:
        tokens, targets = next(iterator)
        with self.hook.micro_batch(targets):
            logits = self._forward(model, tokens)

        def policy_gradient(logits: torch.Tensor) -> Any:
            # The expected reward of a choice at every position, summed over all choices: no sampling noise in a toy.
            mask = torch.ones_like(tokens, dtype=torch.bool)
            losses = row_losses(logits, mask, labels=self.follows[tokens], group=self._tp)
            assert losses.hard is not None
            reward = torch.exp(-losses.hard).mean()
            return -reward, {"reward": reward.item()}

        return logits, policy_gradient

    def _forward(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(COLUMNS).expand(len(tokens), -1)
        causal = torch.ones(1, 1, COLUMNS, COLUMNS, dtype=torch.bool).triu(1)
        logits: torch.Tensor = model(tokens, positions, causal)
        return logits

    def _schedule(self, data: Sequence[Any], forward_step: Any) -> list[dict[str, float]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        results: list[dict[str, float]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(data),
            model=self.chunks[0],
            num_microbatches=len(data),
            seq_length=COLUMNS,
            micro_batch_size=ROWS,
            forward_only=not torch.is_grad_enabled(),
        )
        return results


def train(job: dict[str, Any], show: Any) -> None:
    """`job`: engine, seeds, steps. `show(dict)` hands a line of the table to `run`."""
    from weightsync.bench.megatron import cpu_runtime

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=DEADLINE_S))
    engine = HttpControl(**job["engine"])
    versions = itertools.count(1)
    with cpu_runtime():
        for seed in job["seeds"]:
            cotrain(seed, job["steps"], engine, versions, show)
    dist.barrier()
    dist.destroy_process_group()


def cotrain(seed: int, steps: int, engine: HttpControl, versions: Iterator[int], show: Any) -> None:
    trainer = Trainer(seed)
    replica, rank, size = replica_place()
    store = dist.distributed_c10d._get_default_store()
    exchange = Exchange(store, rank, size, run=f"cotrain-{seed}", replica=replica, deadline_s=DEADLINE_S, rows="memory")
    torch.manual_seed(seed)
    d2t = torch.zeros(VOCAB, dtype=torch.int64)
    drafters = {"cotrained": Eagle3Drafter(DRAFTER, d2t), "control": Eagle3Drafter(DRAFTER, d2t)}
    drafters["control"].load_state_dict(drafters["cotrained"].state_dict())
    source = WithDrafter(MegatronSource(trainer.chunks, HF_CONFIG, include_mtp=False), drafters["cotrained"])
    line: dict[str, Any] = {"seed": seed}
    with Publisher(source, [engine], PublishConfig(run_id="cotrain", deadline_s=DEADLINE_S)) as publisher:

        def publish(_: object = None) -> None:
            publisher.publish(next(versions), "both")

        publish()
        line["start"] = measure(engine)
        tables = target_tables(trainer.chunks)
        settings = DrafterTraining(lr=5e-3, steps=DRAFTED, updates=12)
        learners = {
            name: DrafterTrainer(
                drafter,
                embedding=tables[0],
                head=tables[1],
                config=settings,
                publish=publish if name == "cotrained" else None,
            )
            for name, drafter in drafters.items()
        }
        for step in range(steps):
            batch, length = rollouts(engine, seed, step)
            if rank == 0:
                show({"seed": seed, "step": step, "rollouts": length})
            captured = trainer.states(batch, exchange, step)
            tables = target_tables(trainer.chunks)  # of the weights that were captured
            for i in range(UPDATES):
                seen = trainer.update(batch, step * UPDATES + i)
            if captured is None:
                publish()  # the other ranks' side of the hook
                continue
            tokens = dict(enumerate(batch.tokens))
            supervised = dict.fromkeys(tokens, batch.supervised)
            for name, rows in (("control", scrambled(captured, step)), ("cotrained", captured)):
                learners[name].refresh(*tables)
                learners[name].step(rows, tokens, supervised)
        line["cotrained"] = measure(engine)
        source.drafter.load_state_dict(drafters["control"].state_dict())
        publish()
        line["control"] = measure(engine)
    line["gap"] = sequence_parallel_gap(trainer, batch, exchange, steps)
    exchange.close()
    learned: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(learned, seen)
    if rank == 0:
        show({**line, **learned[-1]})


def sequence_parallel_gap(trainer: Trainer, batch: Batch, exchange: Exchange, step: int) -> float:
    """Largest relative difference of any captured row from that of the same weights without sequence parallelism."""
    captured = trainer.states(batch, exchange, step)
    plain = Trainer(0, sequence_parallel=False)  # from here on Megatron's parallel state is this one's
    plain.chunks[0].load_state_dict(trainer.chunks[0].state_dict())
    others = plain.states(batch, exchange, step + 1)
    if captured is None or others is None:
        return 0.0
    return max(
        float((rows.values - others[ref].values).abs().max() / rows.values.abs().max())
        for ref, rows in captured.items()
    )


def scrambled(captured: Mapping[LayerRef, Rows], seed: int) -> dict[LayerRef, Rows]:
    """The same rows under each other's keys, all layers alike."""
    out = {}
    for ref, rows in captured.items():
        order = torch.randperm(len(rows.keys), generator=torch.Generator().manual_seed(seed))
        out[ref] = Rows(keys=rows.keys, values=rows.values[order])
    return out


def rollouts(engine: HttpControl, seed: int, step: int) -> tuple[Batch, float]:
    """Answers to uniform prompts, asked on rank 0, and their accepted length."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        prompts = torch.randint(0, VOCAB, (ROWS * MICRO_BATCHES, PROMPT), generator=generator).tolist()
        reply = ask(engine, prompts)
        shared = [([p + a for p, a in zip(prompts, reply["tokens"], strict=True)], accepted_length(reply))]
    dist.broadcast_object_list(shared, src=0)
    return Batch(tokens=torch.tensor(shared[0][0])), shared[0][1]


def measure(engine: HttpControl) -> float:
    """Accepted length over prompts that no seed trains on; asked on rank 0, 0.0 elsewhere."""
    if dist.get_rank() != 0:
        return 0.0
    prompts = torch.randint(0, VOCAB, (64, PROMPT), generator=torch.Generator().manual_seed(10**6)).tolist()
    return accepted_length(ask(engine, prompts))


def ask(engine: HttpControl, prompts: list[list[int]]) -> dict[str, Any]:
    request = {"prompts": prompts, "max_tokens": ANSWER, "speculate": DRAFTED}
    return engine.call("generate", request, deadline_s=DEADLINE_S)


def accepted_length(reply: Mapping[str, Any]) -> float:
    """Tokens per decoding pass of the target; the pass that reads the prompt is none."""
    tokens = sum(len(answer) - 1 for answer in reply["tokens"])
    return float(tokens / (tokens - reply["accepted"]))


# -- the cluster around it ---------------------------------------------------------------------------------------------


def run(seeds: Sequence[int], steps: int) -> int:
    """Start the ranks and an engine, print what they say; returns the exit code."""
    wrong = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cotrain-"))
        ranks = stack.enter_context(Ranks(TP * PP, "examples.cotrain_eagle3", folder))
        config = EngineConfig(
            name="engine",
            model=HF_CONFIG,
            draft=DRAFTER.to_json(),
            dtype="float32",
            log=f"{folder}/engine",
            max_running=32,
        )
        engine = stack.enter_context(launch(config))
        address = {"url": engine.url, "api_key": engine.api_key, "name": engine.name}
        ranks.send({"engine": address, "seeds": list(seeds), "steps": steps})
        for line in ranks.messages(DEADLINE_S):
            if "step" in line:
                where = f"seed {line['seed']} step {line['step']}"
                print(f"{where}: answers take {line['rollouts']:.2f} tokens per pass", flush=True)
                continue
            print(
                f"seed {line['seed']}: accepted length {line['start']:.2f} -> {line['cotrained']:.2f}, control "
                f"{line['control']:.2f}; reward {line['reward']:.2f}, MTP {line['mtp_accept_length']:.2f}; rows "
                f"without sequence parallelism differ by {line['gap']:.1e}",
                flush=True,
            )
            holds = {
                "co-training raises the accepted length by 0.2": line["cotrained"] >= line["start"] + 0.2,
                "scrambled rows raise it by no more than 0.05": line["control"] <= line["start"] + 0.05,
                "rows with and without sequence parallelism differ by no more than 1e-5": line["gap"] <= 1e-5,
            }
            wrong += [f"does not hold for seed {line['seed']}: {what}" for what, true in holds.items() if not true]
    print("\n".join(wrong or ["all of it holds"]))
    return 1 if wrong else 0


def main() -> int:
    if (rank := this_rank()) is not None:
        return rank.run(train)
    parser = argparse.ArgumentParser(prog="cotrain_eagle3", description="Co-train an EAGLE3 drafter in a toy RL loop.")
    parser.add_argument("--seeds", type=int, default=1, help="independent runs (default 1)")
    parser.add_argument("--steps", type=int, default=6, help="RL steps of each (default 6)")
    args = parser.parse_args()
    if min(args.seeds, args.steps) < 1:
        parser.error("--seeds and --steps: expected at least 1")
    try:
        return run(range(args.seeds), args.steps)
    except (RankFailed, WeightSyncError) as e:
        print(f"cotrain_eagle3: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
