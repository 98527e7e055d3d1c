"""A process on a host of `tests.support.net` that does what a test says; what functions leave in its modules stays.

    with NetHost(net, "a") as a:
        a.call(start_engine, "near")              # a function of an importable module; result or traceback come back
        save = a.begin(save_one, 3)               # likewise, without waiting for it
        ...
        save.result(30)

A function that is called may `ask(word)`: `on` of the call is run with the word, in the test's process, while it waits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tests.support.net import Network
from tests.support.ranks import ROOT

__all__ = ["NetHost", "Pending", "ask"]

_link: Connection | None = None
"""Of such a process, to the test."""


def ask(word: str) -> None:
    """Have the test do something, and wait until it has."""
    assert _link is not None
    _link.send(("ask", word))
    _link.recv()


class NetHost:
    """Leaving the `with` block ends the process and whatever it has started."""

    def __init__(self, net: Network, host: str) -> None:
        self.host = host
        ours, theirs = Pipe()
        self._link = ours
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [*net.inside(host), sys.executable, "-m", "tests.support.net_host", str(fd)],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )

    def begin(self, fn: Callable[..., Any], *args: Any, on: Callable[[str], None] | None = None) -> Pending:
        """Start `fn(*args)` there."""
        self._link.send((fn.__module__, fn.__qualname__, pickle.dumps(args)))
        return Pending(self, on)

    def call(
        self, fn: Callable[..., Any], *args: Any, deadline_s: float = 60.0, on: Callable[[str], None] | None = None
    ) -> Any:
        """What `fn(*args)` returns there. Raises AssertionError: its traceback, or that it still runs."""
        return self.begin(fn, *args, on=on).result(deadline_s)

    def close(self) -> None:
        self._link.close()
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, and nothing that it started is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def __enter__(self) -> NetHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """A function that runs on a host; one at a time."""

    def __init__(self, host: NetHost, on: Callable[[str], None] | None) -> None:
        self._host, self._on = host, on

    def result(self, deadline_s: float) -> Any:
        end, link = time.monotonic() + deadline_s, self._host._link
        while True:
            where = f"host {self._host.host}"
            if not link.poll(max(end - time.monotonic(), 0.0)):
                self._host.process.send_signal(signal.SIGUSR1)  # its stacks, on standard error
                time.sleep(0.5)
                raise AssertionError(f"{where}: still at it after {deadline_s:g} s")
            try:
                kind, value = link.recv()
            except EOFError:
                raise AssertionError(f"{where}: the process ended with {self._host.process.wait(10)}") from None
            if kind == "ask":
                assert self._on is not None, value
                self._on(value)
                link.send(None)
                continue
            assert kind == "done", f"{where}: {value}"
            return value


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    link = Connection(int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    # The module that functions import `ask` from is another than the one that runs.
    importlib.import_module("tests.support.net_host")._link = link
    while True:
        try:
            module, name, args = link.recv()
        except EOFError:
            os._exit(0)
        try:
            fn = getattr(importlib.import_module(module), name)
            said = ("done", fn(*pickle.loads(args)))
            pickle.dumps(said)
        except BaseException:  # noqa: BLE001 - raised by the test
            said = ("failed", traceback.format_exc())
        link.send(said)


if __name__ == "__main__":
    main()
