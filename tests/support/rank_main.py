"""What a process of `tests.support.ranks` runs: one pickled job from stdin, one pickled outcome to a pipe."""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import sys
import traceback
from typing import Any


def main() -> None:
    out = int(sys.argv[1])
    os.set_inheritable(out, False)
    # Imports the test module and with it whatever it imports.
    job = pickle.loads(sys.stdin.buffer.read())
    faulthandler.dump_traceback_later(job["deadline_s"])
    try:
        outcome = (True, _run(job))
        payload = pickle.dumps(outcome)
    except BaseException:  # noqa: BLE001 - reported to the parent, which raises it
        payload = pickle.dumps((False, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    with os.fdopen(out, "wb") as pipe:
        pipe.write(payload)


def _run(job: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = job["rank"], job["world_size"]
    if not job["port"]:
        return job["fn"](rank, world_size, *job["args"])
    timeout = datetime.timedelta(seconds=job["deadline_s"])
    store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return job["fn"](rank, world_size, *job["args"])
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
