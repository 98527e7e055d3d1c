"""The plain Megatron-Core loop: rewards rise by what the engine is sent, and a resumed run is the run it resumes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.test_structure import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def run(folder: Path, steps: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "examples.megatron_rl", "--folder", str(folder), "--steps", str(steps)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.multiproc
@pytest.mark.slow
def test_rewards_rise_and_a_resumed_run_is_the_run_it_resumes(tmp_path):
    *rows, last = run(tmp_path / "whole", 8)
    assert last.endswith("steps [4, 8]")
    rewards = [float(re.search(r"reward ([\d.]+)", row).group(1)) for row in rows]
    assert rewards[0] < 0.2  # the engine's first rollouts are those of random weights
    assert rewards[-1] > 0.8
    acceptance = [float(re.search(r"acceptance ([\d.]+)", row).group(1)) for row in rows]
    assert acceptance[-1] > acceptance[0] + 0.05

    resumed = tmp_path / "resumed"
    resumed.mkdir()
    shutil.copytree(tmp_path / "whole" / "iter_0000004", resumed / "iter_0000004")
    first, *again, _ = run(resumed, 8)
    assert first == "resumed from step 4 (local)"
    assert again == rows[4:]  # the same rollouts, losses and drafts: weights, moments and prompts came back
