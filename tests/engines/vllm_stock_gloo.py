"""A stand-in, for tests only: vLLM's own NCCL transfer engine, with a gloo group where it opens its NCCL one.

NCCL needs CUDA. Everything else is vLLM's: its HTTP API, its sessions, `NCCLWeightTransferEngine`, its reload. In the
engine: `--worker-extension-cls tests.engines.vllm_stock_gloo.Extension`; in the trainer: `open_group=GlooGroup`. The
address of the group's store travels where the NCCL id does.
"""

from __future__ import annotations

import base64
import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import TransportError

TIMEOUT = datetime.timedelta(seconds=20)
ID_BYTES = 128


def broadcast(group: Any, tensor: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([tensor], options)


def gloo(port: int, rank: int, size: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore("stock", store), rank, size, TIMEOUT)


class GlooGroup:
    """Rank 0, as `weightsync.engines.nccl.NcclGroup`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
        self._group: Any = None

    @property
    def words(self) -> dict[str, Any]:
        return {"nccl_unique_id_b64": base64.b64encode(str(self._store.port).encode().ljust(ID_BYTES)).decode()}

    def join(self, deadline_s: float, asked: Any) -> None:
        self._group = gloo(self._store.port, 0, self._size)

    def broadcast(self, tensors: list[torch.Tensor], deadline_s: float, asked: Any) -> None:
        work = [broadcast(self._group, tensor.contiguous()) for tensor in tensors]
        while not all(w.is_completed() for w in work):
            if asked.done() and asked.exception() is not None:
                raise TransportError("vLLM refused")
            time.sleep(1e-4)

    def abort(self) -> None:
        group, self._group, self._store = self._group, None, None
        # Its destructor waits for what is under way: elsewhere.
        held = [group]
        del group
        threading.Thread(target=held.clear, daemon=True).start()

    close = abort


def _install() -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    class Communicator:
        def __init__(self, group: Any) -> None:
            self._group = group

        def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
            assert src == 0
            broadcast(self._group, tensor).wait()

        def destroy(self) -> None:
            self._group = None

    def join(info: Any, parallel: Any) -> Communicator:
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + info.rank_offset
        return Communicator(gloo(int(info.nccl_unique_id_bytes.decode()), rank, info.world_size))

    nccl_engine.worker_init_process_group = join
    torch.cuda.current_stream = lambda device=None: None


class Extension:
    """Importing this module in a worker installs the stand-in; `test_facts` is `vllm_probe`'s."""

    def test_facts(self) -> Any:
        from tests.engines.vllm_probe import facts

        target, draft = self.model_runner.get_model(), self.get_draft_model()  # type: ignore[attr-defined]
        with torch.inference_mode():
            return {"rank": self.rank, **facts({"target": target, "draft": draft})}  # type: ignore[attr-defined]


if dist.is_available():
    try:
        import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401
    except ImportError:
        pass  # the trainer's side
    else:
        _install()
