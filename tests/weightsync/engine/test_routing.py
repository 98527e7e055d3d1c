"""Who loads what: routes learnt from live loaders, everything that preflight refuses, nothing changed by asking."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.weightsync.engine.toy import (
    QKV,
    Toy,
    assert_same_state,
    copy_to,
    draft_runner,
    load_all,
    manifest_of,
    parameter,
    qkv_module,
    random_tensors,
    refusal,
    route,
    spec,
    state,
    take,
    target_runner,
    vocab_rows,
)
from weightsync.engine.regions import Region
from weightsync.engine.routing import check_union
from weightsync.engine.runner import ModuleRunner
from weightsync.errors import ConfigError, RoutingError

# -- routes ------------------------------------------------------------------------------------------------------------


def test_fused_sharded_and_padded_loads_are_recorded_as_copies():
    specs = [*QKV, spec("embed", 10, 4), spec("o", 4, 8)]
    routes, taken, partial = [], {}, {}
    for rank in range(2):
        module = qkv_module(rank, 2)
        module.register_parameter("embed", parameter(6, 4))
        module.register_parameter("o", parameter(4, 4))
        module.rules["embed"] = vocab_rows("embed", rank, 6, 10)
        module.rules["o"] = take("o", 1, rank, 2)
        routes.append(route(specs, [target_runner(module)]))
        taken[rank], partial[rank] = routes[rank].taken(), routes[rank].partial
        assert {r.kind for r in routes[rank].table} == {"target"}
    (o,) = routes[1].actions[4]
    assert o.load.writes[0].source == Region(4, (4, 4), (8, 1))
    (embed,) = routes[1].actions[3]
    assert [w.kind for w in embed.load.writes] == ["copy", "fill"]
    assert embed.load.plain
    assert partial[0]["target"][:2] == ((0, 0, 16), (1, 0, 8))
    assert check_union(manifest_of(specs), taken, partial) == []


def test_shards_that_do_not_add_up_to_the_tensor_are_named():
    # The loaders narrow without looking: a tensor with too many rows (or columns) would lose some in silence.
    specs = [spec("q", 16, 4), *QKV[1:]]
    taken, partial = {}, {}
    for rank in range(2):
        module = qkv_module(rank, 2)
        module.rules["q"] = lambda m, t, r=rank: m.qkv.data[:4].copy_(t.narrow(0, 4 * r, 4))
        routes = route(specs, [target_runner(module)])
        taken[rank], partial[rank] = routes.taken(), routes.partial
    (problem,) = check_union(manifest_of(specs), taken, partial)
    assert "'q' (role target, shape (16, 4), float32)" in problem
    assert "no further than element 32 (row 8) of 64" in problem


def test_a_tensor_that_no_rank_takes_is_named_and_one_that_some_rank_takes_is_not():
    specs = [*QKV, spec("expert.0", 2, 2), spec("typo", 3)]
    taken = {}
    for rank in range(2):
        module = qkv_module()
        if rank == 1:
            module.register_parameter("expert", parameter(2, 2))
            module.rules["expert.0"] = copy_to("expert")
        module.strict = rank == 0  # raises for names that it doesn't know
        routes = route(specs, [target_runner(module)])
        taken[rank] = routes.taken()
        assert 4 in routes.refusals
        assert ("KeyError" in routes.refusals[4]) == (rank == 0)
    (problem,) = check_union(manifest_of(specs), taken)
    assert "1 published tensors are taken by no runner on any of 2 ranks: 'typo' (role target, shape (3,)" in problem


def mtp(target, *, shared=True):
    """A draft with its own layer, and the target's embedding: the same parameter or a copy of its own."""
    embed = target.embed if shared else parameter(6, 4)
    return Toy({"embed": embed, "layer": parameter(4, 4)}, {"embed": copy_to("embed"), "mtp.layer": copy_to("layer")})


def embedding_target():
    return Toy(
        {"embed": parameter(6, 4), "layer": parameter(4, 4)}, {"embed": copy_to("embed"), "layer": copy_to("layer")}
    )


MTP = [spec("embed", 6, 4), spec("layer", 4, 4), spec("mtp.layer", 4, 4, role="draft")]


def test_shared_memory_is_loaded_once_and_own_memory_in_both():
    for shared, kind in ((True, "alias"), (False, "both")):
        target = embedding_target()
        draft = mtp(target, shared=shared)
        runners = [target_runner(target), draft_runner(draft, roles=("draft", "target"))]
        tensors = random_tensors(MTP)
        loading, routes = load_all(MTP, tensors, runners)
        assert [r.kind for r in routes.table] == [kind, "target", "draft[0]"]
        assert routes.taken() == {"target": (0, 1), "draft[0]": (2,) if shared else (0, 2)}
        assert loading.loaded == {"target": 2, "draft[0]": 1 if shared else 2}
        assert torch.equal(draft.embed, tensors[0])
        assert torch.equal(target.embed, tensors[0])
        assert torch.equal(draft.layer, tensors[2])


def test_scopes_cover_the_parameters_of_their_runners():
    target = embedding_target()
    draft = mtp(target)
    runners = [target_runner(target), draft_runner(draft, roles=("draft", "target"))]
    draft_before = draft.layer.clone()
    load_all(MTP[:2], random_tensors(MTP[:2]), runners, scope="target")
    assert torch.equal(draft.layer, draft_before)
    target_before = state(target)
    load_all(MTP[2:], random_tensors(MTP[2:]), runners, scope="draft")
    assert_same_state(target_before, state(target))
    assert not torch.equal(draft.layer, draft_before)


def eagle3():
    """Takes the target's `layers.0.*`, `norm` and `lm_head` for its own, as real EAGLE3 loaders do."""
    return Toy(
        {"o": parameter(4, 4), "norm": parameter(4), "lm_head": parameter(3, 4)},
        {
            "layers.0.o": copy_to("o"),
            "model.layers.0.o": copy_to("o"),
            "norm": copy_to("norm"),
            "model.norm": copy_to("norm"),
            "lm_head": copy_to("lm_head"),
        },
        buffers={"d2t": torch.zeros(3, dtype=torch.int64)},
    )


EAGLE3_TARGET = [spec("model.layers.0.o", 4, 4), spec("model.norm", 4), spec("lm_head", 6, 4)]
EAGLE3_DRAFT = [
    spec("layers.0.o", 4, 4, role="draft"),
    spec("norm", 4, role="draft"),
    spec("lm_head", 3, 4, role="draft"),
]


def eagle3_target():
    return Toy(
        {"o": parameter(4, 4), "norm": parameter(4), "lm_head": parameter(6, 4)},
        {"model.layers.0.o": copy_to("o"), "model.norm": copy_to("norm"), "lm_head": copy_to("lm_head")},
    )


def test_target_tensors_never_reach_an_eagle3_draft_of_the_same_names():
    target, draft = eagle3_target(), eagle3()
    names_offered = []
    inner = draft.load_weights

    def spy(pairs):
        names_offered.extend(n for n, _ in pairs)
        inner(pairs)

    specs = [*EAGLE3_TARGET, *EAGLE3_DRAFT]
    tensors = random_tensors(specs)
    _, routes = load_all(specs, tensors, [target_runner(target), draft_runner(draft, load=spy)])
    assert [r.kind for r in routes.table] == ["target"] * 3 + ["draft[0]"] * 3
    assert not any(n.startswith("model.") for n in names_offered)
    assert torch.equal(draft.o, tensors[3])
    assert torch.equal(draft.lm_head, tensors[5])
    # What offering everything to everybody does instead: the target's layer 0 lies over the draft's.
    stock = eagle3()
    stock.load_weights([("layers.0.o", tensors[3]), ("model.layers.0.o", tensors[0])])
    assert torch.equal(stock.o, tensors[0])


def test_a_target_publish_writes_nothing_to_a_draft_and_covers_all_of_the_target():
    target, draft = eagle3_target(), eagle3()
    before = state(draft)
    _, routes = load_all(
        EAGLE3_TARGET,
        random_tensors(EAGLE3_TARGET),
        [target_runner(target), draft_runner(draft)],
        scope="target",
    )
    assert routes.taken() == {"target": (0, 1, 2)}
    assert_same_state(before, state(draft))


def test_one_role_may_feed_several_drafts_which_each_take_their_part():
    drafts = [Toy({"w": parameter(2)}, {f"mtp.{i}": copy_to("w")}) for i in range(2)]
    specs = [spec("mtp.0", 2, role="mtp"), spec("mtp.1", 2, role="mtp")]
    routes = route(specs, [draft_runner(d, i, roles=("mtp",)) for i, d in enumerate(drafts)], scope="draft")
    assert [r.kind for r in routes.table] == ["draft[0]", "draft[1]"]


def test_in_memory_of_its_own_a_runner_prefers_its_own_role():
    target = eagle3_target()
    draft = Toy({"head": parameter(3, 4)}, {"head": copy_to("head"), "lm_head": lambda m, t: m.head.data.copy_(t[:3])})
    specs = [*EAGLE3_TARGET, spec("head", 3, 4, role="draft")]
    tensors = random_tensors(specs)
    load_all(specs, tensors, [target_runner(target), draft_runner(draft, roles=("draft", "target"))])
    assert torch.equal(draft.head, tensors[3])


def test_a_draft_tensor_for_shared_memory_must_hold_the_same_bytes():
    specs = [*MTP, spec("mtp.embed", 6, 4, role="draft")]
    tensors = random_tensors(specs[:3])
    tensors[0][0, 0] = float("nan")  # equal bytes, though not equal to itself

    def runners():
        target = embedding_target()
        draft = mtp(target)
        draft.rules["mtp.embed"] = copy_to("embed")
        return [target_runner(target), draft_runner(draft)]

    for bucket_bytes in (1 << 20, 4096):
        loading, routes = load_all(specs, [*tensors, tensors[0]], runners(), bucket_bytes=bucket_bytes)
        assert [r.kind for r in routes.table] == ["target", "target", "draft[0]", "verify"]
        assert loading.loaded == {"target": 2, "draft[0]": 2}
    other = tensors[0].clone()
    other[5, 3] += 1
    with pytest.raises(RoutingError, match=r"'mtp.embed' \(role draft.*draft\[0\].*bytes differ"):
        load_all(specs, [*tensors, other], runners())


def test_rows_that_pad_shared_memory_need_no_comparison():
    target = Toy({"embed": parameter(8, 4)}, {"embed": vocab_rows("embed", 0, 8, 6)})
    draft = Toy({"embed": target.embed, "own": parameter(2)}, {"own": copy_to("own")})
    draft.rules["mtp.embed"] = vocab_rows("embed", 0, 8, 6)
    specs = [spec("embed", 6, 4), spec("own", 2, role="draft"), spec("mtp.embed", 6, 4, role="draft")]
    tensors = random_tensors(specs[:2])
    _, routes = load_all(specs, [*tensors, tensors[0]], [target_runner(target), draft_runner(draft)])
    assert routes.table[2].kind == "verify"
    assert torch.equal(target.embed[:6], tensors[0])
    assert not target.embed[6:].any()
    with pytest.raises(RoutingError, match="bytes differ"):
        load_all(specs, [*tensors, tensors[0] + 1], [target_runner(target), draft_runner(draft)])


def test_names_are_renamed_by_role_and_table():
    module = Toy({"a": parameter(2), "b": parameter(2)}, {"a": copy_to("a"), "b": copy_to("b")})
    runner = ModuleRunner(
        "draft[0]",
        module,
        roles=["draft", "target"],
        rename={"draft": [(r"midlayer\.(.*)", r"\1")], "target": [(r"x\..*", None), (r"embed", "b")]},
    )
    specs = [spec("midlayer.a", 2, role="draft"), spec("embed", 2), spec("x.b", 2)]
    assert runner.rename("target", "x.b") is None
    routes = route(specs, [runner], scope="draft")
    assert routes.taken() == {"draft[0]": (0, 1)}
    assert "ignored it" in routes.refusals[2]


def test_parameters_that_are_views_of_one_flat_buffer_are_told_apart():
    flat = torch.zeros(12)
    a, b = nn.Parameter(flat[:8].view(2, 4), requires_grad=False), nn.Parameter(flat[8:], requires_grad=False)
    module = Toy({"a": a, "b": b}, {"a": copy_to("a"), "b": copy_to("b")})
    specs = [spec("a", 2, 4), spec("b", 4)]
    tensors = random_tensors(specs)
    load_all(specs, tensors, [target_runner(module)])
    assert torch.equal(flat, torch.cat([t.flatten() for t in tensors]))
    assert "parameter b" in refusal(specs[:1], [target_runner(module)])


def test_stacked_experts_and_transposed_parameters_are_covered_element_by_element():
    def expert(e, part):
        return lambda m, t: m.w13.data[e, 2 * part : 2 * part + 2].copy_(t)

    rules = {f"{e}.{p}": expert(e, p) for e in range(3) for p in range(2)}
    rules["t"] = lambda m, t: m.t.data.copy_(t.t())
    rules["c0"] = lambda m, t: m.c.data[:, :2].copy_(t)
    rules["c1"] = lambda m, t: m.c.data[:, 2:].copy_(t)
    module = Toy({"w13": parameter(3, 4, 5), "t": parameter(3, 2), "c": parameter(3, 4)}, rules)
    specs = [spec(n, 2, 5) for n in rules if "." in n] + [spec("t", 2, 3), spec("c0", 3, 2), spec("c1", 3, 2)]
    tensors = random_tensors(specs)
    load_all(specs, tensors, [target_runner(module)])
    assert torch.equal(module.w13[2, 2:], tensors[5])
    assert torch.equal(module.t, tensors[6].t())
    assert torch.equal(module.c, torch.cat(tensors[7:], 1))
    text = refusal([s for s in specs if s.name != "c1"], [target_runner(module)])
    assert "parameter c (shape (3, 4), float32): 6 of its elements would not be written, the first at [0, 2]" in text


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_parameter_that_nothing_covers_is_refused_unless_frozen():
    module = qkv_module()
    text = refusal([QKV[0], QKV[2]], [target_runner(module)])
    assert "runner target: parameter qkv (shape (16, 4), float32): 16 of its elements would not be written" in text
    assert "the first at [8, 0]" in text
    assert "written by 'q' (role target, shape (8, 4), float32)" in text
    assert "publish what is missing" in text
    module.register_parameter("scale", parameter(1))
    assert "parameter scale" in refusal(QKV, [target_runner(module)])
    route(QKV, [target_runner(module, frozen=["sc*"])])


def test_a_parameter_covered_twice_is_refused():
    module = qkv_module()
    module.rules["q2"] = copy_to("qkv", rows=slice(6, 10))
    text = refusal([*QKV, spec("q2", 4, 4)], [target_runner(module)])
    assert "runner target: 16 elements of qkv would be written more than once, by 'q' (role target" in text
    assert "'q2' (role target, shape (4, 4), float32); expected once" in text


@pytest.mark.parametrize(
    ("rule", "shape", "says"),
    [
        (copy_to("w"), (3, 4), r"AssertionError: w: got \(3, 4\), expected \(4, 4\)"),
        (
            lambda m, t: m.w.data.copy_(t),
            (4,),
            r"shape \(4,\) is copied into one of shape \(4, 4\), which would repeat it",
        ),
        (lambda m, t: m.w.data.add_(t), (4, 4), "aten::add_ changes a parameter in a way that is not a plain copy"),
        (lambda m, t: m.w.data.index_copy_(0, torch.arange(4), t), (4, 4), "aten::index_copy_ changes a parameter"),
        (lambda m, t: setattr(m.w, "data", t.clone()), (4, 4), "replaces w.data instead of copying into it"),
        (lambda m, t: setattr(m, "w", nn.Parameter(t.clone())), (4, 4), "replaces w instead of copying into it"),
        (lambda m, t: m.w.data.copy_(t.mul_(2)), (4, 4), "aten::mul_ writes into the tensor that the loader was given"),
        (lambda m, t: m.w.data.copy_(t).resize_(2), (4, 4), "aten::resize_ gives a live tensor other memory"),
        (lambda m, t: (m.w.data.copy_(t), m.w.data[2:].zero_()), (4, 4), "a constant is written over elements"),
        (
            lambda m, t: (m.w.data.copy_(t), m.w.data.copy_(t)),
            (4, 4),
            "16 elements of w would be written more than once",
        ),
    ],
    ids=["shape", "broadcast", "add", "indexed", "data", "replaced", "source", "resize", "zeroed", "twice"],
)
def test_loads_that_are_no_exact_copies_are_refused(rule, shape, says):
    module = Toy({"w": parameter(4, 4)}, {"w": rule})
    with pytest.raises(RoutingError, match=says):
        route([spec("w", *shape)], [target_runner(module)])
    assert "w" in refusal([spec("w", *shape)], [target_runner(module)])


def test_casts_must_be_declared_and_are_followed():
    rules = {
        "a": lambda m, t: m.a.data.copy_(t),
        "b": lambda m, t: m.b.data.copy_(t.to(m.b.dtype)[:2]),
        "c": lambda m, t: m.c.data.copy_(t.float().mul_(2)),
    }
    module = Toy({n: parameter(*s) for n, s in (("a", (2, 4)), ("b", (2, 4)), ("c", (4,)))}, rules)
    specs = [spec(n, *s, dtype=torch.bfloat16) for n, s in (("a", (2, 4)), ("b", (4, 4)), ("c", (4,)))]
    text = refusal(specs, [target_runner(module)])
    assert text.count("the cast from bfloat16 is not declared") == 3
    assert "'a' (role target, shape (2, 4), bfloat16): runner target would write a as float32" in text
    cast = {(torch.bfloat16, torch.float32)}
    routes = route(specs, [target_runner(module, casts=cast)])
    plain = [routes.actions[i][0].load.plain for i in range(3)]
    assert plain == [True, True, False]
    assert routes.actions[1][0].load.writes[0].source == Region(0, (2, 4), (4, 1))


def test_frozen_parameters_are_not_written():
    module = qkv_module()
    assert "would write qkv, which is declared frozen" in refusal(QKV, [target_runner(module, frozen=["qk?"])])


def test_a_draft_only_publish_must_not_touch_the_target():
    target = embedding_target()
    draft = mtp(target)
    draft.rules["mtp.embed"] = copy_to("embed")
    specs = [spec("mtp.layer", 4, 4, role="draft"), spec("mtp.embed", 6, 4, role="draft")]
    text = refusal(specs, [target_runner(target), draft_runner(draft)], scope="draft")
    assert "'mtp.embed'" in text
    assert "which is memory of the target (embed); a draft-only publish must not change the target" in text


def test_a_runner_may_write_only_what_it_holds():
    target, other = embedding_target(), embedding_target()
    target.rules["layer"] = lambda m, t: (m.layer.data.copy_(t), other.layer.data.copy_(t))
    text = refusal(MTP[:2], [target_runner(target), draft_runner(other)], scope="target")
    assert "runner target would write draft[0]'s layer, which it does not hold" in text


def test_half_shared_memory_is_refused():
    target = embedding_target()
    draft = Toy(
        {"embed": target.embed, "head": parameter(6, 4)},
        {"embed": lambda m, t: (m.embed.data.copy_(t), m.head.data.copy_(t))},
    )
    runners = [target_runner(target), draft_runner(draft, roles=("draft", "target"))]
    assert "share some of the memory they load it into, but not all" in refusal(MTP[:2], runners)


def test_parameters_without_memory_are_refused():
    module = Toy({"w": nn.Parameter(torch.empty(4, device="meta"))}, {"w": copy_to("w")})
    with pytest.raises(RoutingError, match=r"runner target: parameter w .* has no memory of its own"):
        route([spec("w", 4)], [target_runner(module)])


def test_runners_check_how_they_are_built():
    with pytest.raises(ConfigError, match="expected 'target' or 'draft"):
        ModuleRunner("mtp", qkv_module(), roles=["mtp"])
    with pytest.raises(ConfigError, match="distinct roles"):
        ModuleRunner("target", qkv_module(), roles="target")
    with pytest.raises(ConfigError, match="Linear has no load_weights"):
        ModuleRunner("target", nn.Linear(2, 2), roles=["target"])
    with pytest.raises(ConfigError, match="not a regular expression"):
        ModuleRunner("target", qkv_module(), roles=["target"], rename={"target": [("(", None)]})
