"""The memory in which a state waits for the disk: one memfd, mapped by the trainer and by its writer process.

Touched when it is made (the first touch of fresh memory costs several copies of it) and reused by every save. The first
page is a header of 64-bit words through which the writer tells how far it is: plain memory, so that the trainer
learns it without a system call and without waiting for anybody. `CLOCK_MONOTONIC` is the same in both processes.

With CUDA the mapping is registered with the driver, so that copies from the device run at full speed.
"""

from __future__ import annotations

import mmap
import os
import time

import torch

from checkpoint.errors import DiskError

__all__ = ["ALIVE_NS", "BATCHES_STAGED", "BATCHES_WRITTEN", "BYTES_DONE", "PHASE", "PHASES", "PROGRESS_NS", "Staging"]

HEADER_BYTES = 4096
PHASE, BYTES_DONE, PROGRESS_NS, ALIVE_NS, BATCHES_STAGED, BATCHES_WRITTEN = range(6)
"""Words of the header: index into PHASES; bytes handed to the kernel; when that last moved; when the writer last
showed that it is scheduled; parts that the trainer filled; parts that the writer has used up."""

PHASES = ("idle", "write", "sync", "seal", "vote", "prepare", "decide", "publish", "finished")


class Staging:
    """`nbytes` of shared memory behind a header.

    Args:
        nbytes: for states; the header comes on top.
        fd: an existing memfd to map, else one is made and touched.

    Raises:
        DiskError: there is not enough memory.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        total = HEADER_BYTES + max(nbytes, 1)
        try:
            self.fd = os.memfd_create("checkpoint-staging", os.MFD_CLOEXEC) if fd is None else fd
            if fd is None:
                os.ftruncate(self.fd, total)
                os.posix_fallocate(self.fd, 0, total)  # fails here, not with SIGBUS in the middle of a save
            self._map = mmap.mmap(self.fd, total)
        except OSError as e:
            raise DiskError(
                f"cannot stage {nbytes} bytes in shared memory ({e}): lower staging_bytes to stream the state in parts"
            ) from e
        self.header = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[HEADER_BYTES:]
        self._registered = False
        if fd is None:
            self.data[::4096] = 0

    @property
    def raw(self) -> memoryview:
        """The data as bytes."""
        return memoryview(self._map)[HEADER_BYTES:]

    def register_cuda(self) -> None:
        """Pin the mapping for CUDA; nothing happens the second time.

        Raises:
            DiskError: the driver refuses, for instance over a limit of locked memory.
        """
        if self._registered:
            return
        code = torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), self.data.numel(), 0)
        if int(code) != 0:
            raise DiskError(f"CUDA does not register {self.nbytes} bytes of staging memory (error {int(code)})")
        self._registered = True

    def begin(self) -> None:
        """Reset the words of a save."""
        now = time.monotonic_ns()
        for word, value in ((PHASE, 0), (BYTES_DONE, 0), (PROGRESS_NS, now), (ALIVE_NS, now)):
            self.header[word] = value
        self.header[BATCHES_STAGED] = self.header[BATCHES_WRITTEN] = 0

    def close(self) -> None:
        """Give the memory back once nobody holds a view of it."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
            self._registered = False
        self.header.release()
        self.data = torch.empty(0, dtype=torch.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
