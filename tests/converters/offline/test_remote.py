"""Sources behind URLs: nothing but what is needed is read, and the result is that of a local source."""

from __future__ import annotations

import os
import uuid

import fsspec
import pytest

import converters
from converters.cli import main
from converters.errors import FolderError
from converters.offline import remote
from tests.converters.offline.support import fingerprint, write_folder
from tests.converters.test_families import mimo
from tests.support.s3_server import s3_server


@pytest.fixture
def source(tmp_path):
    config, tensors = mimo(1)
    return write_folder(tmp_path / "src", {**config, "torch_dtype": "bfloat16"}, tensors)


@pytest.fixture
def upload():
    """Puts a folder into fsspec's filesystem in memory and tells its URL."""
    urls = []

    def put(folder):
        urls.append(f"memory://{uuid.uuid4().hex}")
        fs, path = fsspec.core.url_to_fs(urls[-1])
        fs.put(f"{folder}/", f"{path}/", recursive=True)
        return urls[-1]

    yield put
    for url in urls:
        fs, path = fsspec.core.url_to_fs(url)
        fs.rm(path, recursive=True)


def test_both_directions_give_what_local_sources_give(source, upload, tmp_path):
    converters.convert(source, tmp_path / "m")
    converters.convert(upload(source), tmp_path / "m2", verify="bits")
    assert fingerprint(tmp_path / "m2") == fingerprint(tmp_path / "m")
    converters.convert(tmp_path / "m", tmp_path / "h")
    converters.convert(upload(tmp_path / "m"), tmp_path / "h2", verify="bits")
    assert fingerprint(tmp_path / "h2") == fingerprint(tmp_path / "h")


def test_a_plan_reads_headers_only(source, upload, tmp_path, monkeypatch):
    url, read = upload(source), []
    plain = remote.RangedFiles._cat

    def counted(self, file, pos, end):
        read.append(file)
        return plain(self, file, pos, end)

    monkeypatch.setattr(remote.RangedFiles, "_cat", counted)
    report = converters.convert(url, tmp_path / "m", plan=True)
    assert (report.family, report.mtp_layers, read) == ("mimo", 1, [])
    assert not (tmp_path / "m").exists()


def test_what_is_wrong_is_said_of_urls_too(source, upload, tmp_path, capsys):
    with pytest.raises(FolderError, match="no such folder"):
        converters.convert("memory://nothing-here", tmp_path / "m")
    with pytest.raises(FolderError, match="fsspec cannot open"):
        converters.convert("nonsense://x", tmp_path / "m")
    file = next(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    url = upload(source)
    assert main(["inspect", url]) == 1
    assert "truncated" in capsys.readouterr().out
    with pytest.raises(FolderError, match="truncated"):
        converters.convert(url, tmp_path / "m")
    assert not list(tmp_path.glob("*m*"))


def test_a_file_that_changes_between_two_runs_is_another_conversion(source, upload):
    url = upload(source)
    before = converters.offline.places.open_source(remote.place(url)).identity
    fs, path = fsspec.core.url_to_fs(url)
    name = next(f for f in fs.ls(path, detail=False) if f.endswith(".safetensors"))
    fs.pipe_file(name, fs.cat_file(name))
    assert converters.offline.places.open_source(remote.place(url)).identity != before


@pytest.mark.multiproc
def test_a_model_in_a_bucket(source, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with s3_server("models") as address:
        fs = fsspec.filesystem("s3", endpoint_url=address, skip_instance_cache=True)
        for file in source.iterdir():
            fs.pipe_file(f"models/mimo/{file.name}", file.read_bytes())
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": address})
        converters.convert("s3://models/mimo", tmp_path / "m", verify="bits")
        converters.convert(source, tmp_path / "local")
        assert fingerprint(tmp_path / "m") == fingerprint(tmp_path / "local")
        assert not os.path.exists("s3:")  # nobody took the URL for a path
        fsspec.filesystem("s3").clear_instance_cache()
