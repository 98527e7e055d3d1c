"""The co-training example on real Megatron-Core (TP=2 x PP=2, sequence parallelism): it checks its own figures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.test_structure import ROOT


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_cotraining_raises_the_accepted_length_and_scrambled_rows_do_not():
    done = subprocess.run(
        [sys.executable, "-m", "examples.cotrain_eagle3", "--seeds", "3", "--steps", "4"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=270,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if "accepted length" in line]
    assert len(results) == 3
