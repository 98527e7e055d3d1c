"""Sources of one process: roles and groups from names, state dicts, iterators, safetensors folders."""

import json

import pytest
import torch
from safetensors.torch import save_file

from weightsync.errors import ConfigError, ManifestError
from weightsync.sources.base import Source
from weightsync.sources.iterator import IteratorSource
from weightsync.sources.roles import RoleRules, in_load_order
from weightsync.sources.safetensors import SafetensorsSource
from weightsync.sources.state_dict import StateDictSource
from weightsync.timeline import Timeline

EVERY_ROLE = frozenset({"target", "draft"})


def numbered(names, *shape):
    return {name: torch.full(shape or (2, 3), float(i)) for i, name in enumerate(names)}


def streamed(source, roles=EVERY_ROLE):
    """(role, name) -> copy of what a stream yields, in its order."""
    keys = [s.key for s in source.specs() if s.role in roles]
    tensors = [t.clone() for t in source.stream(roles, Timeline())]
    return dict(zip(keys, tensors, strict=True))


def same(got, expected):
    assert list(got) == list(expected)
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor)
    return True


# -- roles and groups --------------------------------------------------------------------------------------------------


def roles_of(rules, *names):
    return {s.name: s.role for s in rules.specs([(name, torch.float32, (1,)) for name in names])}


def groups_of(rules, *names, role=None):
    return {s.name: s.group for s in rules.specs([(name, torch.float32, (1,)) for name in names], role=role)}


@pytest.mark.parametrize(
    "name",
    [
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp.layers.1.self_attn.q_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ],
)
def test_mtp_spellings_are_the_draft(name):
    assert roles_of(RoleRules(), name, "model.norm.weight") == {name: "draft", "model.norm.weight": "target"}
    assert roles_of(RoleRules(draft_role="mtp"), name)[name] == "mtp"


def test_mtp_layers_appended_to_the_decoder_are_told_by_their_own_tensors_or_by_number():
    names = ["model.layers.3.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight"]
    assert set(roles_of(RoleRules(), *names).values()) == {"target"}
    told = roles_of(RoleRules(), *names, "model.layers.4.eh_proj.weight")
    assert told == {names[0]: "target", names[1]: "draft", "model.layers.4.eh_proj.weight": "draft"}
    assert roles_of(RoleRules(num_hidden_layers=4), *names) == {names[0]: "target", names[1]: "draft"}


def test_declared_patterns_decide_over_the_tables():
    rules = RoleRules(roles={"model.mtp_layers.0.*": "first", "model.mtp_layers.*": "rest", "extra.*": "first"})
    names = ["model.mtp_layers.0.a.weight", "model.mtp_layers.1.a.weight", "extra.b", "model.norm.weight"]
    assert list(roles_of(rules, *names).values()) == ["first", "rest", "first", "target"]


def test_groups_are_what_engines_load_as_one():
    layer = "model.layers.0."
    names = ["self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.gate_proj.weight", "mlp.up_proj.weight_scale"]
    assert list(groups_of(RoleRules(), *(layer + n for n in names)).values()) == [
        f"{layer}self_attn.qkv_proj",
        f"{layer}self_attn.qkv_proj",
        f"{layer}mlp.gate_up_proj",
        f"{layer}mlp.gate_up_proj",
    ]
    assert set(
        groups_of(RoleRules(), "model.norm.weight", layer + "mlp.down_proj.weight", "lm_head.weight").values()
    ) == {None}
    mtp = "model.mtp_layers.0."
    assert groups_of(RoleRules(), mtp + "self_attn.q_proj.weight", mtp + "input_proj.weight") == {
        mtp + "self_attn.q_proj.weight": f"draft/model.mtp_layers.0/{mtp}self_attn.qkv_proj",
        mtp + "input_proj.weight": "draft/model.mtp_layers.0",
    }
    eagle = groups_of(RoleRules(), "midlayer.self_attn.q_proj.weight", "fc.weight", role="eagle")
    assert eagle["fc.weight"] == "eagle"
    assert eagle["midlayer.self_attn.q_proj.weight"] == "eagle/midlayer.self_attn.qkv_proj"


def test_load_order_joins_groups_and_keeps_the_rest():
    names = [
        "lm_head.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.norm.weight",
        "model.mtp_layers.0.self_attn.q_proj.weight",
    ]
    specs = RoleRules().specs([(name, torch.float32, (1,)) for name in names])
    assert [names.index(s.name) for s in in_load_order(specs)] == [0, 1, 3, 2, 5, 4, 6]


def test_rules_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="draft_role"):
        RoleRules(draft_role="target")
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        RoleRules(num_hidden_layers=0)


# -- state dict --------------------------------------------------------------------------------------------------------

NAMES = ["model.embed_tokens.weight", "model.mtp_layers.0.input_proj.weight", "lm_head.weight"]


def test_a_state_dict_streams_its_tensors_by_role():
    state = numbered(NAMES)
    source = StateDictSource(state)
    assert isinstance(source, Source)
    assert source.is_sender
    assert (source.stage, source.num_stages) == (0, 1)
    keys = {name: ("draft" if "mtp" in name else "target", name) for name in NAMES}
    order = [NAMES[0], NAMES[2], NAMES[1]]
    assert same(streamed(source), {keys[n]: state[n] for n in order})
    assert same(streamed(source, frozenset({"draft"})), {keys[NAMES[1]]: state[NAMES[1]]})
    state[NAMES[0]].add_(1)
    assert streamed(source)[keys[NAMES[0]]][0, 0] == 1


def test_a_callable_state_is_read_for_every_publish():
    module = torch.nn.Linear(3, 2)
    source = StateDictSource(module.state_dict)
    streamed(source)
    module.weight = torch.nn.Parameter(torch.ones(2, 3))
    assert same(streamed(source), {("target", n): p.detach() for n, p in module.named_parameters()})


def test_a_drafter_of_its_own_keeps_its_colliding_names():
    target, draft = numbered(["lm_head.weight", "norm.weight"]), numbered(["norm.weight", "lm_head.weight"], 4)
    source = StateDictSource(target, drafts={"draft": lambda: draft})
    got = streamed(source)
    expected = {("target", n): t for n, t in target.items()} | {("draft", n): t for n, t in draft.items()}
    assert same(got, expected)
    assert {s.group for s in source.specs() if s.role == "draft"} == {"draft"}


def test_wrappers_vanish_from_names_and_extra_state_is_no_weight():
    state = {"module._orig_mod.model.norm.weight": torch.ones(2), "model.layers.0.fc._extra_state": None}
    assert [s.name for s in StateDictSource(state).specs()] == ["model.norm.weight"]
    state["model.norm.weight"] = torch.ones(2)
    with pytest.raises(ManifestError, match=r"both 'model.norm.weight'"):
        StateDictSource(state).specs()


def test_tied_entries_are_dropped_kept_or_an_error_as_declared():
    embedding = torch.ones(4, 2)
    state = {
        "embed.weight": embedding,
        "part": embedding[:2],
        "norm": torch.ones(2),
        "lm_head.weight": embedding.detach(),
    }
    source = StateDictSource(state, drafts={"draft": {"embed.weight": embedding}})
    assert [s.key for s in source.specs()] == [
        ("target", "embed.weight"),
        ("target", "part"),
        ("target", "norm"),
        ("draft", "embed.weight"),
    ]
    assert [s.name for s in source.tied] == ["lm_head.weight"]
    assert len(streamed(source)) == 4
    assert [s.name for s in StateDictSource(state, tied="keep").specs()] == list(state)
    with pytest.raises(ManifestError, match=r"'lm_head.weight' is tied to 'embed.weight'"):
        StateDictSource(state, tied="error").specs()


def test_a_state_dict_that_changed_is_refused_by_name():
    state = numbered(["a", "b"])
    source = StateDictSource(state)
    source.specs()

    def refused(change, words):
        now = dict(state)
        change(now)
        changed = StateDictSource(lambda: now)
        changed._specs = source.specs()
        with pytest.raises(ManifestError, match=words):
            list(changed.stream(EVERY_ROLE, Timeline()))

    refused(lambda s: s.update(a=torch.ones(2)), r"'a'.*now float32 \(2,\), planned was float32 \(2, 3\)")
    refused(lambda s: s.update(a=s["a"].half()), "'a'.*now float16")
    refused(lambda s: s.pop("b"), "'b'.*no longer")
    refused(lambda s: s.update(c=torch.ones(2)), "'c'.*new in the state dict")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "'w' is a int, not a tensor"),
        (torch.empty(2, device="meta"), "'w' has no memory"),
        (torch.eye(2).to_sparse(), "'w' has layout torch.sparse_coo"),
    ],
)
def test_what_has_no_bytes_to_publish_is_refused(value, words):
    with pytest.raises(ManifestError, match=words):
        StateDictSource({"w": value}).specs()
    with pytest.raises(ManifestError, match=words):
        IteratorSource(lambda: [("w", value)]).specs()


def test_a_freed_parameter_is_refused():
    weight = torch.ones(4)
    source = StateDictSource({"w": weight})
    source.specs()
    weight.untyped_storage().resize_(0)
    with pytest.raises(ManifestError, match=r"'w' has no memory.*offloaded"):
        next(source.stream(EVERY_ROLE, Timeline()))


def test_state_dict_arguments_that_cannot_work_are_refused():
    for arguments, words in (
        ({"tied": "maybe"}, "tied"),
        ({"gather_bytes": 0}, "gather_bytes"),
        ({"stage": 1}, "stage is 1 of 1"),
        ({"drafts": {"target": {}}}, "role 'target'"),
    ):
        with pytest.raises(ConfigError, match=words):
            StateDictSource({}, **arguments)


# -- iterators ---------------------------------------------------------------------------------------------------------


def test_a_factory_streams_the_recorded_plan_and_runs_only_what_a_scope_needs():
    state, draft, runs = numbered(NAMES), numbered(["lm_head.weight"], 5), []

    def factory(name, tensors):
        runs.append(name)
        return iter(list(tensors.items()))

    source = IteratorSource(
        lambda: factory("model", state), drafts={"eagle": lambda: factory("eagle", draft)}, roles=RoleRules()
    )
    assert isinstance(source, Source)
    expected = {("draft" if "mtp" in n else "target", n): t for n, t in state.items()}
    assert same(
        streamed(source, EVERY_ROLE | {"eagle"}), expected | {("eagle", "lm_head.weight"): draft["lm_head.weight"]}
    )
    assert runs == ["model", "eagle"] * 2
    assert same(streamed(source, frozenset({"eagle"})), {("eagle", "lm_head.weight"): draft["lm_head.weight"]})
    assert runs == ["model", "eagle"] * 2 + ["eagle"]


def test_other_ranks_run_the_iterator_and_send_nothing():
    runs = []

    def factory():
        runs.append(1)
        yield from numbered(NAMES).items()

    source = IteratorSource(factory, is_sender=False)
    assert len(source.specs()) == 3
    assert list(source.stream(EVERY_ROLE, Timeline())) == []
    assert len(runs) == 2


def test_an_iterator_closed_early_runs_to_its_end():
    seen = []

    def factory():
        for name, tensor in numbered(NAMES).items():
            yield name, tensor
            seen.append(name)

    source = IteratorSource(factory)
    source.specs()
    seen.clear()
    stream = source.stream(EVERY_ROLE, Timeline())
    next(stream)
    stream.close()
    assert seen == NAMES


def test_a_pass_that_differs_from_the_first_is_refused_by_name():
    now = [list(numbered(["a", "b"]).items())]
    source = IteratorSource(lambda: now[0])
    source.specs()
    for change, words in (
        ([now[0][1], now[0][0]], "number 0 'b'.*first pass came 'a'"),
        ([now[0][0], ("b", torch.ones(2))], r"number 1 'b' as float32 \(2,\).*came 'b' as float32 \(2, 3\)"),
        ([now[0][0], ("b", torch.ones(2, 3).half())], "number 1 'b' as float16"),
        (now[0][:1], "ended after 1 tensors.*came 'b'"),
        ([*now[0], ("c", torch.ones(1))], "goes on after 2 tensors with 'c'.*came the end"),
    ):
        now[0] = change
        with pytest.raises(ManifestError, match=words):
            list(source.stream(EVERY_ROLE, Timeline()))
        now[0] = list(numbered(["a", "b"]).items())
    with pytest.raises(ManifestError, match=r"'a'.*twice, as numbers 0 and 1"):
        IteratorSource(lambda: [now[0][0], now[0][0]]).specs()


def test_the_first_feed_is_copied_and_later_ones_stream_once():
    source = IteratorSource()
    with pytest.raises(ManifestError, match="call `feed` before the first publish"):
        source.specs()
    state, draft = numbered(NAMES), numbered(["fc.weight"])
    source.feed(iter(state.items()), drafts={"eagle": iter(draft.items())})
    every = EVERY_ROLE | {"eagle"}
    expected = {("draft" if "mtp" in n else "target", n): t.clone() for n, t in state.items()}
    expected[("eagle", "fc.weight")] = draft["fc.weight"]
    for tensor in state.values():
        tensor.fill_(-1)
    assert same(streamed(source, every), expected)
    with pytest.raises(ManifestError, match=r"used up.*`feed`"):
        streamed(source, every)

    def lazily():
        for name in NAMES:
            yield name, torch.full((2, 3), 7.0)

    source.feed(lazily(), drafts={"eagle": iter(draft.items())})
    assert all(bool((t == 7).all()) for k, t in streamed(source, every).items() if k[0] != "eagle")
    other = IteratorSource(is_sender=False)
    other.feed(iter(state.items()))
    assert [s.name for s in other.specs()] == NAMES
    assert list(other.stream(EVERY_ROLE, Timeline())) == []
    with pytest.raises(ConfigError, match="has a factory"):
        IteratorSource(list).feed([])
    with pytest.raises(ConfigError, match="drafts without a factory"):
        IteratorSource(drafts={"draft": list})


# -- safetensors folders -----------------------------------------------------------------------------------------------


def sharded(folder, shards, config=None):
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_streams_mapped_tensors_of_every_dtype(tmp_path):
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(5, 3).bfloat16(),
        "d2t": torch.arange(7),
        "t2d": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert isinstance(source, Source)
    got = streamed(source)
    assert {k[1] for k in got} == set(tensors)
    for (_, name), tensor in got.items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.dtype == tensors[name].dtype
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, tmp_path / "model.safetensors")
    assert not any(bool(t.any()) for t in streamed(source).values())


def test_shards_and_drafter_folders_are_one_stream_in_load_order(tmp_path):
    q, k, o = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qko")
    mtp = "model.layers.1.self_attn.q_proj.weight"
    model = sharded(
        tmp_path / "model",
        {"a.safetensors": numbered([k, o]), "b.safetensors": numbered([q, mtp])},
        {"num_hidden_layers": 1},
    )
    draft = sharded(tmp_path / "draft", {"c.safetensors": numbered(["fc.weight", "lm_head.weight"])})
    source = SafetensorsSource(model, draft_folders={"eagle": str(draft)})
    keys = [s.key for s in source.specs()]
    assert keys == [
        ("target", k),
        ("target", q),
        ("target", o),
        ("draft", mtp),
        ("eagle", "fc.weight"),
        ("eagle", "lm_head.weight"),
    ]
    got = streamed(source, frozenset({"target", "eagle"}))
    assert list(got) == [key for key in keys if key[0] != "draft"]
    assert torch.equal(got[("target", o)], torch.ones(2, 3))


def test_a_broken_folder_is_refused_with_the_reason(tmp_path):
    def refused(words):
        with pytest.raises(ManifestError, match=words):
            SafetensorsSource(tmp_path / "model").specs()

    refused("no such folder")
    shards = {"a.safetensors": numbered(["x"]), "b.safetensors": numbered(["y"])}
    model = sharded(tmp_path / "model", shards)
    SafetensorsSource(model).specs()
    good = (model / "b.safetensors").read_bytes()
    (model / "b.safetensors").write_bytes(good[:-4])
    refused("b.safetensors is truncated")
    (model / "b.safetensors").unlink()
    refused("b.safetensors is missing")
    save_file(numbered(["z"]), model / "b.safetensors")
    refused("names y in b.safetensors, which does not hold it|z is in b.safetensors but not in")
    save_file(numbered(["x", "y"]), model / "b.safetensors")
    refused("x is in both")
    (model / "b.safetensors").write_bytes(good)
    SafetensorsSource(model).specs()


def test_a_folder_that_changed_is_refused_by_name(tmp_path):
    save_file(numbered(["x", "y"]), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    source.specs()
    save_file(numbered(["x"]), tmp_path / "model.safetensors")
    with pytest.raises(ManifestError, match=r"'y'.*no longer"):
        list(source.stream(EVERY_ROLE, Timeline()))
    with pytest.raises(ConfigError, match="role 'target'"):
        SafetensorsSource(tmp_path, draft_folders={"target": tmp_path})
