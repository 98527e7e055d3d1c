"""Durable storage that speaks S3 over HTTP: drained whole, resumed after a kill, read by ranges, its failures named."""

from __future__ import annotations

import shutil
import time

import pytest
import torch

from checkpoint import Checkpointer, Retention, SaveConfig
from checkpoint.drain import AGAIN_S, DrainProcess, DrainQueue, drain, drained_to
from checkpoint.durable import Durable
from checkpoint.errors import DigestError, FormatError, StorageError
from checkpoint.layout import committed_path, committed_steps
from checkpoint.load import LoadGroup, candidates, load_best
from checkpoint.store import HostedStore, Store
from tests.checkpoint.support import state
from tests.checkpoint.test_drain import commit, expected
from tests.support.s3_server import s3_server

pytest.importorskip("moto", reason="needs moto's server")
pytest.importorskip("s3fs", reason="needs s3fs")
pytestmark = [
    pytest.mark.multiproc,
    # s3fs ends its sessions when the interpreter does.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def address():
    with s3_server("bucket") as found:
        yield found


@pytest.fixture
def options(address, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    return {"endpoint_url": address}


def wait_for(found, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def test_a_step_of_two_nodes_is_drained_proved_and_read_by_ranges(tmp_path, options):
    url = "s3://bucket/two-nodes"
    commit(tmp_path, 7, nodes=(0, 1), rows=1 << 18)  # 4 MiB each
    assert not drain(tmp_path / "node1", 7, url, storage_options=options).committed
    durable = Durable(url, options)
    assert durable.steps() == []
    with pytest.raises(FormatError, match=r"no metadata\.json"):
        durable.open(7)
    report = drain(tmp_path / "node0", 7, url, storage_options=options)
    assert (report.committed, report.files_copied) == (True, 1)
    assert drained_to(committed_path(tmp_path / "node0", 7)) == url
    assert durable.steps() == [7]
    assert durable.verify(7) > 2 * 4 << 20
    assert durable.verify(7, needs=lambda key: False) < 1 << 20

    fetched = []
    cat = durable._fs.cat_file
    durable._fs.cat_file = lambda path, **range_: fetched.append(data := cat(path, **range_)) or data
    with durable.open(7) as folder:
        rows = folder.read("w", (5, 1), (3, 2))
        assert folder.common() == {"step": 7}
    assert torch.equal(rows, expected(7, ranks=2, rows=1 << 18)[5:8, 1:3])
    assert sum(map(len, fetched)) < 1 << 19  # of 8 MiB
    durable._fs.cat_file = cat

    name = "__1_0.distcp"
    data = bytearray(durable.get(7, name))
    data[len(data) // 2] ^= 1
    durable.put(7, name, bytes(data))
    with pytest.raises(DigestError, match=r"s3://bucket/two-nodes/iter_0000007/__1_0\.distcp differs from what"):
        durable.verify(7)
    durable.put(7, name, bytes(data[:-1]))
    with pytest.raises(FormatError, match=r"__1_0\.distcp has \d+ bytes, \d+ were sealed"):
        durable.verify(7, needs=lambda key: False)
    durable.remove(7, name)
    with pytest.raises(FormatError, match=r"__1_0\.distcp is missing"):
        durable.verify(7)


def test_a_killed_drain_leaves_no_checkpoint_and_the_next_one_goes_on(tmp_path, options):
    url = "s3://bucket/killed"
    rows = 3 << 18  # 12 MiB: more than one part of a multipart upload
    commit(tmp_path, 7, rows=rows)
    commit(tmp_path, 9, rows=8)
    process = DrainProcess(tmp_path, 7, url, bytes_per_s=4e6, storage_options=options)
    time.sleep(0.5)
    assert process.poll() is None
    wait_for(lambda: Durable(url, options)._fs.list_multipart_uploads("bucket"))
    process.stop()
    durable = Durable(url, options)
    assert durable.steps() == []
    assert drained_to(committed_path(tmp_path, 7)) is None
    # Another life of the run finds on the disk what is not durable.
    queue = DrainQueue(tmp_path, url, None, options)
    assert queue.pending == [7, 9]
    assert drain(tmp_path, 9, url, storage_options=options).committed
    queue = DrainQueue(tmp_path, url, None, options)
    assert queue.pending == [7]
    wait_for(lambda: queue.poll() == [7])
    assert durable.steps() == [7, 9]
    assert durable.verify(7) > 12 << 20
    assert DrainQueue(tmp_path, url, None, options).pending == []
    assert DrainQueue(tmp_path, "s3://bucket/elsewhere", None, options).pending == [7, 9]
    again = drain(tmp_path, 7, url, storage_options=options)
    assert (again.files_copied, again.files_there) == (0, 1)


def test_an_earlier_attempt_at_a_step_is_taken_back_before_its_files_are_replaced(tmp_path, options):
    url = "s3://bucket/again"
    commit(tmp_path / "first", 7)
    drain(tmp_path / "first", 7, url, storage_options=options)
    (folder,) = commit(tmp_path / "second", 7, rows=16)
    record = (folder / "commit.json").read_bytes()
    durable = Durable(url, options)
    # The same step of another run, whose drain is interrupted by damage.
    from checkpoint.format.files import put_file
    from checkpoint.seals import CommitRecord, parse_commit

    other = parse_commit(record, "")
    other = CommitRecord(attempt="b.7", step=7, node=0, seals=other.seals, metadata=other.metadata)
    put_file(folder / "commit.json", other.dump())
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1] + b"x")
    with pytest.raises(DigestError, match="not made durable"):
        drain(tmp_path / "second", 7, url, storage_options=options)
    assert durable.steps() == []
    (folder / "__0_0.distcp").write_bytes(data)
    assert drain(tmp_path / "second", 7, url, storage_options=options).committed
    assert durable.verify(7) > 0
    assert durable.record(7).attempt == "b.7"


def test_what_the_storage_refuses_is_one_kind_of_error(tmp_path, options):
    commit(tmp_path, 7)
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/run/iter_0000007"):
        drain(tmp_path, 7, "s3://no-such-bucket/run", storage_options={**options, "anon": True})
    dead = {
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}},
    }
    with pytest.raises(StorageError, match=r"s3://bucket/run: .*127\.0\.0\.1:9"):
        Durable("s3://bucket/run", dead).steps()
    queue = DrainQueue(tmp_path, "s3://bucket/run", None, dead)
    queue.poll()
    wait_for(lambda: queue.poll() or not queue.reading)
    assert queue.pending == [7]  # tried again later
    assert queue._not_before > time.monotonic() + AGAIN_S / 2
    assert committed_steps(tmp_path) == [7]


def test_the_ladder_goes_from_the_local_disk_to_durable_storage_to_older_steps(tmp_path, options, caplog):
    url = "s3://bucket/ladder"
    for step in (1, 2, 3):
        commit(tmp_path / "root", step, rows=1 << 16)
        if step < 3:
            drain(tmp_path / "root", step, url, storage_options=options)
    for step in (2, 3):
        path = committed_path(tmp_path / "root", step) / "__0_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
    durable, hosted = Durable(url, options), HostedStore()

    def load(number):
        found = candidates(tmp_path / "root", durable=[url], options=options)
        group = LoadGroup(
            store=Store(hosted.address, "t/"), rank=0, world_size=1, hosts={0: "h"}, end=time.monotonic() + 60
        )
        chosen, value, reasons = load_best(
            group,
            found,
            prefix=str(number),
            share=(0, 1),
            read=lambda folder: folder.read("w", (0, 0), (1, 4)),
            requested=lambda: {"w"},
            reads_too=lambda _: False,
            allow_unused=lambda _: False,
        )
        group.store.close()
        assert torch.equal(value, expected(chosen.step, rows=1 << 16)[:1])
        return str(chosen), reasons

    chosen, reasons = load(1)
    assert chosen == f"step 2 ({url})"
    assert [reason.partition(":")[0] for reason in reasons] == ["step 3 (local)", "step 2 (local)"]
    # Damage there: the older step is taken.
    data = bytearray(durable.get(2, "__0_0.distcp"))
    data[-40] ^= 1
    durable.put(2, "__0_0.distcp", bytes(data))
    chosen, reasons = load(2)
    assert chosen == "step 1 (local)"
    assert "differs from what was sealed" in reasons[-1]
    hosted.close()
    # A storage that does not answer is passed over with a word.
    impatient = {"connect_timeout": 1, "retries": {"max_attempts": 0}}
    dead = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": impatient}
    found = candidates(tmp_path / "root", durable=["s3://bucket/x"], options=dead)
    assert [str(c) for c in found] == ["step 3 (local)", "step 2 (local)", "step 1 (local)"]
    assert "durable storage is passed over: s3://bucket/x" in caplog.text


def test_a_drain_that_crawls_holds_neither_saves_nor_the_end(tmp_path, options):
    url = "s3://bucket/crawls"
    config = SaveConfig(
        durable_url=url, durable_options=options, durable_bytes_per_s=2e4, retention=Retention(keep_last=1)
    )
    events = []
    with Checkpointer(tmp_path, rank=0, world_size=1, config=config, on_event=events.append) as c:
        for step in (1, 2, 3):
            began = time.monotonic()
            handle = c.save(step, state(0, 1, step))  # 128 KiB, for which the drain takes 6 s and as much for reading
            c.wait()
            assert handle.state == "committed"
            assert handle.waited_s < 1
            assert time.monotonic() - began < 10
            if step == 1:
                wait_for(lambda: Durable(url, options).listing())  # it is being copied from now on
        # The step that is being copied stays although its time is over, and only that one.
        wait_for(lambda: committed_steps(tmp_path) == [1, 3])
        assert [e.kind for e in events if e.kind == "drained"] == []
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert Durable(url, options).steps() == []


@pytest.mark.filterwarnings("ignore")  # of Megatron-Core's imports
def test_what_was_drained_is_loaded_when_the_local_disk_is_gone(tmp_path, options):
    mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping", reason="needs megatron-core")
    config = SaveConfig(durable_url="s3://bucket/gone", durable_options=options)
    events = []
    saved = state(0, 1, 5)

    def into(key):
        """As a Megatron model would ask for it."""
        tensor = torch.zeros_like(saved.shards[0].tensor)
        return {"model": {key: mapping.ShardedTensor.from_rank_offsets(key, tensor, replica_id=0)}}

    with Checkpointer(tmp_path, rank=0, world_size=1, config=config, on_event=events.append) as c:
        c.save(5, saved)
        c.wait()
        assert c.wait_drained(60)
        assert [e.kind for e in events] == ["staged", "sealed", "committed", "drained"]
        shutil.rmtree(committed_path(tmp_path, 5))
        loaded = c.load(into("weight"), allow_unused=lambda key: key != "weight")
    assert (loaded.step, loaded.tier, loaded.passed_over) == (5, "s3://bucket/gone", ())
    assert torch.equal(loaded.state["model"]["weight"], saved.shards[0].tensor)
    assert loaded.state["step"] == 5
