"""One object per step: as a file, through an object store, without blocking an event loop; and shared memory rows."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import start_ranks
from tests.training_hooks.test_capture import LENGTHS, A, B, _in_threads, _merge, _rows, _split, _value
from training_hooks.errors import CaptureError, SettingsError
from training_hooks.exchange import Exchange
from training_hooks.handoff import CapturedStep, Intervals, SideThread
from training_hooks.shared_rows import offered, opened

KEYS = [(s, p) for s, n in LENGTHS.items() for p in range(n)]


def _step(**changes):
    tokens = {s: torch.arange(n) + s for s, n in LENGTHS.items()}
    fields = {
        "run": "r1", "step": 6, "replica": 1, "rows": {A: _rows(KEYS, A, torch.bfloat16), B: _rows(KEYS, B)},
        "tokens": tokens, "supervised": {s: t > s for s, t in tokens.items()},
    }  # fmt: skip
    return CapturedStep(**{**fields, **changes})


def _same(a, b):
    assert (a.run, a.step, a.replica) == (b.run, b.step, b.replica)
    assert list(a.rows) == list(b.rows)
    for ref in a.rows:
        assert torch.equal(a.rows[ref].keys, b.rows[ref].keys)
        assert a.rows[ref].values.dtype == b.rows[ref].values.dtype
        assert torch.equal(a.rows[ref].values, b.rows[ref].values)
    for name in ("tokens", "supervised"):
        assert {k: v.tolist() for k, v in getattr(a, name).items()} == {
            k: v.tolist() for k, v in getattr(b, name).items()
        }


def test_a_step_is_one_file_that_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    step = _step()
    path = step.save(tmp_path / step.file_name)
    assert [p.name for p in tmp_path.iterdir()] == ["r1-step6-replica1.safetensors"]
    _same(CapturedStep.load(path), step)
    before = path.read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        _step(step=7).save(path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before]


def test_an_object_store_takes_a_step_as_one_object():
    step = _step()
    store = []
    store.append(pickle.dumps(step))  # what `ray.put` does
    _same(pickle.loads(store[0]), step)


def test_another_schema_or_version_is_refused(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(CaptureError, match="no captured step version None, this library reads"):
        CapturedStep.load(tmp_path / "other")
    monkeypatch.setattr("training_hooks.handoff.VERSION", 2)
    _step().save(tmp_path / "later")
    monkeypatch.undo()
    with pytest.raises(CaptureError, match=r"version 2, this library reads .* version 1"):
        CapturedStep.load(tmp_path / "later")


def test_rows_and_tokens_of_different_steps_are_refused():
    with pytest.raises(CaptureError, match="rows of final_norm are not those"):
        _step(rows={A: _rows(KEYS, A), B: _rows(KEYS[:-1], B)})
    few = {s: torch.zeros(n, dtype=torch.int64) for s, n in LENGTHS.items() if s != 11}
    with pytest.raises(CaptureError, match="rows of sample 11, but no tokens"):
        _step(tokens=few, supervised=few)
    with pytest.raises(CaptureError, match="without layers"):
        _step(rows={})


def test_drafts_are_trained_in_steps_that_collect():
    intervals = Intervals(collect_every=2, train_every=4)
    assert [i for i in range(9) if intervals.collects(i)] == [0, 2, 4, 6, 8]
    assert [i for i in range(9) if intervals.trains(i)] == [0, 4, 8]
    for wrong in ({"collect_every": 2, "train_every": 3}, {"collect_every": 0}):
        with pytest.raises(SettingsError, match="multiple of the first"):
            Intervals(**wrong)


def test_an_event_loop_goes_on_while_a_late_rank_is_waited_for():
    def late(rank, store):
        exchange = Exchange(store, rank, 2, run="run", deadline_s=10)
        if rank == 1:
            time.sleep(0.8)
            return exchange.merge({A: _rows(KEYS, A)}, step=0, expected=LENGTHS, layers=[A])
        ticks = []

        async def actor():
            side = SideThread()

            async def ticking():
                while True:
                    ticks.append(time.monotonic())
                    await asyncio.sleep(0.01)

            ticker = asyncio.ensure_future(ticking())
            merged = await side.run(exchange.merge, {}, step=0, expected=LENGTHS, layers=[A])
            with pytest.raises(CaptureError):
                await side.run(Exchange.merge, exchange, {}, step=1, expected={0: [1, 1]}, layers=[A])
            ticker.cancel()
            side.close()
            return merged

        merged = asyncio.run(actor())
        return merged, ticks

    (merged, ticks), _ = _in_threads(2, late)
    assert merged[A].keys.tolist() == [list(k) for k in KEYS]
    assert ticks[-1] - ticks[0] >= 0.6
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 0.4


def test_rows_travel_through_shared_memory():
    parts = _split(5, torch.bfloat16)
    first, *others = _in_threads(3, lambda rank, store: _merge(rank, store, parts[rank], rows="memory"))
    assert others == [None, None]
    for layer, rows in first.items():
        assert rows.keys.tolist() == [list(k) for k in KEYS]
        wanted = torch.tensor([_value(s, p, layer) for s, p in KEYS], dtype=torch.bfloat16)
        assert torch.equal(rows.values, wanted)
    with pytest.raises(SettingsError, match="one node"):
        Exchange(dist.HashStore(), 0, 1, run="run", rows="file")


def test_memory_of_another_process_is_told_by_its_nonce():
    with offered([torch.arange(5), torch.ones(3, dtype=torch.bfloat16)]) as address:
        with opened(address) as parts:
            assert parts[0].view(torch.int64).tolist() == [0, 1, 2, 3, 4]
            assert parts[1].view(torch.bfloat16).tolist() == [1, 1, 1]
        with pytest.raises(CaptureError, match="not the memory that was offered"), opened({**address, "nonce": "00"}):
            pass
    with pytest.raises(CaptureError, match=r"cannot open .*rows='gloo'"), opened({**address, "fd": 100000}):
        pass


def _left():
    return sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))


def test_what_the_collector_cannot_reach_raises_on_every_rank_and_leaves_no_descriptor(monkeypatch):
    before = _left()

    def elsewhere(address):
        raise CaptureError("cannot open /proc/7/fd/9")

    monkeypatch.setattr("training_hooks.exchange.opened", elsewhere)
    parts = _split(4)
    out = _in_threads(3, lambda rank, store: _merge(rank, store, parts[rank], rows="memory"))
    assert {str(e) for e in out} == {"replica 0: cannot open /proc/7/fd/9"}
    del out
    end = time.monotonic() + 5
    while _left()[1] > before[1] and time.monotonic() < end:
        time.sleep(0.05)  # gloo's sockets close on their own threads
    assert _left()[0] == before[0]
    assert not [f for f in os.listdir("/proc/self/fd") if "captured-rows" in _target(f)]


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def _die_while_offering(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    exchange = Exchange(store, rank, world_size, run="run", deadline_s=4, rows="memory")
    parts = _split(4)
    if rank == 2:
        gather = exchange._gather
        calls = []

        def gather_and_die(tensor):
            calls.append(tensor)
            if len(calls) == 3:  # headers, keys, then the address of its memory
                os._exit(1)
            return gather(tensor)

        exchange._gather = gather_and_die
    try:
        exchange.merge(parts[rank], step=0, expected=LENGTHS, layers=[A, B])
    except CaptureError as error:
        return str(error), [f for f in os.listdir("/proc/self/fd") if "captured-rows" in _target(f)]
    return None


@pytest.mark.multiproc
def test_a_rank_killed_while_it_offers_its_rows_leaves_nothing_behind():
    before = sorted(os.listdir("/dev/shm"))
    with start_ranks(_die_while_offering, 3, gloo=True, deadline_s=30) as ranks:
        *others, _ = ranks.results(deadline_s=30, expect_dead={2})
    for text, left in others:
        assert "could not move rows" in text
        assert left == []
    assert not set(os.listdir("/dev/shm")) - set(before)
