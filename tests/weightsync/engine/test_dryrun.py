"""Asking a live loader what it would do changes nothing and costs nothing."""

from __future__ import annotations

import torch
from torch import nn

from tests.weightsync.engine.toy import (
    QKV,
    Toy,
    assert_same_state,
    manifest_of,
    parameter,
    qkv_module,
    refusal,
    route,
    spec,
    state,
    target_runner,
)
from weightsync.engine.dryrun import dry_run
from weightsync.engine.memory import resident_bytes
from weightsync.engine.regions import Region
from weightsync.engine.routing import build_routes
from weightsync.engine.writes import Places, WriteWatch

CPU = torch.device("cpu")


def test_a_dry_run_changes_nothing_also_when_loaders_raise():
    class Helper:
        count = 0

    module = qkv_module()
    module.sub = nn.Linear(2, 2)
    module.register_buffer("table", torch.arange(4))
    module.names, module.cache, module.helper = [], {"x": [1]}, Helper()
    module.qkv.mark = "old"
    plain = torch.zeros(3)
    module.plain = plain

    def messy(m, t):
        m.names.append("q")
        m.cache["x"].append(2)
        m.cache["y"] = m.qkv
        m.helper.count += 1
        m.qkv.mark = "new"
        m.hot = t.sum()
        m.sub.weight = nn.Parameter(torch.ones(2, 2))
        m.table = torch.ones(4)
        m.plain.fill_(7)
        m.qkv.data[:8].copy_(t)
        m.qkv.data = torch.zeros(1)
        raise MemoryError("half way")

    module.rules["q"] = messy
    before = state(module)
    text = refusal(QKV, [target_runner(module)])
    assert "MemoryError: half way" in text
    assert_same_state(before, state(module))
    assert (module.names, module.cache, module.helper.count, module.qkv.mark) == ([], {"x": [1]}, 0, "old")
    assert not hasattr(module, "hot")
    assert torch.equal(plain, torch.zeros(3))


def test_a_replaced_tensor_attribute_counts_as_taking_but_a_cache_does_not():
    module = qkv_module()
    module.cache = None

    def load(pairs):
        module.cache = {"all": dict(module.named_parameters())}  # filled on first use, whatever is loaded
        for name, t in pairs:
            if name == "d2t":
                module.hot_token_id = t + torch.arange(t.numel())
            elif name in module.rules:
                module.rules[name](module, t)

    specs = [*QKV, spec("d2t", 5, dtype=torch.int64), spec("unknown", 2)]
    routes = route(specs, [target_runner(module, load=load)])
    assert routes.actions[3][0].load.rebinds == ["hot_token_id"]
    assert routes.taken() == {"target": (0, 1, 2, 3)}
    assert list(routes.refusals) == [4]
    assert not hasattr(module, "hot_token_id")
    assert module.cache is None


def test_watching_writes_does_not_drag_in_the_compiler():
    # torch wraps a mode's `__torch_dispatch__` so that its first call imports torch._dynamo: seconds, and memory.
    for mode in (WriteWatch, *WriteWatch.__subclasses__()):
        assert mode.__torch_dispatch__ is WriteWatch._dispatch


def test_a_dry_run_costs_no_memory():
    rows = 64 << 10
    module = Toy({"w": parameter(8, 1024)}, {"w": lambda m, t: m.w.data.copy_(t.to(torch.bfloat16).narrow(0, 8, 8))})
    before = resident_bytes()
    places = Places([target_runner(module)])
    (load,) = dry_run(target_runner(module), [(spec("w", rows, 1024), "w")], places, CPU)  # 256 MiB
    assert load.writes[0].source == Region(8 * 1024, (8, 1024), (1024, 1))
    assert resident_bytes()["rss"] - before["rss"] < 8 << 20


def test_routes_notice_a_parameter_that_moved():
    module = qkv_module()
    runners = [target_runner(module)]
    routes = build_routes(manifest_of(QKV), runners)
    assert routes.places.moved(runners) == []
    module.qkv.data = module.qkv.data.clone()
    assert routes.places.moved(runners) == [(0, "qkv")]
