"""Rank 0 of an NCCL communicator whose other ranks are an engine's own: they join by a unique id that we make.

torch's `ProcessGroupNCCL` spreads the id its own way, which engines do not follow; so this calls the NCCL library that
torch has loaded. Used by `weightsync.engines.vllm.stock`; needs a CUDA device.
"""

from __future__ import annotations

import base64
import concurrent.futures
import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.acks import start_call
from weightsync.engines.joint import Asked, refused
from weightsync.errors import ConfigError, TransferTimeout, TransportError

__all__ = ["NcclGroup"]

_UNIQUE_ID_BYTES = 128
_SUM = 0
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
}
"""What both sides call a tensor's type; of others vLLM's communicator knows none either."""
_IN_PROGRESS = 7
"""`ncclInProgress`: what asynchronous errors say of an operation that goes on."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _UNIQUE_ID_BYTES)]


class NcclGroup:
    """One communicator of `size` ranks on the current CUDA device; `join` blocks until all are there.

    Raises:
        ConfigError: no CUDA device, or no NCCL library in this process.
    """

    def __init__(self, size: int) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "vLLM's own transfer moves weights over NCCL, and this process has no CUDA device: publish from a "
                "process with one, or use weightsync's adapter in the engine, which takes gloo and shm, too"
            )
        self.size = size
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._lib = _library()
        self._id = _UniqueId()
        self._check(self._lib.ncclGetUniqueId(ctypes.byref(self._id)), "ncclGetUniqueId")
        self._comm = ctypes.c_void_p()
        self._stream = torch.cuda.Stream(self.device)

    @property
    def words(self) -> dict[str, Any]:
        """What the other ranks need to find this group."""
        return {"nccl_unique_id_b64": base64.b64encode(bytes(self._id)).decode()}

    def join(self, deadline_s: float, asked: Asked) -> None:
        """The ranks of vLLM start with a sum of one float; so does this one.

        Args:
            asked: the engine's answer, once there is one: after a refusal nobody else will come.

        Raises:
            TransportError, TransferTimeout
        """
        # It blocks in C until every rank is there, which nothing can end: on a thread of its own.
        joining = start_call(self._init_rank)
        concurrent.futures.wait([joining, asked], deadline_s, concurrent.futures.FIRST_COMPLETED)
        if not joining.done() and refused(asked):
            raise TransportError("NCCL group of vLLM's own: joining: vLLM refused")
        try:
            joining.result(deadline_s)
        except concurrent.futures.TimeoutError:
            raise TransferTimeout(
                f"NCCL group of vLLM's own: joining: its {self.size - 1} ranks did not come within {deadline_s:g} s"
            ) from None
        with torch.cuda.device(self.device):
            one = torch.zeros(1, device=self.device)
            torch.cuda.current_stream().synchronize()
            pointer = ctypes.c_void_p(one.data_ptr())
            self._check(
                self._lib.ncclAllReduce(pointer, pointer, 1, _DTYPES[one.dtype], _SUM, self._comm, self._stream_handle),
                "ncclAllReduce",
            )
            self._wait(deadline_s, "joining", asked)

    def _init_rank(self) -> dict[str, Any]:
        with torch.cuda.device(self.device):
            result = self._lib.ncclCommInitRank(ctypes.byref(self._comm), self.size, self._id, 0)
        self._check(result, "ncclCommInitRank")
        return {}

    def broadcast(self, tensors: Sequence[torch.Tensor], deadline_s: float, asked: Asked) -> None:
        """Each tensor in one broadcast of its own, as vLLM receives them; may be overwritten afterwards.

        Raises:
            TransportError, TransferTimeout
        """
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            held = [t.to(self.device, non_blocking=True).contiguous() for t in tensors]
            for t in held:
                if t.dtype not in _DTYPES:
                    raise TransportError(
                        f"NCCL group of vLLM's own: it cannot carry {t.dtype}: cast it (publish_dtype)"
                    )
                pointer, kind = ctypes.c_void_p(t.data_ptr()), _DTYPES[t.dtype]
                self._check(
                    self._lib.ncclBroadcast(pointer, pointer, t.numel(), kind, 0, self._comm, self._stream_handle),
                    "ncclBroadcast",
                )
            self._wait(deadline_s, f"sending {sum(t.nbytes for t in held)} bytes", asked)

    def abort(self) -> None:
        """End it without the others; never blocks on them."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._lib.ncclCommAbort(comm)

    close = abort

    @property
    def _stream_handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._stream.cuda_stream)

    def _wait(self, deadline_s: float, what: str, asked: Asked) -> None:
        end = time.monotonic() + deadline_s
        error = ctypes.c_int()
        while not self._stream.query():
            self._check(self._lib.ncclCommGetAsyncError(self._comm, ctypes.byref(error)), "ncclCommGetAsyncError")
            if error.value not in (0, _IN_PROGRESS):
                self.abort()
                raise TransportError(f"NCCL group of vLLM's own: {what}: {self._text(error.value)}")
            if refused(asked):
                self.abort()
                raise TransportError(f"NCCL group of vLLM's own: {what}: vLLM refused")
            if time.monotonic() > end:
                self.abort()
                raise TransferTimeout(f"NCCL group of vLLM's own: {what}: not done within {deadline_s:g} s; aborted")
            time.sleep(50e-6)

    def _text(self, result: int) -> str:
        return str(ctypes.cast(self._lib.ncclGetErrorString(result), ctypes.c_char_p).value)

    def _check(self, result: int, what: str) -> None:
        if result not in (0, _IN_PROGRESS):
            raise TransportError(f"NCCL group of vLLM's own: {what}: {self._text(result)}")


def _library() -> Any:
    """The NCCL that torch has loaded, so that the process has one."""
    for name in (None, "libnccl.so.2"):
        try:
            lib = ctypes.CDLL(name)
            lib.ncclGetErrorString.restype = ctypes.c_void_p
        except (OSError, AttributeError):
            continue
        lib.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int]
        buffers: list[Any] = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        for collective in (lib.ncclAllReduce, lib.ncclBroadcast):
            collective.argtypes = [*buffers, ctypes.c_void_p]
        lib.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        lib.ncclCommAbort.argtypes = [ctypes.c_void_p]
        return lib
    raise ConfigError("no NCCL library (libnccl.so.2) in this process: install a CUDA build of torch")
