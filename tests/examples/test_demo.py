"""The demo: its table holds what it says, its exit code tells how it went, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time

import psutil
import pytest

from examples.demo_table import HEADER, Row, problems, summary
from tests.examples.lines import command, lines
from weightsync.report import EngineReport, PublishReport

STARTED = "training and publishing"
WHOLE, TARGET_ONLY = lines("examples.demo")


@contextlib.contextmanager
def demo(line, folder):
    """The running make; what the demo writes to disk goes to `folder`."""
    process = subprocess.Popen(**command(line, folder), start_new_session=True)
    with process:
        try:
            yield process
        finally:
            # The group's id is the handle: make may be gone before what it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def launcher_of(process):
    (launcher,) = psutil.Process(process.pid).children()
    return launcher


def wait_for(text, stream, deadline_s):
    end = time.monotonic() + deadline_s
    for line in stream:
        if text in line:
            return
        assert time.monotonic() < end, f"no {text!r} within {deadline_s} s"
    raise AssertionError(f"the demo ended before it said {text!r}")


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_shows_that_every_publish_equals_a_fresh_engine_and_what_a_draft_left_behind_costs(tmp_path):
    with demo(WHOLE, tmp_path) as process:
        printed, said = process.communicate(timeout=280)
    assert process.returncode == 0, printed + said
    printed_by_make, *shown = printed.splitlines()
    assert printed_by_make.strip().endswith("-m examples.demo")
    header, rows = shown[:2], [line.split() for line in shown[2:-1]]
    assert "\n".join(header) == HEADER
    assert [(row[0], row[1]) for row in rows] == [
        ("1", "both"), ("2", "both"), ("3", "both"), ("4", "both"), ("5", "target"), ("5", "both")
    ]  # fmt: skip
    names = header[1].split()
    assert all(len(row) == len(names) - 1 for row in rows)  # `each rank` is one cell
    # Everything once, the target alone, everything: the draft's bytes are what a rank is spared in between.
    *_, everything, target, again = (int(row[names.index("each")].replace(",", "")) for row in rows)
    assert everything == again > target
    tokens, accept = names.index("tokens") - 1, names.index("accept") - 1
    assert [(row[tokens], row[accept]) for row in rows] == 4 * [("yes", "yes")] + [("yes", "no"), ("yes", "yes")]
    after = [float(row[names.index("after") - 1]) for row in rows]
    assert after[-2] < 0.5 * after[-1] > 0.3
    assert shown[-1].startswith("Target 5 beside draft 4: acceptance ")
    assert list(tmp_path.glob("weightsync-*")) == []


@pytest.mark.multiproc
@pytest.mark.timeout(180)
def test_an_interrupted_demo_ends_every_process_and_removes_its_files(tmp_path):
    with demo(TARGET_ONLY, tmp_path) as process:
        wait_for(STARTED, process.stderr, 150)
        launcher = launcher_of(process)
        started = launcher.children(recursive=True)
        assert len(started) == 4 + 3
        launcher.send_signal(signal.SIGINT)
        assert process.wait(20) == 2  # make's, whose last words name the demo's own
        assert "130" in process.stderr.read()
        assert [p for p in started if p.is_running()] == []
    assert list(tmp_path.glob("weightsync-*")) == []


@pytest.mark.multiproc
@pytest.mark.timeout(180)
def test_a_demo_whose_trainer_rank_dies_names_it_and_fails(tmp_path):
    with demo(WHOLE, tmp_path) as process:
        wait_for(STARTED, process.stderr, 150)
        trainers = [child for child in launcher_of(process).children() if child.environ().get("RANK") == "2"]
        trainers[0].kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "trainer rank 2 ended with exit code -9" in said
    assert "Error 1" in said
    assert list(tmp_path.glob("weightsync-*")) == []


# -- what must hold ----------------------------------------------------------------------------------------------------


def answer(accepted, *, tokens=((1, 2),), target=2, draft=2):
    return {
        "tokens": tokens,
        "proposed": 100,
        "accepted": accepted,
        "versions": {"target": target, "draft[0]": draft},
    }


def row(version, scope, *, before, after, fresh, draft=None):
    engine = EngineReport(name="engine-0", outcome="committed", bytes_received=(640, 640))
    report = PublishReport(
        version=version, outcome="committed", scope=scope, run_id="demo", wire_bytes=640, engines=(engine,)
    )
    versions = {"target": version, "draft": draft or version}
    return Row(
        report=report,
        loss=1.0,
        before=[answer(before, **versions)],
        after=[answer(after, **versions)],
        fresh=answer(fresh, **versions),
    )


GOOD = (
    row(1, "both", before=0, after=30, fresh=30),
    row(2, "target", before=30, after=2, fresh=90, draft=1),
    row(2, "both", before=2, after=90, fresh=90),
)


def changed(index, **changes):
    rows = list(GOOD)
    rows[index] = dataclasses.replace(rows[index], **changes)
    return rows


def test_a_run_in_which_everything_holds_has_no_problems():
    assert problems(GOOD, 2) == []
    assert summary(GOOD) == "Target 2 beside draft 1: acceptance 0.02. Both of version 2: 0.90."


@pytest.mark.parametrize(
    ("rows", "versions", "words"),
    [
        (changed(0, fresh=answer(31)), 2, "version 1, scope both: acceptance differs"),
        (changed(1, fresh=answer(90, tokens=((1, 3),))), 2, "version 2, scope target: tokens differ"),
        (changed(2, after=[answer(90, draft=1)]), 2, "engine-0 is committed and serves"),
        (changed(1, after=[answer(80, draft=1)]), 2, "no fall"),
        (changed(2, after=[answer(30)], fresh=answer(30)), 2, "did not rise"),
        (GOOD[:1], 2, "do not make versions 1 to 2"),
        ((), 2, "0 publishes"),
    ],
)
def test_what_does_not_hold_is_said(rows, versions, words):
    assert any(words in line for line in problems(rows, versions))


def test_bytes_that_did_not_arrive_are_a_problem():
    short = EngineReport(name="engine-0", outcome="committed", bytes_received=(640, 576))
    rows = changed(0, report=dataclasses.replace(GOOD[0].report, engines=(short,)))
    assert any("received (640, 576) bytes" in line for line in problems(rows, 2))
