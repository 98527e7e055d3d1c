"""Moves elements: reads what a `Layout` names, decodes and casts, writes files with several threads.

    Values(source, decoded)             elements of a layout as bytes, piece by piece
    write_files(files, folder, ...)     every `OutFile`, each synced and reported (`done`) when it is complete

Threads, not processes: reads, writes, copies and arithmetic release the interpreter lock, and a process more is an
import of torch more. Memory is one buffer per worker and what decoding one piece takes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from converters.errors import FolderError, MappingError
from converters.offline.layout import Block, Layout
from converters.offline.mapping import Decoded
from converters.offline.sources import Source
from converters.offline.targets import OutFile, Segment

__all__ = ["Budget", "Values", "in_parallel", "pieces", "write_files"]

SYNC_BYTES = 32 << 20
MIN_MEMORY_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Shares `max_memory_bytes` out: decoding takes about eight times the bytes of what it gives."""

    max_memory_bytes: int = 512 << 20
    workers: int = 2

    @property
    def piece_bytes(self) -> int:
        return max(min(self.max_memory_bytes // (16 * self.workers), 4 << 20), 1 << 20)

    @property
    def span_bytes(self) -> int:
        """How much of a source may be read at once to gather scattered elements (transposed matrices)."""
        return self.max_memory_bytes // (4 * self.workers)


class Values:
    """Reads the elements that layouts name."""

    def __init__(self, source: Source, decoded: Mapping[str, Decoded]) -> None:
        self.source = source
        self._decoded = decoded

    def fill(self, blocks: Sequence[Block], stored: torch.dtype, dtype: torch.dtype, out: memoryview) -> None:
        """The elements of `blocks`, whose dtype is `stored`, into `out` as `dtype`.

        Raises:
            FolderError: the source cannot be read.
        """
        at = 0
        for block in blocks:
            size = block.numel * dtype.itemsize
            part = out[at : at + size]
            at += size
            if block.is_run and not block.add and stored == dtype and block.source not in self._decoded:
                self.source.read(block.source, block.start, part)
                continue
            values = self._run(block.source, block.start, block.start + block.span, stored)
            if not block.is_run:
                values = values.as_strided(block.shape, block.strides, values.storage_offset())
            if block.add:
                values = values + block.add
            torch.frombuffer(part, dtype=dtype).view(values.shape).copy_(values)

    def _run(self, name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements [start, stop) of a stored or decoded tensor, in its own dtype."""
        decoded = self._decoded.get(name)
        if decoded is None:
            return self._stored(name, start, stop, dtype)
        shape = decoded.header.shape
        row = decoded.header.numel // shape[0]
        step = decoded.encoding.rows_together(shape)
        first, last = start // row // step * step, -(-stop // row)
        last = min(-(-last // step) * step, shape[0])
        parts = []
        for stored in decoded.stored:
            header = self.source.headers[stored]
            # A tensor with fewer rows (scales) has one for each `step` of the weight.
            per = 1 if header.shape[0] == shape[0] else step
            a, b = first // per, -(-last // per)
            inner = header.numel // header.shape[0]
            parts.append(self._stored(stored, a * inner, b * inner, header.dtype).view(b - a, *header.shape[1:]))
        values = decoded.encoding.decode(tuple(parts)).reshape(-1)
        return values[start - first * row : stop - first * row]

    def _stored(self, name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        raw = torch.empty((stop - start) * dtype.itemsize, dtype=torch.uint8)
        self.source.read(name, start, raw.numpy().data)
        return raw.view(dtype)


def pieces(
    layout: Layout, item: int, decoded: Mapping[str, Decoded], budget: Budget
) -> Iterator[tuple[int, int, list[Block]]]:
    """(first, stop, blocks) of consecutive elements that fit the budget; `item` bytes each when written."""
    limit = max(budget.piece_bytes // item, 1)
    held: list[Block] = []
    first = at = 0
    for block in layout.blocks:
        for part in _parts(block, item, limit, decoded, budget):
            count = part.numel
            if held and at - first + count > limit:
                yield first, at, held
                first, held = at, []
            held.append(part)
            at += count
    if held:
        yield first, at, held


def _parts(block: Block, item: int, limit: int, decoded: Mapping[str, Decoded], budget: Budget) -> Iterator[Block]:
    """`block` in parts of at most `limit` elements where that costs nothing."""
    if block.is_run:
        unit = 1
        if info := decoded.get(block.source):
            shape = info.header.shape
            unit = info.encoding.rows_together(shape) * (info.header.numel // shape[0])
        step = max(limit // unit, 1) * unit
        start, end = block.start, block.start + block.shape[0]
        while start < end:
            stop = min((start // step + 1) * step if unit > 1 else start + step, end)
            yield block._replace(start=start, shape=(stop - start,))
            start = stop
        return
    span = budget.span_bytes // item
    if block.span <= span:
        yield block
        return
    # Too much to gather at once: one index of the outermost dimension after the other.
    inner = block._replace(shape=block.shape[1:], strides=block.strides[1:])
    if inner.span > span:
        raise MappingError(
            f"{block.source} is transposed and takes {2 * inner.span * item * 4 * budget.workers >> 20} MiB: "
            "raise --max-memory or take fewer --workers"
        )
    rows = max((span - inner.span) // max(block.strides[0], 1), 1)
    for row in range(0, block.shape[0], rows):
        yield block._replace(
            start=block.start + row * block.strides[0], shape=(min(rows, block.shape[0] - row), *block.shape[1:])
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive bytes of a file."""

    file: int
    pos: int
    nbytes: int
    parts: tuple[tuple[int, bytes | list[Block], torch.dtype, torch.dtype], ...]


def _pieces_of(number: int, file: OutFile, decoded: Mapping[str, Decoded], budget: Budget) -> Iterator[_Piece]:
    """Pieces of a file; small segments share one."""
    parts: list[tuple[int, bytes | list[Block], torch.dtype, torch.dtype]] = []
    start = held = 0
    for pos, nbytes, content, stored, dtype in _contents(file.segments, decoded, budget):
        if parts and held + nbytes > budget.piece_bytes:
            yield _Piece(number, start, held, tuple(parts))
            parts, held = [], 0
        if not parts:
            start = pos
        parts.append((pos - start, content, stored, dtype))
        held = pos + nbytes - start
    if parts:
        yield _Piece(number, start, held, tuple(parts))


def _contents(
    segments: Sequence[Segment], decoded: Mapping[str, Decoded], budget: Budget
) -> Iterator[tuple[int, int, bytes | list[Block], torch.dtype, torch.dtype]]:
    for segment in segments:
        if segment.layout is None:
            yield segment.pos, segment.nbytes, segment.literal, torch.uint8, torch.uint8
            continue
        item = segment.dtype.itemsize
        for first, stop, blocks in pieces(segment.layout, item, decoded, budget):
            yield segment.pos + first * item, (stop - first) * item, blocks, segment.layout.dtype, segment.dtype


class _Queue:
    """Hands out pieces: a worker stays in one file as long as there are files for all (a file takes one write at a
    time), then helps the others."""

    def __init__(self, files: Sequence[OutFile], decoded: Mapping[str, Decoded], budget: Budget) -> None:
        self._lock = threading.Lock()
        self._waiting = collections.deque(
            (number, _pieces_of(number, file, decoded, budget)) for number, file in enumerate(files)
        )
        self._open: dict[int, tuple[_Piece, Iterator[_Piece]]] = {}  # the next piece, those after it
        self._in_work: collections.Counter[int] = collections.Counter()

    def next(self, own: int | None) -> _Piece | None:
        with self._lock:
            if own is None or own not in self._open:
                if self._waiting:
                    own, waiting = self._waiting.popleft()
                    self._open[own] = (next(waiting), waiting)
                elif self._open:
                    own = next(iter(self._open))
                else:
                    return None
            piece, rest = self._open.pop(own)
            if (after := next(rest, None)) is not None:
                self._open[own] = (after, rest)
            self._in_work[own] += 1
            return piece

    def finish(self, piece: _Piece) -> bool:
        """Whether the piece was the last of its file."""
        with self._lock:
            self._in_work[piece.file] -= 1
            return not self._in_work[piece.file] and piece.file not in self._open


def write_at(fd: int, data: memoryview, pos: int) -> int:
    """os.pwrite; a name of its own so that faults can be injected where the bytes leave the process."""
    return os.pwrite(fd, data, pos)


def write_files(
    files: Sequence[OutFile],
    folder: Path,
    values: Values,
    decoded: Mapping[str, Decoded],
    budget: Budget,
    *,
    progress: Callable[[int], None],
    done: Callable[[OutFile], None],
) -> None:
    """Write `files` into `folder`; `progress` gets bytes, `done` each file once the disk has it (one at a time).

    Raises:
        FolderError: a source cannot be read, or the target cannot be written; other workers have stopped then.
    """
    queue = _Queue(files, decoded, budget)
    fds: dict[int, int] = {}
    lock = threading.Lock()

    def descriptor(number: int) -> int:
        with lock:
            if number not in fds:
                flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC
                fds[number] = os.open(folder / files[number].name, flags, 0o644)
            return fds[number]

    def work(stop: threading.Event) -> None:
        buffer = bytearray(budget.piece_bytes)
        own: int | None = None
        begun: dict[int, list[int]] = {}
        while not stop.is_set() and (piece := queue.next(own)) is not None:
            own = piece.file
            if piece.nbytes > len(buffer):
                buffer = bytearray(piece.nbytes)
            view = memoryview(buffer)[: piece.nbytes]
            for at, content, stored, dtype in piece.parts:
                if isinstance(content, bytes):
                    view[at : at + len(content)] = content
                else:
                    size = sum(b.numel for b in content) * dtype.itemsize
                    values.fill(content, stored, dtype, view[at : at + size])
            fd = descriptor(own)
            written = 0
            while written < len(view):
                written += write_at(fd, view[written:], piece.pos + written)
            progress(piece.nbytes)
            ranges = begun.setdefault(own, [piece.pos, 0])
            ranges[1] += piece.nbytes
            if ranges[1] >= SYNC_BYTES:
                # Lets the disk begin now instead of at the sync.
                os.posix_fadvise(fd, ranges[0], piece.pos + piece.nbytes - ranges[0], os.POSIX_FADV_DONTNEED)
                begun[own] = [piece.pos + piece.nbytes, 0]
            if queue.finish(piece):
                os.fsync(fd)
                with lock:
                    os.close(fds.pop(own))
                    done(files[own])

    try:
        with _named(folder):
            in_parallel(work, budget.workers)
    finally:
        for fd in fds.values():
            os.close(fd)


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except FolderError:
        raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FolderError(f"{folder}: the disk or quota is full; free space and start again") from e
        raise FolderError(f"{folder} cannot be written: {e.strerror}") from e


def in_parallel(work: Callable[[threading.Event], None], workers: int) -> None:
    """`work(stop)` in `workers` threads; the first error (or an interrupt) stops all, and is raised."""
    stop = threading.Event()
    threads = torch.get_num_threads()

    def run() -> None:
        try:
            # The workers are the parallelism: threads within each would only wait for each other's cores.
            torch.set_num_threads(1)
            work(stop)
        except BaseException:
            stop.set()
            raise

    try:
        with concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
            futures = [pool.submit(run) for _ in range(workers)]
            try:
                concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            except BaseException:
                stop.set()
                raise
            for future in futures:
                future.result()
    finally:
        torch.set_num_threads(threads)
