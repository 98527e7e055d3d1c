"""Roots and steps as a shell names them: a folder, or a URL that fsspec opens with `--storage-options FILE`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoint.durable import Durable
from checkpoint.errors import ConfigError, FormatError
from checkpoint.format.folder import TorchDistReader
from checkpoint.layout import step_of
from checkpoint.load import prove
from checkpoint.seals import CommitRecord, read_commit
from checkpoint.storage import is_url

__all__ = ["Step", "add_storage_options", "existing_folder", "open_durable", "open_step", "storage_options"]


def add_storage_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--storage-options", metavar="FILE", help="JSON object for fsspec, where a place is a URL; - reads stdin"
    )


def storage_options(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError: not readable, or no JSON object."""
    source = args.storage_options
    if source is None:
        return {}
    try:
        value = json.loads(sys.stdin.read() if source == "-" else Path(source).read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"--storage-options {source}: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"--storage-options {source}: expected a JSON object, got {type(value).__name__}")
    return value


def existing_folder(place: str) -> Path:
    """Raises ConfigError: there is none."""
    path = Path(place)
    if not path.is_dir():
        raise ConfigError(f"{place} is no folder" if path.exists() else f"{place}: no such folder")
    return path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One checkpoint, here or behind a URL."""

    place: str
    step: int | None
    """None: its name does not tell."""
    sizes: dict[str, int]
    """Files and their bytes."""
    record: CommitRecord | None
    """None: saved by stock Megatron-Core, or not committed."""
    open: Callable[[], TorchDistReader]
    prove: Callable[[Sequence[str]], Iterator[tuple[int, FormatError | None]]]
    """Given folders of other nodes: of each file its bytes and what is wrong with it."""


def open_durable(url: str, args: argparse.Namespace) -> Durable:
    return Durable(url, storage_options(args))


def open_step(place: str, args: argparse.Namespace) -> Step:
    """Raises ConfigError: nothing there; FormatError: a damaged commit record."""
    if is_url(place):
        root, _, name = place.rstrip("/").rpartition("/")
        step = step_of(name)
        if step is None:
            raise ConfigError(f"{place} does not end in iter_<step>: give one checkpoint of that root")
        durable = open_durable(root, args)
        sizes = durable.sizes(step)
        if not sizes:
            raise ConfigError(f"{place}: nothing there")
        remote = durable.record(step) if "commit.json" in sizes else None
        return Step(
            place=place,
            step=step,
            sizes=sizes,
            record=remote,
            open=lambda: durable.open(step),
            prove=lambda others: durable.prove(step),
        )
    path = existing_folder(place)
    try:
        record = read_commit(path / "commit.json")
    except FileNotFoundError:
        record = None
    if record is None and not (path / ".metadata").exists() and not any(path.glob("*.distcp")):
        hint = f": give one of its checkpoints, or see `ckpt ls {place}`" if any(path.glob("iter_*")) else ""
        raise ConfigError(f"{place} is no torch_dist checkpoint{hint}")
    return Step(
        place=place,
        step=record.step if record is not None else step_of(path.name),
        sizes={p.name: p.stat().st_size for p in sorted(path.iterdir()) if p.is_file()},
        record=record,
        open=lambda: TorchDistReader(path),
        prove=lambda others: (
            (file.nbytes, problem) for file, problem in prove(path, others=[existing_folder(o) for o in others])
        ),
    )
