"""Paths to sources: what kind of checkpoint is there, which iteration, and everything wrong with its files.

`open_source` is where a conversion, an inspection and a comparison begin. `reference` finds what Megatron checkpoints
do not hold and Hugging Face folders need: the config, tokenizer files, and names and dtypes of the original tensors.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from checkpoint.errors import CheckpointError
from checkpoint.legacy_zarr import LegacyZarrReader
from converters.errors import FolderError
from converters.hf_folder import read_folder
from converters.offline.remote import is_remote
from converters.offline.sources import HfSource, TorchDistSource, ZarrSource

__all__ = [
    "REFERENCE",
    "WEIGHTS",
    "AnySource",
    "Reference",
    "carried_files",
    "open_source",
    "problems",
    "reference",
    "weights_record",
]

AnySource: TypeAlias = "HfSource | TorchDistSource | ZarrSource"

TRACKER = "latest_checkpointed_iteration.txt"
REFERENCE = "hf"
"""Folder inside a converted Megatron checkpoint with the config and the other files of its Hugging Face origin."""
WEIGHTS = "weights.json"

# Weights in any format, and what is written anew.
_NO_FILES = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors", ".index.json")


def open_source(path: Path, *, iteration: str | None = None) -> AnySource:
    """A source on the checkpoint at `path`; `iteration` ("release" or a number) where it has several.

    Raises:
        FolderError: no checkpoint, or its files are damaged: the message says what is wrong.
    """
    folder = _iteration_folder(path, iteration)
    if not (folder / "metadata.json").exists():
        if (folder / ".metadata").exists():
            raise FolderError(
                f"{folder}: has .metadata but no metadata.json, which is written last: the save did not end"
            )
        found = read_folder(folder)
        return HfSource(found)
    try:
        backend = json.loads((folder / "metadata.json").read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as e:
        raise FolderError(f"{folder}/metadata.json cannot be read: {e}") from e
    try:
        if backend == "zarr" and is_remote(folder):
            raise FolderError(f"{folder} is a legacy zarr checkpoint: copy it here first, it is read from local disks")
        if backend == "zarr":
            return ZarrSource(LegacyZarrReader(folder))
        source = TorchDistSource(folder)
    except CheckpointError as e:
        raise FolderError(str(e)) from e
    return source


def problems(source: AnySource) -> list[str]:
    """Everything wrong with a source's files, as far as headers tell."""
    if isinstance(source, HfSource):
        return list(source.folder.problems)
    if isinstance(source, ZarrSource):
        missing = {
            key: source.reader.missing_chunks(key, [0] * len(h.shape), h.shape) for key, h in source.headers.items()
        }
        return [
            f"{key} lacks {len(m)} of its chunk files ({m[0]}, ...): zeros would be read"
            for key, m in missing.items()
            if m
        ]
    found = [f"{file} is missing: is it on another node?" for file in source.missing_files()]
    found += [f"{file} is truncated: the metadata places more in it" for file in source.truncated_files()]
    try:
        source.reader.index.check()
    except CheckpointError as e:
        found.append(str(e))
    return found


def _iteration_folder(path: Path, iteration: str | None) -> Path:
    if not path.is_dir():
        raise FolderError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
    if (path / "metadata.json").exists() or (path / "config.json").exists():
        if iteration is not None:
            raise FolderError(f"{path} is one checkpoint, not a folder of iterations: leave out --iteration")
        return path
    there = sorted(p.name for p in path.iterdir() if re.fullmatch(r"iter_\d+|release", p.name))
    if iteration is None and (path / TRACKER).exists():
        iteration = (path / TRACKER).read_text().strip()
    if iteration is None:
        if len(there) > 1:
            raise FolderError(f"{path} has {', '.join(there)} and no {TRACKER}: choose with --iteration")
        return path / there[0] if there else path
    name = iteration if iteration == "release" else f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration
    if not (path / name).is_dir():
        raise FolderError(f"{path} has no {name}; it has {', '.join(there) or 'no iterations'}")
    return path / name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What the Hugging Face side of a model is like. `names` and `dtypes` of its tensors, where known."""

    path: Path | None
    config: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]


def reference(source: AnySource, given: Path | None) -> Reference:
    """The Hugging Face side of a Megatron checkpoint: `given` (a folder or a config.json), or what a conversion left.

    Raises:
        FolderError: neither is there, or it has no readable config.
    """
    folder = given
    if folder is None:
        assert not isinstance(source, HfSource)
        folder = source.path / REFERENCE
        if not folder.is_dir():
            raise FolderError(
                f"{source.path} does not say which Hugging Face model it is: name a folder with its config.json "
                "(and tokenizer) by --hf"
            )
    file = folder if folder.is_file() else folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise FolderError(f"{file} cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise FolderError(f"{file} is not a JSON object")
    dtypes: dict[str, torch.dtype] = {}
    if (folder / WEIGHTS).is_file():
        record = json.loads((folder / WEIGHTS).read_text())
        dtypes = {name: getattr(torch, dtype) for name, dtype in record["dtypes"].items()}
    elif folder.is_dir() and any(folder.glob("*.safetensors")):
        dtypes = {t.name: t.dtype for t in read_folder(folder).tensors.values()}
    return Reference(path=folder if folder.is_dir() else None, config=config, dtypes=dtypes)


def weights_record(dtypes: Mapping[str, torch.dtype]) -> bytes:
    """`hf/weights.json`: names and dtypes of the original tensors, so that the way back gives the same ones."""
    return (
        json.dumps({"format": 1, "dtypes": {n: str(d).removeprefix("torch.") for n, d in dtypes.items()}}) + "\n"
    ).encode()


def carried_files(folder: Path | None) -> list[tuple[str, bytes]]:
    """Tokenizer, generation and other small files beside the weights, by name."""
    if folder is None:
        return []
    return [
        (entry.name, entry.read_bytes())
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.is_file()
        and not entry.name.startswith(".")
        and not entry.name.endswith(_NO_FILES)
        and entry.name not in ("config.json", WEIGHTS)
    ]
