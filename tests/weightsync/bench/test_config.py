"""Nonsense arguments of `weightsync bench`: one line, status 2, before any process is started."""

import sys

import pytest

from weightsync import cli
from weightsync.bench.config import BenchConfig, TrainerLayout
from weightsync.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engines", "0"], "--engines 0: expected at least 1"),
        (["--engines", "many"], "--engines: invalid int value"),
        (["--engine-tp", "3"], "--engine-tp 3: expected 1 or 2"),
        (["--draft", "medusa"], "--draft 'medusa': expected one of none, mtp, eagle3"),
        (["--transport", "tcp"], "--transport 'tcp': expected one of gloo, shm, nccl, ipc"),
        (["--transport", "ipc", "--trainer", "tp=2"], "--transport ipc: everything is on one GPU"),
        (["--transport", "ipc", "--compare"], "--compare: other ways of --transport ipc are not measured"),
        (["--bucket-mib", "0"], "--bucket-mib 0: expected"),
        (["--bucket-mib", "nan"], "--bucket-mib nan: expected"),
        (["--bucket-mib", "9999"], "--bucket-mib 9999: expected at most"),
        (["--buffers", "1"], "--buffers 1: expected at least 2"),
        (["--publishes", "0"], "--publishes 0: expected at least 1"),
        (["--warmup", "-1"], "--warmup -1: expected at least 0"),
        (["--deadline", "0"], "--deadline 0: expected seconds"),
        (["--trainer", "dp=2"], "--trainer 'dp=2': expected state-dict, or sizes"),
        (["--trainer", "tp=0"], "--trainer 'tp=0': expected"),
        (["--trainer", "tp=2,tp=2"], "--trainer 'tp=2,tp=2': expected"),
        (["--trainer", "tp=2", "--draft", "eagle3"], "--draft eagle3 needs --trainer state-dict"),
        (["--model", "no-such-model"], "'no-such-model' is neither a shape"),
        (["--json", "no-such-folder/x.json"], "cannot write"),
        (["--trace", "."], "cannot write '.'"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_nonsense_arguments_are_one_line_and_status_2(arguments, says, capsys):
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as e:
        status = e.code
    out, err = capsys.readouterr()
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert out == ""


def test_nccl_without_enough_devices_is_refused(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["bench", "--transport", "nccl", "--engines", "2"]) == 2
    assert "--transport nccl" in (err := capsys.readouterr().err)
    assert "3 CUDA devices" in err


def test_ipc_without_a_device_is_refused(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--transport", "ipc"]) == 2
    assert "--transport ipc: trainer and engines share a CUDA device" in capsys.readouterr().err


def test_a_live_trainer_without_megatron_core_is_refused(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)  # as if it were not installed
    assert cli.main(["bench", "--model", "tiny", "--trainer", "tp=2"]) == 2
    assert "pip install 'weightsync[megatron]'" in capsys.readouterr().err


def test_an_interpreter_that_is_not_there_is_named_before_anything_starts(capsys):
    assert cli.main(["bench", "--model", "tiny", "--engine", "vllm", "--engine-python", "/no/such/python"]) == 2
    assert "--engine-python /no/such/python: no such program here" in capsys.readouterr().err


def test_every_process_of_a_bench_has_its_device():
    nccl = BenchConfig(transport="nccl", engines=2, engine_tp=2)
    assert (nccl.trainer_device, nccl.engine_device(0), nccl.engine_device(1)) == ("cuda:0", "cuda:1", "cuda:3")
    ipc = BenchConfig(transport="ipc", engines=2, engine_tp=2)
    assert (ipc.trainer_device, ipc.engine_device(1)) == ("cuda:0", "cuda:0,cuda:0")
    assert (BenchConfig().trainer_device, BenchConfig().engine_device(3)) == ("cpu", "cpu")


def test_layouts_are_parsed_and_printed():
    assert TrainerLayout.parse("state-dict").world_size == 1
    layout = TrainerLayout.parse("pp=2,tp=4")
    assert (layout.tp, layout.pp, layout.world_size, str(layout)) == (4, 2, 8, "tp=4,pp=2")
    assert TrainerLayout.parse("pp=3").tp == 1


def test_a_configuration_survives_its_json():
    config = BenchConfig(trainer=TrainerLayout.parse("tp=2"), engines=3, model="tiny", bucket_mib=0.5)
    assert BenchConfig.from_json(config.to_json()) == config
    assert config.bucket_bytes == 1 << 19


def test_a_folder_without_mtp_layers_is_refused(tmp_path):
    from weightsync.bench.weights import model_configs
    from weightsync.embedded.config import SHAPES
    from weightsync.embedded.known import known_argmax, write_hf_folder

    shape = SHAPES["tiny-qwen3"]
    folder = write_hf_folder(tmp_path / "model", shape, known_argmax(shape, seed=0)["target"])
    with pytest.raises(ConfigError, match="has no MTP layers"):
        model_configs(BenchConfig(model=str(folder), draft="mtp"))
    target, drafter = model_configs(BenchConfig(model=str(folder), draft="eagle3"))
    assert target == shape
    assert drafter.is_eagle3
