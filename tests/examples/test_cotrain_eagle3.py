"""The co-training example on real Megatron-Core (TP=2 x PP=2, sequence parallelism): it checks its own figures."""

from __future__ import annotations

import pytest

from tests.examples.lines import lines, run

(LINE,) = lines("examples.cotrain_eagle3")


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_cotraining_raises_the_accepted_length_and_scrambled_rows_do_not(tmp_path):
    done = run(LINE, tmp_path, timeout=470)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if "accepted length" in line]
    assert len(results) == 3
