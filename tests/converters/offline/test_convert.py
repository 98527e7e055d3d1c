"""Conversions of small folders: there and back, what is chosen, what is said, what is refused."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

import converters
from checkpoint.format import TorchDistReader, TorchDistWriter
from converters.cli import main
from converters.errors import ConfigMismatch, FolderError, MappingError, UnsupportedFamilyError
from converters.offline import conversion, move
from tests.converters import test_inspect as damages
from tests.converters.offline.support import assert_same_tensors, fingerprint, read_tensors, write_folder
from tests.converters.test_families import mimo

LAYOUTS = ("stacked", "per-layer", "singleton")


@pytest.fixture
def source(tmp_path):
    config, tensors = mimo(2)
    return write_folder(tmp_path / "src", {**config, "torch_dtype": "bfloat16"}, tensors)


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_gives_the_same_folder(source, tmp_path, layout, spec):
    there = converters.convert(source, tmp_path / "m", layout=layout, spec=spec, verify="bits")
    assert (there.to, there.family, there.layout, there.mtp_layers) == ("mcore", "mimo", layout, 2)
    assert there.verified["tensors"] == there.num_stored
    back = converters.convert(tmp_path / "m", tmp_path / "h", verify="bits", shard_bytes=3000)
    assert (back.to, back.num_tensors, back.casts) == ("hf", there.num_stored, {})
    assert len(back.files) > 2
    assert_same_tensors(read_tensors(tmp_path / "h"), read_tensors(source))
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((tmp_path / "h" / name).read_text()) == json.loads((source / name).read_text())
    index = json.loads((tmp_path / "h" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in read_tensors_of(tmp_path / "h" / file)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_tensors(source).values())
    assert not list(tmp_path.glob(".*"))


def read_tensors_of(file):
    from safetensors.torch import load_file

    return load_file(file)


def test_a_megatron_checkpoint_has_what_loaders_look_for(source, tmp_path):
    converters.convert(source, tmp_path / "m", layout="per-layer", iteration="12")
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "12"
    with TorchDistReader(tmp_path / "m" / "iter_0000012") as folder:
        common = folder.common()
        assert folder.content_metadata() == {"non_homogeneous_layers": True, "singleton_local_shards": False}
        assert (common["iteration"], common["checkpoint_version"]) == (12, 3.0)
        config = json.loads((source / "config.json").read_text())
        assert common["args"].num_layers == config["num_hidden_layers"]
        assert common["args"].add_qkv_bias
        assert folder.read_object("decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1") == [None]
    release = converters.convert(source, tmp_path / "r")
    assert release.layout == "stacked"
    assert (tmp_path / "r" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = converters.convert(tmp_path / "r" / "release", tmp_path / "h")
    assert back.num_tensors == release.num_stored


def test_small_memory_and_many_workers_give_the_same_bytes(source, tmp_path, monkeypatch):
    converters.convert(source, tmp_path / "a", workers=1)
    # Pieces smaller than rows, than groups and than tensors.
    monkeypatch.setattr(move.Budget, "piece_bytes", 50)
    converters.convert(source, tmp_path / "b", workers=5)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_a_plan_reads_no_data_and_writes_nothing(source, tmp_path, monkeypatch):
    real = converters.convert(source, tmp_path / "m")
    monkeypatch.setattr(os, "preadv", None)
    planned = converters.convert(source, tmp_path / "p", plan=True)
    assert not (tmp_path / "p").exists()
    differ = {k for k, v in planned.to_json().items() if v != real.to_json()[k]}
    assert differ <= {"target", "seconds"}


def test_dtypes_are_cast_but_for_what_keeps_its_own(source, tmp_path):
    report = converters.convert(source, tmp_path / "m", dtype=torch.float32, keep_dtype=("*layernorm*",), verify="bits")
    assert set(report.dtypes) == {"float32", "bfloat16"}
    with TorchDistReader(tmp_path / "m" / "release") as folder:
        assert folder.index.tensors["decoder.final_layernorm.weight"].dtype == torch.bfloat16
        assert folder.index.tensors["output_layer.weight"].dtype == torch.float32
    # What comes back has the dtypes that went in.
    back = converters.convert(tmp_path / "m", tmp_path / "h", verify="bits")
    assert back.casts == {"float32 -> bfloat16": sum(back.casts.values())}
    assert_same_tensors(read_tensors(tmp_path / "h"), read_tensors(source))
    wide = converters.convert(tmp_path / "m", tmp_path / "w", dtype=torch.float32)
    assert set(wide.dtypes) == {"float32"}
    assert json.loads((tmp_path / "w" / "config.json").read_text())["torch_dtype"] == "float32"


def test_padding_and_optimizer_state_of_a_trained_checkpoint_stay_behind(source, tmp_path):
    converters.convert(source, tmp_path / "m")
    with TorchDistReader(tmp_path / "m" / "release") as folder:
        tensors = {key: folder.read(key) for key in folder.index.tensors}
    tensors["embedding.word_embeddings.weight"] = padded(tensors["embedding.word_embeddings.weight"])
    tensors["output_layer.weight"] = padded(tensors["output_layer.weight"])
    tensors["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(3)
    with TorchDistWriter(tmp_path / "trained") as writer:
        for key, tensor in tensors.items():
            writer.declare(key, tensor.shape, tensor.dtype)
            # Columns apart, as tensor parallelism leaves them: the elements of a row do not lie together.
            half = tensor.shape[-1] // 2
            writer.put(key, (0,) * tensor.dim(), tensor[..., :half])
            writer.put(key, (*(0,) * (tensor.dim() - 1), half), tensor[..., half:])
        writer.commit({"iteration": 3})
    with pytest.raises(FolderError, match=r"name a folder with its config\.json .* by --hf"):
        converters.convert(tmp_path / "trained", tmp_path / "h")
    report = converters.convert(tmp_path / "trained", tmp_path / "h", hf=source, verify="bits")
    assert report.optimizer_keys == 1
    assert report.padding_elements == 2 * 5 * tensors["output_layer.weight"].shape[1]
    assert_same_tensors(read_tensors(tmp_path / "h"), read_tensors(source))


def padded(tensor):
    return torch.cat([tensor, torch.full((5, tensor.shape[1]), 9.0, dtype=tensor.dtype)])


def test_tied_weights_are_compared_and_written_as_the_source_had_them(tmp_path):
    config, tensors = mimo(1)
    config["tie_word_embeddings"] = True
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = write_folder(tmp_path / "src", config, tensors)
    converters.convert(source, tmp_path / "m")
    converters.convert(tmp_path / "m", tmp_path / "h")
    assert_same_tensors(read_tensors(tmp_path / "h"), tensors)
    tensors["lm_head.weight"][3, 1] += 1
    other = write_folder(tmp_path / "other", config, tensors)
    with pytest.raises(MappingError, match="differ in 1 elements"):
        converters.convert(other, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    del tensors["lm_head.weight"]
    bare = write_folder(tmp_path / "bare", config, tensors)
    converters.convert(bare, tmp_path / "bm")
    converters.convert(tmp_path / "bm", tmp_path / "bh")
    assert "lm_head.weight" not in read_tensors(tmp_path / "bh")


def test_what_no_rule_knows_is_refused_dropped_or_carried(tmp_path):
    config, tensors = mimo(1)
    tensors["vision.weight"] = torch.randn(3, 5)
    source = write_folder(tmp_path / "src", config, tensors)
    with pytest.raises(MappingError, match=r"1 unmapped \(vision.weight\)"):
        converters.convert(source, tmp_path / "m")
    carried = converters.convert(source, tmp_path / "m", carry=["vision.*"], verify="bits")
    assert carried.carried == ["vision.weight"]
    converters.convert(tmp_path / "m", tmp_path / "h", carry=["vision.*"], verify="bits")
    assert_same_tensors(read_tensors(tmp_path / "h"), tensors)
    dropped = converters.convert(source, tmp_path / "d", drop=["vision.*", "model.mtp_layers.*"], verify="bits")
    assert (dropped.mtp_layers, "vision.weight" in dropped.dropped) == (0, True)
    with pytest.raises(MappingError, match=r"mtp\.layers\.0"):
        converters.convert(tmp_path / "d", tmp_path / "dh")
    converters.convert(tmp_path / "d", tmp_path / "dh", drop=["mtp.*"])
    assert json.loads((tmp_path / "dh" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with pytest.raises(MappingError, match="drop all of them or none"):
        converters.convert(source, tmp_path / "x", drop=["vision.*", "model.layers.0.mlp.gate_proj.weight"])


def test_fp8_blocks_are_decoded_in_fp32_whatever_the_pieces(tmp_path, monkeypatch):
    config, tensors = mimo(1)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 5]}
    want = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        weight = tensors[name].to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // 4), -(-columns // 5)) + 0.5
        tensors[name], tensors[name + "_scale_inv"] = weight, scale
        spread = scale.repeat_interleave(4, 0)[:rows].repeat_interleave(5, 1)[:, :columns]
        want[name] = (weight.float() * spread).bfloat16()
    source = write_folder(tmp_path / "src", config, tensors)
    monkeypatch.setattr(move.Budget, "piece_bytes", 64)
    report = converters.convert(source, tmp_path / "m", verify="bits")
    assert report.decoded == sum(n.endswith("_scale_inv") for n in tensors)
    converters.convert(tmp_path / "m", tmp_path / "h")
    assert_same_tensors(read_tensors(tmp_path / "h"), want)
    assert "quantization_config" not in json.loads((tmp_path / "h" / "config.json").read_text())


def test_verification_finds_a_changed_byte(source, tmp_path, monkeypatch):
    plain = move.write_at

    def flip(fd, data, pos):
        if len(data) > 2000:
            data = bytearray(data)
            data[1000] ^= 1  # of the embedding, which comes first
        return plain(fd, memoryview(data), pos)

    monkeypatch.setattr(move, "write_at", flip)
    with pytest.raises(FolderError, match="verification: 1 tensors differ"):
        converters.convert(source, tmp_path / "m", verify="bits")
    assert not (tmp_path / "m").exists()


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


BAD = {
    "truncated shard": (damages.damage_truncate, "is truncated"),
    "missing shard": (damages.damage_missing_shard, "is missing"),
    "absent tensor in the index": (damages.damage_ghost_in_index, "names model.ghost.weight"),
    "no config": (damages.damage_no_config, "config.json is missing"),
    "unknown family": (damages.damage_unknown_family, "no rules for architectures"),
    "heads that do not fit": (damages.damage_wrong_heads, "expected 4 x 6 = 24"),
    "a layer too few": (damages.damage_more_layers, "missing"),
    "a layer too many": (damages.damage_fewer_layers, "unmapped"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_error_and_nothing_is_written(tmp_path, case, capsys):
    config, tensors = mimo(1)
    source = write_folder(tmp_path / "src", config, tensors)
    damage, words = BAD[case]
    damage(source)
    refused(source, tmp_path / "m", words, capsys)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: cut(p / "__0_0.distcp", 2000), "__0_0.distcp is truncated"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda p: (p / "metadata.json").unlink(), "no metadata.json"),
        (lambda p: (p / ".metadata").unlink(), "no .metadata"),
        (lambda p: cut(p / ".metadata", 50), "is not a readable pickle"),
        (lambda p: (p / "hf" / "config.json").write_text("["), "cannot be read"),
        (lambda p: (p / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}'), "fsdp_dtensor"),
    ],
)
def test_a_bad_megatron_checkpoint_is_one_error_and_nothing_is_written(source, tmp_path, damage, words, capsys):
    converters.convert(source, tmp_path / "m")
    damage(tmp_path / "m" / "release")
    refused(tmp_path / "m", tmp_path / "h", words, capsys)


def refused(source, target, words, capsys, *options):
    before = fingerprint(source)
    assert main(["convert", str(source), str(target), *options]) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1
    assert fingerprint(source) == before
    assert not target.exists()
    assert not list(target.parent.glob(".*converting"))


def test_wrong_wishes_are_refused(source, tmp_path, capsys):
    with pytest.raises(MappingError, match="unmapped"):
        converters.convert(source, tmp_path / "m", family="llama")
    with pytest.raises(UnsupportedFamilyError, match="no family 'nobody'; known: "):
        converters.convert(source, tmp_path / "m", family="nobody")
    refused(source, tmp_path / "m", "is a Hugging Face folder already", capsys, "--to", "hf")
    with pytest.raises(ConfigMismatch, match="64 MiB"):
        converters.convert(source, tmp_path / "m", max_memory_bytes=1000)
    for wish in (("--workers", "0"), ("--max-memory", "1M"), ("--iteration", "-1")):
        with pytest.raises(SystemExit) as e:
            main(["convert", str(source), str(tmp_path / "m"), *wish])
        assert e.value.code == 2
        assert f"argument {wish[0]}: '{wish[1]}': expected" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_target_that_exists_or_cannot_be_made_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(FolderError, match="exists already"):
        converters.convert(source, tmp_path / "there")
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["file"]
    refused(source, tmp_path / "there" / "file" / "m", "cannot be written", capsys)
    with pytest.raises(FolderError, match="name a local folder"):
        converters.convert(source, f"file://{tmp_path}/url")
    (tmp_path / "empty").mkdir()
    converters.convert(source, tmp_path / "empty")
    assert (tmp_path / "empty" / "release").is_dir()


@pytest.mark.parametrize("resume", [False, True])
def test_a_full_disk_says_so_and_leaves_nothing_half(source, tmp_path, monkeypatch, resume):
    def full(fd, data, pos):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(move, "write_at", full)
        with pytest.raises(FolderError, match="the disk or quota is full"):
            converters.convert(source, tmp_path / "m", resume=resume)
    assert not (tmp_path / "m").exists()
    assert (tmp_path / ".m.converting").exists() == resume
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "disk_left_bytes", lambda path: 1000)
        with pytest.raises(FolderError, match="free space first"):
            converters.convert(source, tmp_path / "m", resume=resume)
    converters.convert(source, tmp_path / "m", resume=resume, verify="bits")
    assert not (tmp_path / ".m.converting").exists()


def test_what_another_run_left_or_still_writes_is_not_mixed(source, tmp_path, monkeypatch):
    def fail(fd, data, pos):
        # In the midst of one, another begins.
        with pytest.raises(FolderError, match="being written by another conversion"):
            converters.convert(source, tmp_path / "m", resume=True)
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(move, "write_at", fail)
        with pytest.raises(FolderError, match="cannot be written: broken"):
            converters.convert(source, tmp_path / "m", resume=True, workers=1)
    with pytest.raises(FolderError, match="of another conversion"):
        converters.convert(source, tmp_path / "m", resume=True, layout="per-layer")
    converters.convert(source, tmp_path / "m", layout="per-layer")


def test_the_command_prints_a_report_and_compares(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "m"), "--plan"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    options = ["--layout", "singleton", "--max-memory", "100Mi", "--verify", "bits", "--json"]
    assert main(["convert", str(source), str(tmp_path / "m"), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["verified"]["semantic"]) == ("singleton", None)
    assert main(["diff", str(tmp_path / "m"), str(source)]) == 0
    assert main(["inspect", str(tmp_path / "m"), "--json"]) == 0
    captured = capsys.readouterr().out
    told = json.loads(captured[captured.index("{") :])
    assert (told["layout"], told["family"], told["problems"]) == ("torch_dist, singleton", "mimo", [])
    converters.convert(source, tmp_path / "s", dtype=torch.float32, keep_dtype=("*layernorm*",))
    assert main(["diff", str(tmp_path / "m"), str(tmp_path / "s"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["names"], found["different"], found["only_first"]) == ("mcore", [], [])
    assert found["dtypes"]["output_layer.weight"] == ["bfloat16", "float32"]
    changed = read_tensors(source)
    changed["model.norm.weight"][:2] += 1
    other = write_folder(tmp_path / "other", json.loads((source / "config.json").read_text()), changed)
    assert main(["diff", str(tmp_path / "m"), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(d["name"], d["num_elements"]) for d in found["different"]] == [("model.norm.weight", 2)]
    assert main(["diff", str(source), str(other), "--headers"]) == 0


def test_legacy_zarr_checkpoints_are_read_and_missing_chunks_refused(source, tmp_path, capsys):
    tensorstore = pytest.importorskip("tensorstore")
    converters.convert(source, tmp_path / "m")
    old = tmp_path / "old" / "iter_0000007"
    old.mkdir(parents=True)
    with TorchDistReader(tmp_path / "m" / "release") as folder:
        for key in folder.index.tensors:
            tensor = folder.read(key)
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": str(old / key)},
                "metadata": {"shape": list(tensor.shape), "chunks": [-(-n // 2) for n in tensor.shape], "dtype": "<f4"},
            }
            array = tensorstore.open(spec, create=True).result()
            array[...].write(tensor.float().numpy()).result()
    (old / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    report = converters.convert(tmp_path / "old", tmp_path / "h", hf=source, verify="bits")
    assert report.casts == {"float32 -> bfloat16": report.num_tensors}
    assert_same_tensors(read_tensors(tmp_path / "h"), read_tensors(source))
    next((old / "output_layer.weight").glob("1.*")).unlink()
    refused(tmp_path / "old", tmp_path / "x", "zeros would be read", capsys, "--hf", str(source))
