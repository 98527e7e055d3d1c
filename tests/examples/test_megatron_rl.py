"""The plain Megatron-Core loop: rewards rise by what the engine is sent, and a resumed run is the run it resumes."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.examples.lines import lines, run

FIRST, SECOND = lines("examples.megatron_rl")


def shown(line, folder):
    done = run(line, folder, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_rewards_rise_and_a_resumed_run_is_the_run_it_resumes(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    *rows, last = shown(FIRST, whole)
    assert last == "checkpoints in run: steps [4, 8]"
    rewards = [float(re.search(r"reward ([\d.]+)", row).group(1)) for row in rows]
    assert rewards[0] < 0.2  # the engine's first rollouts are those of random weights
    assert rewards[-1] > 0.8
    acceptance = [float(re.search(r"acceptance ([\d.]+)", row).group(1)) for row in rows]
    assert acceptance[-1] > acceptance[0] + 0.05

    # As if the first run had ended at its step 6: the second goes on at 4, beyond where the first one ended.
    (resumed / "run").mkdir(parents=True)
    shutil.copytree(whole / "run" / "iter_0000004", resumed / "run" / "iter_0000004")
    first, *again, last = shown(SECOND, resumed)
    assert first == "resumed from step 4 (local)"
    assert again[:4] == rows[4:]  # the same rollouts, losses and drafts: weights, moments and prompts came back
    assert [row.split()[1] for row in again[4:]] == ["9", "10", "11", "12"]
    assert last == "checkpoints in run: steps [8, 12]"
