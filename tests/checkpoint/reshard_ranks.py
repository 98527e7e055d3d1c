"""Ranks that save real Megatron-Core models in one layout and go on in another; see test_reshard.py.

One process imports Megatron-Core and forks the ranks of each job. Jobs of every layout train on the same global
batches, so their losses can be compared: bit by bit in the layout that saved, else up to the order of sums (fp32).
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import faulthandler
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.checkpoint import megatron_ranks as m
from tests.support.forks import Fork

DENSE = m.TINY
MOE = m.MOE
SHORT_KEYS = {"chained_optim_avoid_prefix": True}
"""Without it, Megatron-Core numbers the optimizers of a chain in their keys, and another EP counts otherwise."""
STEPS_BEFORE, STEPS_AFTER = 2, 10
SEQUENCES, TOKENS = 8, 17

SAVES = {
    "tp2pp2 plain": {"config": DENSE, "world": 4, "layout": {"tp": 2, "pp": 2}, "fmt": None},
    "tp2dp2 distributed": {"config": DENSE, "world": 4, "layout": {"tp": 2}, "fmt": "fully_reshardable"},
    "ep2 distributed": {"config": MOE, "world": 2, "layout": {"ep": 2}, "fmt": "fully_reshardable"},
    "ep2 plain": {"config": MOE, "world": 2, "layout": {"ep": 2}, "fmt": None},
    "ep1 plain": {"config": MOE, "world": 1, "layout": {}, "fmt": None},
}
SAME = [name for name in SAVES if name != "ep1 plain"]
"""Those that go on in their own layout, too."""
DENSE_LOADS = {
    "tp1": (1, {}),
    "pp4": (4, {"pp": 4}),
    "dp4": (4, {}),
    "tp2": (2, {"tp": 2}),
}
MOE_LOADS = {"ep1dp2": (2, {}), "ep1": (1, {}), "ep2": (2, {"ep": 2})}
OTHER_CHAINS = {"ep2 plain": ["ep1dp2", "ep1"], "ep2 distributed": ["ep1"], "ep1 plain": ["ep2"]}
"""save: loads, where Megatron-Core has another number of optimizers."""
BY_CHECKPOINTER = "ep2 distributed"


def join(rank, world, folder):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=90)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timeout)


def make(case, layout, seed):
    from weightsync.bench.megatron import build_model, make_optimizer

    ddp = {"use_distributed_optimizer": case["fmt"] is not None}
    # Megatron's own experts: the grouped ones come from Transformer Engine, their stand-in on the CPU cannot be saved.
    how = {"experts": "sequential"} if case["config"] is MOE else {}
    chunks = build_model(case["config"], dtype=torch.float32, ddp=ddp, seed=seed, **how, **layout)
    return m.Trainer(chunks, make_optimizer(chunks))


def train(trainer, first, number):
    """Losses of `number` steps on global batches that do not depend on the layout; the same on all ranks."""
    from megatron.core import parallel_state as ps

    from weightsync.bench.megatron import train_step

    found = []
    for step in range(first, first + number):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, m.TINY["vocab_size"], (SEQUENCES, TOKENS), generator=generator)
        size = SEQUENCES // ps.get_data_parallel_world_size()
        own = batch[ps.get_data_parallel_rank() * size :][:size]
        loss = train_step(trainer.chunks, trainer.optimizer, micro_batches=list(own.split(2)))
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss)
        losses = [loss for loss in losses if loss is not None]
        found.append(sum(losses) / len(losses))
    return found


def save_job(rank, name, folder):
    """Train, save, and go on as if nothing had happened: (state of the save, its error, losses)."""
    from checkpoint import Checkpointer, SaveConfig

    case = SAVES[name]
    join(rank, case["world"], folder)
    with m.megatron():
        trainer = make(case, case["layout"], seed=3)
        train(trainer, 0, STEPS_BEFORE)
        config = SaveConfig(deadline_s=60)
        with Checkpointer(folder / "root", rank=rank, world_size=case["world"], config=config) as c:
            handle = c.save(
                STEPS_BEFORE, m.state_dict(trainer, fmt=case["fmt"], ours=case["fmt"] is not None, metadata=SHORT_KEYS)
            )
            # What is staged is the state of now: training goes on at once.
            losses = train(trainer, STEPS_BEFORE, STEPS_AFTER)
            c.wait()
    return handle.state, handle.error, losses


def load_job(rank, name, world, layout, by, path, folder):
    """Another model of that layout, filled from `path` by "ours" or "stock": what differs, of how many shards; losses.

    If it cannot be loaded: the error; and for ours, what differs after a load of the weights only.
    """
    from megatron.core import dist_checkpointing as dc

    from checkpoint.format import TorchDistReader
    from checkpoint.megatron import load_sharded

    case = SAVES[name]
    join(rank, world, folder)
    with m.megatron():
        trainer = make(case, layout, seed=77)
        same = layout == case["layout"] and world == case["world"]
        state = m.state_dict(trainer, fmt=case["fmt"], loading=True, rng=same, metadata=SHORT_KEYS)
        try:
            if by == "stock":
                loaded = dc.load(state, str(path))
            else:
                with TorchDistReader(path) as reader:
                    loaded = load_sharded(state, reader)
            trainer.module.load_state_dict(loaded["model"])
            trainer.optimizer.load_state_dict(loaded["optimizer"])
        except BaseException as e:  # noqa: BLE001 - torch's CheckpointException is no Exception
            found = {"error": f"{type(e).__name__}: {e}"}
            return found | (weights_only(rank, name, trainer, path) if by == "ours" else {})
        m.own_steps(trainer)
        gold, _ = m.read_all(path)
        bad, count = m.mismatches(trainer, gold, fmt=case["fmt"], metadata=SHORT_KEYS)
        found = {"bad": bad, "count": count, "losses": train(trainer, STEPS_BEFORE, STEPS_AFTER)}
        if not same:
            with TorchDistReader(path) as reader:
                found["rng"] = _error(
                    lambda: load_sharded(m.state_dict(trainer, fmt=case["fmt"], metadata=SHORT_KEYS), reader)
                )
        return found


def weights_only(rank, name, trainer, path):
    """What differs from the weights that were saved: after that error, and after a load of them alone.

    Of one save through the Checkpointer, with what that says when it is asked for all.
    """
    from checkpoint import Checkpointer, SaveConfig
    from checkpoint.contents import section_of, select
    from checkpoint.errors import LoadError
    from checkpoint.format import TorchDistReader
    from checkpoint.megatron import load_sharded

    how = {"fmt": SAVES[name]["fmt"], "metadata": SHORT_KEYS}
    state = m.state_dict(trainer, loading=True, rng=False, **how)
    gold, _ = m.read_all(path)
    weights = {key: value for key, value in gold.items() if section_of(key) == "model"}
    found = {"refused": "", "before": m.mismatches(trainer, weights, **how)[0]}
    if name == BY_CHECKPOINTER:
        with Checkpointer(path.parent, rank=rank, world_size=dist.get_world_size(), config=SaveConfig()) as c:
            try:
                c.load(state, allow_unused=lambda key: section_of(key) == "rng")
            except LoadError as e:
                found["refused"] = str(e)
            loaded = c.load(state, contents=("model",)).state
    else:
        with TorchDistReader(path) as reader:
            loaded = load_sharded(select(state, ("model",)), reader)
    trainer.module.load_state_dict(loaded["model"])
    found["bad"], found["count"] = m.mismatches(trainer, weights, **how)
    return found


def _error(fn):
    try:
        fn()
    except Exception as e:  # noqa: BLE001 - what it raises is what is looked at
        return f"{type(e).__name__}: {e}"
    return ""


def run(jobs, at_once=2):
    """{job: results by rank} of {job: (folder, world, fn, *args)}: fn(rank, *args, folder) in `world` forks each."""
    found, running, rest = {}, collections.deque(), collections.deque(jobs.items())
    with contextlib.ExitStack() as everything:
        while rest or running:
            while rest and len(running) < at_once:
                job, (folder, world, fn, *args) = rest.popleft()
                folder.mkdir()
                ranks = contextlib.ExitStack()
                everything.push(ranks)
                forks = [ranks.enter_context(Fork(_loud, fn, rank, *args, folder)) for rank in range(world)]
                running.append((job, ranks, forks))
            job, ranks, forks = running.popleft()
            with ranks:
                found[job] = [fork.result(120) for fork in forks]
    return found


def _loud(fn, *args):
    try:
        return fn(*args)
    except Exception:
        traceback.print_exc()  # the others wait in a collective meanwhile, and hide the reason
        raise


def observe_all(_rank, _world, base, names):
    """{save: {"saved": [(state, error, losses)], load: [what each rank found]}}"""
    faulthandler.cancel_dump_traceback_later()
    os.environ["OMP_NUM_THREADS"] = "1"
    import megatron.core.dist_checkpointing
    import megatron.core.optimizer
    import megatron.core.transformer  # noqa: F401 - before the forks, which then need not

    base, seen = Path(base), {}
    for number, name in enumerate(names):
        case = SAVES[name]
        home = base / str(number)
        seen[name] = run({"saved": (home, case["world"], save_job, name)})
        path = home / f"root/iter_{STEPS_BEFORE:07d}"
        moe = case["config"] is MOE
        loads = {load: MOE_LOADS[load] for load in OTHER_CHAINS[name]} if moe else dict(DENSE_LOADS)
        if name in SAME:
            loads["same"] = case["world"], case["layout"]
        jobs = {}
        for load, (world, layout) in loads.items():
            for by in ("ours", "stock") if moe and load != "same" else ("ours",):
                folder = base / f"{number} {load} {by}"
                jobs[f"{load} {by}"] = folder, world, load_job, name, world, layout, by, path
        seen[name] |= run(jobs)
    return seen
