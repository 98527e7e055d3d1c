"""Many short-lived processes for the price of one import of torch.

A fault test needs processes that it may kill or stop, and torch takes seconds to import. So one process is started with
`spawn_ranks`, stays single-threaded, and forks the members of each scenario in milliseconds. Only such a process may
call `fork`: a forked copy of a threaded one holds locks that nobody will release.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any


class Fork:
    """One forked process running `fn(*args)`; leave the `with` block, and it is gone."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        settle()
        read_fd, write_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_fd)
            try:
                outcome = (True, fn(*args))
            except BaseException:  # noqa: BLE001 - raised by `result`
                outcome = (False, traceback.format_exc())
            with os.fdopen(write_fd, "wb") as pipe:
                pipe.write(pickle.dumps(outcome))
            # No handlers and no destructors of what the parent had: they are the parent's.
            os._exit(0)
        os.close(write_fd)
        self._fd = read_fd
        self._gone = False

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def result(self, deadline_s: float) -> Any:
        """What `fn` returned. Raises AssertionError with its traceback, if it died, or at the deadline."""
        end = time.monotonic() + deadline_s
        data = b""
        while True:
            ready, _, _ = select.select([self._fd], [], [], max(end - time.monotonic(), 0))
            assert ready, f"process {self.pid} still ran after {deadline_s} s"
            chunk = os.read(self._fd, 1 << 16)
            if not chunk:
                break
            data += chunk
        assert data, f"process {self.pid} died without a result"
        ok, value = pickle.loads(data)
        assert ok, value
        return value

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._gone:
            self._gone = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._fd)


def observe(scenarios: dict[str, Callable[[], Any]]) -> dict[str, tuple[bool, Any]]:
    """Run every scenario; one that fails does not keep the others from running. Name -> (ok, result or traceback)."""
    # `spawn_ranks` watches this process from a thread, which must not be there when it forks.
    faulthandler.cancel_dump_traceback_later()
    seen = {}
    for name, scenario in scenarios.items():
        try:
            seen[name] = (True, scenario())
        except Exception:  # noqa: BLE001 - the test that asks for it fails with this text
            seen[name] = (False, traceback.format_exc())
    return seen


def settle() -> None:
    """Until this process has one thread: one that was joined may still be on its way out of the kernel."""
    end = time.monotonic() + 5.0
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < end:
        time.sleep(0.001)
    assert threads == 1, "expected a single-threaded process"


def holdings() -> dict[str, int]:
    """What a process must give back: open descriptors, threads, mapped memfds."""
    with open("/proc/self/maps") as maps:
        mapped = sum("/memfd:" in line for line in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memfds": mapped,
    }
