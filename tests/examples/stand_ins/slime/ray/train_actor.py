"""What a training actor of slime is before it has a backend."""

from __future__ import annotations

from typing import Any


class TrainRayActor:
    def __init__(self, world_size, rank, master_addr, master_port):
        self._world_size, self._rank = world_size, rank
        self.master_addr, self.master_port = master_addr, master_port

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> None:
        self.args, self.role = args, role

    def set_rollout_manager(self, rollout_manager):
        self.rollout_manager = rollout_manager
