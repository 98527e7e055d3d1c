"""The writer program with faults: in place of `checkpoint.process.PROGRAM`, steered by a file per rank.

`fault.<rank>.json` in the folder named by CHECKPOINT_TEST_FAULTS holds {"phase": ..., "do": ..., "hit": [...]}; it is
used up by the first save in which that rank's writer enters that phase. `do` is

    "kill", "stop"      that signal, to the processes in `hit` ("writer.<rank>", "trainer.<rank>", "store"; the writer
                        itself if there is none), whose ids are the files `pid.<name>` of the folder
    "torn"              SIGKILL to itself when it has handed half of a piece of data to the kernel
    a number            seconds to sleep
    "clock+86400"       the wall clock of this process jumps by so many seconds
    "EIO", ...          the next write of data or metadata fails with this errno
    "fsync EIO", ...    likewise the next fsync
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

from checkpoint import progress, writer
from checkpoint.format import files

PROGRAM = "from tests.checkpoint.faulty_writer import main; main()"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_failing = {}


def folder():
    return Path(os.environ["CHECKPOINT_TEST_FAULTS"])


def note_pid(name, pid=None):
    """Let others hit this process (or another) as `name`."""
    # Whole or not at all: others look at any moment.
    temporary = folder() / f".pid.{name}.{os.getpid()}"
    temporary.write_text(str(pid or os.getpid()))
    temporary.rename(folder() / f"pid.{name}")


def hit(names, do):
    """Send "kill" or "stop" to processes that noted their ids; this one last, because nothing comes after."""
    pids = [int((folder() / f"pid.{name}").read_text()) for name in names]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, SIGNALS[do])


def jump_wall_clock(seconds):
    """As if the administrator, or NTP, had set the clock: what does not ask for the wall clock sees nothing."""
    plain, plain_ns = time.time, time.time_ns
    time.time = lambda: plain() + seconds
    time.time_ns = lambda: plain_ns() + int(seconds * 1e9)


def _enter(self, phase):
    _plain_enter(self, phase)
    note_pid(f"writer.{self.rank}")
    path = folder() / f"fault.{self.rank}.json"
    if not path.exists():
        return
    fault = json.loads(path.read_text())
    if fault["phase"] != phase:
        return
    path.unlink()
    do = fault["do"]
    if do in SIGNALS:
        hit(fault.get("hit") or [f"writer.{self.rank}"], do)
    elif isinstance(do, (int, float)):
        time.sleep(do)
    elif do == "torn":
        _failing["torn"] = True
    elif do.startswith("clock"):
        jump_wall_clock(float(do.removeprefix("clock")))
    else:
        kind, _, name = do.rpartition(" ")
        _failing[kind or "write"] = getattr(errno, name)


def _write_some(fd, data):
    if _failing.pop("torn", False):
        os.write(fd, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    _fail("write")
    return os.write(fd, data)


def _fsync(fd):
    _fail("fsync")
    _plain_fsync(fd)


def _fail(kind):
    if kind in _failing:
        code = _failing.pop(kind)
        raise OSError(code, os.strerror(code))


_plain_enter = progress.Progress.enter
_plain_fsync = os.fsync


def main():
    progress.Progress.enter = _enter
    files.write_some = _write_some
    os.fsync = _fsync
    writer.main()


if __name__ == "__main__":
    sys.exit(main())
