"""A Megatron `sharded_state_dict` as a `State`: factories applied, main replicas only, nothing exchanged."""

from __future__ import annotations

from typing import Any

from checkpoint.errors import ConfigError
from checkpoint.megatron.probe import require_core
from checkpoint.plan import Shard, State
from checkpoint.replicas import Share, held_digest, shard_id

__all__ = ["state_from_sharded"]


def state_from_sharded(sharded_state_dict: dict[str, Any], share: Share | None = None) -> State:
    """This rank's part: the shards and objects of which it holds the main replica, or those of its `share`.

    The dict itself is not changed. Stock validation, which gathers the metadata of all ranks, is not run: the verdict
    checks the seals instead.

    Raises:
        ConfigError: a shard in a format that Megatron-Core dropped (flattened ranges), or without data.
    """
    require_core()
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    # A copy of the containers: applying factories replaces values in place.
    copied, _ = extract_matching_values(sharded_state_dict, lambda _: True)
    sharded, common = save_preprocess(copied, validate_access_integrity=False)
    shards: list[Shard] = []
    objects: dict[str, list[Any]] = {}
    written: set[tuple[str, tuple[int, ...]]] = set()
    held: dict[str, None] = {}
    parts = list(nested_values(sharded))
    places = (
        "" if share is None else held_digest((p.key, p.global_offset) for p in parts if isinstance(p, ShardedTensor))
    )
    if share is not None and share.held != places:
        share = Share()
    for part in parts:
        main = is_main_replica(part.replica_id)
        if not isinstance(part, ShardedTensor):
            if main:
                # Megatron's reader expects a list under each key.
                objects.setdefault(part.unique_key, []).append(part.data)
            continue
        place = (part.key, tuple(part.global_offset))
        if not (main if share is None else share.writes(*place, main=main)):
            if share is not None:
                held[shard_id(*place)] = None
            continue
        if place in written and share is not None and share.basis:
            continue  # tied parameters: this rank holds two replicas
        written.add(place)
        if getattr(part, "flattened_range", None) is not None:
            raise ConfigError(
                f"{part.key} has a flattened range, which no current Megatron-Core loads: use the fully reshardable or "
                "the dp_reshardable optimizer format"
            )
        if part.data is None:
            raise ConfigError(f"{part.key} has no data: the state dict was built for loading")
        shards.append(
            Shard(
                key=part.key,
                tensor=part.data.detach(),
                global_shape=tuple(part.global_shape),
                offset=tuple(part.global_offset),
                shape=(1,) * part.prepend_axis_num + tuple(part.local_shape),
            )
        )
    if held:
        held = dict.fromkeys(held.keys() - {shard_id(*place) for place in written})
    return State(
        shards=shards,
        objects=objects,
        common=common,
        replicas=tuple(sorted(held)),
        basis=share.basis if share else "",
        held=places,
    )
