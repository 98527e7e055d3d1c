"""What a result was measured with and on: versions and machine, without anything that names the host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_machine", "describe_versions"]

_DISTRIBUTIONS = ("weightsync", "torch", "numpy", "safetensors", "megatron-core")


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the distributions that matter here; those that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "weightsync":
                versions[name] = "source tree"
    return versions


def describe_machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory, kernel, CUDA devices."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
