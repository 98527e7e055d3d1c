"""`ckpt inspect` on real folders, sound and broken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from converters.cli import main
from tests.converters.test_families import mimo


@pytest.fixture
def folder(tmp_path):
    """A MiMo-shaped folder of two shards with an index."""
    config, tensors = mimo(1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for k in range(2):
        file = f"model-0000{k + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names[k::2]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[k::2], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def report(capsys, folder):
    code = main(["inspect", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_sound_folder_is_told_in_full(folder, capsys):
    _, tensors = mimo(1)
    code, told = report(capsys, folder)
    assert code == 0
    assert told["problems"] == told["unmapped"] == told["missing"] == []
    assert (told["family"], told["layout"], told["tensor_count"]) == ("mimo", "huggingface", len(tensors))
    assert told["bytes"] == sum(t.nbytes for t in tensors.values())
    by_name = {t["name"]: t for t in told["tensors"]}
    assert by_name.keys() == tensors.keys()
    assert by_name["model.mtp_layers.0.input_proj.weight"] | {"file": ""} == {
        "name": "model.mtp_layers.0.input_proj.weight",
        "dtype": "bfloat16",
        "shape": [24, 48],
        "bytes": 24 * 48 * 2,
        "file": "",
        "megatron": ["mtp.layers.0.eh_proj.weight"],
    }
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "family mimo" in text
    assert (
        "model.layers.1.self_attn.v_proj.bias  bfloat16  12  24 B  decoder.layers.1.self_attention.linear_qkv.bias"
        in text
    )
    assert text.endswith("0 problem(s)\n")


def test_a_single_file_is_read_too_and_data_is_not(tmp_path, capsys):
    config, tensors = mimo(1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    assert report(capsys, tmp_path)[0] == 0


def damage_truncate(folder):
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])


def damage_cut_header(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\xff\0\0")


def damage_garbage_header(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes((8).to_bytes(8, "little") + b"no json!")


def damage_other_format(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"PK\3\4 is a zip file, not safetensors")


def damage_wrong_size(folder):
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def damage_missing_shard(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def damage_ghost_in_index(folder):
    shard = "model-00001-of-00002.safetensors"
    edit(folder / "model.safetensors.index.json", lambda v: v["weight_map"].update({"model.ghost.weight": shard}))


def damage_not_in_index(folder):
    edit(folder / "model.safetensors.index.json", lambda v: v["weight_map"].pop("model.norm.weight"))


def damage_path_in_index(folder):
    edit(folder / "model.safetensors.index.json", lambda v: v["weight_map"].update({"x": "../x.safetensors"}))


def damage_no_map(folder):
    edit(folder / "model.safetensors.index.json", lambda v: v.pop("weight_map"))


def damage_no_config(folder):
    (folder / "config.json").unlink()


def damage_bad_config(folder):
    (folder / "config.json").write_text("{")


def damage_unknown_family(folder):
    edit(folder / "config.json", lambda v: v.update(architectures=["Unheard"]))


def damage_wrong_heads(folder):
    edit(folder / "config.json", lambda v: v.update(num_key_value_heads=4))


def damage_more_layers(folder):
    edit(folder / "config.json", lambda v: v.update(num_nextn_predict_layers=2))


def damage_fewer_layers(folder):
    edit(folder / "config.json", lambda v: v.update(num_nextn_predict_layers=0))


def damage_twice(folder):
    save_file({"model.norm.weight": torch.zeros(24)}, folder / "model-00003.safetensors")
    edit(
        folder / "model.safetensors.index.json",
        lambda v: v["weight_map"].update({"extra": "model-00003.safetensors"}),
    )


@pytest.mark.parametrize(
    ("damage", "words", "only"),
    [
        (damage_truncate, "model-00002-of-00002.safetensors is truncated", True),
        (damage_cut_header, "model-00002-of-00002.safetensors is truncated: 3 bytes", True),
        (damage_garbage_header, "is not safetensors: its header is not JSON", True),
        (damage_other_format, "is not safetensors: its header would be", True),
        (damage_wrong_size, "model.norm.weight has 8 bytes for F32 of shape (3,)", True),
        (damage_missing_shard, "model-00002-of-00002.safetensors is missing", True),
        (damage_ghost_in_index, "names model.ghost.weight in model-00001-of-00002.safetensors, which does not", False),
        (damage_not_in_index, "model.norm.weight is in model-00001-of-00002.safetensors but not in model.safe", True),
        (damage_path_in_index, "'../x.safetensors', which is not a plain file name", False),
        (damage_no_map, "has no weight_map", True),
        (damage_no_config, "config.json is missing", True),
        (damage_bad_config, "config.json cannot be read", True),
        (damage_unknown_family, "no rules for architectures ['Unheard']", True),
        (damage_wrong_heads, "expected 4 x 6 = 24 along dimension 0", False),
        (damage_more_layers, "model.mtp_layers.1.input_proj.weight is missing: the mimo rules need it", False),
        (damage_fewer_layers, "model.mtp_layers.0.input_proj.weight is not known to the mimo rules", False),
        (damage_twice, "model.norm.weight is in both model-00001-of-00002.safetensors and model-00003", False),
    ],
)
def test_every_damage_is_one_line_and_exit_code_1(folder, capsys, damage, words, only):
    damage(folder)
    code, told = report(capsys, folder)
    assert code == 1
    assert [p for p in told["problems"] if words in p], told["problems"]
    assert all("\n" not in p for p in told["problems"])
    if only:
        assert len(told["problems"]) == 1, told["problems"]
    assert main(["inspect", str(folder)]) == 1
    assert f"problem: {told['problems'][0]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda p: p / "nowhere", "no such folder"),
        (lambda p: p, "not a Hugging Face folder"),
        (lambda p: (p / ".metadata").touch() or p, "the save did not end"),
        (lambda p: (p / "f").touch() or p / "f", "not a folder"),
    ],
)
def test_what_is_no_folder_of_weights_is_wrong_usage(tmp_path, capsys, prepare, words):
    path = prepare(tmp_path)
    assert main(["inspect", str(path)]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert words in out.err
    assert out.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["look"], "invalid choice: 'look'"),
        (["inspect"], "PATH"),
        (["inspect", "--nonsense", "."], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(argv, words, capsys):
    with pytest.raises(SystemExit) as e:
        main(argv)
    out, err = capsys.readouterr()
    assert (e.value.code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert "--help" in err


@pytest.mark.multiproc
def test_a_reader_that_stops_reading_is_no_error(folder):
    child = subprocess.Popen(
        [sys.executable, "-m", "converters.cli", "inspect", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    try:
        _, error = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, error) == (0, b"")
