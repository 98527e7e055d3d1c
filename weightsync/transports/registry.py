"""Transports by name. Adding one means a line in `_TRANSPORTS`; any torch.distributed backend works by its own name."""

from __future__ import annotations

import importlib

from weightsync.errors import ConfigError
from weightsync.transports.base import Transport

__all__ = ["TRANSPORTS", "get_transport"]

_TRANSPORTS = {
    "gloo": ("weightsync.transports.collective:CollectiveTransport", "any network, CPU buckets"),
    "nccl": ("weightsync.transports.collective:CollectiveTransport", "CUDA buckets; a torch build with NCCL"),
    "ipc": ("weightsync.transports.ipc:CudaIpcTransport", "engines on the GPU of their trainer rank"),
    "shm": ("weightsync.transports.shm:SharedMemoryTransport", "trainer and engines on one host, Linux"),
}

TRANSPORTS = tuple(_TRANSPORTS)
"""Names that are tested; `get_transport` takes other backends of torch.distributed, too."""


def get_transport(name: str) -> Transport:
    """The transport of this name; `caps.tested` is False for a backend that only torch.distributed knows.

    Raises:
        ConfigError: nobody knows the name.
        UnsupportedError: this torch or system lacks what it needs.
    """
    path, _ = _TRANSPORTS.get(name, ("weightsync.transports.collective:CollectiveTransport", ""))
    module, attribute = path.split(":")
    try:
        transport: Transport = getattr(importlib.import_module(module), attribute)(name)
    except ConfigError as e:
        choices = "; ".join(f"{known}: {hint}" for known, (_, hint) in _TRANSPORTS.items())
        raise ConfigError(f"unknown transport {name!r} ({choices}): {e}") from e
    return transport
