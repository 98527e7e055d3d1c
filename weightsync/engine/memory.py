"""Peak resident memory of a stretch of work in this process, from /proc; None where the kernel does not tell."""

from __future__ import annotations

import types
from pathlib import Path

__all__ = ["PeakMemory", "resident_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def _status(*names: str) -> dict[str, int] | None:
    """Fields of /proc/self/status in bytes, or None."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in names:
            found[name] = int(value.split()[0]) * 1024
    return found if len(found) == len(names) else None


def resident_bytes() -> dict[str, int] | None:
    """`rss` (private and file pages, plus each mapped shared page once) and `shared` (shared memory in it), bytes."""
    found = _status("VmRSS", "RssShmem")
    return None if found is None else {"rss": found["VmRSS"], "shared": found["RssShmem"]}


class PeakMemory:
    """`with PeakMemory() as m: ...; m.peak_extra_bytes()`: peak resident memory inside minus that before, in bytes.

    Memory shared with other processes counts in full in each of them that touches it, once per mapping. Resets the
    process's high-water mark (`VmHWM`), so these must not nest: the inner one would cut the outer one's peak short.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] | None = None
        self._reset = False

    def __enter__(self) -> PeakMemory:
        self._before = _status("VmRSS", "VmHWM")
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self._reset = True
        except OSError:
            self._reset = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        return None

    def peak_extra_bytes(self) -> int | None:
        """So far; None if the kernel does not tell, or if an older peak hides this one."""
        now = _status("VmHWM")
        if self._before is None or now is None:
            return None
        if not self._reset and now["VmHWM"] <= self._before["VmHWM"]:
            return None
        return max(0, now["VmHWM"] - self._before["VmRSS"])
