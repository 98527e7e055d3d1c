"""A live model written as a Hugging Face folder, by all ranks together and without ever holding more than a tensor.

Each pipeline stage's sender writes its own safetensors files straight from the export; the first rank writes the index
and the config and gives the folder its name last, so a folder that is there is complete.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converters.errors import ConverterError, FolderError, MappingError
from converters.families import rules_for
from converters.live.exporter import ExportedTensor, LiveExporter
from converters.live.groups import ParallelGroups

__all__ = ["write_hf_folder"]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def write_hf_folder(
    chunks: Sequence[Any],
    path: str | os.PathLike[str],
    hf_config: Mapping[str, Any],
    *,
    groups: ParallelGroups | None = None,
    file_bytes: int = 4 << 30,
) -> None:
    """Write the model in `chunks` to the new folder `path`: safetensors, their index, and `config.json`.

    Collective over the default process group (if there is one); returns, or raises, on every rank after the folder has
    its name. `path` must mean the same folder on all senders. `file_bytes` bounds a file, unless one tensor is larger.

    Raises:
        FolderError: `path` exists, or a rank failed; the message says which and why.
        LiveModelError, MappingError: the model cannot be exported (see `LiveExporter`).
    """
    exporter = LiveExporter(chunks, rules_for(hf_config), groups=groups)
    sends = exporter.groups.is_sender
    final = Path(path)
    temp = final.with_name(f".{final.name}.incomplete")
    planned = exporter.tensors()  # collective: on every rank, not on senders only
    # By world rank; a rank that sends nothing has no files.
    files = _exchange(_split(planned, file_bytes) if sends else [])
    total, mine = sum(map(len, files)), sum(map(len, files[: _world_rank()]))
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    first = sends and mine == 0
    try:
        with _all_or_none("make the folder"):
            if first:
                if final.exists():
                    raise FolderError(f"{final} exists already: give a new path")
                shutil.rmtree(temp, ignore_errors=True)
                temp.mkdir(parents=True)
        with _all_or_none("write weights"), contextlib.closing(exporter.export()) as stream:
            for name, tensors in zip(names[mine:], files[_world_rank()], strict=False):
                _write_file(temp / name, tensors, stream)
            for tensor, _ in stream:
                raise AssertionError(f"{tensor.name} comes after the last planned tensor")
        with _all_or_none("complete the folder"):
            if first:
                _write_metadata(temp, dict(zip(names, (f for held in files for f in held), strict=True)), hf_config)
                temp.rename(final)
    finally:
        if first:
            shutil.rmtree(temp, ignore_errors=True)


def _split(tensors: Sequence[ExportedTensor], file_bytes: int) -> list[list[ExportedTensor]]:
    files: list[list[ExportedTensor]] = []
    room = 0
    for tensor in tensors:
        if not files or tensor.nbytes > room:
            files.append([])
            room = file_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files


def _write_file(
    path: Path, tensors: Sequence[ExportedTensor], stream: Iterator[tuple[ExportedTensor, torch.Tensor]]
) -> None:
    """One safetensors file: header length, JSON header, data in the order of `tensors`, which `stream` yields next."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        header[t.name] = {"dtype": _dtype(t), "shape": t.shape, "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for expected in tensors:
            tensor, data = next(stream)
            assert tensor == expected
            file.write(data.reshape(-1).view(torch.uint8).cpu().numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _dtype(tensor: ExportedTensor) -> str:
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise MappingError(f"{tensor.name} is {tensor.dtype}, which is not written to Hugging Face folders") from None


def _write_metadata(folder: Path, files: Mapping[str, Sequence[ExportedTensor]], hf_config: Mapping[str, Any]) -> None:
    tensors = [t for held in files.values() for t in held]
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors)},
        "weight_map": {t.name: name for name, held in files.items() for t in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    sizes: collections.Counter[str] = collections.Counter()
    for t in tensors:
        sizes[str(t.dtype).removeprefix("torch.")] += t.nbytes
    # Norms may be kept in fp32: the weights' dtype is that of most bytes.
    config = {**hf_config, "torch_dtype": sizes.most_common(1)[0][0]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


@contextlib.contextmanager
def _all_or_none(what: str) -> Iterator[None]:
    """Raises on every rank after the block if it failed on one, so that no rank waits for a failed one later."""
    problem: Exception | None = None
    try:
        yield
    except Exception as e:  # noqa: BLE001 - raised again below, on every rank
        problem = e
    failed = {
        rank: text for rank, text in enumerate(_exchange(problem and f"{type(problem).__name__}: {problem}")) if text
    }
    if isinstance(problem, ConverterError):
        raise problem
    if failed:
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise FolderError(f"could not {what}: {reasons}") from problem


def _exchange(value: Any) -> list[Any]:
    """`value` of every rank of the default group, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
