"""A trainer rank in a process of its own, for fault tests: publishes once, perhaps dies on the way.

Prints the store's port (rank 0), then the outcome. Exit codes: 0 committed, 3 a `WeightSyncError` (printed).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch

from tests.weightsync.fleet import Weights
from weightsync import errors
from weightsync.config import PublishConfig
from weightsync.engine.control import HttpControl
from weightsync.publisher import Publisher


def _die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, stages = job["rank"], job["stages"]
    source = Weights(job["version"], stage=rank, num_stages=stages)
    config = PublishConfig(run_id=job["run"], deadline_s=job["deadline_s"], control_s=5, heartbeat_s=4)
    engines = [HttpControl(url, api_key=key, name=name) for url, key, name in job["engines"]] if rank == 0 else []
    address = ("127.0.0.1", int(job["port"])) if rank else ("127.0.0.1", _free_port())
    with Publisher(source, engines, config, rank=rank, world_size=stages, store_address=address) as p:
        if rank == 0:
            print(address[1], flush=True)
        if job["die"] == f"stage {rank} mid-stream" or (rank == 0 and job["die"] == "coordinator mid-stream"):
            source.at[5] = _die
        if rank == 0 and job["die"] == "coordinator decided":
            p._coordinator.commit = _die  # type: ignore[union-attr,method-assign]
        try:
            print(p.publish(job["version"]).outcome)
        except errors.WeightSyncError as e:
            print(f"{type(e).__name__}: {e}")
            return 3
    return 0


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
