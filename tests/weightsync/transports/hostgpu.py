"""Host memory where the `ipc` transport has a GPU's: what lets its protocol run without one. It is no GPU: handles are
paths of a memfd, events are moments of time; reference counts are kept as torch keeps them, in a shared file.
"""

from __future__ import annotations

import mmap
import os
import time

import torch

from weightsync.transports.ipc import CudaDriver, Handle, allocator_refusal


class _Memory(mmap.mmap):
    """Calls `gone` when the last tensor over it is gone, as torch's deleters do."""

    gone = staticmethod(lambda: None)

    def __del__(self):
        self.gone()


class HostGpu(CudaDriver):
    """`faulty` names what this one does wrong; `held()` is how many of the handles it gave are not returned."""

    device_type = "cpu"

    def __init__(self, *, gpu="GPU-0", sees=("GPU-0",), reach=True, expandable=False, faulty="", backend="native"):
        self.gpu, self.sees, self.reach, self.expandable, self.backend = gpu, sees, reach, expandable, backend
        self.faulty = faulty
        self.fd = os.memfd_create("counters")
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self.counters = mmap.mmap(self.fd, mmap.PAGESIZE)
        self.files = {}
        self.shares = self.fences = self.collected = 0

    def check(self, name):
        pass

    def uuid(self, device):
        return self.gpu

    def visible(self):
        return {gpu: torch.device("cpu", i) if i else torch.device("cpu") for i, gpu in enumerate(self.sees)}

    def can_reach(self, device, other):
        return self.reach

    def allocate(self, nbytes, device):
        if self.faulty == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything\nmore")
        fd = os.memfd_create("hostgpu")
        os.ftruncate(fd, nbytes)
        memory = _Memory(fd, nbytes)
        memory.gone = lambda: os.close(fd)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.files[tensor.data_ptr()] = fd
        return tensor

    def refusal(self, memory):
        segment = {"address": memory.data_ptr(), "total_size": memory.numel(), "is_expandable": self.expandable}
        return allocator_refusal(self.backend, memory.data_ptr(), [segment], "")

    def share(self, memory):
        if self.faulty == "no handle":
            raise RuntimeError("CUDA error: invalid argument\nmore lines")
        self.shares += 1
        self.counters[self.shares] = 1
        return Handle(
            memory=self._path(self.files[memory.data_ptr()]),
            nbytes=memory.numel(),
            offset=0,
            counter=self._path(self.fd),
            counter_offset=self.shares,
        )

    @staticmethod
    def _path(fd):
        return f"/proc/{os.getpid()}/fd/{fd}".encode()

    def open(self, handle, device):
        if self.faulty == "cannot open":
            raise RuntimeError("CUDA error: invalid resource handle\nmore lines")
        counter = os.open(handle.counter.decode(), os.O_RDWR)
        fd = os.open(handle.memory.decode(), os.O_RDWR)
        memory = _Memory(fd, handle.nbytes)
        os.close(fd)
        memory.gone = lambda: (os.pwrite(counter, b"\0", handle.counter_offset), os.close(counter))
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return torch.ones_like(tensor) if self.faulty == "other memory" else tensor

    def disown(self, handle):
        fd = os.open(handle.counter.decode(), os.O_RDWR)
        os.pwrite(fd, b"\0", handle.counter_offset)
        os.close(fd)

    def collect(self):
        self.collected += 1

    def fence(self, device):
        self.fences += 1
        never = self.faulty == "hung" and self.fences > 3
        end = time.monotonic() + (1e9 if never else 0.0002)
        return lambda: time.monotonic() >= end

    def held(self):
        return sum(self.counters[:])
