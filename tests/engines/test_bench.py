"""`weightsync bench --engine`: real engines, started, published to, decoded with and stopped by the command itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines import sglang_server
from tests.engines.vllm_server import PYTHON, require_vllm
from weightsync import cli
from weightsync.bench.config import BenchConfig
from weightsync.bench.harness import check
from weightsync.errors import ConfigError


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["bench", "--model", "tiny", "--publishes", "2", "--warmup", "0", "--json", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result = json.loads(shown.out)
    summary = result["summary"]
    assert summary["acceptance_before"] < 0.2
    assert summary["acceptance_after"] == 1.0
    assert summary["unique_bytes"] + summary["padding_bytes"] == summary["wire_bytes_per_engine_rank"]
    assert {"load_target", "load_draft", "wire", "verify", "commit"} <= set(result["phases"])
    assert summary["peak_extra_bytes"]["engine0 process 0"] is not None
    assert "engine_python" not in result["config"]
    return result


@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(400)
def test_a_real_vllm_beside_the_limit_and_other_ways(capsys: pytest.CaptureFixture[str]) -> None:
    require_vllm()
    result = bench(capsys, "--engine", "vllm", "--engine-python", str(PYTHON), "--compare")
    assert result["versions"]["vllm"] == "0.32.0"
    assert result["title"] == "tiny, mtp draft: state-dict trainer to 1 vllm engine TP1 over gloo"
    assert result["summary"]["ratio_to_limit"] > 0
    assert {w["name"] for w in result["compare"]} >= {"two_pass_full", "flattened_bucket"}


@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(400)
def test_a_real_sglang_with_an_eagle3_drafter(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = "0.5.23"
    # The stand-ins without which SGLang does not run here, and the entry points of an installed weightsync.
    monkeypatch.setenv("PYTHONPATH", sglang_server.environment(tmp_path)["PYTHONPATH"])
    python = str(sglang_server.python_of(release))
    result = bench(capsys, "--engine", "sglang", "--engine-python", python, "--draft", "eagle3")
    assert result["versions"]["sglang"] == release


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"engine": "trt"}, "expected one of embedded, vllm, sglang"),
        ({"engine_python": "python3"}, "add --engine vllm"),
        ({"engine": "vllm"}, "pass --engine-python"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is(arguments: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(BenchConfig(model="tiny", **arguments))


@pytest.mark.multiproc
def test_a_server_that_does_not_start_is_one_line_with_its_last_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no vllm here'\nexit 3\n")
    python.chmod(0o755)
    assert cli.main(["bench", "--model", "tiny", "--engine", "vllm", "--engine-python", str(python)]) == 1
    shown = capsys.readouterr().err
    assert "ended with code 3" in shown
    assert "no vllm here" in shown
