"""Folders with data and without metadata become checkpoints again, or it is said why not; disk and memory limits."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import Retention, SaveConfig
from checkpoint.disk import disk_left_bytes, folder_bytes, memory_left_bytes
from checkpoint.errors import ConfigError, DigestError, FormatError
from checkpoint.format import TorchDistReader, TorchDistWriter, put_file
from checkpoint.layout import clean_up, committed_path, committed_steps, leftovers, owner_record, saving_path
from checkpoint.load import candidates, open_assembled, verify
from checkpoint.rebuild import rebuild
from checkpoint.retention import prune
from checkpoint.seals import read_commit
from tests.checkpoint.test_drain import commit, expected


def uncommitted(root, step, seals=True, nodes=(0,)):
    """A committed folder turned back into that of an attempt whose coordinator died."""
    (folder,) = commit(root, step, nodes)
    record = read_commit(folder / "commit.json")
    path = saving_path(root, step, record.attempt)
    folder.rename(path)
    for name in ("commit.json", ".metadata", "metadata.json"):
        (path / name).unlink()
    if seals:
        for seal in record.seals:
            put_file(path / f"seal.{seal.rank}.json", json.dumps(seal.to_json()).encode())
    return path


def test_sealed_data_becomes_a_checkpoint_and_nothing_is_assumed(tmp_path):
    path = uncommitted(tmp_path, 7)
    assert committed_steps(tmp_path) == []
    assert [left.complete for left in leftovers(tmp_path)] == [True]
    report = rebuild(path, commit_as=7)
    assert (report.path, report.not_proved) == (committed_path(tmp_path, 7), ())
    assert committed_steps(tmp_path) == [7]
    verify(report.path)
    with TorchDistReader(report.path) as folder:
        assert torch.equal(folder.read("w"), expected(7))
        assert folder.common() == {"step": 7}


def test_rebuild_refuses_damage_and_what_is_incomplete(tmp_path):
    path = uncommitted(tmp_path, 7)
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(data[:-10] + b"0123456789")
    with pytest.raises(DigestError, match=r"__0_0\.distcp was changed after it was sealed"):
        rebuild(path)
    assert not (path / ".metadata").exists()
    (path / "__0_0.distcp").unlink()
    with pytest.raises(FormatError, match=r"lacks __0_0\.distcp, which is sealed"):
        rebuild(path)
    (path / "__0_0.distcp").write_bytes(data)
    seal = json.loads((path / "seal.0.json").read_text())
    put_file(path / "seal.0.json", json.dumps({**seal, "world_size": 2}).encode())
    with pytest.raises(FormatError, match="1 of 2 seals: give a sibling"):
        rebuild(path)
    put_file(path / "seal.0.json", b"{")
    with pytest.raises(FormatError, match=r"seal\.0\.json is damaged"):
        rebuild(path)
    put_file(path / "seal.0.json", json.dumps(seal).encode())
    (path / "common.pt").unlink()
    with pytest.raises(FormatError, match=r"no common\.pt"):
        rebuild(path)


def test_nodes_with_disks_of_their_own_are_committed_together(tmp_path):
    folders = []
    for folder in commit(tmp_path, 7, nodes=(0, 1)):
        record = read_commit(folder / "commit.json")
        path = saving_path(folder.parent, 7, record.attempt)
        folder.rename(path)
        for name in ("commit.json", ".metadata", "metadata.json"):
            (path / name).unlink()
        own = next(seal for seal in record.seals if seal.node == record.node)
        put_file(path / f"seal.{own.rank}.json", json.dumps(own.to_json()).encode())
        folders.append(path)
    (folders[1] / "common.pt").unlink()  # only rank 0 writes it before the commit
    with pytest.raises(FormatError, match="1 of 2 seals: give a sibling"):
        rebuild(folders[0])
    with pytest.raises(FormatError, match=r"1 of 2 seals in all .*: give the folder of every node"):
        rebuild(folders[0], peers=[tmp_path])
    report = rebuild(folders[0], peers=folders[1:], commit_as=7)
    assert report.not_proved == ()
    done = [committed_path(tmp_path / name, 7) for name in ("node0", "node1")]
    assert report.path == done[0]
    assert verify(done[0], others=[done[1]]) == verify(done[1], others=[done[0]]) > 0
    assert [read_commit(folder / "commit.json").node for folder in done] == [0, 1]
    (candidate,) = candidates(tmp_path / "node1", peers=[tmp_path / "node0"])
    with open_assembled(candidate) as reader:
        assert torch.equal(reader.read("w"), expected(7, ranks=2))


def stock_like(path, step, rows=8):
    with TorchDistWriter(path) as writer:
        writer.declare("w", (rows, 4), torch.float32)
        writer.put("w", (0, 0), torch.full((rows, 4), float(step)))
        writer.put_object("o/shard_0_1", [step])
        writer.commit({"iteration": step})


def test_data_without_seals_is_read_like_a_sibling_and_the_assumptions_are_said(tmp_path):
    stock_like(tmp_path / "good", 1)
    stock_like(tmp_path / "torn", 2)
    for name in (".metadata", "metadata.json", "common.pt"):
        (tmp_path / "torn" / name).unlink()
    with pytest.raises(FormatError, match="no common"):
        rebuild(tmp_path / "torn")
    report = rebuild(tmp_path / "torn", sibling=tmp_path / "good")
    assert len(report.not_proved) == 3
    with TorchDistReader(tmp_path / "torn") as folder:
        assert torch.equal(folder.read("w"), torch.full((8, 4), 2.0))
        assert folder.read_object("o/shard_0_1") == [2]
    stock_like(tmp_path / "other", 3, rows=9)
    with pytest.raises(FormatError, match=r"not of the same structure|truncated|damaged"):
        rebuild(tmp_path / "other", sibling=tmp_path / "good")
    data = (tmp_path / "torn" / "__0_0.distcp").read_bytes()
    (tmp_path / "torn" / "__0_0.distcp").write_bytes(data[:-5])
    with pytest.raises(FormatError, match=r"torn|truncated"):
        rebuild(tmp_path / "torn", sibling=tmp_path / "good")


def test_only_what_is_provably_dead_is_cleaned_up(tmp_path):
    dead = json.dumps({"host": os.uname().nodename, "boot": "another boot", "pid": 1, "start": "1"}).encode()
    elsewhere = json.dumps({"host": "another-host", "boot": "b", "pid": 1, "start": "1"}).encode()
    for step, owner in ((1, dead), (2, owner_record(os.getpid())), (3, elsewhere)):
        folder = saving_path(tmp_path, step, "a.1")
        folder.mkdir()
        put_file(folder / "owner.0.json", owner)
        (folder / "__0_0.distcp").write_bytes(b"x")
    sealed = uncommitted(tmp_path, 4)
    (tmp_path / ".removing-iter_0000009-ab").mkdir()
    assert [left.step for left in clean_up(tmp_path)] == [1]
    assert [left.step for left in leftovers(tmp_path)] == [2, 3, 4]
    assert not (tmp_path / ".removing-iter_0000009-ab").exists()
    # A newer checkpoint makes the sealed attempt useless.
    commit(tmp_path, 5)
    assert [left.step for left in clean_up(tmp_path)] == [4]
    assert not sealed.exists()


@given(
    steps=st.sets(st.integers(0, 60), max_size=12),
    keep_last=st.integers(1, 4),
    keep_every=st.one_of(st.none(), st.integers(1, 20)),
)
def test_retention_keeps_the_newest_and_the_multiples(steps, keep_last, keep_every):
    kept = Retention(keep_last=keep_last, keep_every=keep_every).keep(sorted(steps))
    newest = sorted(steps)[-keep_last:]
    assert kept == {s for s in steps if s in newest or (keep_every and s % keep_every == 0)}
    assert Retention().keep(sorted(steps)) == steps


def test_pruning_reads_the_disk_and_spares_what_is_being_read(tmp_path):
    for step in (1, 2, 3, 4):
        commit(tmp_path, step)
    (committed_path(tmp_path, 9)).mkdir()  # never finished: no checkpoint, so it counts for nothing
    assert prune(tmp_path, Retention(keep_last=1), protect=[2]) == [1, 3]
    assert committed_steps(tmp_path) == [2, 4]
    assert prune(tmp_path, Retention()) == []


def test_limits_are_the_smallest_that_apply(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    assert folder_bytes(tmp_path) == 1000
    free = disk_left_bytes(tmp_path)
    assert free > 1000
    assert disk_left_bytes(tmp_path, 5000, held_bytes=1000) == 4000
    assert disk_left_bytes(tmp_path, 500, held_bytes=1000) == 0


def test_memory_is_what_the_tightest_control_group_leaves(tmp_path):
    machine = memory_left_bytes(tmp_path, tmp_path / "none")
    assert machine > 1 << 20
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    job = tmp_path / "job"
    (job / "step").mkdir(parents=True)
    (job / "step" / "memory.max").write_text("max\n")
    (job / "step" / "memory.current").write_text("20000\n")
    assert abs(memory_left_bytes(tmp_path, membership) - machine) < machine / 2
    # The limit of a group above counts, too; pages of files that nobody uses do not.
    (job / "memory.max").write_text("50000\n")
    (job / "memory.current").write_text("45000\n")
    assert memory_left_bytes(tmp_path, membership) == 5000
    (job / "memory.stat").write_text("anon 15000\nactive_file 5000\ninactive_file 25000\n")
    assert memory_left_bytes(tmp_path, membership) == 30000
    # The older control groups have one tree per resource.
    membership.write_text("7:cpu:/x\n4:memory:/slurm/job\n")
    older = tmp_path / "memory" / "slurm"
    older.mkdir(parents=True)
    (older / "memory.limit_in_bytes").write_text("9000")
    (older / "memory.usage_in_bytes").write_text("8000")
    (older / "memory.stat").write_text("total_inactive_file 500\n")
    assert memory_left_bytes(tmp_path, membership) == 1500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline_s": 0}, "deadline_s must be a positive number"),
        ({"num_files": 0}, "num_files must be at least 1"),
        ({"on_failure": "ignore"}, "on_failure must be"),
        ({"staging_bytes": 0}, "staging_bytes must be positive"),
        ({"durable_bytes_per_s": -1}, "durable_bytes_per_s"),
        ({"disk_limit_bytes": 0}, "disk_limit_bytes"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        SaveConfig(**options)
    with pytest.raises(ConfigError, match="keep_last must be a positive number"):
        Retention(keep_last=0)
    with pytest.raises(TypeError, match="keep_lst"):
        Retention(keep_lst=1)
