"""The MTP example trains on the CPU, and its drafts become right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.test_structure import ROOT


@pytest.mark.multiproc
@pytest.mark.slow
def test_drafts_become_right():
    done = subprocess.run(
        [sys.executable, "-m", "examples.train_mtp", "--steps", "16"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split()[:2] == ["step", "policy"]
    first, last = (
        dict(zip(("step", "policy", "mtp 1", "mtp 2"), row.split()[:4], strict=True)) for row in (rows[0], rows[-1])
    )
    assert last["step"] == "15"
    for name in ("policy", "mtp 1", "mtp 2"):
        assert float(last[name]) < 0.7 * float(first[name])
    assert float(rows[0].split()[-1]) < 1.3  # tokens per decoding step
    assert float(rows[-1].split()[-1]) > 2.5
