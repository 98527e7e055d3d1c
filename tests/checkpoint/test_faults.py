"""Rows of the fault matrix that are cheap enough for every change; `python benchmarks/faults.py --checkpoint` runs all.

Also the soak of many saves, at a small size.
"""

from __future__ import annotations

import faulthandler

import pytest

from benchmarks.fault_rows import PHASES, ROWS, select
from tests.support import spawn_ranks

CHEAP = (
    "kill writer 0 vote",
    "kill writer 1 commit",
    "stop writer 0 verdict",
    "kill trainer 0 verdict",
    "kill trainer 1 write",
    "stop trainer 1 stage",
    "kill 2nd node commit",
    "kill store commit",
    "disk full",
    "EIO fsync 0",
    "ENOSPC metadata",
    "torn write 1",
    "bit flip data",
)


def rows(_rank, _world_size, base):
    faulthandler.cancel_dump_traceback_later()  # its thread would be in the way of forks
    from benchmarks.faults import run

    return [(outcome.name, outcome.wrong) for outcome in run([ROWS[name] for name in CHEAP], base, jobs=3)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    base = tmp_path_factory.mktemp("faults")
    return dict(spawn_ranks(rows, 1, args=(str(base),), deadline_s=280)[0])


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHEAP)
def test_what_comes_of_a_fault_is_what_the_table_says(outcomes, name):
    assert outcomes[name] == []


def test_the_table_has_every_process_at_every_phase():
    for do in ("kill", "stop"):
        for whom in ("writer 0", "writer 1", "trainer 0", "trainer 1"):
            assert [row.name for row in select([f"{do} {whom}"])] == [f"{do} {whom} {phase}" for phase in PHASES]
    with pytest.raises(ValueError, match="no row begins with 'burn'"):
        select(["burn"])


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_saves_in_a_row_keep_the_stated_disk_peak_and_hold_nothing(tmp_path):
    from benchmarks.soak_checkpoint import soak

    lines = []
    _, problems = soak(45, 15, 1, 2, tmp_path, say=lines.append)
    assert problems == [], "\n".join(lines)
