"""The limit and the other ways: they write what they claim to, where engines would have it, and count their bytes."""

import itertools

import pytest
import torch

from weightsync.bench import limit, peers
from weightsync.bench.compare import LaneGroup
from weightsync.bench.config import BenchConfig
from weightsync.bench.destinations import Destinations, shards
from weightsync.bench.launchers import LocalLauncher
from weightsync.bench.stats import quantiles
from weightsync.embedded.config import SHAPES, eagle3_config
from weightsync.embedded.loading import checkpoint_shapes
from weightsync.errors import ManifestError
from weightsync.manifest import TensorSpec

CPU = torch.device("cpu")


def specs_of(draft="mtp"):
    shapes = checkpoint_shapes(SHAPES["tiny"])
    if draft == "eagle3":
        shapes["draft"] = checkpoint_shapes(eagle3_config(SHAPES["tiny"]))["draft"]
    dtypes = {"d2t": torch.int64, "t2d": torch.bool}
    return [
        TensorSpec(name=name, dtype=dtypes.get(name, torch.bfloat16), shape=shape, role=role)
        for role, named in shapes.items()
        for name, shape in named.items()
    ]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
def test_destinations_hold_every_byte_of_every_rank_once(draft, tp_size):
    specs = specs_of(draft)
    full = {}
    for i, spec in enumerate(specs):
        full[spec.key] = (torch.arange(spec.numel) + 31 * i).to(spec.dtype).view(spec.shape)
    ranks = [Destinations(specs, tp_rank=r, tp_size=tp_size, device=CPU) for r in range(tp_size)]
    for spec in specs:
        for rank in ranks:
            rank.load(spec, full[spec.key])
    for spec in specs:
        parts = [rank.views[spec.key] for rank in ranks]
        dim, _, length = shards(spec, 0, tp_size)
        whole = parts[0] if length == spec.shape[dim] else torch.cat(parts, dim)
        assert torch.equal(whole, full[spec.key]), spec.name
    for rank in ranks:
        assert rank.nbytes == sum(v.nbytes for v in rank.views.values())
        spans = sorted((v.data_ptr(), v.data_ptr() + v.nbytes) for v in rank.views.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_rows_load_to_where_the_whole_tensor_does():
    specs = specs_of()
    whole, by_rows = (Destinations(specs, tp_rank=1, tp_size=2, device=CPU) for _ in range(2))
    for spec in specs:
        tensor = torch.randn(spec.shape).to(spec.dtype)
        whole.load(spec, tensor)
        for first in range(0, spec.shape[0], 37):
            by_rows.load_rows(spec, first, tensor[first : first + 37])
    assert torch.equal(whole.storage, by_rows.storage)


def test_q_k_v_and_gate_up_lie_next_to_each_other():
    specs = [s for s in specs_of() if "layers.0.self_attn" in s.name and s.name.endswith("_proj.weight")]
    views = Destinations(specs, tp_rank=0, tp_size=1, device=CPU).views
    q, k, v = (views["target", f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    assert k.data_ptr() == q.data_ptr() + q.nbytes
    assert v.data_ptr() == k.data_ptr() + k.nbytes


def test_heads_that_do_not_divide_are_an_error():
    spec = TensorSpec(name="model.layers.0.self_attn.q_proj.weight", dtype=torch.bfloat16, shape=(7, 4))
    with pytest.raises(ManifestError, match="not divisible by engine TP 2"):
        shards(spec, 0, 2)


def test_peers_bucket_in_order_and_never_split():
    specs = [TensorSpec(name=str(i), dtype=torch.uint8, shape=(n,)) for i, n in enumerate((3, 3, 9, 1))]
    assert [[s.name for s in b] for b in peers.buckets(specs, 6)] == [["0", "1"], ["2"], ["3"]]
    assert [s.role for s in peers.draft_subset(specs_of())].count("target") == 1


def test_the_limit_is_the_fastest_broadcast_and_a_copy_round_by_round():
    seconds = {"broadcast_whole": [5.0, 1.0, 5.0], "broadcast_64mib": [2.0, 3.0, 4.0], "memcpy": [0.1, 0.2, 0.3]}
    found = limit.combine(seconds)
    assert found.parts == ("broadcast_64mib", "memcpy")
    assert found.quantiles == quantiles([2.1, 3.2, 4.3])
    shared = limit.combine({"shared_copy_in": [1.0], "shared_copy_out": [2.0]})
    assert shared.seconds == (3.0,)
    names = limit.names(shared=False, nbytes=100 << 20)
    assert "broadcast_256mib" not in names
    assert {"broadcast_whole", "broadcast_64mib", "broadcast_16mib_async", "memcpy"} < set(names)


def test_p99_is_the_largest_of_a_few():
    assert (quantiles([3.0, 1.0, 2.0]).median, quantiles([3.0, 1.0, 2.0]).p99) == (2.0, 3.0)
    assert quantiles([float(i) for i in range(1, 201)]).p99 == 198.0
    with pytest.raises(ValueError, match="no samples"):
        quantiles([])


@pytest.mark.multiproc
def test_every_way_moves_every_byte_to_sharded_receivers_and_counts_them():
    specs = specs_of()
    unique = sum(s.nbytes for s in specs)
    draft = sum(s.nbytes for s in peers.draft_subset(specs))
    group = LaneGroup(
        specs, receivers=2, tp_size=2, backend="gloo", shared=True, deadline_s=60, launcher=LocalLauncher(BenchConfig())
    )
    try:
        assert sum(group.loaded_bytes) > unique  # norms are replicated
        group.round(warmup=True)  # raises if a way leaves a byte unwritten
        group.round()
        found, ways = group.results()
    finally:
        group.close()
    assert found.parts == ("shared_copy_in", "shared_copy_out")
    carried = {w.name: w.wire_bytes for w in ways}
    assert carried == {
        "shared_copy_in": 0,
        "shared_copy_out": 0,
        "per_tensor_broadcast": unique,
        "flattened_bucket": unique,
        "two_pass_full": 2 * unique,
        "two_pass_subset": unique + draft,
        "ring_16mib_x4": unique,
        "ring_shared_64mib_x4": unique,
    }
    assert all(0 < w.quantiles.median < 30 for w in ways)
