"""Engines and trainers that are Ray actors: control clients over actor handles, and actors with places and deadlines.

    EngineActor           base of an actor that holds one engine
    RayControl            what a `Publisher` takes for such an actor
    Cluster, Member       connect, reserve places, start actors there, end them (`weightsync bench --launcher ray`)
    node_host             address of this actor's node: for `PublishConfig.bind_host` and `Checkpointer(bind_host=)`

The one package that imports Ray, and only when something of it is used. Needs the extra `ray`.
"""

from __future__ import annotations

from weightsync.actors.calls import Place, node_host
from weightsync.actors.cluster import Cluster, Member
from weightsync.actors.control import EngineActor, RayControl

__all__ = ["Cluster", "EngineActor", "Member", "Place", "RayControl", "node_host"]
