"""Reading and writing torch_dist folders: what stock torch reads back, what is refused, what is never executed."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import pickle
import random
import struct

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.errors import ConfigError, CoverageError, FormatError
from checkpoint.format import (
    Chunk,
    Foreign,
    Index,
    TensorEntry,
    TorchDistReader,
    TorchDistWriter,
    dump_metadata,
    file_digest,
    load_object,
    parse_metadata,
)
from checkpoint.format.saved import dump_object, locate_tensor
from checkpoint.format.unpickle import loads

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


class Ours:
    """A class that a reader does not know."""

    def __init__(self):
        self.depth = 3


def write_sample(path):
    weight = torch.arange(6 * 4 * 5, dtype=torch.float32).view(6, 4, 5)
    with TorchDistWriter(path, max_file_bytes=1000) as writer:
        writer.declare("w", (6, 4, 5), torch.float32)
        for row in range(0, 6, 2):
            writer.put("w", (row, 0, 0), weight[row : row + 2])
        writer.declare("scalar", (), torch.int64)
        writer.put("scalar", (), torch.tensor(7))
        writer.declare("empty", (0, 3), torch.float32)
        writer.put("empty", (0, 0), torch.empty(0, 3))
        writer.put_object("rng/shard_0_1", {"state": torch.arange(3), "class": Ours()})
        records = writer.commit({"iteration": 5, "args": argparse.Namespace(lr=0.5), "content_metadata": {"a": 1}})
    return weight, records


SINGLE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@SINGLE
def test_stock_torch_reads_what_the_writer_wrote(tmp_path):
    weight, records = write_sample(tmp_path / "c")
    got = {"w": torch.empty(6, 4, 5), "scalar": torch.tensor(0), "empty": torch.empty(0, 3)}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(got["w"], weight)
    assert got["scalar"].item() == 7
    assert len({r.name for r in records if r.name.endswith(".distcp")}) > 1
    assert all(file_digest(tmp_path / "c" / r.name) == r for r in records)


@SINGLE
def test_reader_reads_what_stock_torch_wrote(tmp_path):
    state = {f"t{i}": (torch.rand(3, 4) * 50).to(dtype) for i, dtype in enumerate(DTYPES)}
    dcp.save(state | {"view": torch.arange(100.0).view(10, 10)[2:4, 3:5]}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    with TorchDistReader(tmp_path / "c") as folder:
        for key, tensor in state.items():
            got = folder.read(key)
            assert got.dtype == tensor.dtype
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
        folder.index.check()
        assert folder.read("t2", (1, 1), (2, 2)).tolist() == state["t2"][1:3, 1:3].tolist()


def test_boxes_are_read_across_shards_and_only_their_rows(tmp_path):
    weight, _ = write_sample(tmp_path / "c")
    fetched = []

    def fetch(file, pos, size):
        data = (tmp_path / "c" / file).read_bytes()
        fetched.append(size)
        return data[pos:] if size is None else data[pos : pos + size]

    folder = TorchDistReader("elsewhere", fetch=fetch)
    for a, b in itertools.combinations(range(7), 2):
        assert torch.equal(folder.read("w", (a, 1, 2), (b - a, 2, 3)), weight[a:b, 1:3, 2:5])
    fetched.clear()
    folder.read("w", (3, 0, 0), (1, 4, 5))
    assert fetched == [4 * 5 * 4]
    assert folder.read("w", (3, 0, 0), (0, 4, 5)).shape == (0, 4, 5)
    with pytest.raises(CoverageError, match=r"no box \(7, 1, 1\)"):
        folder.read("w", (0, 0, 0), (7, 1, 1))
    with pytest.raises(CoverageError, match="no tensor 'v'"):
        folder.read("v")


def test_common_state_and_objects_come_back_without_their_classes(tmp_path):
    write_sample(tmp_path / "c")
    with TorchDistReader(tmp_path / "c") as folder:
        common = folder.common()
        assert common["iteration"] == 5
        assert common["args"].lr == 0.5
        assert folder.content_metadata() == {"a": 1}
        value = folder.read_object("rng/shard_0_1")
        assert value["state"].tolist() == [0, 1, 2]
        assert isinstance(value["class"], Foreign)
        assert value["class"].path == "tests.checkpoint.test_format.Ours"
        assert value["class"].depth == 3
        with pytest.raises(CoverageError, match="no object"):
            folder.read_object("w")


def test_everything_that_trainers_put_into_common_state_is_read():
    value = {
        "transposed": torch.arange(6).view(2, 3).t(),
        "parameter": [torch.nn.Parameter(torch.ones(3).bfloat16())],
        "numpy state": np.random.get_state(),
        "python state": random.getstate(),
        "array": np.arange(6, dtype=">i4").reshape(2, 3).T,
        "scalar": np.float32(3.5),
        "dtype": torch.float16,
        "bytes": io.BytesIO(b"abc"),
        "set": {1, 2},
    }
    got = load_object(dump_object(value), "common.pt")
    assert torch.equal(got["transposed"], value["transposed"])
    assert torch.equal(got["parameter"][0], torch.ones(3).bfloat16())
    assert (got["numpy state"][1] == value["numpy state"][1]).all()
    assert got["python state"] == value["python state"]
    assert (got["array"] == value["array"]).all()
    assert (got["scalar"], got["dtype"], got["bytes"].getvalue(), got["set"]) == (3.5, torch.float16, b"abc", {1, 2})


class Call:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_is_recorded_and_not_run(tmp_path, protocol):
    import os

    marker = tmp_path / "ran"
    for function, args in ((os.system, (f"touch {marker}",)), (eval, ("1",)), (getattr, ("text", "upper"))):
        value = loads(pickle.dumps([Call(function, *args)], protocol), what="test")[0]
        assert isinstance(value, Foreign)
        assert value.__dict__["args"] == args
    # Dotted names of protocol 4 do not reach into allowed modules either.
    assert isinstance(loads(b"\x80\x04\x8c\x05torch\x8c\x08hub.load\x93)R.", what="test"), Foreign)
    assert not marker.exists()


def test_numpy_objects_that_could_hold_pickles_are_refused():
    data = pickle.dumps(np.array([{"a": 1}], dtype=object))
    with pytest.raises(FormatError, match="holds objects"):
        loads(data, what="test")


@pytest.mark.parametrize("cut", [0, 10, 100, -40, -1])
def test_truncated_metadata_and_records_are_refused(tmp_path, cut):
    write_sample(tmp_path / "c")
    data = (tmp_path / "c" / ".metadata").read_bytes()
    with pytest.raises(FormatError, match=r"\.metadata is not"):
        parse_metadata(data[:cut])
    record = dump_object({"a": torch.ones(5)})
    with pytest.raises(FormatError, match="truncated"):
        load_object(record[:cut], "common.pt")


def test_truncated_and_missing_shards_are_refused(tmp_path):
    write_sample(tmp_path / "c")
    with TorchDistReader(tmp_path / "c") as folder:
        last = folder.index.tensors["w"].chunks[-1]
    path = tmp_path / "c" / last.file
    path.write_bytes(path.read_bytes()[: last.pos + 300])
    with TorchDistReader(tmp_path / "c") as folder, pytest.raises(FormatError, match=rf"{last.file}.*w.*truncated"):
        folder.read("w")
    path.unlink()
    with TorchDistReader(tmp_path / "c") as folder, pytest.raises(FormatError, match="file is missing"):
        folder.read("w")


def test_folders_that_are_no_checkpoints_say_why(tmp_path):
    with pytest.raises(FormatError, match=r"no metadata\.json"):
        TorchDistReader(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(FormatError, match=r"saved as 'zarr', expected 'torch_dist'.*legacy_zarr"):
        TorchDistReader(tmp_path)
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(FormatError, match="damaged"):
        TorchDistReader(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    with pytest.raises(FormatError, match=r"no \.metadata.*rebuild"):
        TorchDistReader(tmp_path)


def test_the_writer_refuses_what_it_could_not_complete(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        TorchDistWriter(tmp_path / "used")
    with TorchDistWriter(tmp_path / "c") as writer:
        writer.declare("w", (4, 3), torch.float32)
        writer.put("w", (0, 0), torch.ones(2, 3))
        with pytest.raises(ConfigError, match="declared before its shards"):
            writer.put("v", (0,), torch.ones(2))
        with pytest.raises(ConfigError, match="float32"):
            writer.put("w", (2, 0), torch.ones(2, 3).half())
        with pytest.raises(ConfigError, match="declared before"):
            writer.declare("w", (4, 3), torch.float32)
        with pytest.raises(CoverageError, match="holes: 6 of 12"):
            writer.commit({})
    assert list((tmp_path / "c").iterdir()) == []


def entry(shape, *boxes):
    chunks = tuple(Chunk(offset=o, shape=s, file="f", pos=i, nbytes=1) for i, (o, s) in enumerate(boxes))
    return Index(tensors={"w": TensorEntry(dtype=torch.float32, shape=shape, chunks=chunks)}, objects={})


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_coverage_finds_every_hole_and_every_overlap(data, shape):
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in itertools.product(*(list(itertools.pairwise(c)) for c in cuts))
    ]
    entry(tuple(shape), *boxes).check()
    index = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(CoverageError, match="holes"):
        entry(tuple(shape), *boxes[:index], *boxes[index + 1 :]).check()
    with pytest.raises(CoverageError, match="stored twice"):
        entry(tuple(shape), *boxes, boxes[index]).check()
    with pytest.raises(CoverageError, match="outside"):
        entry(tuple(shape), *boxes, (tuple(shape), (1,) * len(shape))).check()


def test_metadata_of_older_torch_and_of_megatron_subclasses_is_read():
    index = entry((4,), ((0,), (2,)), ((2,), (2,)))
    data = dump_metadata(index)
    assert parse_metadata(data) == index
    # As a class of another module: only the names of the fields count.
    older = data.replace(b"torch.distributed.checkpoint.filesystem", b"older.distributed.checkpoint.filesystem")
    assert len(older) == len(data)
    assert parse_metadata(older) == index
    with pytest.raises(FormatError, match="not the metadata of a distributed checkpoint"):
        parse_metadata(pickle.dumps({"a": 1}))


def test_a_tensor_is_found_in_its_record_without_reading_it():
    tensor = torch.arange(10_000.0).view(100, 100)
    record = dump_object(tensor)
    read = []

    def at(pos, size):
        read.append(size)
        return record[pos : pos + size]

    place = locate_tensor(at, len(record), "test")
    assert (place.dtype, place.shape) == (torch.float32, (100, 100))
    assert struct.unpack_from("<f", record, place.pos + 4 * 4321) == (4321.0,)
    assert sum(read) < 8000
    other = dump_object([1])
    with pytest.raises(FormatError, match="expected one contiguous tensor"):
        locate_tensor(lambda pos, size: other[pos : pos + size], len(other), "test")
