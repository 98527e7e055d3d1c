"""The MTP example trains on the CPU, and its drafts become right."""

from __future__ import annotations

import pytest

from tests.examples.lines import lines, run

(LINE,) = lines("examples.train_mtp")


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_drafts_become_right(tmp_path):
    done = run(LINE, tmp_path, timeout=270)
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
