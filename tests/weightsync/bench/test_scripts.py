"""The scripts under benchmarks/ that state facts about the transport and the processes, at small sizes."""

import argparse
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightsync.bench import cli
from weightsync.bench.config import BenchConfig
from weightsync.embedded.config import SHAPES
from weightsync.embedded.known import known_argmax, write_hf_folder

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def script(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.multiproc
def test_publishes_in_a_row_leave_processes_as_they_were():
    soak = script("soak")
    lines = []
    config = BenchConfig(model="tiny", engines=1, bucket_mib=1 / 16)
    problems = soak.soak(config, publishes=70, warmup=20, say=lines.append)
    assert problems == [], "\n".join(lines)
    assert [line.split()[0] for line in lines[2:]] == ["trainer", "engine0"]


def test_growth_is_seen_and_noise_is_not():
    soak = script("soak")
    page = 4096
    assert soak.growth_per_publish([10 * page] * 100) == 0
    assert soak.growth_per_publish([10 * page + i % 2 * page for i in range(100)]) == 0
    assert soak.growth_per_publish([i * page for i in range(100)]) == page


def test_the_gpu_script_shows_its_plan_and_stays_within_its_budget(capsys):
    gpu = script("gpu")
    assert gpu.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [s.name for s in gpu.STEPS]
    assert int(lines[-1].split()[2]) <= gpu.BUDGET_S < 600
    for step in gpu.STEPS:
        if "bench" in step.command:  # every row is one that the bench takes
            parser = argparse.ArgumentParser()
            cli.add_arguments(parser)
            parsed = parser.parse_args(step.command[4:])
            assert parsed.transport in step.name
    assert gpu.main(["--dry-run", "--only", "tests"]) == 0
    assert capsys.readouterr().out.startswith("tests (at most")


def test_the_gpu_script_reports_every_way_in_which_a_step_ends():
    gpu = script("gpu")
    say = [sys.executable, "-c"]
    good = gpu.run(gpu.Step("good", 20, [*say, 'print(\'{"rate_per_s": 2e9, "same": true}\')']))
    bad = gpu.run(gpu.Step("bad", 20, [*say, "raise SystemExit('no card')"]))
    late = gpu.run(gpu.Step("late", 1, [*say, "import time; print('so far', flush=True); time.sleep(30)"]))
    assert (good["status"], bad["status"], late["status"]) == (0, 1, "over its limit of 1 s")
    assert gpu.line_of("good", good).endswith("| rate_per_s 2e9, same True |")
    assert "no card" in bad["output"]
    assert gpu.line_of("late", late).endswith("so far |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_script_refuses_a_machine_without_a_card(capsys):
    assert script("gpu").main([]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


@pytest.mark.multiproc
def test_bytes_on_the_loopback_interface_are_those_that_the_transport_counts(tmp_path):
    # Large enough for the control traffic to vanish, small enough to take seconds.
    shape = dataclasses.replace(SHAPES["tiny-qwen3"], hidden_size=512, vocab_size=32000, intermediate_size=1024)
    folder = write_hf_folder(tmp_path / "model", shape, known_argmax(shape, seed=0)["target"])
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "loopback.py", "--model", folder, "--draft", "none", "--engines", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=BENCHMARKS.parent,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("difference") == 3


def test_the_yardstick_needs_nothing_of_this_project():
    text = (BENCHMARKS / "anchors" / "ways.py").read_text()
    for package in ("checkpoint", "converters", "training_hooks", "weightsync"):
        assert f"import {package}" not in text
        assert f"from {package}" not in text
