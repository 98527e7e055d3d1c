"""The writer program with faults: in place of `checkpoint.process.PROGRAM`, steered by a file per rank.

`fault.<rank>.json` in the folder named by CHECKPOINT_TEST_FAULTS holds {"phase": ..., "do": ...}; it is used up by the
first save that enters that phase. `do` is "kill", "stop", a number of seconds to sleep, or an errno's name, which then
is what the next write of data or metadata fails with.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

from checkpoint import writer
from checkpoint.format import files

PROGRAM = "from tests.checkpoint.faulty_writer import main; main()"
_failing = {}


def _enter(self, phase):
    _plain_enter(self, phase)
    path = Path(os.environ["CHECKPOINT_TEST_FAULTS"]) / f"fault.{self.rank}.json"
    if not path.exists():
        return
    fault = json.loads(path.read_text())
    if fault["phase"] != phase:
        return
    path.unlink()
    if fault["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault["do"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif isinstance(fault["do"], (int, float)):
        time.sleep(fault["do"])
    else:
        _failing["error"] = getattr(errno, fault["do"])


def _write_some(fd, data):
    if "error" in _failing:
        code = _failing.pop("error")
        raise OSError(code, os.strerror(code))
    return os.write(fd, data)


_plain_enter = writer._Writer._enter


def main():
    writer._Writer._enter = _enter
    files.write_some = _write_some
    writer.main()


if __name__ == "__main__":
    sys.exit(main())
