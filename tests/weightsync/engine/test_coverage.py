"""Loading under proof, and tensors larger than a bucket, part by part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weightsync.engine.toy import (
    Toy,
    buckets_of,
    copy_to,
    draft_runner,
    load_all,
    manifest_of,
    parameter,
    random_tensors,
    route,
    spec,
    take,
    target_runner,
    vocab_rows,
)
from weightsync.embedded.config import ModelConfig
from weightsync.embedded.loading import checkpoint_shapes
from weightsync.embedded.model import Target
from weightsync.embedded.parallel import TpGroup
from weightsync.engine.coverage import Loading
from weightsync.errors import RoutingError
from weightsync.plan import segments_of
from weightsync.timeline import Timeline

SPECS = [spec("a", 4, 4), spec("b", 4)]


def misbehaving(after_dry_run):
    """A module whose loader does something else for `a` once it is loaded for real, and what is dry."""
    live = [False]

    def a(m, t):
        if live[0]:
            after_dry_run(m, t)
        else:
            m.a.data.copy_(t)

    module = Toy({"a": parameter(4, 4), "b": parameter(4), "other": parameter(4)}, {"a": a, "b": copy_to("b")})
    return module, live


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda m, t: None, r"left out 1 writes that it made in the dry run, of 'a' \(role target"),
        (
            lambda m, t: m.a.data[:2].copy_(t[:2]),
            r"1 writes that it did not make in the dry run, the first aten::copy_ on a",
        ),
        (lambda m, t: (m.a.data.copy_(t), m.a.data.copy_(t)), "1 writes that it did not make in the dry run"),
        (lambda m, t: (m.a.data.copy_(t), m.other.data.fill_(3)), "the first aten::fill_ on other"),
        (lambda m, t: setattr(m.a, "data", t.clone()), "left out 1 writes"),
        (
            lambda m, t: (m.a.data.copy_(t), setattr(m.a, "data", t.clone())),
            "a .* has other memory than before the publish",
        ),
    ],
    ids=["skips", "half", "twice", "elsewhere", "rebinds", "copies-and-rebinds"],
)
def test_a_loader_that_does_otherwise_than_in_the_dry_run_is_caught(what, says):
    module, live = misbehaving(what)
    runners = [target_runner(module, frozen=["other"])]
    manifest = manifest_of(SPECS)
    routes = route(SPECS, runners)
    live[0] = True
    loading = Loading(routes, runners, Timeline())
    (bucket,) = buckets_of(manifest, random_tensors(SPECS))

    def publish():
        loading.take(segments_of(manifest, *bucket))
        loading.finish()

    with pytest.raises(RoutingError, match=says):
        publish()
    assert torch.equal(module.other, torch.full((4,), -1.0)), "a write that no route expects was carried out"


def test_a_bucket_that_does_not_come_is_missed():
    module, _ = misbehaving(None)
    runners = [target_runner(module, frozen=["other"])]
    loading = Loading(route(SPECS, runners), runners, Timeline())
    with pytest.raises(RoutingError, match="2 routed tensors were not loaded, the first is 'a'"):
        loading.finish()


def test_tensors_of_a_bucket_reach_a_loader_in_one_call():
    calls = []
    module = Toy({n: parameter(4) for n in "abc"}, {n: copy_to(n) for n in "abc"})

    def load(pairs):
        calls.append([n for n, _ in pairs])
        module.load_weights(pairs)

    runner = target_runner(module, load=load)
    specs = [spec(n, 4) for n in "abc"]
    manifest = manifest_of(specs)
    routes = route(specs, [runner])
    calls.clear()
    timeline = Timeline()
    loading = Loading(routes, [runner], timeline)
    for i, buffer in buckets_of(manifest, random_tensors(specs)):
        loading.take(segments_of(manifest, i, buffer))
    assert calls == [["a", "b", "c"]]
    assert timeline.nbytes == {"load_target": 48}


# -- tensors larger than a bucket --------------------------------------------------------------------------------------


def interleaved(m, t):
    """q, k and v rows interleaved per head, as fused checkpoints store them: [heads, 3, 2, width]."""
    parts = t.view(4, 3, 2, 96)
    for i in range(3):
        m.w.data.view(3, 8, 96)[i].copy_(parts[:, i].reshape(8, 96))


def interleaved_plain(m, t):
    parts = t.view(4, 3, 2, 96)
    for i in range(3):
        m.w.data.view(3, 4, 2, 96)[i].copy_(parts[:, i])


BIG = {
    "rows": (Toy, (24, 96), take("w", 0, 1, 2), (12, 96), True),
    "columns": (Toy, (24, 96), take("w", 1, 1, 2), (24, 48), True),
    "vocab": (Toy, (25, 96), vocab_rows("w", 1, 16, 25), (16, 96), True),
    "transposed": (Toy, (24, 96), lambda m, t: m.w.data.copy_(t.t()), (96, 24), True),
    "interleaved-views": (Toy, (24, 96), interleaved_plain, (24, 96), True),
    "interleaved-copies": (Toy, (24, 96), interleaved, (24, 96), False),
    "computed": (Toy, (24, 96), lambda m, t: m.w.data.copy_(t + 1), (24, 96), False),
    "wide-rows": (Toy, (3, 3000), take("w", 1, 0, 2), (3, 1500), True),
    "vector": (Toy, (3000,), take("w", 0, 1, 3), (1000,), True),
}


@pytest.mark.parametrize("case", BIG)
def test_a_split_tensor_loads_as_a_whole_one_does(case):
    _, shape, rule, own, plain = BIG[case]
    specs = [spec("small", 16, dtype=torch.bfloat16), spec("w", *shape), spec("last", 4)]
    tensors = random_tensors(specs)

    def module():
        rules = {"small": copy_to("small"), "w": rule, "last": copy_to("last")}
        return Toy({"small": parameter(16, dtype=torch.bfloat16), "w": parameter(*own), "last": parameter(4)}, rules)

    whole, split = module(), module()
    load_all(specs, tensors, [target_runner(whole)])
    loading, routes = load_all(specs, tensors, [target_runner(split)], bucket_bytes=4096)
    for name, value in whole.named_parameters():
        assert torch.equal(value, getattr(split, name)), name
    assert routes.actions[1][0].load.plain is plain
    assert routes.assembly_bytes == (0 if plain else specs[1].nbytes)
    assert loading.loaded == {"target": 3}
    assert loading.num_tensors == 3


@settings(max_examples=40)
@given(st.data())
def test_split_tensors_load_alike_whatever_their_shapes_and_slices(data):
    rows, columns = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 1100))
    top = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, columns - 1))
    height = data.draw(st.integers(1, rows - top))
    width = data.draw(st.integers(1, columns - left))
    cast = data.draw(st.booleans())

    def rule(m, t):
        view = t[top : top + height, left : left + width]
        m.w.data.copy_(view.to(torch.float32) if cast else view)

    before = data.draw(st.integers(1, 900))
    specs = [spec("x", before), spec("w", rows, columns, dtype=torch.bfloat16)]
    module = Toy({"x": parameter(before), "w": parameter(height, width)}, {"x": copy_to("x"), "w": rule})
    tensors = random_tensors(specs)
    runner = target_runner(module, casts={(torch.bfloat16, torch.float32)})
    load_all(specs, tensors, [runner], bucket_bytes=4096)
    assert torch.equal(module.w, tensors[1][top : top + height, left : left + width].float())


def test_a_split_draft_tensor_for_shared_memory_is_compared_part_by_part():
    specs = [spec("e", 60, 40), spec("d", 60, 40, role="draft")]
    (tensor,) = random_tensors(specs[:1])

    def runners():
        target = Toy({"e": parameter(60, 40)}, {"e": copy_to("e")})
        draft = Toy({"e": target.e}, {"d": copy_to("e")})
        return [target_runner(target), draft_runner(draft)]

    load_all(specs, [tensor, tensor], runners(), bucket_bytes=4096)
    other = tensor.clone()
    other[-1, -1] += 1
    with pytest.raises(RoutingError, match="bytes differ"):
        load_all(specs, [tensor, other], runners(), bucket_bytes=4096)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_vocabulary_larger_than_a_bucket_needs_no_assembly_in_the_embedded_engine(rank):
    config = ModelConfig(
        family="qwen3",
        vocab_size=301,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    models = [Target(config, TpGroup(rank=rank, size=2), dtype=torch.bfloat16) for _ in range(2)]
    specs = [spec(n, *s, dtype=torch.bfloat16) for n, s in checkpoint_shapes(config)["target"].items()]
    tensors = random_tensors(specs)
    models[0].load_weights((s.name, t) for s, t in zip(specs, tensors, strict=True))
    loading, routes = load_all(specs, tensors, [target_runner(models[1])], bucket_bytes=4096)
    assert routes.assembly_bytes == 0
    assert loading.loaded == {"target": len(specs)}
    for (name, a), (_, b) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(a, b), name
