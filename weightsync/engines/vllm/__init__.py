"""vLLM: a registered weight-transfer engine in its workers, and a leader in its front end.

`register` is the `vllm.general_plugins` entry point. In the workers `engine` receives and `reload` loads; in the front
end `leader` drives them, for the HTTP server as ASGI middleware (`server`), for an `LLM` object in process (`local`).
"""

from __future__ import annotations

__all__ = ["BACKEND", "EXTENSION", "register"]

BACKEND = "weightsync"
"""Of `--weight-transfer-config '{"backend": "weightsync"}'`."""

EXTENSION = "weightsync.engines.vllm.extension.Extension"
"""Of `--worker-extension-cls`, before 0.28."""


def register() -> None:
    """Make the backend known to vLLM; it calls this in every process. Imports nothing heavy, changes nothing else."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightsync.engines.vllm.engine", "WeightSyncEngine")
    except ValueError as e:
        if "already registered" not in str(e):
            raise
