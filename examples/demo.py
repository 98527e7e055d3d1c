"""Train a tiny Megatron-Core model and publish it to two engines after every step: `python -m examples.demo`.

`train` is what a user writes around the library, and what every trainer rank runs: a model, a `MegatronSource`, a
`Publisher`, and one `publish` after a step. `main` is the cluster around it: it starts the trainer's ranks (TP=2, PP=2)
and two embedded engines (one of them TP=2), compares these after every publish with an engine that loads the same
weights from a Hugging Face folder, and prints a row of the table.

The data of the last step are others than before, and its target is published once without its draft: what happens
where only the target is synchronised. Exit code 1 if anything does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from converters.live import write_hf_folder
from examples.demo_ranks import RankFailed, Ranks, this_rank
from examples.demo_table import HEADER, Row, problems, summary
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.engine.control import HttpControl
from weightsync.errors import WeightSyncError
from weightsync.publisher import PublishConfig, Publisher
from weightsync.report import PublishReport
from weightsync.sources.megatron import MegatronSource

TP, PP = 2, 2
ENGINE_TP = (1, 2)
VOCAB_SIZE = 251
# MiMo-shaped: Qwen2 with one MTP layer.
HF_CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
REQUEST = {"prompts": [[3], [17, 5], [40, 2, 9], [111, 30]], "max_tokens": 24, "speculate": 2}
"""What every engine is asked: greedy answers, with two draft tokens per step."""
DEADLINE_S = 120.0
"""Of every wait; where the machine is idle none takes ten seconds."""


# -- the trainer: every rank runs this ---------------------------------------------------------------------------------


def train(job: dict[str, Any], show: Any) -> None:
    """`job`: engines, folder, steps, target_only. `show(dict)` hands a publish to `run` and waits for it."""
    from weightsync.bench.megatron import build_model, make_optimizer, train_step

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=DEADLINE_S))
    model = build_model(HF_CONFIG, tp=TP, pp=PP, ddp={})
    optimizer = make_optimizer(model, lr=1e-3)

    source = MegatronSource(model, HF_CONFIG)
    engines = [HttpControl(**engine) for engine in job["engines"]]
    with Publisher(source, engines, PublishConfig(run_id="demo", deadline_s=DEADLINE_S)) as publisher:
        for version in range(1, job["steps"] + 2):
            new_data = version > job["steps"]
            for micro_batches in batches(version, new_data):
                loss = train_step(model, optimizer, micro_batches=micro_batches)
            shared = [loss]  # only the last pipeline stage knows it
            dist.broadcast_object_list(shared, src=dist.get_world_size() - 1)
            folder = f"{job['folder']}/version-{version}"
            write_hf_folder(model, folder, HF_CONFIG)

            for scope in scopes(version, new_data, job["target_only"]):
                before = [generate(engine) for engine in engines] if dist.get_rank() == 0 else []
                report = publisher.publish(version, scope)
                if dist.get_rank() == 0:
                    after = [generate(engine) for engine in engines]
                    answers = {"before": before, "after": after}
                    show({"report": report.to_json(), "loss": shared[0], "folder": folder, **answers})
    dist.barrier()
    dist.destroy_process_group()


def scopes(version: int, new_data: bool, target_only: bool) -> Sequence[str]:
    """What is published of a version, one after the other."""
    if target_only:
        return ("both",) if version == 1 else ("target",)
    return ("target", "both") if new_data else ("both",)


def batches(version: int, new_data: bool) -> Iterator[list[torch.Tensor]]:
    """Micro-batches [8, 33] for the optimizer steps of one version; each token follows from the one before it."""
    follows = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(int(new_data)))
    generator = torch.Generator().manual_seed(100 + version)
    for _ in range(40 if new_data else 10):
        columns = [torch.randint(0, VOCAB_SIZE, (16,), generator=generator)]
        while len(columns) < 33:
            columns.append(follows[columns[-1]])
        yield list(torch.stack(columns, dim=1).split(8))


def generate(engine: HttpControl) -> dict[str, Any]:
    """Tokens of every prompt, and how many draft tokens were proposed and accepted."""
    return engine.call("generate", REQUEST, deadline_s=DEADLINE_S)


# -- the cluster around it ---------------------------------------------------------------------------------------------


def run(steps: int, target_only: bool) -> int:
    """Start everything, print a row per publish; returns the exit code."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-"))

        def engine(name: str, model: Any, tp: int) -> Any:
            # fp32: engines of different TP agree to the last token.
            config = EngineConfig(name=name, model=model, draft="mtp", tp=tp, dtype="float32", log=f"{folder}/{name}")
            return launch(config)

        say(f"starting {TP * PP} trainer ranks and {len(ENGINE_TP)} engines")
        ranks = stack.enter_context(Ranks(TP * PP, "examples.demo", folder))
        engines = [stack.enter_context(engine(f"engine-{i}", HF_CONFIG, tp)) for i, tp in enumerate(ENGINE_TP)]
        addresses = [{"url": e.url, "api_key": e.api_key, "name": e.name} for e in engines]
        ranks.send({"engines": addresses, "folder": folder, "steps": steps, "target_only": target_only})
        print(HEADER, flush=True)
        say(f"training and publishing {steps + 1} versions")
        for published in ranks.messages(DEADLINE_S):
            report = PublishReport.from_json(published["report"])
            if not rows or rows[-1].report.version != report.version:
                say(f"version {report.version}: starting an engine that loads it from a folder")
                with engine("fresh", published["folder"], 1) as fresh:
                    expected = generate(fresh.control())
            answers = {"before": published["before"], "after": published["after"], "fresh": expected}
            rows.append(Row(report=report, loss=published["loss"], **answers))
            print(rows[-1], flush=True)
    wrong = problems(rows, steps + 1)
    print("\n".join(f"does not hold: {line}" for line in wrong) if wrong else summary(rows))
    return 1 if wrong else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    if (rank := this_rank()) is not None:
        return rank.run(train)
    parser = argparse.ArgumentParser(prog="demo", description="Train a tiny model, publish every step to two engines.")
    parser.add_argument("--steps", type=int, default=4, help="training steps before the data change (default 4)")
    parser.add_argument("--target-only", action="store_true", help="publish the draft once and then never again")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}: expected at least 1")

    def interrupted(number: int, _: object) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_IGN)  # what is being ended must not be interrupted
        say("interrupted: ending every process")
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    try:
        return run(args.steps, args.target_only)
    except (RankFailed, WeightSyncError) as e:
        say(f"demo: {e}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
