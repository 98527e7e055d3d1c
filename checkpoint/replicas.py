"""Which rank writes a shard that several hold: computed from the seals of the save before, with nothing exchanged.

In the first save, and in the one after a failure, every shard is written by the rank that has Megatron's main replica.
Each seal also names the shards that a rank holds and does not write, and how fast it wrote. From a committed record,
the same on all nodes, every writer computes the same distribution for the next save and tells its trainer its `Share`;
the seals name the record it was computed from, so that ranks of different opinion abort instead of leaving holes.

A distribution stays as it is while it is good: another one moves staging memory about.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from checkpoint.seals import CommitRecord

__all__ = ["Share", "distribute", "held_digest", "shard_id", "share_of"]

GOOD_ENOUGH = 1.2
"""Times the best finish that was found: then nothing moves."""
RATE_SPAN = 4.0
"""Rates count within this factor of their median: one stalled disk must not leave a rank without work for ever."""

TELLS_S = 1.0
"""A save that was written sooner says nothing of its disks: all count the same."""


def shard_id(key: str, offset: Sequence[int]) -> str:
    """Short name of a box of a tensor, the same on all ranks."""
    return hashlib.blake2b(f"{key}|{tuple(offset)}".encode(), digest_size=6).hexdigest()


def held_digest(places: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Of all boxes that a rank holds, whoever writes them."""
    text = "\n".join(sorted(f"{key}|{tuple(offset)}" for key, offset in places))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's share of what several hold. Without a basis it is what it has the main replica of."""

    basis: str = ""
    """Attempt whose record it was computed from."""
    mine: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    held: str = ""
    """What the rank held in that save (`held_digest`): a state of another layout is saved by its main replicas."""

    def writes(self, key: str, offset: Sequence[int], *, main: bool) -> bool:
        """Whether this rank writes a shard that it holds; `main`: it has the main replica."""
        if not self.basis:
            return main
        name = shard_id(key, offset)
        return name in self.mine or (main and name not in self.others)

    def to_json(self) -> dict[str, Any]:
        return {"basis": self.basis, "mine": sorted(self.mine), "others": sorted(self.others)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Share:
        return cls(basis=value["basis"], mine=frozenset(value["mine"]), others=frozenset(value["others"]))


def share_of(record: CommitRecord, rank: int) -> Share:
    """What a rank writes in the save after a committed one."""
    writers = distribute(record)
    if not writers:
        return Share()
    seal = next(seal for seal in record.seals if seal.rank == rank)
    held = {*seal.replicas, *(shard_id(tensor[0], tensor[3]) for tensor in seal.tensors)} & writers.keys()
    mine = frozenset(name for name in held if writers[name] == rank)
    return Share(basis=record.attempt, mine=mine, others=frozenset(held) - mine)


def distribute(record: CommitRecord) -> dict[str, int]:
    """Shard -> rank that writes it next, of those that several hold: spread by bytes and by the rates of the seals."""
    rates = _rates(record)
    holders: dict[str, list[int]] = {}
    for seal in record.seals:
        for name in seal.replicas:
            holders.setdefault(name, []).append(seal.rank)
    alone = dict.fromkeys(rates, 0)
    shared: list[tuple[int, str]] = []
    before: dict[str, int] = {}
    for seal in record.seals:
        for key, _, _, offset, _, _, _, nbytes in seal.tensors:
            name = shard_id(key, offset)
            if name in holders:
                holders[name].append(seal.rank)
                shared.append((nbytes, name))
                before[name] = seal.rank
            else:
                alone[seal.rank] += nbytes
    if not shared:
        return {}
    size = {name: nbytes for nbytes, name in shared}
    load, writers = dict(alone), dict[str, int]()
    for nbytes, name in sorted(shared, reverse=True):
        writer = min(sorted(holders[name]), key=lambda rank: (load[rank] + nbytes) / rates[rank])
        load[writer] += nbytes
        writers[name] = writer
    same = dict(alone)
    for name, rank in before.items():
        same[rank] += size[name]
    best, now = (max(amount[rank] / rates[rank] for rank in rates) for amount in (load, same))
    return before if now <= GOOD_ENOUGH * best else writers


def _rates(record: CommitRecord) -> dict[int, float]:
    """Bytes per second by rank; who wrote too little to tell gets the median of the others."""
    wrote = {seal.rank: sum(file.nbytes for file in seal.files) for seal in record.seals}
    if max(seal.write_s for seal in record.seals) < TELLS_S:
        return dict.fromkeys(wrote, 1.0)
    enough = max(sum(wrote.values()) / len(wrote) / RATE_SPAN, 1.0)
    told = {s.rank: wrote[s.rank] / s.write_s for s in record.seals if s.write_s > 0 and wrote[s.rank] >= enough}
    middle = statistics.median(told.values()) if told else 1.0
    return {rank: min(max(told.get(rank, middle), middle / RATE_SPAN), middle * RATE_SPAN) for rank in wrote}
