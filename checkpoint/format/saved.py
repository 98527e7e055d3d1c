"""One record of a `.distcp` file, or a whole `common.pt`: what `torch.save` writes, read and written piece by piece.

A record is a zip without compression. Its pickle (`data.pkl`) describes the value; tensors lie in entries of their own
(`data/0`, ...), aligned to 64 bytes. Torch's own reader wants the whole record; here the entry of a tensor is located
first, so that a slice of it can be read alone, and the pickle is read by the restricted unpickler.

CRCs are neither written nor checked: computing them halves the writing speed, and whole files carry an xxh3 digest in
their seal.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import struct
import threading
import zipfile
from collections.abc import Callable
from typing import Any, cast

import torch

from checkpoint.errors import FormatError
from checkpoint.format.unpickle import loads

__all__ = ["Payload", "dump_object", "load_object", "locate_tensor", "tensor_frame"]

Read = Callable[[int, int], bytes]
"""(position, number of bytes) -> bytes of a record; shorter at its end."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """Where the bytes of a record's tensor lie: row-major, in the machine's (little-endian) byte order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pos: int
    """First byte, counted from the beginning of the record."""
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    key: str
    numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Lazy:
    """A tensor of a record, not read yet."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        want, step = [], 1
        for size in reversed(self.shape):
            want.append(step)
            step *= size
        return all(s == w for s, w, n in zip(self.stride, reversed(want), self.shape, strict=True) if n > 1)


def _rebuild_v2(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> _Lazy:
    assert storage.dtype is not None
    return _Lazy(storage, offset, tuple(size), tuple(stride), storage.dtype)


def _rebuild_v3(storage: _Storage, offset: int, size: Any, stride: Any, _g: Any, _h: Any, dtype: Any, *_: Any) -> _Lazy:
    return _Lazy(storage, offset, tuple(size), tuple(stride), dtype)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


@functools.cache
def _torch_globals() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
        ("torch.storage", "UntypedStorage"): "untyped",
    }
    names = {
        "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
        "Double": torch.float64,
        "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Float": torch.float32,
        "Half": torch.float16, "Int": torch.int32, "Long": torch.int64, "Short": torch.int16,
    }  # fmt: skip
    for name, dtype in names.items():
        table["torch", f"{name}Storage"] = dtype
    return table


class _Window(io.RawIOBase):
    """A record as the seekable file that `zipfile` wants; only what is asked for is read."""

    def __init__(self, read: Read, length: int) -> None:
        super().__init__()
        self._read_at, self._length, self._pos = read, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._pos = offset + (0, self._pos, self._length)[whence]
        return self._pos

    def tell(self) -> int:
        return self._pos

    def read(self, size: int | None = -1) -> bytes:
        size = self._length - self._pos if size is None or size < 0 else min(size, self._length - self._pos)
        if size <= 0:
            return b""
        data = self._read_at(self._pos, size)
        self._pos += len(data)
        return data


class _Record:
    def __init__(self, read: Read, length: int, what: str) -> None:
        self.read, self.what = read, what
        read(0, 1)  # a missing file says so here; zipfile would call it damaged
        try:
            # Only the directory is taken from zipfile: it would check CRCs that are not there.
            entries = zipfile.ZipFile(_Window(read, length)).infolist()
        except (zipfile.BadZipFile, struct.error, OSError, ValueError) as e:
            raise FormatError(f"{what} is not what torch.save writes ({e}): truncated, or of another format") from e
        self.entries = {info.filename.partition("/")[2]: info for info in entries}
        if "data.pkl" not in self.entries:
            raise FormatError(f"{what} is a zip without data.pkl: not written by torch.save")
        order = self.bytes("byteorder") if "byteorder" in self.entries else b"little"
        if order != b"little":
            raise FormatError(f"{what} holds {order.decode(errors='replace')}-endian tensors: only little is read")

    def place(self, name: str) -> tuple[int, int]:
        """(position, bytes) of an entry's data."""
        info = self.entries.get(name)
        if info is None:
            raise FormatError(f"{self.what} lacks its entry {name!r}: truncated or damaged")
        head = self.read(info.header_offset, _LOCAL_HEADER.size)
        if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
            raise FormatError(f"{self.what}: entry {name!r} has a damaged header at {info.header_offset}")
        _, name_len, extra_len = _LOCAL_HEADER.unpack(head)
        return info.header_offset + _LOCAL_HEADER.size + name_len + extra_len, info.file_size

    def bytes(self, name: str) -> bytes:
        pos, size = self.place(name)
        data = self.read(pos, size)
        if len(data) != size:
            raise FormatError(f"{self.what}: entry {name!r} has {len(data)} of {size} bytes: truncated")
        return data

    def value(self) -> Any:
        return loads(self.bytes("data.pkl"), what=self.what, more=_torch_globals(), persistent_load=self._storage)

    def _storage(self, pid: Any) -> _Storage:
        kind, storage_class, key, _, numel = pid
        if kind != "storage":
            raise FormatError(f"{self.what} refers to {kind!r}: only tensor storages are read")
        dtype = storage_class if isinstance(storage_class, torch.dtype) else None
        if dtype is None and storage_class != "untyped":
            raise FormatError(f"{self.what} has a storage of the unknown class {storage_class!r}")
        return _Storage(dtype, str(key), int(numel))

    def tensor(self, lazy: _Lazy) -> torch.Tensor:
        data = bytearray(self.bytes(f"data/{lazy.storage.key}"))
        item = lazy.dtype.itemsize
        last = lazy.offset + sum((n - 1) * s for n, s in zip(lazy.shape, lazy.stride, strict=True))
        if not math.prod(lazy.shape):
            return torch.empty(lazy.shape, dtype=lazy.dtype)
        if lazy.offset < 0 or min(lazy.stride, default=0) < 0 or (last + 1) * item > len(data):
            raise FormatError(f"{self.what}: a tensor of shape {lazy.shape} reaches beyond its {len(data)} bytes")
        flat = torch.frombuffer(data, dtype=lazy.dtype, count=len(data) // item)
        return flat.as_strided(lazy.shape, lazy.stride, lazy.offset)


def locate_tensor(read: Read, length: int, what: str) -> Payload:
    """Find the tensor of a record that holds exactly one, without reading it.

    Raises:
        FormatError: damaged, or not a single contiguous tensor.
    """
    record = _Record(read, length, what)
    lazy = record.value()
    if not isinstance(lazy, _Lazy) or not lazy.contiguous:
        raise FormatError(f"{what} holds {type(lazy).__name__}, expected one contiguous tensor")
    if not lazy.nbytes:
        return Payload(dtype=lazy.dtype, shape=lazy.shape, pos=0, nbytes=0)
    pos, size = record.place(f"data/{lazy.storage.key}")
    start = lazy.offset * lazy.dtype.itemsize
    if start < 0 or start + lazy.nbytes > size or pos + size > length:
        raise FormatError(f"{what}: a tensor of {lazy.nbytes} bytes in an entry of {size}: truncated or damaged")
    return Payload(dtype=lazy.dtype, shape=lazy.shape, pos=pos + start, nbytes=lazy.nbytes)


def load_object(data: bytes, what: str) -> Any:
    """The value of a whole record, tensors included; nothing is executed, unknown classes become `Foreign`.

    Raises:
        FormatError: damaged, truncated, or not written by torch.save in its zip format.
    """
    record = _Record(lambda pos, size: data[pos : pos + size], len(data), what)
    return _tensors(record.value(), record, {})


def _tensors(value: Any, record: _Record, seen: dict[int, Any]) -> Any:
    if isinstance(value, _Lazy):
        return record.tensor(value)
    if id(value) in seen:
        return value
    if isinstance(value, dict):
        seen[id(value)] = value
        for key in list(value):
            value[key] = _tensors(value[key], record, seen)
    elif isinstance(value, list):
        seen[id(value)] = value
        value[:] = [_tensors(item, record, seen) for item in value]
    elif type(value) is tuple:
        return tuple(_tensors(item, record, seen) for item in value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        seen[id(value)] = value
        for name in list(value.__dict__):
            value.__dict__[name] = _tensors(value.__dict__[name], record, seen)
    return value


def dump_object(value: Any) -> bytes:
    """A record of any picklable value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


LARGE_BYTES = 1 << 16  # above it the only such piece of a record is the data itself


class _Frame:
    """Takes a record and drops the data of its tensor."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [b""]

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) > LARGE_BYTES:
            self.parts.append(b"")
        else:
            self.parts[-1] += bytes(view)
        return len(view)

    def flush(self) -> None:
        """For torch.save."""


_FRAME_LOCK = threading.Lock()


@functools.lru_cache(4096)
def tensor_frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What a record of such a tensor has before and after its (row-major) data; without CRC.

    So a record can be written without the tensor in memory. The frame comes from torch.save itself, run on memory that
    is never touched.
    """
    empty = torch.empty(shape, dtype=dtype)
    with _FRAME_LOCK:
        # Process-wide, hence put back: a CRC would read all of that memory.
        crc = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            if empty.nbytes > LARGE_BYTES:
                frame = _Frame()
                torch.save(empty, cast("Any", frame))
                before, after = frame.parts
                return before, after
            record = dump_object(empty)
        finally:
            torch.serialization.set_crc32_options(crc)
    place = locate_tensor(lambda pos, size: record[pos : pos + size], len(record), "an empty record")
    # Without data there is no entry to split at.
    at = place.pos if place.nbytes else len(record)
    return record[:at], record[at + place.nbytes :]
