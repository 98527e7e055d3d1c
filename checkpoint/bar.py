"""A line on the terminal that says how far a save is (tqdm); nothing where there is no terminal or no tqdm.

Drawn by the supervisor's watching thread on rank 0, for the bytes of that rank. It is gone when the save has ended.
"""

from __future__ import annotations

import sys
from typing import Any

from checkpoint.events import SaveHandle

__all__ = ["Bar"]


class Bar:
    """Args:
    enabled: whether to draw at all.
    stream: where to; None: standard error, as it is when the first save begins.
    """

    def __init__(self, *, enabled: bool, stream: Any = None) -> None:
        self._enabled, self._stream = enabled, stream
        self._bar: Any = None
        self._shown = ""

    def show(self, handle: SaveHandle) -> None:
        """Draw it as it is now; at most a few times a second. Never raises."""
        if not self._enabled:
            return
        try:
            if self._bar is None:
                self._bar = self._open(handle)
            if self._bar is None:
                return
            self._bar.update(handle.bytes_done - self._bar.n)  # backwards when the save is tried again
            if handle.state != self._shown:
                self._shown = handle.state
                self._bar.set_postfix_str(handle.state)
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """The terminal is gone."""
        self._enabled = False
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.disable = True  # else its destructor writes once more

    def _open(self, handle: SaveHandle) -> Any:
        stream = self._stream or sys.stderr
        try:
            from tqdm import tqdm
        except ImportError:
            tqdm = None
        if tqdm is None or stream is None or not stream.isatty():
            self._enabled = False
            return None
        # Of a class of its own: the monitor that tqdm starts for all its bars is a thread that training need not have.
        quiet = type("_SaveBar", (tqdm,), {"monitor_interval": 0})
        return quiet(
            total=handle.nbytes,
            desc=f"checkpoint {handle.step}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=stream,
            leave=False,
            dynamic_ncols=True,
        )

    def end(self) -> None:
        """The save has ended: remove the line."""
        self._shown = ""
        if self._bar is not None:
            try:
                self._bar.close()
                self._bar = None
            except (OSError, ValueError):
                self._give_up()
