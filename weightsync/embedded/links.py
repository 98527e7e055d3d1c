"""Messages between the ranks of one engine, and between ranks and the launcher: JSON over inherited socket pairs.

Rank 0 holds one `Follower` per other rank; a thread of it reads, so that a rank that dies is known at once, whatever
rank 0's main thread is doing.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from weightsync.errors import EngineError

__all__ = ["Follower", "RankLost", "receive", "send"]


class RankLost(EngineError):
    """A rank of this engine closed its connection: its process is gone."""


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Blocks; raises EOFError or OSError if the other side is gone."""
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message


class Follower:
    """Another rank of the engine, as rank 0 sees it. `on_lost` is called once, from a thread, when it is gone."""

    def __init__(self, rank: int, pid: int, connection: Connection, on_lost: Callable[[RankLost], None]) -> None:
        self.rank = rank
        self.pid = pid
        self.lost: RankLost | None = None
        self._connection = connection
        self._on_lost = on_lost
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sent = self._answered = 0
        self._thread = threading.Thread(target=self._read, name=f"weightsync-rank{rank}", daemon=True)
        self._thread.start()

    @property
    def owes_reply(self) -> bool:
        """True while it has not answered the last command."""
        return self._answered < self._sent

    def command(self, op: Mapping[str, Any]) -> None:
        """Raises `RankLost`."""
        if self.lost is not None:
            raise self.lost
        self._sent += 1
        try:
            send(self._connection, op)
        except OSError as e:
            raise self._gone() from e

    def reply(self) -> dict[str, Any]:
        """The answer to the last command; waits as long as the process lives. Raises `RankLost`."""
        reply = self._replies.get()
        if reply is None:
            raise self._gone()
        return reply

    def _gone(self) -> RankLost:
        return RankLost(
            f"rank {self.rank} (pid {self.pid}) is gone: it was killed or crashed; restart the engine", rank=self.rank
        )

    def _read(self) -> None:
        try:
            while True:
                reply = receive(self._connection)
                self._answered += 1
                self._replies.put(reply)
        except (EOFError, OSError):
            self.lost = self._gone()
            self._replies.put(None)
            self._on_lost(self.lost)
