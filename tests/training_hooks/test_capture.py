"""Captured rows and their exchange. Ranks are threads here (each has its own gloo group), processes where one dies."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import start_ranks
from training_hooks.alignment import CpSplit, Layout
from training_hooks.capture import HiddenCapture, LayerRef, RowForm, Rows, row_keys
from training_hooks.errors import CaptureError, SettingsError
from training_hooks.exchange import Exchange
from training_hooks.hf import capture_from_hf

A, B = LayerRef("output_of", 1), LayerRef("final_norm")
LENGTHS = {3: 5, 8: 2, 11: 4}


def _value(sample, position, layer):
    return [sample * 100 + position, layer.index]


def _rows(keys, layer, dtype=torch.float32):
    values = torch.tensor([_value(s, p, layer) for s, p in keys], dtype=dtype).reshape(-1, 2)
    return Rows(keys=torch.tensor(keys, dtype=torch.int64).reshape(-1, 2), values=values)


def _everything():
    return [(s, p) for s, n in LENGTHS.items() for p in range(n)]


def _in_threads(size, fn, deadline_s=20.0):
    """fn(rank, store) on `size` threads -> results or exceptions by rank."""
    store, out = dist.HashStore(), [None] * size

    def body(rank):
        try:
            out[rank] = fn(rank, store)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            out[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
        assert not thread.is_alive()
    return out


def _merge(
    rank, store, parts, *, size=3, step=4, run="run", deadline_s=5.0, layers=(A, B), expected=LENGTHS, rows="gloo"
):
    exchange = Exchange(store, rank, size, run=run, deadline_s=deadline_s, rows=rows)
    try:
        return exchange.merge(parts, step=step, expected=expected, layers=layers)
    finally:
        exchange.close()


def _split(seed=0, dtype=torch.float32):
    """Rows of layer A scattered over ranks 0 and 1, those of B on rank 2, all shuffled."""
    keys, generator = _everything(), torch.Generator().manual_seed(seed)
    order = [keys[i] for i in torch.randperm(len(keys), generator=generator)]
    cut = seed % len(keys)
    return [{A: _rows(order[:cut], A, dtype)}, {A: _rows(order[cut:], A, dtype)}, {B: _rows(order[::-1], B, dtype)}]


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_rows_are_merged_by_key_whatever_their_order_and_whoever_has_them(seed):
    dtype = torch.bfloat16 if seed == 3 else torch.float32
    parts = _split(seed, dtype)
    first, *others = _in_threads(3, lambda rank, store: _merge(rank, store, parts[rank]))
    assert others == [None, None]
    assert sorted(first) == sorted([A, B])
    for layer, rows in first.items():
        assert [tuple(k) for k in rows.keys.tolist()] == _everything()
        wanted = torch.tensor([_value(s, p, layer) for s, p in _everything()], dtype=dtype)
        assert torch.equal(rows.values, wanted)


def test_one_exchange_merges_step_after_step_and_single_positions():
    def run(rank, store):
        exchange = Exchange(store, rank, 2, run="run", deadline_s=5)
        out = []
        for step in range(3):
            parts = {A: _rows([(step, 2)], A)} if rank == 1 else {}
            out.append(exchange.merge(parts, step=step, expected={step: [2]}, layers=[A]))
        return out

    first, second = _in_threads(2, run)
    assert second == [None] * 3
    assert [out[A].keys.tolist() for out in first] == [[[step, 2]] for step in range(3)]


def _without(parts, rank, layer, key):
    keys = [tuple(k) for k in parts[rank][layer].keys.tolist() if tuple(k) != key]
    return [*parts[:rank], {layer: _rows(keys, layer)}, *parts[rank + 1 :]]


def _with(parts, rank, layer, key):
    keys = [tuple(k) for k in parts[rank].get(layer, _rows([], layer)).keys.tolist()] + [key]
    return [*parts[:rank], {**parts[rank], layer: _rows(keys, layer)}, *parts[rank + 1 :]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda parts: _without(parts, 2, B, (8, 1)),
            r"1 of 11 rows of final_norm are missing, e.g. sample 8, position 1",
        ),
        (lambda parts: [*parts[:2], {}], r"11 of 11 rows of final_norm are missing.*from ranks \[\] of 3"),
        (lambda parts: _with(parts, 0, A, (11, 3)), r"1 of 11 rows of output_of_1 are there more than once.*sample 11"),
        (
            lambda parts: _with(parts, 1, A, (5, 0)),
            r"rank 1 has 1 rows of output_of_1 that were not expected.*sample 5",
        ),
        (
            lambda parts: _with(parts, 0, LayerRef("output_of", 2), (3, 0)),
            "rank 0 captured output_of_2, which nobody asked",
        ),
    ],
)
def test_rows_that_are_missing_doubled_or_unknown_raise_the_same_on_every_rank(change, words):
    parts = change(_split(4))
    out = _in_threads(3, lambda rank, store: _merge(rank, store, parts[rank]))
    assert all(isinstance(error, CaptureError) for error in out), out
    assert len({str(error) for error in out}) == 1
    with pytest.raises(CaptureError, match=words):
        raise out[0]


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("step", (4, 4, 5), r"do not agree on step: \{0: 4, 1: 4, 2: 5\}"),
        ("expected", (LENGTHS, {**LENGTHS, 3: 4}, LENGTHS), "do not agree on rows"),
        ("layers", ((A, B), (A,), (A, B)), "do not agree on layers"),
        ("rows", ("gloo", "memory", "gloo"), "do not agree on way"),
    ],
)
def test_ranks_of_other_steps_or_batches_raise_on_every_rank(field, values, words):
    parts = _split(4)
    out = _in_threads(3, lambda rank, store: _merge(rank, store, parts[rank], **{field: values[rank]}))
    for error in out:
        with pytest.raises(CaptureError, match=words):
            raise error


def test_a_rank_that_does_not_come_is_named_at_the_deadline():
    def run(rank, store):
        exchange = Exchange(store, rank, 3, run="run", deadline_s=1.5)
        if rank == 1:
            time.sleep(4)  # alive, but busy elsewhere
            return None
        start = time.monotonic()
        with pytest.raises(CaptureError, match=r"within 1\.5 s: rank 1 did not come"):
            exchange.merge({}, step=0, expected=LENGTHS, layers=[A])
        with pytest.raises(CaptureError, match="closed"):
            exchange.merge({}, step=0, expected=LENGTHS, layers=[A])
        return time.monotonic() - start

    out = _in_threads(3, run)
    assert out[0] < 3
    assert out[2] < 3


def test_replicas_with_one_store_do_not_mix():
    def run(rank, store):
        replica, place = divmod(rank, 2)
        exchange = Exchange(store, place, 2, run="run", replica=replica, deadline_s=5)
        parts = {A: _rows([(replica, place)], A)}
        return exchange.merge(parts, step=0, expected={replica: 2}, layers=[A])

    out = _in_threads(4, run)
    assert (out[1], out[3]) == (None, None)
    assert out[0][A].keys.tolist() == [[0, 0], [0, 1]]
    assert out[2][A].keys.tolist() == [[1, 0], [1, 1]]


def _die(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    exchange = Exchange(store, rank, world_size, run="run", deadline_s=4)
    if rank == 2:
        os._exit(1)
    try:
        exchange.merge({}, step=0, expected=LENGTHS, layers=[A])
    except CaptureError as error:
        return str(error)
    return None


@pytest.mark.multiproc
def test_a_killed_rank_is_an_error_on_every_other():
    with start_ranks(_die, 3, gloo=True, deadline_s=30) as ranks:
        *others, _ = ranks.results(deadline_s=30, expect_dead={2})
    for text in others:
        assert "rank 2 did not come" in text


class _Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def test_hooks_exist_inside_the_context_only_and_record_only_inside_a_micro_batch():
    net = _Net()
    capture = HiddenCapture({A: net.layers[1], B: net.norm}, RowForm(sequence_first=False))
    x = torch.randn(1, 3, 4)
    keys = row_keys(Layout.padded([3], 3), [7])
    with capture.active():
        net(x)  # a reference pass
        with capture.micro_batch(keys):
            net(x)
        net(x)
    rows = capture.take()
    assert rows[B].keys.tolist() == [[7, 0], [7, 1], [7, 2]]
    assert torch.equal(rows[B].values, net(x)[0])
    assert not rows[B].values.requires_grad
    assert len(capture.take()[B].keys) == 0

    def hooks():
        return sum(len(module._forward_hooks) for module in net.modules())

    assert hooks() == 0
    with pytest.raises(ZeroDivisionError), capture.active(), capture.micro_batch(keys):  # noqa: PT012
        assert hooks() == 2
        net(x)
        raise ZeroDivisionError
    assert hooks() == 0
    assert len(capture.take()[B].keys) == 0
    with pytest.raises(CaptureError, match="ran twice"), capture.active(), capture.micro_batch(keys):  # noqa: PT012
        net(x)
        net(x)
    with pytest.raises(CaptureError, match="outside of active"), capture.micro_batch(keys):
        pass
    with pytest.raises(CaptureError, match="do not nest"), capture.active(), capture.active():
        pass
    with pytest.raises(CaptureError, match="the keys describe"), capture.active(), capture.micro_batch(keys):
        net(x[:, :2])
    assert hooks() == 0


def test_row_keys_follow_padding_selection_and_the_context_parallel_split():
    layout = Layout.packed([0, 3, 5], [0, 4, 8])
    assert row_keys(layout, [9, 4]).tolist() == [[[9, 0], [9, 1], [9, 2], [-1, -1], [4, 0], [4, 1], [-1, -1], [-1, -1]]]
    select = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    mine = row_keys(layout, [9, 4], cp=CpSplit(size=2, rank=1), select=select)
    assert mine.tolist() == [[[9, 1], [9, 2], [-1, -1], [-1, -1]]]
    with pytest.raises(CaptureError, match="a number of its own"):
        row_keys(layout, [9, 9])


def test_layer_references_say_their_convention():
    assert LayerRef("input_to", 3).canonical == LayerRef("output_of", 2)
    assert LayerRef("input_to", 0).canonical == LayerRef("input_to", 0)
    assert str(LayerRef("output_of", 2)) == "output_of_2"
    with pytest.raises(SettingsError, match="number layers differently"):
        LayerRef(2)
    with pytest.raises(SettingsError, match="does not exist"):
        LayerRef("output_of", -1)


def test_a_transformers_decoder_is_found_inside_its_model_and_layers_beyond_it_are_refused():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(5, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.norm = nn.LayerNorm(4)

        def forward(self, ids):
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Decoder()
            self.lm_head = nn.Linear(4, 5)

    net = Model()
    refs = [LayerRef("input_to", 0), LayerRef("input_to", 1), LayerRef("output_of", 1), LayerRef("final_norm")]
    capture = capture_from_hf(net, refs)
    ids = torch.tensor([[3, 1]])
    with capture.active(), capture.micro_batch(row_keys(Layout.padded([2], 2), [6])):
        out = net.model(ids)
    rows = capture.take()
    assert sorted(rows) == sorted(ref.canonical for ref in refs)
    assert torch.equal(rows[LayerRef("input_to", 0)].values, net.model.embed_tokens.weight[[3, 1]])
    assert torch.equal(rows[LayerRef("final_norm")].values, out[0])
    with pytest.raises(CaptureError, match="has 2 layers, there is no output_of_2"):
        capture_from_hf(net, [LayerRef("input_to", 3)])
    with pytest.raises(CaptureError, match="0 modules of Linear have embed_tokens"):
        capture_from_hf(net.lm_head, refs)
