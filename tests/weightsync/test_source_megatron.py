"""`MegatronSource` on live models: the contract of a source, stale and unreadable parameters, what an export costs."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import warnings
import zlib
from pathlib import Path

import pytest
import torch

from tests.support import spawn_ranks
from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.timeline import Timeline

pytestmark = pytest.mark.multiproc

BOTH = frozenset({"target", "draft"})
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIMO = {
    **QWEN3,
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "num_nextn_predict_layers": 2,
}
LARGE = {
    **QWEN3,
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "head_dim": 128,
    "vocab_size": 4000,
}


# What the ranks run. Each case returns something for the test of its name to look at.


def run_cases(rank, world_size):
    warnings.simplefilter("ignore")
    return {name: case(rank) for name, case in CASES.items()}


def build(config, *, fill=True, **options):
    from weightsync.bench.megatron import build_model

    chunks = build_model(config, vocab_multiple=8, **options)
    if fill:
        fill_by_name(chunks, config)
    return chunks


def fill_by_name(chunks, config):
    """Values that depend on the canonical name and the shard only: equal in models that spell names differently."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from converters import rules_for
    from converters.live.model import collect

    rank = dist.get_rank(parallel_state.get_tensor_model_parallel_group())
    for live in collect(chunks, rules_for(config)).values():
        seed = zlib.crc32(live.name.encode()) + (0 if live.dim is None else rank)
        live.tensor.copy_(torch.randn(live.tensor.shape, generator=torch.Generator().manual_seed(seed)))


def source_of(chunks, config, **options):
    from weightsync.sources.megatron import MegatronSource

    return MegatronSource(chunks, config, **options)


def streamed(source, roles=BOTH, timeline=None):
    specs = [s for s in source.specs() if s.role in roles]
    tensors = [t.clone() for t in source.stream(roles, timeline or Timeline())]
    if not source.is_sender:
        assert tensors == []
        return {}
    assert [(s.shape, s.dtype) for s in specs] == [(tuple(t.shape), t.dtype) for t in tensors]
    return {s.key: t for s, t in zip(specs, tensors, strict=True)}


def failure(fn):
    try:
        fn()
    except Exception as e:  # noqa: BLE001 - the test looks at it
        return type(e).__name__, str(e)
    return None


def contract(rank):
    from weightsync.sources.base import Source

    source = source_of(build(MIMO, tp=2), MIMO)
    assert isinstance(source, Source)
    timeline = Timeline()
    first = streamed(source, timeline=timeline)
    return {
        "sender": source.is_sender,
        "stage": (source.stage, source.num_stages),
        "specs": [(s.name, s.role, s.group) for s in source.specs()],
        "repeats": all(torch.equal(first[k], t) for k, t in streamed(source).items()),
        "roles": [list(streamed(source, frozenset({role}))) for role in ("target", "draft")],
        "seconds": timeline.seconds,
        "nbytes": timeline.nbytes,
    }


def options(rank):
    chunks = build(MIMO, tp=2)
    return {
        "renamed": sorted({s.role for s in source_of(chunks, MIMO, draft_role="mtp").specs()}),
        "without mtp": sorted({s.role for s in source_of(chunks, MIMO, include_mtp=False).specs()}),
        "same role": failure(lambda: source_of(chunks, MIMO, draft_role="target")),
        "no bytes": failure(lambda: source_of(chunks, MIMO, gather_bytes=0)),
        "no chunks": failure(lambda: source_of([], MIMO)),
    }


def explicit_groups(rank):
    import torch.distributed as dist

    from converters.live import ParallelGroups

    chunks = build(QWEN3, tp=2)
    given = streamed(source_of(chunks, QWEN3, groups=ParallelGroups(tp=dist.group.WORLD)))
    found = streamed(source_of(chunks, QWEN3))
    return all(torch.equal(given[k], t) for k, t in found.items())


def local_spec(rank):
    """Megatron's local spec spells norms differently. One of them is kept in fp32 in a bf16 model."""
    te = streamed(source_of(build(MIMO, tp=2), MIMO))
    local = streamed(source_of(build(MIMO, tp=2, layer_names="local"), MIMO))
    chunks = build(MIMO, tp=2, layer_names="local", dtype=torch.bfloat16)
    norm = chunks[0].module.decoder.layers[0].input_layernorm
    norm.weight.data = norm.weight.data.float()
    half = source_of(chunks, MIMO)
    streamed(half)
    return {
        "same names": list(te) == list(local),
        "same values": all(torch.equal(te[k], t) for k, t in local.items()),
        "dtypes": {s.name: str(s.dtype) for s in half.specs()},
    }


def closed_early(rank):
    """A sender that stops after three tensors leaves nobody waiting, and the next stream is whole."""
    source = source_of(build(MIMO, tp=2), MIMO, gather_bytes=1 << 12)
    whole = streamed(source)
    with contextlib.closing(source.stream(BOTH, Timeline())) as stream:
        if source.is_sender:
            for _ in range(3):
                next(stream)
        else:
            list(stream)
    return all(torch.equal(whole[k], t) for k, t in streamed(source).items())


def operations(rank):
    from tests.converters.live_ranks import CommunicationCount

    found = {}
    for gather_bytes in (1 << 13, 1 << 15, 1 << 30):
        source = source_of(build(MIMO, tp=2), MIMO, gather_bytes=gather_bytes)
        source.specs()
        with CommunicationCount() as count:
            for _ in source.stream(BOTH, Timeline()):
                pass
        found[gather_bytes] = (len(count.ops), source.buffer_bytes)
    return {"found": found, "nbytes": sum(s.nbytes for s in source.specs()), "tensors": len(source.specs())}


def memory(rank):
    """Growth of this process while a model of many layers streams through a small bucket."""
    source = source_of(build(LARGE, fill=False, tp=2), LARGE, gather_bytes=4 << 20)
    nbytes = [s.nbytes for s in source.specs()]
    before, peak = resident_bytes(), 0
    for _ in source.stream(BOTH, Timeline()):
        peak = max(peak, resident_bytes())
    return {"growth": max(peak, resident_bytes()) - before, "model": sum(nbytes), "largest": max(nbytes)}


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def overlap_param_gather(rank):
    from weightsync.bench.megatron import forward_logits, make_optimizer, train_step

    chunks = build(MIMO, fill=False, ddp=OVERLAP)
    optimizer = make_optimizer(chunks)
    source = source_of(chunks, MIMO)
    result = {"unwrapped": failure(lambda: source_of([c.module for c in chunks], MIMO).specs())}
    old = streamed(source)
    train_step(chunks, optimizer, vocab_size=101)
    stale = {name: p.detach().clone() for name, p in chunks[0].named_parameters()}
    new = streamed(source)
    train_step(chunks, optimizer, step=1, vocab_size=101)  # the forced gather leaves training in order
    newer = streamed(source)
    forward_logits(chunks, torch.arange(8).view(1, 8))  # gathers whatever is stale by Megatron's own means
    truth = streamed(source_of(chunks, MIMO))
    result["moved"] = all(not torch.equal(old[k], t) for k, t in new.items())
    result["right"] = all(torch.equal(newer[k], t) for k, t in truth.items())
    # That a step alone leaves them stale is what the test is about.
    embedding = "module.embedding.word_embeddings.weight"
    result["stale"] = (
        not torch.equal(stale[embedding][:101], new["target", "model.embed_tokens.weight"]) if new else None
    )
    return result


def changed(rank):
    import torch.distributed as dist

    chunks = build(QWEN3, tp=2)
    source = source_of(chunks, QWEN3)
    source.specs()
    found = {}
    layer = chunks[0].decoder.layers[1]
    norm = layer.self_attention.q_layernorm

    def stream():
        return failure(lambda: list(source.stream(BOTH, Timeline())))

    weight = norm.weight
    norm.weight = torch.nn.Parameter(weight.data.bfloat16())
    found["dtype"] = stream()
    if rank == 1:
        norm.weight = weight
    found["one rank only"] = stream()
    norm.weight = weight
    norm.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    found["added"] = stream()
    found["unknown"] = failure(lambda: source_of(chunks, QWEN3).specs())
    del norm.extra
    found["restored"] = stream()
    dist.barrier()
    return found


def unreadable(rank):
    chunks = build(QWEN3, tp=2)
    norm = chunks[0].decoder.final_layernorm
    weight = norm.weight
    found = {}

    class Quantised(torch.Tensor):
        pass

    for name, value in (
        ("fp8", weight.data.to(torch.float8_e4m3fn)),
        ("subclass", weight.data.as_subclass(Quantised)),
        ("meta", weight.data.to("meta")),
    ):
        norm.weight = torch.nn.Parameter(value, requires_grad=False)
        found[name] = failure(lambda: source_of(chunks, QWEN3).specs())
    emptied = torch.nn.Parameter(weight.data.clone())
    emptied.untyped_storage().resize_(0)
    norm.weight = emptied
    found["offloaded"] = failure(lambda: source_of(chunks, QWEN3).specs())
    norm.weight = torch.nn.Parameter(weight.data)
    norm.weight.allreduce = False
    found["expert"] = failure(lambda: source_of(chunks, QWEN3).specs())
    return found


def mismatched(rank):
    chunks = build(QWEN3, tp=2)
    return {
        "layers": failure(lambda: source_of(chunks, {**QWEN3, "num_hidden_layers": 5}).specs()),
        "vocabulary": failure(lambda: source_of(chunks, {**QWEN3, "vocab_size": 1000}).specs()),
        "heads": failure(lambda: source_of(chunks, {**QWEN3, "num_key_value_heads": 4}).specs()),
        "family": failure(lambda: source_of(chunks, {**QWEN3, "architectures": ["NoSuchModel"]})),
    }


def folder_refused(rank):
    import torch.distributed as dist

    from converters.live import write_hf_folder

    chunks = build(QWEN3, tp=2)
    with tempfile.TemporaryDirectory() as own:
        root = [own]
        dist.broadcast_object_list(root)
        found = {"exists": failure(lambda: write_hf_folder(chunks, root[0], QWEN3))}
        found["written"] = failure(lambda: write_hf_folder(chunks, f"{root[0]}/new", QWEN3))
        found["left"] = sorted(os.listdir(root[0]))
        dist.barrier()
    return found


CASES = {
    fn.__name__: fn
    for fn in (
        contract,
        options,
        explicit_groups,
        local_spec,
        closed_early,
        operations,
        memory,
        overlap_param_gather,
        changed,
        unreadable,
        mismatched,
        folder_refused,
    )
}


@pytest.fixture(scope="module")
def ranks():
    return spawn_ranks(run_cases, 2, gloo=True, deadline_s=100)


def test_a_source_streams_what_it_declares(ranks):
    first, second = (r["contract"] for r in ranks)
    assert (first["sender"], second["sender"]) == (True, False)
    assert first["stage"] == second["stage"] == (0, 1)
    assert first["specs"] == second["specs"], "identical on every rank of the stage"
    names = [name for name, _, _ in first["specs"]]
    assert len(names) == len(set(names))
    assert all((role == "draft") == name.startswith("model.mtp_layers.") for name, role, _ in first["specs"])
    assert first["repeats"]
    target, draft = first["roles"]
    assert {role for role, _ in target} == {"target"}
    assert {role for role, _ in draft} == {"draft"}
    assert [name for _, name in target + draft] == names


def test_time_goes_into_gather_and_convert(ranks):
    first, second = (r["contract"] for r in ranks)
    assert first["seconds"].keys() == {"gather", "convert"}
    assert all(s > 0 for s in first["seconds"].values())
    assert second["seconds"].keys() == {"gather"}
    assert first["nbytes"]["gather"] > 0
    assert first["nbytes"]["convert"] > first["nbytes"]["gather"]


def test_tensors_that_load_as_one_carry_one_group(ranks):
    groups = {name: group for name, _, group in ranks[0]["contract"]["specs"]}
    q, k, v = (groups[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert q is not None
    assert q == k == v != groups["model.layers.2.self_attn.q_proj.weight"]
    mtp = {groups[name] for name in groups if name.startswith("model.mtp_layers.1.")}
    assert len(mtp) == 1
    assert None not in mtp


def test_options_choose_the_draft_role_and_leave_mtp_layers_out(ranks):
    found = ranks[0]["options"]
    assert found["renamed"] == ["mtp", "target"]
    assert found["without mtp"] == ["target"]
    assert found["same role"][0] == ConfigError.__name__
    assert "draft_role" in found["same role"][1]
    assert found["no bytes"][0] == ConfigError.__name__
    assert "gather_bytes" in found["no bytes"][1]
    assert found["no chunks"][0] == UnsupportedError.__name__


def test_groups_may_be_given_instead_of_asking_megatron(ranks):
    assert all(r["explicit_groups"] for r in ranks)


def test_local_spec_exports_the_same_tensors_each_in_its_own_dtype(ranks):
    found = ranks[0]["local_spec"]
    assert found["same names"]
    assert found["same values"]
    dtypes = found["dtypes"]
    assert dtypes["model.layers.0.input_layernorm.weight"] == "torch.float32"
    assert {d for name, d in dtypes.items() if name != "model.layers.0.input_layernorm.weight"} == {"torch.bfloat16"}


def test_a_stream_closed_early_leaves_nobody_waiting(ranks):
    assert all(r["closed_early"] for r in ranks)


def test_gathers_are_bucketed(ranks):
    for rank, found in enumerate(r["operations"] for r in ranks):
        for gather_bytes, (count, buffer_bytes) in found["found"].items():
            # One to agree, then one message per bucket; a bucket is at least half full beside its neighbour.
            assert 2 <= count <= 2 + 2 * math.ceil(found["nbytes"] / gather_bytes), (rank, gather_bytes)
            assert count < found["tensors"] / 2
            largest = 2 * 48 * 32 * 4 * 2
            assert buffer_bytes <= 2 * max(gather_bytes, largest) + largest, (rank, gather_bytes)
    assert ranks[0]["operations"]["found"][1 << 30][0] == 2


def test_no_rank_holds_the_whole_model(ranks):
    for found in (r["memory"] for r in ranks):
        assert found["model"] > 60 << 20
        # Two buckets, the largest tensor in its own buffer, in scratch and converted, and the allocator's slack.
        assert found["growth"] < 2 * (4 << 20) + 3 * found["largest"] + (4 << 20) < found["model"] / 2, found


def test_parameters_gathered_during_forward_are_synced_before_a_stream(ranks):
    found = ranks[0]["overlap_param_gather"]
    assert found["stale"], "a step alone must leave parameters stale, else this tests nothing"
    assert found["moved"]
    assert found["right"]
    for r in ranks:
        error, text = r["overlap_param_gather"]["unwrapped"]
        assert error == UnsupportedError.__name__
        assert "overlap_param_gather" in text
        assert "DistributedDataParallel" in text


def test_a_changed_model_is_refused_on_every_rank(ranks):
    for rank, found in enumerate(r["changed"] for r in ranks):
        assert found["dtype"][0] == ManifestError.__name__
        assert "decoder.layers.1.self_attention.q_layernorm.weight was torch.float32" in found["dtype"][1]
        assert found["one rank only"][0] == (ManifestError if rank == 0 else UnsupportedError).__name__
        assert found["added"][0] == ManifestError.__name__
        assert "q_layernorm.extra was absent" in found["added"][1]
        assert found["unknown"][0] == ManifestError.__name__
        assert "1 unmapped (decoder.layers.1.self_attention.q_layernorm.extra)" in found["unknown"][1]
        assert found["restored"] is None


def test_parameters_that_do_not_hold_the_weights_are_refused_with_the_reason(ranks):
    words = {"fp8": "fp8", "subclass": "Quantised", "meta": "offloaded", "offloaded": "offloaded", "expert": "expert"}
    for found in (r["unreadable"] for r in ranks):
        for case, word in words.items():
            error, text = found[case]
            assert error == UnsupportedError.__name__
            assert "decoder.final_layernorm.weight" in text
            assert word in text


def test_a_config_of_another_model_is_refused(ranks):
    words = {"layers": "missing", "vocabulary": "vocab", "heads": "linear_qkv", "family": "NoSuchModel"}
    for found in (r["mismatched"] for r in ranks):
        for case, word in words.items():
            assert found[case][0] == ManifestError.__name__, case
            assert word in found[case][1], case


def test_a_folder_that_exists_is_not_overwritten_and_nothing_incomplete_stays(ranks):
    for rank, found in enumerate(r["folder_refused"] for r in ranks):
        error, text = found["exists"]
        assert error == "FolderError"
        assert "exists already" in text, rank
        assert found["written"] is None
        assert found["left"] == ["new"]
