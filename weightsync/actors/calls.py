"""One call to a Ray actor, with a deadline and with a name for whatever goes wrong; where an actor runs.

`control.RayControl` and `cluster.Member` wait by `answer` alone, and put in front of its messages who was asked for
what. What the actor's method itself raises comes through as Ray hands it over.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import threading
from typing import Any

from weightsync.errors import ConfigError, PeerLost, TransferTimeout

__all__ = ["Place", "answer", "import_ray", "node_host"]

_LOOK_S = 2.0
"""How long Ray is asked what became of a node: its head may be what was lost."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an actor runs, in its own words."""

    node: str
    """Ray's id of the node."""
    host: str
    """Address of the node, as the rest of the cluster reaches it."""
    pid: int

    def __str__(self) -> str:
        return f"node {self.host} ({self.node[:8]}), pid {self.pid}"

    @classmethod
    def here(cls) -> Place:
        """Of the calling actor (or driver)."""
        return cls(node=str(import_ray().get_runtime_context().get_node_id()), host=node_host(), pid=os.getpid())


def import_ray() -> Any:
    """Raises `ConfigError` where Ray is not installed."""
    try:
        import ray
    except ImportError as e:
        raise ConfigError(f"Ray is not installed here ({e}): pip install 'weightsync[ray]' on every node") from e
    return ray


def node_host() -> str:
    """Address of this process's node in its Ray cluster, to listen on and to be reached at by other nodes."""
    ray = import_ray()
    return str(ray.util.get_node_ip_address())


def answer(ref: Any, deadline_s: float, place: Place | None) -> Any:
    """What the call behind `ref` returns. From any thread, also one of an async actor (but never on its event loop).

    Raises:
        TransferTimeout: not within `deadline_s`. The call is cancelled: one that still queues is not carried out later.
        PeerLost: the actor died, or Ray cannot reach it.
        Exception: the call raised it.
    """
    ray = import_ray()
    try:
        # Not `ray.get`: inside an async actor it warns, whatever thread it is called on.
        return ref.future().result(deadline_s)
    except concurrent.futures.TimeoutError as e:
        if isinstance(e, ray.exceptions.RayError):
            raise
        with contextlib.suppress(Exception):
            ray.cancel(ref)
        raise TransferTimeout(f"no answer within {deadline_s:.3g} s{_node_state(place)}") from e
    except ray.exceptions.RayActorError as e:
        raise PeerLost(f"{_reason(e)}{_node_state(place)}") from e


def _reason(error: Exception) -> str:
    """What Ray tells: of a constructor that raised, its error; else the first line, and the cause in the last one."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    raised = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*: ", line)]
    if "creation task" in lines[0] and raised:
        text = "its constructor raised " + "\n".join(lines[raised[-1] :])
    else:
        text = " ".join(dict.fromkeys([lines[0].strip(), lines[-1].strip()]))
    return f"{type(error).__name__}: {text[:2000]}"


def _node_state(place: Place | None) -> str:
    """What Ray believes of the node; nothing if it cannot be asked in time."""
    if place is None:
        return ""
    found: list[bool] = []

    def look() -> None:
        with contextlib.suppress(Exception):
            found.extend(bool(n["Alive"]) for n in import_ray().nodes() if n["NodeID"] == place.node)

    # On a thread: a lost head makes Ray wait for longer than we want to.
    thread = threading.Thread(target=look, name="weightsync-ray-nodes", daemon=True)
    thread.start()
    thread.join(_LOOK_S)
    if not found:
        return ""
    return "; Ray still counts its node as alive" if found[0] else "; its node is dead"
