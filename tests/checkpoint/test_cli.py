"""`ckpt` on real roots: what it lists, proves, mends, copies and removes, and how it fails."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from checkpoint.format import put_file
from checkpoint.layout import committed_path, committed_steps, owner_record, saving_path, write_tracker
from converters.cli import main
from tests.checkpoint.test_drain import commit
from tests.checkpoint.test_rebuild import stock_like, uncommitted


@pytest.fixture
def ckpt(capsys):
    """Runs `ckpt ARGV --json` and, with the same arguments, as a person sees it: (status, report, text)."""

    def run(*argv, status=0, twice=True):
        assert main([*map(str, argv), "--json"]) == status
        report = json.loads(capsys.readouterr().out)
        assert report["schema_version"] == 1
        if not twice:
            return report
        assert main([*map(str, argv)]) == status
        return report, capsys.readouterr().out

    return run


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_tells_steps_their_state_and_what_attempts_left(tmp_path, ckpt):
    commit(tmp_path, 5)
    stock_like(committed_path(tmp_path, 6), 6)
    left = uncommitted(tmp_path, 7)
    alive = saving_path(tmp_path, 8, "b.1")
    alive.mkdir()
    put_file(alive / "owner.0.json", owner_record(os.getpid()))
    write_tracker(tmp_path, 5)
    ckpt("drain", tmp_path, f"file://{tmp_path}/durable", twice=False)
    report, text = ckpt("ls", tmp_path)
    first, stock = report["checkpoints"]
    assert (first["step"], first["ranks"], first["nodes"], first["by"]) == (5, 1, 1, "weightsync")
    assert first["drained_to"] == f"file://{tmp_path}/durable"
    assert first["bytes"] == sum(p.stat().st_size for p in committed_path(tmp_path, 5).iterdir())
    assert (stock["step"], stock["by"], stock["drained_to"]) == (6, "stock", None)
    assert report["tracker"] == 5
    assert [(x["path"], x["seals"], x["verdict"]) for x in report["leftovers"]] == [
        (str(left), 1, "complete: `ckpt rebuild`"),
        (str(alive), 0, "an owner may be alive"),
    ]
    assert "<- tracker" in text
    assert f"(rank 0 on {os.uname().nodename} (pid {os.getpid()}))" in text
    durable, _ = ckpt("ls", f"file://{tmp_path}/durable")
    assert [(row["step"], row["ranks"]) for row in durable["checkpoints"]] == [(5, 1)]
    (tmp_path / "durable" / "iter_0000005" / "metadata.json").unlink()
    report, text = ckpt("ls", f"file://{tmp_path}/durable")
    assert (report["checkpoints"], [x["step"] for x in report["leftovers"]]) == ([], [5])
    assert "not drained to its end (1 nodes are done)" in text
    write_tracker(tmp_path, 9)
    flip(committed_path(tmp_path, 5) / "commit.json")
    report, text = ckpt("ls", tmp_path, status=1)
    assert any("points at step 9, which is not there" in p for p in report["problems"])
    assert text.count("problem: ") == 2


def test_show_tells_what_is_in_a_checkpoint(tmp_path, ckpt):
    folders = commit(tmp_path, 7, nodes=(0, 1))
    report, text = ckpt("show", folders[1])
    assert [(t["key"], t["dtype"], t["shape"], t["shards"]) for t in report["tensors"]] == [
        ("w", "float32", [16, 4], 2)
    ]
    assert [(r["rank"], r["node"], r["here"]) for r in report["commit"]["ranks"]] == [(0, 0, False), (1, 1, True)]
    assert report["not_here"] == ["__0_0.distcp"]
    assert report["common"] == {"step": 7}
    assert "w  float32  16x4  256 B  2 shard(s)" in text
    assert ckpt("show", folders[1], "--keys", "x*", twice=False)["tensors"] == []
    stock_like(tmp_path / "stock", 1)
    report, text = ckpt("show", tmp_path / "stock")
    assert (report["commit"], report["objects"]) == (None, ["o/shard_0_1"])
    assert "there are no digests to verify" in text
    (tmp_path / "stock" / "common.pt").rename(tmp_path / "common.pt")
    report, _ = ckpt("show", tmp_path / "stock", status=1)
    assert [t["key"] for t in report["tensors"]] == ["w"]
    assert "has no common.pt" in report["problems"][0]
    (tmp_path / "stock" / ".metadata").unlink()
    report, text = ckpt("show", tmp_path / "stock", status=1)
    assert "no .metadata" in report["problems"][0]
    assert report["files"]["__0_0.distcp"] > 0


def test_verify_lists_every_damaged_file(tmp_path, ckpt):
    folders = commit(tmp_path, 7, nodes=(0, 1))
    report, text = ckpt("verify", folders[0])
    assert report["problems"] == []
    assert "files of other nodes: give their folders with --peer" in text
    report = ckpt("verify", folders[0], "--peer", folders[1], twice=False)
    assert (report["files"], report["not_looked_at"]) == (5, None)
    flip(folders[0] / "__0_0.distcp")
    flip(folders[0] / ".metadata")
    (folders[1] / "__1_0.distcp").unlink()
    report, text = ckpt("verify", folders[0], "--peer", folders[1], status=1)
    assert len(report["problems"]) == 3
    assert text.endswith("3 problem(s)\n")
    commit(tmp_path / "alone", 8)
    url = f"file://{tmp_path}/durable"
    assert ckpt("drain", tmp_path / "alone", url, twice=False)["problems"] == []
    assert ckpt("verify", f"{url}/iter_0000008")[0]["problems"] == []
    flip(tmp_path / "durable" / "iter_0000008" / "__0_0.distcp")
    report, _ = ckpt("verify", f"{url}/iter_0000008", status=1)
    assert "differs from what was sealed" in report["problems"][0]


def test_rebuild_says_what_it_proved_and_what_not(tmp_path, ckpt):
    folder = uncommitted(tmp_path, 7)
    report = ckpt("rebuild", folder, twice=False)
    assert report["path"] == str(committed_path(tmp_path, 7))
    assert report["not_proved"] == []
    assert report["bytes_verified"] > 0
    assert committed_steps(tmp_path) == [7]
    stock_like(tmp_path / "good", 1)
    stock_like(tmp_path / "torn", 2)
    (tmp_path / "torn" / ".metadata").unlink()
    report, text = ckpt("rebuild", tmp_path / "torn", "--sibling", tmp_path / "good")
    assert (report["path"], report["bytes_verified"]) == (str(tmp_path / "torn"), 0)
    assert any("no digests" in doubt for doubt in report["not_proved"])
    assert "not proved: no digests" in text


def test_drain_copies_what_is_not_durable_yet_and_goes_on_after_a_failure(tmp_path, ckpt):
    for step in (1, 2, 3):
        commit(tmp_path, step)
    flip(committed_path(tmp_path, 2) / "__0_0.distcp")
    url = f"file://{tmp_path}/durable"
    report = ckpt("drain", tmp_path, url, "--mb-per-s", "50", status=1, twice=False)
    assert [row["step"] for row in report["drained"]] == [1, 3]
    assert "step 2: DigestError" in report["problems"][0]
    shutil.rmtree(committed_path(tmp_path, 2))
    report, text = ckpt("drain", tmp_path, url)
    assert report["drained"] == []
    report, text = ckpt("drain", tmp_path, url, "--step", 3)
    assert "step 3: 0 files (0 B) copied, 1 were there, complete" in text
    assert ckpt("drain", tmp_path, url, "--step", 9, status=1, twice=False)["drained"] == []


def test_prune_removes_what_need_not_stay_and_spares_what_is_nowhere_else(tmp_path, ckpt):
    for step in (1, 2, 3, 4):
        commit(tmp_path, step)
    dry, text = ckpt("prune", tmp_path, "--keep-last", 1, "--keep-every", 2, "--dry-run")
    assert (len(dry["removed"]), dry["kept"]) == (2, [2, 4])
    assert "would go" in text
    assert committed_steps(tmp_path) == [1, 2, 3, 4]
    url = f"file://{tmp_path}/durable"
    ckpt("drain", tmp_path, url, "--step", 1, twice=False)
    report = ckpt("prune", tmp_path, "--keep-last", 1, twice=False)
    assert (committed_steps(tmp_path), report["spared_undrained"]) == ([2, 3, 4], [2, 3])
    ckpt("prune", tmp_path, "--keep-last", 1, "--undrained", twice=False)
    assert committed_steps(tmp_path) == [4]

    dead = saving_path(tmp_path, 5, "a.1")
    dead.mkdir()
    put_file(
        dead / "owner.0.json", b'{"host": "%s", "boot": "gone", "pid": 1, "start": "1"}' % os.uname().nodename.encode()
    )
    alive = saving_path(tmp_path, 6, "a.2")
    alive.mkdir()
    put_file(alive / "owner.0.json", owner_record(os.getpid()))
    whole = uncommitted(tmp_path, 7)
    report, text = ckpt("prune", tmp_path, "--leftovers", "--dry-run")
    assert list(report["removed"]) == [str(dead)]
    assert set(report["spared_leftovers"]) == {str(alive), str(whole)}
    assert "its data is complete" in text
    ckpt("prune", tmp_path, "--leftovers", twice=False)
    assert not dead.exists()
    assert alive.exists()
    assert whole.exists()


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["ls", "{tmp}/nowhere"], 2, "no such folder"),
        (["ls", "{tmp}/file"], 2, "is no folder"),
        (["ls", "nonsense://x"], 2, "fsspec cannot open 'nonsense://x'"),
        (["show", "{tmp}"], 2, "is no torch_dist checkpoint"),
        (["show", "file://{tmp}/run"], 2, "does not end in iter_<step>"),
        (["show", "file://{tmp}/iter_0000001"], 2, "nothing there"),
        (["verify", "{tmp}/stock"], 1, "FormatError: .* no commit.json"),
        (["rebuild", "{tmp}/nowhere"], 2, "no such folder"),
        (["rebuild", "{tmp}/stock"], 1, "no seals: give a sibling"),
        (["rebuild", "{tmp}"], 1, "name the folder of one step"),
        (["drain", "{tmp}", "{tmp}/durable"], 2, "is no URL: a mounted folder is file://"),
        (["drain", "{tmp}", "file://{tmp}/d", "--mb-per-s", "0"], 2, "--mb-per-s must be positive"),
        (["drain", "{tmp}", "file://{tmp}/d/.."], 2, "the root of the checkpoints itself"),
        (["ls", "file://{tmp}", "--storage-options", "{tmp}/file"], 2, "--storage-options"),
        (["prune", "{tmp}"], 2, "say what may go"),
        (["prune", "{tmp}", "--keep-last", "0"], 2, "keep_last must be a positive number"),
        (["prune", "{tmp}", "--keep-every", "5"], 2, "--keep-every without --keep-last"),
        (["doctor", "--bench", "{tmp}/nowhere"], 2, "no such folder"),
        (["doctor", "--bench", "{tmp}", "--files", "0"], 2, "must be positive"),
        (["doctor", "--bench", "{tmp}", "--mb", "1e15"], 2, "lower --mb"),
    ],
)
def test_failures_are_one_line_with_a_status(argv, status, words, tmp_path, capsys):
    import re

    (tmp_path / "file").write_text("x")
    stock_like(tmp_path / "stock", 1)
    assert main([a.replace("{tmp}", str(tmp_path)) for a in argv]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"ckpt {argv[0]}: error: ")
    assert re.search(words, err), err


def test_doctor_tells_what_is_here(tmp_path, ckpt):
    report, text = ckpt("doctor", tmp_path / "new" / "root")
    assert report["packages"]["torch"]
    assert (report["root"]["exists"], report["root"]["held_bytes"], report["bench"]) == (False, 0, None)
    assert report["root"]["left_bytes"] > 0
    assert "(will be made)" in text
    assert not (tmp_path / "new").exists()
    assert text.endswith("0 problem(s)\n")
    (tmp_path / "file").touch()
    report, text = ckpt("doctor", tmp_path / "file" / "root", status=1)
    assert report["problems"] == [f"{tmp_path}/file is no folder"]


def test_doctor_names_what_is_missing(tmp_path, ckpt, monkeypatch):
    from checkpoint.cli import doctor

    plain = doctor.importlib.metadata.version

    def version(name):
        if name in ("psutil", "xxhash", "s3fs"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return plain(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    report, text = ckpt("doctor", tmp_path, status=1)
    assert report["packages"]["s3fs"] is None
    assert report["problems"] == [
        "xxhash is not installed: needed for saving and verifying",
        "psutil is not installed: needed for preflight, resource watch",
    ]
    assert "s3fs missing" in text


@pytest.mark.multiproc
def test_the_bench_measures_both_and_blames_by_their_ratio(tmp_path, ckpt, monkeypatch):
    from checkpoint.cli import doctor

    report = ckpt("doctor", "--bench", tmp_path, "--mb", 17, "--rounds", 1, twice=False)["bench"]
    assert report["nbytes"] == 16 << 20
    assert report["plain_s"] >= report["plain_write_s"] > 0
    assert report["ours"]["committed_s"] > report["ours"]["write_s"] > 0
    assert report["ratio"] == pytest.approx(report["ours"]["committed_s"] / report["plain_s"])
    assert report["blame"] == ("storage" if report["ratio"] <= doctor.FAIR else "process")
    assert os.listdir(tmp_path) == []
    # A storage that holds plain writers up as long as a save takes is to blame, and the text says so.
    slow = {**report, "plain_s": report["ours"]["committed_s"], "ratio": 1.0, "blame": "storage"}
    assert any("storage: plain writers are as slow" in line for line in doctor._bench_lines(slow))
    fast = {**report, "ratio": 5.0, "blame": "process"}
    assert any("process: our save takes 5.00 x" in line for line in doctor._bench_lines(fast))
