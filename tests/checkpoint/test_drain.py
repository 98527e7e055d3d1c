"""Durable copies: whole, verified, resumed; and the readers of other storages."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch

from checkpoint import Checkpointer, SaveConfig
from checkpoint.disk import disk_left_bytes
from checkpoint.drain import DrainProcess, drain
from checkpoint.durable import Durable
from checkpoint.errors import ConfigError, CoverageError, DigestError, FormatError
from checkpoint.format import FileRecord, TorchDistReader, TorchDistWriter, write_folder_metadata
from checkpoint.format.files import file_digest, put_file
from checkpoint.format.saved import dump_object
from checkpoint.layout import committed_path, committed_steps
from checkpoint.legacy_zarr import LegacyZarrReader
from checkpoint.load import verify
from checkpoint.seals import CommitRecord, Seal, index_from_seals


def commit(root, step, nodes=(0,), rows=8):
    """A committed step made without any process: one rank per node, each in `root/<node>` (alone: in `root`)."""
    seals, folders = [], []
    for rank, node in enumerate(nodes):
        base = root / f"node{node}" if len(nodes) > 1 else root
        folder = committed_path(base, step)
        scratch = base / "scratch"
        with TorchDistWriter(scratch) as writer:
            writer.declare("w", (rows, 4), torch.float32)
            writer.put("w", (0, 0), torch.arange(rows * 4.0).view(rows, 4) + 100 * rank + step)
            writer.commit({})
        with TorchDistReader(scratch) as reader:
            chunk = reader.index.tensors["w"].chunks[0]
        place = (chunk.pos, chunk.nbytes)
        folder.mkdir(parents=True)
        name = f"__{rank}_0.distcp"
        shutil.move(scratch / chunk.file, folder / name)
        shutil.rmtree(scratch)
        record = file_digest(folder / name)
        seals.append(
            Seal(
                attempt=f"a.{step}", step=step, rank=rank, world_size=len(nodes), host="h", node=node, files=(record,),
                tensors=(("w", "float32", [rows * len(nodes), 4], [rows * rank, 0], [rows, 4], 0, *place),),
                objects=(), common={},
            )
        )  # fmt: skip
        folders.append((node, folder))
    for node, folder in folders:
        metadata = write_folder_metadata(folder, index_from_seals(seals), dump_object({"step": step}))
        record = CommitRecord(attempt=f"a.{step}", step=step, node=node, seals=tuple(seals), metadata=tuple(metadata))
        put_file(folder / "commit.json", record.dump())
    return [folder for _, folder in folders]


def expected(step, ranks=1, rows=8):
    return torch.cat([torch.arange(rows * 4.0).view(rows, 4) + 100 * rank + step for rank in range(ranks)])


def test_a_drained_step_is_a_checkpoint_of_its_own(tmp_path):
    commit(tmp_path / "root", 7)
    report = drain(tmp_path / "root", 7, f"file://{tmp_path}/durable")
    assert (report.committed, report.files_copied, report.files_there) == (True, 1, 0)
    copy = committed_path(tmp_path / "durable", 7)
    assert verify(copy) > 0
    with TorchDistReader(copy) as folder:
        assert torch.equal(folder.read("w"), expected(7))
    assert committed_steps(tmp_path / "durable") == [7]


def test_an_interrupted_drain_goes_on_and_replaces_what_differs(tmp_path):
    commit(tmp_path / "root", 7)
    url = f"file://{tmp_path}/durable"
    drain(tmp_path / "root", 7, url)
    assert drain(tmp_path / "root", 7, url).files_there == 1
    copy = committed_path(tmp_path / "durable", 7) / "__0_0.distcp"
    data = bytearray(copy.read_bytes())
    data[-40] ^= 1
    copy.write_bytes(data)
    assert drain(tmp_path / "root", 7, url).files_copied == 1
    assert verify(copy.parent) > 0


@pytest.mark.parametrize("url", ["{root}", "file://{root}", "local://{root}/../root/"])
def test_a_root_is_no_copy_of_itself(tmp_path, url):
    (folder,) = commit(tmp_path / "root", 7)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    url = url.format(root=tmp_path / "root")
    with pytest.raises(ConfigError, match="no copy of it"):
        drain(tmp_path / "root", 7, url)
    with pytest.raises(ConfigError, match="no copy of it"):
        Checkpointer(tmp_path / "root", rank=0, world_size=1, config=SaveConfig(durable_url=url))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_missing_package_is_not_taken_for_damage(tmp_path, monkeypatch):
    commit(tmp_path / "root", 7)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"^checkpoints are digested with xxh3, which needs the package `xxhash`"):
        drain(tmp_path / "root", 7, f"file://{tmp_path}/durable")
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert disk_left_bytes(tmp_path) > 0  # conversions need torch alone


def test_damage_is_not_made_durable(tmp_path):
    (folder,) = commit(tmp_path / "root", 7)
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[800] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"__0_0\.distcp was changed after it was sealed"):
        drain(tmp_path / "root", 7, f"file://{tmp_path}/durable")
    assert committed_steps(tmp_path / "durable") == []
    with pytest.raises(FormatError, match="not committed"):
        drain(tmp_path / "root", 8, f"file://{tmp_path}/durable")


def test_the_last_node_to_drain_commits_the_copy(tmp_path):
    commit(tmp_path / "root", 7, nodes=(0, 1))
    url = f"file://{tmp_path}/durable"
    assert not drain(tmp_path / "root" / "node1", 7, url).committed
    assert committed_steps(tmp_path / "durable") == []
    assert drain(tmp_path / "root" / "node0", 7, url).committed
    copy = committed_path(tmp_path / "durable", 7)
    verify(copy)
    with TorchDistReader(copy) as folder:
        assert torch.equal(folder.read("w"), expected(7, ranks=2))


def test_tensors_are_read_from_durable_storage_by_ranges(tmp_path):
    commit(tmp_path / "root", 7)
    drain(tmp_path / "root", 7, "memory://bucket/run")
    with Durable("memory://bucket/run").open(7) as folder:
        assert torch.equal(folder.read("w", (2, 1), (3, 2)), expected(7)[2:5, 1:3])
        assert folder.common() == {"step": 7}
    with pytest.raises(FormatError, match=r"no metadata\.json"):
        Durable("memory://bucket/run").open(8)


def test_a_rate_limit_holds(tmp_path):
    import time

    commit(tmp_path / "root", 7, rows=4096)
    began = time.monotonic()
    report = drain(tmp_path / "root", 7, f"file://{tmp_path}/durable", bytes_per_s=200_000)
    assert time.monotonic() - began > 0.9 * report.bytes_copied / 200_000


@pytest.mark.multiproc
def test_a_drain_process_reports_and_says_what_failed(tmp_path):
    import time

    commit(tmp_path / "root", 7)
    processes = [DrainProcess(tmp_path / "root", step, f"file://{tmp_path}/durable") for step in (7, 8)]
    end = time.monotonic() + 60
    while None in (found := [p.poll() for p in processes]):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert found[0].committed
    assert "step 8 was not drained" in found[1]
    assert "not committed" in found[1]


def test_verify_names_what_is_damaged_missing_or_truncated(tmp_path):
    (folder,) = commit(tmp_path / "root", 7)
    path = folder / "__0_0.distcp"
    whole = path.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"__0_0\.distcp was changed after it was sealed"):
        verify(folder)
    path.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match=rf"has {len(whole) - 1} bytes, {len(whole)} were sealed"):
        verify(folder)
    path.unlink()
    with pytest.raises(FormatError, match=r"__0_0\.distcp of .* is missing"):
        verify(folder)
    path.write_bytes(whole)
    verify(folder)
    record = json.loads((folder / "commit.json").read_text())
    record["record"]["seals"][0]["files"][0][1] += 1
    (folder / "commit.json").write_text(json.dumps(record))
    with pytest.raises(FormatError, match="digest does not fit"):
        verify(folder)
    (folder / "commit.json").unlink()
    with pytest.raises(FormatError, match=r"no commit\.json"):
        verify(folder)


def write_zarr(path, key, array, chunks):
    import tensorstore

    dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.str
    spec = {
        "driver": "zarr", "kvstore": {"driver": "file", "path": str(path / key)},
        "metadata": {"shape": list(array.shape), "chunks": list(chunks), "dtype": dtype},
    }  # fmt: skip
    store = tensorstore.open(spec, create=True).result()
    import ml_dtypes

    store.write(array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array).result()


def test_legacy_zarr_is_read_and_missing_chunks_are_refused(tmp_path):
    pytest.importorskip("tensorstore", reason="needs tensorstore")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    plain = np.arange(48, dtype=np.float32).reshape(6, 8)
    half = torch.arange(48.0).view(6, 8).bfloat16()
    write_zarr(tmp_path, "decoder.w", plain, (2, 4))
    write_zarr(tmp_path, "half", half.view(torch.int16).numpy().view(np.uint16), (3, 8))
    reader = LegacyZarrReader(tmp_path)
    assert reader.shapes == {"decoder.w": (6, 8), "half": (6, 8)}
    assert torch.equal(reader.read("decoder.w"), torch.from_numpy(plain))
    assert torch.equal(reader.read("decoder.w", (1, 3), (4, 2)), torch.from_numpy(plain[1:5, 3:5]))
    assert torch.equal(reader.read("half"), half)
    (tmp_path / "decoder.w" / "1.0").unlink()
    with pytest.raises(CoverageError, match=r"lacks 1 of its chunk files \(\['1\.0'\]\)"):
        reader.read("decoder.w")
    assert torch.equal(reader.read("decoder.w", (0, 0), (2, 8)), torch.from_numpy(plain[:2]))
    with pytest.raises(CoverageError, match="no tensor"):
        reader.read("other")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(FormatError, match="saved as 'torch_dist', expected 'zarr'"):
        LegacyZarrReader(tmp_path)


def test_file_records_of_equal_bytes_are_equal(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    record = file_digest(tmp_path / "a")
    assert record == FileRecord(name="a", nbytes=1000, xxh3=record.xxh3)
    assert put_file(tmp_path / "b", b"x" * 1000).xxh3 == record.xxh3
