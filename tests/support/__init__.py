"""Helpers shared by tests: processes that end, whatever happens. See `tests.support.ranks`."""

from tests.support.ranks import RankError, RankGroup, spawn_ranks, start_ranks

__all__ = ["RankError", "RankGroup", "spawn_ranks", "start_ranks"]
