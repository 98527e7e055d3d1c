"""Watch memory, shared memory and the disk during training, and call before a floor is hit.

    with ResourceWatch(root, Floors(disk_bytes=50 << 30), on_low):      on_low(Reading) on the watch's thread
        train()

The readings are those of `checkpoint.disk`: the smallest limit that applies, on any platform that psutil knows. A
resource is low when it is at its floor, or would be if what was lost within the last `lead_s` were lost once more: a
leak is told ahead of time, and so is a second save like the last one, without a model of how memory is used.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint.disk import disk_left_bytes, folder_bytes, memory_left_bytes, shm_left_bytes
from checkpoint.errors import ConfigError

__all__ = ["Floors", "Reading", "ResourceWatch"]

log = logging.getLogger("checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Floors:
    """What must stay free, in bytes; None: not watched."""

    memory_bytes: int | None = 4 << 30
    shm_bytes: int | None = 256 << 20
    disk_bytes: int | None = 16 << 30

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 0:
                raise ConfigError(f"{field.name} must be a number of bytes or None, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One resource ("memory", "shm" or "disk"), now. `lost_bytes`: how much less than at its best in the window."""

    resource: str
    left_bytes: int
    floor_bytes: int
    lost_bytes: int
    window_s: float

    @property
    def low(self) -> bool:
        """At the floor, or one more such loss away from it."""
        return self.left_bytes - max(self.lost_bytes, 0) <= self.floor_bytes

    def __str__(self) -> str:
        where = "is at" if self.left_bytes <= self.floor_bytes else "nears"
        return (
            f"{self.resource} {where} its floor: {self.left_bytes} bytes left, floor {self.floor_bytes}, "
            f"{self.lost_bytes} fewer than {self.window_s:.0f} s ago or less"
        )


class ResourceWatch:
    """A thread that reads every `every_s` seconds until `close`.

    Args:
        root: the folder whose disk is watched.
        on_low: called on the watch's thread, once when a resource becomes low and again after it had recovered; what
            it raises is logged. Set a flag there, or ask the job to save and end.
        lead_s: how far back losses count.
        disk_limit_bytes: what the root may hold, as in `SaveConfig`.
    """

    def __init__(
        self,
        root: str | Path,
        floors: Floors,
        on_low: Callable[[Reading], None],
        *,
        lead_s: float = 60.0,
        every_s: float = 2.0,
        disk_limit_bytes: int | None = None,
    ) -> None:
        if not (every_s > 0 and lead_s >= 0):
            raise ConfigError(f"every_s must be positive and lead_s not negative, got {every_s!r} and {lead_s!r}")
        self._root, self._floors, self._on_low = Path(root), floors, on_low
        self._lead_s, self._every_s, self._limit = lead_s, every_s, disk_limit_bytes
        self._past: dict[str, collections.deque[tuple[float, int]]] = collections.defaultdict(collections.deque)
        self._told: set[str] = set()
        self.readings: dict[str, Reading] = self._read()
        """The last reading of each watched resource that this platform has."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="checkpoint-resources", daemon=True)
        self._thread.start()

    def _read(self) -> dict[str, Reading]:
        now, found = time.monotonic(), {}
        held = folder_bytes(self._root) if self._limit is not None else 0
        for name, floor, read in (
            ("memory", self._floors.memory_bytes, memory_left_bytes),
            ("shm", self._floors.shm_bytes, shm_left_bytes),
            ("disk", self._floors.disk_bytes, lambda: disk_left_bytes(self._root, self._limit, held)),
        ):
            left = read() if floor is not None else None
            if floor is None or left is None:
                continue
            past = self._past[name]
            past.append((now, left))
            while now - past[0][0] > self._lead_s:
                past.popleft()
            found[name] = Reading(
                resource=name,
                left_bytes=left,
                floor_bytes=floor,
                lost_bytes=max(value for _, value in past) - left,
                window_s=now - past[0][0],
            )
        return found

    def _watch(self) -> None:
        while True:
            for name, reading in self.readings.items():
                if not reading.low:
                    self._told.discard(name)
                elif name not in self._told:
                    self._told.add(name)
                    self._tell(reading)
            if self._stop.wait(self._every_s):
                return
            try:
                self.readings = self._read()
            except OSError as e:
                log.warning("resources of %s could not be read: %s", self._root, e)

    def _tell(self, reading: Reading) -> None:
        log.warning("%s", reading)
        try:
            self._on_low(reading)
        except Exception:
            # The watch goes on: the next floor may matter more than this callback's error.
            log.exception("the callback of %s failed", reading.resource)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._stop.set()
        self._thread.join(10)

    def __enter__(self) -> ResourceWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
