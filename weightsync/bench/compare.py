"""`--compare`: the limit and today's ways beside our publish, round by round in one run.

`harness` builds one `LaneGroup` after the engines are up, calls `round` between its publishes, and `results` once at
the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.bench import limit, peers
from weightsync.bench.children import ask_all
from weightsync.bench.lanes import LaneConfig, Tokens
from weightsync.bench.launchers import Launcher, Worker
from weightsync.bench.stats import Quantiles, quantiles
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.manifest import TARGET, TensorSpec

__all__ = ["LaneGroup", "Way"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One measured way: `wire_bytes` are those that one receiver got per run, counted in its broadcasts."""

    name: str
    seconds: tuple[float, ...]
    wire_bytes: int

    @property
    def quantiles(self) -> Quantiles:
        return quantiles(self.seconds)


class LaneGroup:
    """One sender and `receivers` receivers that own copies of all `specs`.

    Args:
        specs: what a publish moves, in streaming order.
        receivers: number of engine ranks.
        tp_size: tensor parallel size of each engine.
        backend: `gloo` or `nccl`, of the broadcasts.
        shared: measure the limit of shared memory instead of that of a broadcast.
        ways: also run today's ways, not the limit alone.
        deadline_s: for each command.
        launcher: starts the lanes and ends them.

    Raises:
        ConfigError: shared memory is to be measured, but the lanes are on several machines.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        receivers: int,
        tp_size: int,
        backend: str,
        shared: bool,
        ways: bool = True,
        deadline_s: float = 120.0,
        launcher: Launcher,
    ) -> None:
        self._deadline_s = deadline_s
        # Bytes are checked by filling them with one value, which no copy of bools would keep.
        specs = [dataclasses.replace(s, dtype=torch.uint8) if s.dtype == torch.bool else s for s in specs]
        nbytes = sum(s.nbytes for s in specs)
        draft = any(s.role != TARGET for s in specs)
        self._limit_names = limit.names(shared=shared, nbytes=nbytes)
        self._way_names = peers.names(draft=draft, shared=shared) if ways else []
        self._seconds: dict[str, list[float]] = {n: [] for n in (*self._limit_names, *self._way_names)}
        self._wire_bytes: dict[str, int] = {}
        self._folder = tempfile.mkdtemp(prefix="weightsync-bench-")
        self._children: list[Worker] = []
        try:
            for rank in range(receivers + 1):
                self._children.append(launcher.lane(rank))
            self._join(specs, tp_size=tp_size, backend=backend, shared=shared)
        except BaseException:
            self.close()
            raise

    def _join(self, specs: Sequence[TensorSpec], *, tp_size: int, backend: str, shared: bool) -> None:
        size = len(self._children)
        port, machines = None, set()
        for rank, child in enumerate(self._children):
            config = LaneConfig(
                rank=rank,
                size=size,
                host=child.host,
                tp_size=tp_size,
                backend=backend,
                shared=shared,
                specs=tuple(specs),
                deadline_s=self._deadline_s,
            )
            (answer,) = ask_all([child], {"cmd": "configure", "config": config.to_json()}, self._deadline_s)
            port = answer.get("port", port)
            machines.add(answer["machine"])
        if shared and len(machines) > 1:
            raise ConfigError(
                "--transport shm: trainer and engines are on several machines: --placement pack, or --transport gloo"
            )
        where = {"host": self._children[0].host, "port": port, "one_clock": len(machines) == 1}
        joined = self._ask({"cmd": "join", **where})
        self.loaded_bytes = [a["loaded_bytes"] for a in joined[1:]]
        """Bytes that the runners of each receiver load."""
        if shared:
            Tokens.make(self._folder, size)
            sender = joined[0]
            self._ask({"cmd": "map", "pid": sender["pid"], "fd": sender["fd"], "folder": self._folder})

    def _ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return ask_all(self._children, message, self._deadline_s)

    @property
    def num_variants(self) -> int:
        return len(self._seconds)

    def round(self, *, warmup: bool = False) -> None:
        """Run everything once. A warm-up is not counted; it proves that each way writes every byte it should."""
        for i, name in enumerate(self._seconds):
            value = 3 + i % 200
            if warmup:
                self._ask({"cmd": "fill", "value": value})
            answers = self._ask({"cmd": "run", "name": name})
            if warmup:
                if name in self._way_names:
                    self._check(name, value)
                continue
            self._seconds[name].append(max(a["end_s"] - a["start_s"] for a in answers))
            self._wire_bytes[name] = max(a["wire_bytes"] for a in answers[1:])

    def _check(self, name: str, value: int) -> None:
        for child, answer in zip(self._children, self._ask({"cmd": "check", "value": value}), strict=True):
            if answer["wrong"]:
                wrong = answer["wrong"]
                raise WeightSyncError(
                    f"bench: {name} left {len(wrong)} tensors of {child.name} unwritten or wrong, e.g. {wrong[:3]}: "
                    "its time would mean nothing"
                )

    def results(self) -> tuple[limit.Limit, list[Way]]:
        """The limit, and every way, the limit's variants among them; needs one round that was no warm-up."""
        found = limit.combine({n: self._seconds[n] for n in self._limit_names})
        ways = [Way(name=n, seconds=tuple(s), wire_bytes=self._wire_bytes[n]) for n, s in self._seconds.items()]
        return found, ways

    def close(self) -> None:
        """End the lanes; none is left, whatever state they are in."""
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for child in self._children:
                stack.callback(child.close)
