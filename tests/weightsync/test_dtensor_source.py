"""State dicts of DTensors on four ranks: the sender publishes the bytes of the plain state dict, every rank agrees."""

import pytest
import torch

from tests.support import spawn_ranks
from weightsync.digest import digest
from weightsync.errors import ConfigError, ManifestError
from weightsync.plan import BucketPacker, build_manifest
from weightsync.sources.iterator import IteratorSource
from weightsync.sources.state_dict import StateDictSource
from weightsync.timeline import Timeline

EVERY_ROLE = frozenset({"target", "draft"})


def published(source):
    """Digests of the buckets that a sender packs, None on other ranks."""
    timeline = Timeline()
    specs = source.specs()
    stream = source.stream(EVERY_ROLE, timeline)
    if not source.is_sender:
        assert list(stream) == []
        return None
    manifest = build_manifest([specs], bucket_bytes=4096)
    buffer, digests = torch.zeros(4096, dtype=torch.uint8), []
    BucketPacker(manifest, 0).pack(stream, lambda: buffer, lambda n, i: digests.append(digest(buffer[:n])), timeline)
    return digests


def plain_state():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "even": random(8, 3),
        "small": random(2),
        "uneven": random(5, 7).bfloat16(),
        "one_row": random(1, 9),
        "one": random(6, 2),
        "empty": random(0, 3),
        "replicated": random(4, 3),
        "columns": random(3, 8),
        "flags": torch.arange(10) % 3 == 0,
        "plain": random(2, 2),
        "model.mtp_layers.0.input_proj.weight": random(700, 4),
        "scalar": torch.tensor(3.0),
    }


def on_ranks(rank, world_size):
    """All cases in one process group; returns name of case -> what this rank saw."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    saw = {}
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = plain_state()
    saw["plain"] = published(StateDictSource(dict(plain)))

    def sharded(placements_of, on=mesh):
        return {
            name: tensor.clone()
            if name == "plain"
            else distribute_tensor(tensor.clone(), on, placements_of(name, tensor))
            for name, tensor in plain.items()
        }

    def rows(name, tensor):
        if name in ("replicated", "scalar"):
            return [Replicate()]
        return [Shard(1 if name == "columns" else 0)]

    for gather_bytes in (1, 300, 1 << 20):
        state = sharded(rows)
        source = StateDictSource(state, gather_bytes=gather_bytes)
        saw[f"rows {gather_bytes}"] = published(source)
        for tensor in state.values():
            tensor.logical_not_() if tensor.dtype == torch.bool else tensor.mul_(2)
        saw[f"doubled {gather_bytes}"] = published(source)
    saw["sender"] = source.is_sender
    doubled = {n: ~t if t.dtype == torch.bool else t * 2 for n, t in plain.items()}
    saw["plain doubled"] = published(StateDictSource(doubled))

    # Hybrid sharding, and both dimensions sharded.
    hybrid = sharded(lambda n, t: [Replicate(), Replicate() if n == "scalar" else Shard(0)], grid)
    saw["hybrid"] = published(StateDictSource(hybrid, gather_bytes=300))
    twice = sharded(lambda n, t: [Shard(0), Shard(t.dim() - 1)] if t.dim() > 1 else [Replicate()] * 2, grid)
    saw["twice"] = published(StateDictSource(twice))

    # A sender that gives up leaves nobody waiting, and the next stream is whole.
    source = StateDictSource(sharded(rows), gather_bytes=300)
    stream = source.stream(EVERY_ROLE, Timeline())
    next(stream, None)
    stream.close() if source.is_sender else list(stream)
    saw["after a close"] = published(source)

    # A rank without rows of a tied tensor cannot see the tie.
    tied = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    source = StateDictSource({"embed": tied, "lm_head": tied.detach()})
    saw["tied"] = ([s.name for s in source.specs()], published(source) is not None)

    # FSDP2 itself, and an iterator over its parameters.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    saw["fsdp plain"] = published(StateDictSource(before))
    fully_shard(model, mesh=mesh)
    saw["fsdp"] = published(StateDictSource(model.state_dict))
    saw["fsdp iterator"] = published(IteratorSource(lambda: model.state_dict().items(), is_sender=rank == 0))

    def refused(error, source):
        try:
            source.specs()
            list(source.stream(EVERY_ROLE, Timeline()))
        except error as e:
            return str(e)
        return None

    # One rank's trouble is raised on all of them.
    state = sharded(rows)
    source = StateDictSource(state)
    source.specs()
    if rank == 2:
        state["surplus"] = torch.ones(1)
    saw["one changed"] = refused(ManifestError, source)
    own = {"a": tied} if rank else {"b": tied}
    saw["different"] = refused(ManifestError, StateDictSource(own))
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, [Partial()])
    saw["partial"] = refused(ManifestError, StateDictSource({"p": partial}))
    both = {"a": tied, "b": distribute_tensor(torch.ones(4, 2), grid, [Replicate(), Shard(0)])}
    saw["two meshes"] = refused(ConfigError, StateDictSource(both))
    saw["two meshes, group"] = published(StateDictSource(both, group=torch.distributed.group.WORLD))
    saw["stages"] = refused(ConfigError, StateDictSource({"a": torch.ones(1)}, num_stages=2))
    return saw


@pytest.mark.multiproc
def test_dtensors_publish_the_bytes_of_the_plain_state_dict():
    ranks = spawn_ranks(on_ranks, 4, gloo=True, deadline_s=90)
    first = ranks[0]
    assert [saw["sender"] for saw in ranks] == [True, False, False, False]
    assert len(first["plain"]) == 3
    for case in ("rows 1", "rows 300", f"rows {1 << 20}", "hybrid", "twice", "after a close"):
        assert first[case] == first["plain"], case
    for gather_bytes in (1, 300, 1 << 20):
        assert first[f"doubled {gather_bytes}"] == first["plain doubled"] != first["plain"]
    assert first["fsdp"] == first["fsdp iterator"] == first["fsdp plain"]
    assert first["two meshes, group"] is not None
    for rank, saw in enumerate(ranks):
        assert saw["tied"] == (["embed"], rank == 0)
        assert ("'surplus'" if rank == 2 else "another trainer rank") in saw["one changed"]
        assert "hold different entries" in saw["different"]
        assert "'p' is a partial DTensor" in saw["partial"]
        assert "2 meshes: pass `group`" in saw["two meshes"]
        assert "4 ranks for 2 stages" in saw["stages"]
        if rank:
            assert saw["plain"] is saw["rows 300"] is saw["hybrid"] is saw["fsdp"] is None
