"""The progress bar of saves: on a terminal, and nowhere else."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
import termios

import pytest

from checkpoint import Checkpointer, SaveConfig, process
from checkpoint.bar import Bar
from checkpoint.errors import ConfigError
from checkpoint.events import SaveHandle
from tests.checkpoint import faulty_writer
from tests.checkpoint.support import state


@pytest.fixture
def terminal():
    """(a stream to a pseudo-terminal, a function that reads what was drawn on it)"""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.set_blocking(master, False)
    drawn = []

    def read():
        try:
            while data := os.read(master, 1 << 16):
                drawn.append(data)
        except BlockingIOError:
            pass
        return b"".join(drawn).decode()

    with os.fdopen(slave, "w") as stream:
        yield stream, read
    os.close(master)


@pytest.mark.multiproc
def test_a_save_is_drawn_on_a_terminal_and_removed_when_it_ended(tmp_path, terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    # A save as small as this one is over before it is drawn, unless its writer takes its time.
    monkeypatch.setattr(process, "PROGRAM", faulty_writer.PROGRAM)
    monkeypatch.setenv("CHECKPOINT_TEST_FAULTS", str(tmp_path))
    (tmp_path / "fault.0.json").write_text(json.dumps({"phase": "sync", "do": 1.0}))
    seen = []
    with Checkpointer(tmp_path / "root", rank=0, world_size=1, on_event=seen.append) as c:
        for wrong in (-1, "12", 1.5):
            with pytest.raises(ConfigError, match="expected an int, 0 or more"):
                c.save(wrong, state(0, 1))
        c.save(12, state(0, 1))
        handle = c.wait()
    assert handle.bytes_done == handle.nbytes
    text = read()
    assert "checkpoint 12:" in text
    assert "130k/130k" in text
    assert "staged" in text
    assert text.endswith("\r")
    assert [e.kind for e in seen] == ["staged", "sealed", "committed"]


def test_it_counts_bytes_and_goes_back_when_a_save_is_tried_again(terminal):
    stream, read = terminal
    bar = Bar(enabled=True, stream=stream)
    handle = SaveHandle(step=3, attempt="a", nbytes=4 << 20)
    for state_name, done in (("staged", 1 << 20), ("sealed", 4 << 20), ("staged", 2 << 20)):
        handle.state, handle.bytes_done = state_name, done
        bar.show(handle)
    bar.end()
    text = read()
    assert [f"{n}.00M/4.00M" in text for n in (1, 4, 2)] == [True] * 3
    assert "sealed" in text
    bar.end()


def test_without_a_terminal_nothing_is_drawn(tmp_path):
    handle = SaveHandle(step=3, attempt="a", nbytes=4 << 20)
    path = tmp_path / "log"
    with open(path, "w") as stream:
        bar = Bar(enabled=True, stream=stream)
        bar.show(handle)
        bar.end()
    assert path.read_text() == ""
    assert SaveConfig().progress


def test_a_terminal_that_goes_away_stops_the_drawing_only(terminal):
    stream, _ = terminal
    bar = Bar(enabled=True, stream=stream)
    bar.show(SaveHandle(step=3, attempt="a", nbytes=10))
    gone = SaveHandle(step=3, attempt="a", nbytes=10, bytes_done=5, state="sealed")
    os.close(os.dup(stream.fileno()))
    duplicate = os.dup(stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), stream.fileno())
    bar.show(gone)
    bar.show(gone)
    bar.end()
    os.dup2(duplicate, stream.fileno())
    os.close(duplicate)
