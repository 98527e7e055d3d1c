"""A connection to a Ray cluster, places in it, and actors that run there until the connection closes.

    with Cluster("10.0.0.1:6379") as cluster:
        trainers = cluster.reserve([{"CPU": 1.0}] * 2, spread=False)
        rank0 = cluster.start(TrainerActor, trainers[0], args=(config,), name="trainer rank 0", cpus=1)
        rank0.call("step", deadline_s=60)

Used by `weightsync.bench.actors`. Every wait has a deadline. `close` asks each actor to end what it started, then ends
the actors, gives the places back and, if the connection is its own, disconnects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightsync.actors.calls import Place, answer, import_ray
from weightsync.errors import ConfigError, PeerLost, TransferTimeout, WeightSyncError

__all__ = ["Cluster", "Member", "Slot"]

RESERVE_S = 30.0
"""For Ray to find places: nodes that are there answer within milliseconds."""
STOP_S = 10.0
OBJECT_STORE_BYTES = 80 << 20
"""Of a cluster started here: control messages alone go through it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One bundle of a placement group, and the node that Ray chose for it."""

    group: Any
    index: int
    node: str


class Member:
    """An actor that this process started. Methods that it must have: `weightsync_place`, `weightsync_stop`."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.place: Place | None = None

    @property
    def pid(self) -> int:
        assert self.place is not None, "ready() has not been called"
        return self.place.pid

    def __str__(self) -> str:
        where = f" on {self.place}" if self.place is not None else ""
        return f"{self.name} (Ray actor {self.handle._actor_id.hex()[:8]}{where})"

    def ready(self, deadline_s: float) -> Member:
        """Wait until its constructor has returned. Raises as `call` does."""
        self.place = self.call("weightsync_place", deadline_s=deadline_s)
        return self

    def submit(self, method: str, *args: Any) -> Any:
        """Start a call; hand what is returned to `result`."""
        return getattr(self.handle, method).remote(*args)

    def result(self, ref: Any, what: str, deadline_s: float) -> Any:
        """
        Raises:
            TransferTimeout: no answer in time.
            PeerLost: the actor is gone; its constructor may have failed, then the reason is in the message.
            WeightSyncError: the call raised it.
        """
        try:
            return answer(ref, deadline_s, self.place)
        except TransferTimeout as e:
            raise TransferTimeout(f"{self}, {what!r}: {e}", peer=self.name) from e
        except PeerLost as e:
            raise PeerLost(f"{self}, {what!r}: {e}", peer=self.name) from e
        except WeightSyncError:
            raise
        except Exception as e:
            raise WeightSyncError(f"{self}, {what!r}: {type(e).__name__}: {e}") from e

    def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Raises as `result` does."""
        return self.result(self.submit(method, *args), method, deadline_s)


class Cluster:
    """Connects when built; use as a context manager, or call `close`.

    Args:
        address: `host:port` of the cluster's head, or `auto` for the cluster that this host belongs to. None: the
            connection that this process has already, else a cluster on this machine that ends with this object.
        cpus: CPUs that a cluster started here claims to have. Ray's CPUs are a count to schedule by, not cores.

    Raises:
        ConfigError: Ray is missing, there is no such cluster, or it has another version of Ray or Python.
    """

    def __init__(self, address: str | None = None, *, cpus: int = 1) -> None:
        self._ray = ray = import_ray()
        self._members: list[Member] = []
        self._groups: list[Any] = []
        self._own = not ray.is_initialized()
        if not self._own:
            if address is not None:
                raise ConfigError(
                    f"--address {address}: this process is connected to a Ray cluster already: leave it out"
                )
            return
        options: dict[str, Any] = {"address": address, "namespace": f"weightsync-{secrets.token_hex(4)}"}
        if address is None:
            options |= {
                "address": "local",
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            _check_address(address)
        try:
            ray.init(**options, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise ConfigError(f"cannot join the Ray cluster at {options['address']}: {' '.join(str(e).split())}") from e

    def nodes(self) -> list[Mapping[str, Any]]:
        """Ray's description of every node that is alive and has CPUs, the head first."""
        alive = [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
        return sorted(alive, key=lambda n: "node:__internal_head__" not in n["Resources"])

    def reserve(
        self,
        bundles: Sequence[Mapping[str, float]],
        *,
        spread: bool,
        avoid: Sequence[str] = (),
        deadline_s: float = RESERVE_S,
    ) -> list[Slot]:
        """Places for `bundles` (resources of each), all of them or none.

        Args:
            spread: over as many nodes as possible; else on as few.
            avoid: ids of nodes that none may be on.

        Raises:
            ConfigError: the cluster has no such places free.
        """
        from ray.util import placement_group, placement_group_table

        selector = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] * len(bundles) if avoid else None
        group = placement_group(
            [dict(b) for b in bundles], strategy="SPREAD" if spread else "PACK", bundle_label_selector=selector
        )
        self._groups.append(group)
        if not group.wait(deadline_s):
            has = "; ".join(
                f"{n['NodeManagerAddress']} has {n['Resources']['CPU']:g} CPU, {n['Resources'].get('GPU', 0):g} GPU"
                + (" (not to be used)" if n["NodeID"] in avoid else "")
                for n in self.nodes()
            )
            raise ConfigError(
                f"no places within {deadline_s:g} s for {[dict(b) for b in bundles]}: {has}; is something else running "
                "there? Add nodes, ask for less, or let trainer and engines share nodes (--placement pack)"
            )
        on = placement_group_table(group)["bundles_to_node_id"]
        return [Slot(group=group, index=i, node=on[i]) for i in range(len(bundles))]

    def start(
        self,
        cls: type,
        slot: Slot,
        *,
        args: Sequence[Any] = (),
        name: str,
        cpus: float = 0.0,
        gpus: float = 0.0,
    ) -> Member:
        """An actor of class `cls` at `slot`, perhaps not running yet (`Member.ready`)."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.index)
        options = self._ray.remote(cls).options(
            num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy, max_restarts=0, max_task_retries=0
        )
        member = Member(name, options.remote(*args))
        self._members.append(member)
        return member

    @property
    def versions(self) -> dict[str, str]:
        return {"ray": importlib.metadata.version("ray")}

    def close(self) -> None:
        """End every actor that was started here, and give its place back; may be called twice."""
        members, self._members = self._members, []
        groups, self._groups = self._groups, []
        end = time.monotonic() + STOP_S
        stopping = [_quietly(member.submit, "weightsync_stop") for member in members]
        for member, ref in zip(members, stopping, strict=True):
            # Dead ones have nothing to stop any more, and hung ones are killed all the same.
            if ref is not None and member.place is not None:
                _quietly(member.result, ref, "weightsync_stop", max(0.0, end - time.monotonic()))
            _quietly(self._ray.kill, member.handle)
        for group in groups:
            _quietly(self._ray.util.remove_placement_group, group)
        if self._own:
            self._own = False
            self._ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _quietly(fn: Callable[..., Any], *args: Any) -> Any:
    """For ends: one actor that fails to end must not keep the others."""
    with contextlib.suppress(Exception):
        return fn(*args)
    return None


def _check_address(address: str) -> None:
    """Ray itself tries for minutes, and then says only that it timed out."""
    if "://" in address:
        raise ConfigError(
            f"--address {address}: Ray's client protocol is not used here: run on a node of the cluster, with the "
            "head's host:port (6379 by default), or auto"
        )
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address {address!r}: expected host:port of the cluster's head, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as e:
        raise ConfigError(
            f"--address {address}: nobody answers there ({e}): is the head up, and is that its GCS port?"
        ) from e
