"""Ranks with real Megatron-Core 0.16.1 models and optimizers on gloo, for tests/checkpoint/test_megatron.py."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import shutil
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint import Checkpointer, SaveConfig
from checkpoint.format import TorchDistReader
from checkpoint.layout import committed_path
from checkpoint.megatron import load_sharded, optimizer_state

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


class CountCollectives(TorchDispatchMode):
    """Counts the c10d operators of this process: every collective of a process group is one."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Trainer:
    chunks: list
    optimizer: object

    @property
    def module(self):
        return self.chunks[0].module


MOE = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make(tp=1, pp=1, ep=1, distributed=False, steps=2, seed=0):
    from weightsync.bench.megatron import build_model, make_optimizer, train_step

    # Megatron's own experts: the grouped ones come from Transformer Engine, their stand-in on the CPU cannot be saved.
    config, how = (MOE, {"ep": ep, "experts": "sequential"}) if ep > 1 else (TINY, {})
    # No two saves at the same values: the seed differs for what is to be overwritten by a load.
    chunks = build_model(
        config, tp=tp, pp=pp, dtype=torch.bfloat16, ddp={"use_distributed_optimizer": distributed}, seed=seed, **how
    )
    trainer = Trainer(chunks, make_optimizer(chunks))
    for step in range(steps):
        train_step(trainer.chunks, trainer.optimizer, step=step)
    return trainer


def state_dict(trainer, *, fmt=None, loading=False, ours=False, rng=True, metadata=None):
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

    metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True), **(metadata or {})}
    if fmt:
        metadata["distrib_optim_sharding_type"] = fmt
        if loading:
            for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
                part._init_optimizer_states_with_dummy_values()
    model = trainer.module.sharded_state_dict(metadata=metadata)
    if ours:
        optimizer = optimizer_state(trainer.optimizer, model, metadata=metadata)
    else:
        optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    state = {
        "model": model,
        "optimizer": optimizer,
        "iteration": 5,
        "args": {"a": 1},
        "local": LocalNonpersistentObject(dist.get_rank()),
    }
    if rng:
        shape = (ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size())
        offset = (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank())
        value = [{"torch": torch.get_rng_state(), "rank": dist.get_rank()}]
        state["rng"] = ShardedObject("rng_state", value, shape, offset, replica_id=ps.get_data_parallel_rank())
    return state


def read_all(path):
    with TorchDistReader(path) as folder:
        folder.index.check()
        return {key: folder.read(key) for key in folder.index.tensors}, sorted(folder.index.objects)


def mismatches(trainer, gold, **how):
    """Shards of this trainer's state that differ from the global tensors `gold`; and how many were compared."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = state_dict(trainer, **how)
    apply_factories(state)
    bad, count = [], 0
    for part in nested_values(state):
        if isinstance(part, ShardedTensor) and part.key in gold:
            shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
            box = tuple(slice(o, o + n) for o, n in zip(part.global_offset, shape, strict=True))
            count += 1
            if not torch.equal(gold[part.key][box].reshape(part.data.shape), part.data):
                bad.append(part.key)
    return bad, count


def losses(trainer, num_steps, first):
    from weightsync.bench.megatron import train_step

    found = [train_step(trainer.chunks, trainer.optimizer, step=first + i) for i in range(num_steps)]
    return [loss for loss in found if loss is not None]


def stock_save(trainer, path, **how):
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
    dist.barrier()
    dc.save(state_dict(trainer, **how), str(path), get_default_save_sharded_strategy("torch_dist", 1))
    dist.barrier()


def own_steps(trainer):
    """Without Transformer Engine, Megatron-Core gives all parameters one tensor as step: each would count it up."""
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def reload(path, *, ours, same, fmt=None, **layout):
    """A fresh trainer with other weights, loaded from `path` by stock Megatron-Core or by `load_sharded`."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.validation import StrictHandling

    trainer = make(**layout, steps=0, seed=77)
    state = state_dict(trainer, fmt=fmt, loading=True, rng=same)
    if ours:
        with CountCollectives() as count, TorchDistReader(path) as folder:
            loaded = load_sharded(state, folder)
        assert not count.calls, count.calls
    elif same:
        loaded = dc.load(state, str(path), strict=StrictHandling.RAISE_ALL)
    else:
        loaded = dc.load(state, str(path))
    trainer.module.load_state_dict(loaded["model"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    own_steps(trainer)
    assert loaded["local"] == dist.get_rank()
    assert loaded["iteration"] == 5
    return trainer


@contextlib.contextmanager
def megatron():
    from weightsync.bench.megatron import cpu_runtime

    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    with cpu_runtime(), torch_adam():
        yield


@contextlib.contextmanager
def torch_adam():
    """Without Transformer Engine and Apex, Megatron-Core 0.16.1 cannot load what it saved (KeyError: 'step')."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, parameter, tensors):
        group, order = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        return plain(self, parameter, {**({"step": state["step"]} if "step" in state else {}), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = plain


def cases(rank, world_size, root, names):
    """Runs the named cases one after the other: {name: what it found}."""
    results = {}
    with megatron(), Checkpointer(root, rank=rank, world_size=world_size, config=SaveConfig(deadline_s=40)) as c:
        for step, name in enumerate(names, 1):
            try:
                results[name] = save_and_load(c, step, Path(root), **CASES[name])
            except Exception:  # noqa: BLE001
                # Without this the other ranks wait in a collective until the deadline and hide the reason.
                traceback.print_exc()
                os._exit(1)
    return results


T2, P2 = {"tp": 2}, {"pp": 2}
CASES = {
    "tp2 plain": {"layout": T2, "loads": [(T2, True), ({}, False)]},
    "pp2 plain": {"layout": P2, "loads": [(P2, True), (T2, False)]},
    "dp2 gathered": {"layout": {}, "fmt": "fully_reshardable", "ours": False, "loads": [({}, True)]},
    "dp2 distributed": {"layout": {}, "fmt": "fully_reshardable", "loads": [({}, True), (T2, False), (P2, False)]},
    # Two distributed optimizers in a chain: the dense parameters' and the experts'.
    "ep2 chained": {"layout": {"ep": 2}, "fmt": "fully_reshardable", "loads": [({"ep": 2}, True)]},
    "tp2 dp_reshardable": {"layout": T2, "fmt": "dp_reshardable", "ours": False, "loads": [(T2, True)]},
    "tp2pp2 plain": {"layout": {**T2, **P2}, "loads": [({**T2, **P2}, True), ({}, False), ({"pp": 4}, False)]},
    "tp2dp2 distributed": {
        "layout": T2,
        "fmt": "fully_reshardable",
        "loads": [(T2, True), ({}, False), ({**T2, **P2}, False)],
    },
}


def save_and_load(checkpointer, step, root, *, layout, loads, fmt=None, ours=True):
    distributed = fmt is not None
    trainer = make(**layout, distributed=distributed)
    stock = root / "stock"
    stock_save(trainer, stock, fmt=fmt)
    with CountCollectives() as building:
        state = state_dict(trainer, fmt=fmt, ours=ours)
    with CountCollectives() as saving:
        handle = checkpointer.save(step, state)
        checkpointer.wait()
    dist.barrier()
    path = committed_path(root, step)
    found = {
        "state": handle.state,
        "error": handle.error,
        "differs": handle.result.get("common_differs"),
        "collectives": dict(saving.calls),
    }
    if ours:
        found["collectives of the optimizer"] = dict(building.calls)
    if handle.state != "committed":
        return found
    gold, objects = read_all(stock)
    mine, my_objects = read_all(path)
    found["same keys"] = gold.keys() == mine.keys() and objects == my_objects
    # dp_reshardable pads with uninitialised memory: those bytes are no state.
    found["different"] = [] if fmt == "dp_reshardable" else [k for k in gold if not torch.equal(gold[k], mine.get(k))]
    found["num tensors"] = len(gold)
    if fmt == "dp_reshardable":
        # With torch's Adam stock does not go on from this format as if nothing had happened: it is the measure itself.
        trainer = reload(stock, ours=False, same=True, fmt=fmt, distributed=True, **layout)
    after = losses(trainer, 2, first=10)
    found["loads"] = []
    for target, same in loads:
        for by_us in (False, True):
            again = reload(path, ours=by_us, same=same, fmt=fmt, distributed=distributed, **target)
            bad, count = ([], 1) if fmt == "dp_reshardable" else mismatches(again, gold, fmt=fmt)
            entry = {"target": target, "by us": by_us, "bad": bad, "count": count}
            if same:
                entry["losses equal"] = losses(again, 2, first=10) == after
            found["loads"].append(entry)
    dist.barrier()
    return found


def contents(rank, world_size, root):
    """What several hold is spread from the second save on; weights alone; registered state of the user's own."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing import ShardedTensor

    from checkpoint.errors import LoadError

    numel = 1 << 19

    def part(fill):
        def tensor(key, at):
            data = torch.arange(numel, dtype=torch.float32) + at if fill else torch.zeros(numel)
            # Data-parallel replicas of the weights; the optimizer's state is split.
            if key.startswith("optimizer"):
                return ShardedTensor.from_rank_offsets(key, data, (0, rank, world_size))
            return ShardedTensor.from_rank_offsets(key, data, replica_id=rank)

        weights = {f"w{i}": tensor(f"w{i}", i) for i in range(4)}
        return {"model": weights, "optimizer": {"m": tensor("optimizer.state.exp_avg.w", 100 * rank)}, "iteration": 3}

    def good(state, names=("model", "optimizer")):
        want = part(True)
        return all(torch.equal(state[n][k], v.data) for n in names for k, v in want[n].items())

    found, given = {}, {}
    with Checkpointer(root, rank=rank, world_size=world_size, config=SaveConfig(deadline_s=40)) as c:
        c.register("data", save=lambda: {"at": 10 + rank}, load=lambda v: given.update(data=v))
        c.register("curriculum", save=lambda: [1, 2], load=lambda v: given.update(curriculum=v), shared=True)
        for step in (1, 2, 3):
            handle = c.save(step, part(True))
            c.wait()
            assert handle.state == "committed", handle.error
            found["bytes", step] = handle.nbytes
        loaded = c.load(part(False))
        found["all"] = good(loaded.state), loaded.step, dict(given)
        stock = dc.load(part(False), str(committed_path(root, 3)))
        found["stock"] = good(stock)
        # The optimizer's files are damaged: weights alone neither read nor prove them.
        with TorchDistReader(committed_path(root, 3)) as folder:
            weights = {chunk.file for k, e in folder.index.tensors.items() if k[0] == "w" for chunk in e.chunks}
            other = {chunk.file for k, e in folder.index.tensors.items() if k[0] == "o" for chunk in e.chunks}
        found["apart"] = not weights & other
        dist.barrier()
        if rank == 0:
            for name in other:
                path = committed_path(root, 3) / name
                path.write_bytes(path.read_bytes()[:-1] + b"x")
        dist.barrier()
        given.clear()
        loaded = c.load(part(False), step=3, contents=("model",))
        found["weights"] = good(loaded.state, ("model",)), sorted(loaded.state), dict(given)
        try:
            c.load(part(False), step=3)
        except LoadError as e:
            found["damaged"] = str(e)
        handle = c.save(4, part(True), contents=("model",))
        c.wait()
        with TorchDistReader(committed_path(root, 4)) as folder:
            found["saved"] = sorted(folder.index.tensors), sorted(folder.index.objects)
        found["weights of four"] = good(c.load(part(False), step=4, contents=("model",)).state, ("model",))
        c.save(5, part(True))
        c.wait()
        # One rank has not seen the last save end: named, nothing is committed, and the next one is whole again.
        if rank == 1:
            from checkpoint.replicas import Share

            c._supervisor.share = Share()
        handle = c.save(6, part(True))
        c.wait()
        found["different opinions"] = handle.state, handle.error
        handle = c.save(7, part(True))
        c.wait()
        found["afterwards"] = handle.state
    return found


def ladder(rank, world_size, root, durable):
    """Loading when the newest is damaged, then the one before: which is taken, and why not the others."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing import ShardedTensor

    from checkpoint.drain import drain
    from checkpoint.errors import LoadError

    def part(step, rows=8):
        whole = torch.arange(2 * 8 * 16.0).view(16, 16) + 100 * step
        return {
            "w": ShardedTensor.from_rank_offsets("w", whole[8 * rank : 8 * rank + rows].clone(), (0, rank, world_size)),
            "rep": ShardedTensor.from_rank_offsets("rep", torch.full((4,), float(step)), replica_id=rank),
            "step": step,
        }

    def blank():
        state = part(0)
        state["w"].data.zero_()
        return state

    def got(result):
        good = torch.equal(result.state["w"], part(result.step)["w"].data) and result.state["step"] == result.step
        return result.step, Path(result.tier).name, good, list(result.passed_over)

    def damage(step, where):
        if rank == 0:
            path = committed_path(where, step) / "__1_0.distcp"
            data = bytearray(path.read_bytes())
            data[900] ^= 16
            path.write_bytes(data)
        dist.barrier()

    found = {}
    with megatron(), Checkpointer(root, rank=rank, world_size=world_size, config=SaveConfig(deadline_s=40)) as c:
        for step in (1, 2, 3):
            c.save(step, part(step), content_metadata={"step": step})
            c.wait()
        if rank == 0:
            for step in (1, 2):
                drain(root, step, f"file://{durable}")
        dist.barrier()
        found["newest"] = got(c.load(blank(), durable=[durable]))
        found["chosen"] = got(c.load(blank(), step=1))
        damage(3, root)
        loaded = dc.load(blank(), str(committed_path(root, 3)))
        found["stock loads damage"] = not torch.equal(loaded["w"], part(3)["w"].data) if rank == 1 else True
        found["older"] = got(c.load(blank()))
        damage(2, root)
        found["durable"] = got(c.load(blank(), durable=[durable]))
        damage(2, durable)
        if rank == 1:
            (committed_path(root, 1) / "__0_0.distcp").unlink()
        dist.barrier()
        found["durable of the oldest"] = got(c.load(blank(), durable=[durable]))
        damage(1, durable)
        try:
            c.load(blank(), durable=[durable])
        except LoadError as e:
            found["nothing"] = str(e)
        c.save(4, part(4))
        c.wait()
        less = {key: value for key, value in blank().items() if key != "rep"}
        try:
            c.load(less, step=4)
        except LoadError as e:
            found["dropped"] = str(e)
        found["weights only"] = got(c.load(less, step=4, allow_unused=lambda key: key == "rep"))
        if rank == 0:
            try:
                c.load(blank(), deadline_s=1.0)
            except LoadError as e:
                found["silent"] = str(e)
        dist.barrier()
    with megatron():
        found["contents"] = contents(rank, world_size, f"{root}-contents")
    return found


def node_local(rank, world_size, roots):
    """Nodes with disks of their own: what stock does, and how ours is put together."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing import ShardedTensor

    from checkpoint.errors import LoadError

    def part(fill):
        whole = torch.arange(16 * 16.0).view(16, 16)
        rows = whole[8 * rank : 8 * rank + 8].clone() if fill else torch.zeros(8, 16)
        return {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, world_size)), "step": 1}

    def other_way(fill):
        """The same tensor, cut along the other dimension: each rank needs the files of both nodes."""
        whole = torch.arange(16 * 16.0).view(16, 16)
        columns = whole[:, 8 * rank : 8 * rank + 8].clone() if fill else torch.zeros(16, 8)
        return {"w": ShardedTensor.from_rank_offsets("w", columns, (1, rank, world_size)), "step": 1}

    root, other = roots[rank], roots[1 - rank]
    found = {}
    with megatron():
        stock = Path(root) / "stock"
        stock.mkdir()
        dist.barrier()
        dc.save(part(True), str(stock))
        dist.barrier()
        found["stock has metadata"] = (stock / "metadata.json").exists()
        with Checkpointer(root, rank=rank, world_size=world_size, config=SaveConfig(deadline_s=40)) as c:
            c.save(1, part(True))
            c.wait()
            same = c.load(part(False))
            found["own node"] = torch.equal(same.state["w"], part(True)["w"].data)
            across = c.load(other_way(False), peers=[other])
            found["both nodes"] = torch.equal(across.state["w"], other_way(True)["w"].data)
            try:
                c.load(other_way(False))
            except LoadError as e:
                found["without peers"] = str(e)
    return found
