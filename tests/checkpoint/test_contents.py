"""What is saved of a state and who writes it: sections, files of weights, registered state, replicas; no processes."""

from __future__ import annotations

import collections
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import Shard, State
from checkpoint.contents import CONTENTS, Extras, check_contents, section_of, select
from checkpoint.errors import ConfigError, CoverageError
from checkpoint.format import FileRecord
from checkpoint.megatron.probe import require_optimizer
from checkpoint.plan import make_plan
from checkpoint.replicas import Share, distribute, shard_id, share_of
from checkpoint.seals import CommitRecord, Seal


def test_keys_and_entries_belong_to_their_section():
    keys = {
        "decoder.layers.0.weight": "model",
        "optimizer.state.exp_avg.decoder.layers.0.weight": "optimizer",
        "chained_1.optimizer.state.param.weight": "optimizer",
        "optimizer_of_hearts.weight": "model",
        "rng_state/shard_0.0_1.1": "rng",
        "extra.data/shard_0_2": "extra",
    }
    assert {key: section_of(key) for key in keys} == keys
    state = {"model": 1, "model0": 2, "optimizer": 3, "opt_param_scheduler": 4, "rng_state": 5, "iteration": 6, "x": 7}
    assert select(state, ("model",)) == {"model": 1, "model0": 2, "iteration": 6}
    assert select(state, ("optimizer", "rng")) == {
        "optimizer": 3, "opt_param_scheduler": 4, "rng_state": 5, "iteration": 6
    }  # fmt: skip
    assert select(state, CONTENTS) == state
    assert check_contents(["extra", "model"]) == ("model", "extra")
    with pytest.raises(ConfigError, match=r"unknown \['weights'\]"):
        check_contents(["weights"])
    with pytest.raises(ConfigError, match="got 'model'"):
        check_contents("model")
    with pytest.raises(ConfigError, match=r"names \['optimizer'\], the state dict has only \['model'\]"):
        select({"model": 1}, ("optimizer",))


def box(key, nbytes, start=0):
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return Shard(key=key, tensor=tensor, global_shape=(2 * nbytes,), offset=(start,), shape=(nbytes,))


def files_of(plan):
    found = collections.defaultdict(set)
    for item in plan.items:
        found[item["file"]].add(section_of(item["key"]))
    return dict(found)


def test_weights_lie_in_files_of_their_own_unless_there_is_little():
    big, small = 2 << 20, 1000
    weights = [box("w0", big), box("w1", big)]
    state = [box("optimizer.state.exp_avg.w0", big), box("optimizer.state.exp_avg.w1", big)]
    plan = make_plan(State(shards=weights + state), rank=0, num_files=2, staging_bytes=None)
    assert plan.num_files == 4
    assert files_of(plan) == {0: {"model"}, 1: {"model"}, 2: {"optimizer", "model"}, 3: {"optimizer"}} or files_of(
        plan
    ) == {0: {"model"}, 1: {"model"}, 2: {"optimizer"}, 3: {"optimizer", "model"}}  # the common state
    little = State(shards=[box("w", small), box("optimizer.state.exp_avg.w", big)])
    assert make_plan(little, rank=1, num_files=1, staging_bytes=None).num_files == 1


def test_registered_state_comes_back_where_it_was_taken_and_is_refused_elsewhere():
    given_back = {}
    ranks = [Extras(rank, 2) for rank in range(2)]
    objects = {}
    for rank, extras in enumerate(ranks):
        extras.register("data", save=lambda rank=rank: {"epoch": 3, "at": rank}, load=lambda v: given_back.update(d=v))
        extras.register("bandit", save=lambda: [1, 2], load=lambda v: given_back.update(b=v), shared=True)
        taken, common = extras.take()
        objects |= taken
    assert set(objects) == {"extra.data/shard_0_2", "extra.data/shard_1_2"}

    def read(key):
        return objects[key][0]

    values = ranks[1].read(objects, read, common)
    assert given_back == {}
    ranks[1].give_back(values)
    assert given_back == {"d": {"epoch": 3, "at": 1}, "b": [1, 2]}
    three = Extras(2, 3)
    three.register("data", save=dict, load=print)
    with pytest.raises(CoverageError, match="saved by 2 ranks, now there are 3"):
        three.read(objects, read, common)
    three = Extras(2, 3)
    three.register("data", save=dict, load=print, reshard=lambda parts, rank, world: (len(parts), rank, world))
    assert three.read(objects, read, common) == {"data": (2, 2, 3)}
    new = Extras(0, 2)
    new.register("newer", save=dict, load=print, optional=True)
    assert new.read(objects, read, common) == {}
    new.register("needed", save=dict, load=print)
    with pytest.raises(CoverageError, match="no extra state 'needed'"):
        new.read(objects, read, common)
    with pytest.raises(ConfigError, match="expected a new name"):
        new.register("needed", save=dict, load=print)
    assert ranks[0].owns("extra.data/shard_1_2")
    assert not ranks[0].owns("extra.other/shard_0_2")


def commit(world_size, held, written, write_s, attempt="a"):
    """A record of shards {key: bytes}: `held[rank]` are keys that a rank has, `written[key]` the rank that wrote it."""
    seals = []
    for rank in range(world_size):
        mine = [(key, nbytes) for key, nbytes in held[rank].items() if written[key] == rank]
        seals.append(
            Seal(
                attempt=attempt, step=1, rank=rank, world_size=world_size, host="h", node=0,
                files=(FileRecord(name=f"__{rank}_0.distcp", nbytes=sum(n for _, n in mine), xxh3="0"),),
                tensors=tuple((key, "uint8", [n], [0], [n], 0, 0, n) for key, n in mine), objects=(), common={},
                replicas=tuple(shard_id(key, (0,)) for key in held[rank] if written[key] != rank),
                write_s=write_s[rank],
            )
        )  # fmt: skip
    return CommitRecord(attempt=attempt, step=1, node=0, seals=tuple(seals), metadata=())


@given(data=st.data(), world_size=st.integers(1, 5), sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_every_shard_is_written_by_one_of_its_holders_and_all_ranks_agree(data, world_size, sizes):
    held, written = [{} for _ in range(world_size)], {}
    for number, nbytes in enumerate(sizes):
        holders = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1))
        for rank in holders:
            held[rank][f"t{number}"] = nbytes
        written[f"t{number}"] = min(holders)
    seconds = data.draw(st.lists(st.floats(0.001, 10), min_size=world_size, max_size=world_size))
    record = commit(world_size, held, written, seconds)
    shares = [share_of(record, rank) for rank in range(world_size)]
    assert len({share.basis for share in shares}) == 1
    for key, main in written.items():
        writers = [r for r in range(world_size) if key in held[r] and shares[r].writes(key, (0,), main=r == main)]
        assert len(writers) == 1, key


def test_equal_ranks_share_evenly_a_slow_one_writes_less_and_a_good_distribution_stays():
    held = [{f"t{i}": 100 for i in range(16)} for _ in range(4)]
    main = dict.fromkeys(held[0], 0)
    even = distribute(commit(4, held, main, [1.0, 1.0, 1.0, 1.0]))
    assert collections.Counter(even.values()) == {0: 4, 1: 4, 2: 4, 3: 4}
    names = {key: shard_id(key, (0,)) for key in main}
    spread = {key: i % 4 for i, key in enumerate(main)}
    assert distribute(commit(4, held, spread, [1.0] * 4)) == {names[key]: rank for key, rank in spread.items()}
    slow = collections.Counter(distribute(commit(4, held, spread, [4.0, 1.0, 1.0, 1.0])).values())
    assert slow[0] < 4
    assert min(slow[rank] for rank in (1, 2, 3)) > 4
    quick = [0.04, 0.01, 0.01, 0.01]  # noise, however large
    assert distribute(commit(4, held, spread, quick)) == {names[key]: rank for key, rank in spread.items()}
    assert share_of(commit(1, held[:1], main, [1.0]), 0) == Share()


def test_optimizers_that_cannot_be_described_are_refused_with_the_reason():
    def optimizer(*, aware=False, fsdp=False, inner=None):
        config = types.SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=aware)
        ddp = types.SimpleNamespace(use_megatron_fsdp=fsdp)
        return types.SimpleNamespace(
            _get_main_param_and_optimizer_states=None, gbuf_ranges=[], state_dict=dict, config=config, ddp_config=ddp,
            optimizer=inner or torch.optim.Adam([torch.zeros(1)]),
        )  # fmt: skip

    require_optimizer(optimizer())
    require_optimizer(optimizer(aware=True, inner=types.SimpleNamespace(get_unscaled_state=None)))
    with pytest.raises(ConfigError, match="Adam without get_unscaled_state, by which Megatron-Core reads it"):
        require_optimizer(optimizer(aware=True))
    with pytest.raises(ConfigError, match="Megatron-FSDP"):
        require_optimizer(optimizer(fsdp=True))
    with pytest.raises(ConfigError, match="has no _get_main_param_and_optimizer_states"):
        require_optimizer(types.SimpleNamespace(gbuf_ranges=[]))
