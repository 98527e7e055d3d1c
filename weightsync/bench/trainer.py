"""One trainer rank of the bench: `python -m weightsync.bench.trainer FD`, driven by `harness` over the socket FD, or an
actor (`weightsync.bench.actors`).

Commands, the same on every rank and in this order: `configure` and `join` (the trainer's own process group), `load`
(the weights and their source), `connect` (the publisher), then `step` and `publish` per version.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightsync.bench import weights
from weightsync.bench.children import serve
from weightsync.bench.config import BenchConfig
from weightsync.bench.servers import control_of
from weightsync.engine.base import EngineControl
from weightsync.publisher import PublishConfig, Publisher
from weightsync.sources.base import Source
from weightsync.sources.state_dict import StateDictSource
from weightsync.store import HostedStore, host_store

__all__ = ["TrainerRank", "main", "make"]


class TrainerRank:
    """Answers the commands of `harness.Session`."""

    def __init__(self) -> None:
        self.rank = 0
        self.host = "127.0.0.1"
        self.config = BenchConfig()
        self.hosted: HostedStore | None = None
        self.source: Source | None = None
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.publisher: Publisher | None = None

    def __call__(self, message: dict[str, Any]) -> dict[str, Any]:
        command = message.pop("cmd")
        return _COMMANDS[command](self, **message)

    def do_configure(self, rank: int, config: dict[str, Any], host: str) -> dict[str, Any]:
        """`host`: the address of this rank's machine, the only one that it listens on."""
        torch.set_num_threads(1)
        self.rank, self.host = rank, host
        self.config = BenchConfig.from_json(config)
        if rank or self.config.trainer.world_size == 1:
            return {}
        self.hosted = host_store(host)
        return {"port": self.hosted.port}

    def do_join(self, host: str, port: int | None) -> dict[str, Any]:
        """`host` and `port`: of rank 0's store."""
        if port is None:
            return {}
        timeout = datetime.timedelta(seconds=self.config.deadline_s)
        store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        size = self.config.trainer.world_size
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("trainer", store), rank=self.rank, world_size=size, timeout=timeout
        )
        return {}

    def do_load(self, seed: int) -> dict[str, Any]:
        """Returns the specs of this rank's stage if it is its sender, else an empty list."""
        by_role = weights.load(self.config, seed=seed)
        if self.config.trainer.kind == "megatron":
            self._load_megatron({name: t for tensors in by_role.values() for name, t in tensors.items()})
        else:
            drafter = {weights.DRAFT: by_role.pop(weights.DRAFT)} if self.config.draft == "eagle3" else None
            # MTP layers are part of their model's state dict; which tensors these are, the source's rules know.
            device = self.config.trainer_device
            self.tensors = {name: t.to(device) for tensors in by_role.values() for name, t in tensors.items()}
            drafter = drafter and {r: {n: t.to(device) for n, t in ts.items()} for r, ts in drafter.items()}
            self.source = StateDictSource(self.tensors, drafts=drafter)
        assert self.source is not None
        specs = [s.to_json() for s in self.source.specs()]
        return {"stage": self.source.stage, "specs": specs if self.source.is_sender else []}

    def _load_megatron(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from converters.live import load_tensors
        from weightsync.bench.megatron import build_model
        from weightsync.sources.megatron import MegatronSource

        hf_config = weights.model_configs(self.config)[0].to_hf()
        layout = self.config.trainer
        chunks = build_model(hf_config, tp=layout.tp, pp=layout.pp, dtype=next(iter(tensors.values())).dtype)
        self.tensors = load_tensors(chunks, hf_config, tensors)
        self.source = MegatronSource(chunks, hf_config)

    def do_connect(self, engines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`engines`: name of each, and its url and api_key, or its actor."""
        assert self.source is not None
        self.publisher = Publisher(
            self.source,
            [self._control(**e) for e in engines],
            PublishConfig(
                transport=self.config.transport,
                bucket_bytes=self.config.bucket_bytes,
                num_buffers=self.config.buffers,
                deadline_s=self.config.deadline_s,
                trace=self.config.trace,
                bind_host=self.host,
            ),
        )
        return {}

    def _control(self, name: str, url: str = "", api_key: str = "", actor: Any = None) -> EngineControl:
        if actor is None:
            return control_of(self.config.engine, url, api_key, name)
        from weightsync.actors import RayControl

        return RayControl(actor, name=name)

    def do_step(self, version: int) -> dict[str, Any]:
        """What stands for a training step: other bytes than before. Weights of a folder stay as they are."""
        if self.config.folder is None:
            weights.nudge(self.tensors, version)
        return {}

    def do_publish(self, version: int, scope: str) -> dict[str, Any]:
        assert self.publisher is not None
        start = time.perf_counter()
        report = self.publisher.publish(version, scope)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "report": report.to_json() if self.rank == 0 else None}

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        if dist.is_initialized():
            dist.destroy_process_group()


# Not `getattr` by a name made on the spot: Python's type cache would keep each such string, which `soak.py` sees.
_COMMANDS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "configure": TrainerRank.do_configure,
    "connect": TrainerRank.do_connect,
    "join": TrainerRank.do_join,
    "load": TrainerRank.do_load,
    "publish": TrainerRank.do_publish,
    "step": TrainerRank.do_step,
}


make = TrainerRank


def main() -> None:
    """Serve on an inherited socket until it closes."""
    rank = make()
    try:
        serve(int(sys.argv[1]), rank)
    finally:
        rank.close()


if __name__ == "__main__":
    main()
