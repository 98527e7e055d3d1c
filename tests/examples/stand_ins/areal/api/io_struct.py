"""What AReaL's calls carry: the fields that the adapter reads."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass
class WeightUpdateMeta:
    type: Literal["disk", "xccl", "awex"]
    path: str | None = None
    version: int | None = None

    def with_version(self, version: int) -> WeightUpdateMeta:
        return dataclasses.replace(self, version=version)


@dataclasses.dataclass
class SaveLoadMeta:
    path: str
    weight_format: str
    with_optim: bool


@dataclasses.dataclass
class LocalInfServerInfo:
    host: str
    port: int
