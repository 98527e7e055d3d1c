"""What goes from the trainer of a target to the trainer of its draft: one object per step, whatever took part in it.

    intervals = Intervals(collect_every=2, train_every=4)
    if intervals.collects(step): ...                       # capture, Exchange.merge
    handed = CapturedStep(run=..., step=step, replica=replica, rows=merged, tokens=..., supervised=...)
    ref = ray.put(handed)                                  # an object store takes it as it is, or
    path = handed.save(folder / handed.file_name)          # one safetensors file, there as a whole or not at all

An async actor wraps what blocks: `await side.run(exchange.merge, rows, ...)`, `await side.run(handed.save, path)`; one
thread does them in order, and the event loop goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from training_hooks.capture import LayerRef, Rows
from training_hooks.errors import CaptureError, SettingsError

__all__ = ["CapturedStep", "Intervals", "SideThread"]

SCHEMA, VERSION = "training_hooks.captured_step", 1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """States are collected in every `collect_every`-th step, the draft trained in every `train_every`-th, counted from
    step 0 on, always in a step that collects.

    Raises:
        SettingsError: a step that trains would have nothing of its own to train on.
    """

    collect_every: int = 1
    train_every: int = 1

    def __post_init__(self) -> None:
        if min(self.collect_every, self.train_every) < 1 or self.train_every % self.collect_every:
            raise SettingsError(
                f"collect_every is {self.collect_every}, train_every {self.train_every}: both must be positive, and "
                "the second a multiple of the first: drafts are trained on states of the same step"
            )

    def collects(self, step: int) -> bool:
        return step % self.collect_every == 0

    def trains(self, step: int) -> bool:
        return step % self.train_every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedStep:
    """The merged states of one replica in one step, with the tokens that they belong to.

    `rows`: from `Exchange.merge`: the same keys, sorted, for every layer. `tokens` int64 [n] and `supervised` bool [n]
    by sample.

    Raises:
        CaptureError: layers with other keys than the first, or samples without tokens.
    """

    run: str
    step: int
    replica: int
    rows: Mapping[LayerRef, Rows]
    tokens: Mapping[int, torch.Tensor]
    supervised: Mapping[int, torch.Tensor]

    def __post_init__(self) -> None:
        first = next(iter(self.rows.values()), None)
        if first is None:
            raise CaptureError("a captured step without layers: hand over what Exchange.merge returned on rank 0")
        for ref, rows in self.rows.items():
            if not torch.equal(rows.keys, first.keys) or len(rows.values) != len(rows.keys):
                raise CaptureError(f"rows of {ref} are not those of the other layers: hand over one merge of one step")
        lengths = {k: len(t) for k, t in self.tokens.items()}
        if lengths != {k: len(t) for k, t in self.supervised.items()}:
            raise CaptureError("tokens and supervised do not speak of the same samples and lengths")
        if unknown := set(first.keys[:, 0].tolist()) - set(lengths):
            raise CaptureError(f"there are rows of sample {min(unknown)}, but no tokens")

    @property
    def file_name(self) -> str:
        """Unlike for every run, step and replica."""
        return f"{self.run}-step{self.step}-replica{self.replica}.safetensors"

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file; readers see all of it or nothing. Returns the path.

        Raises:
            OSError: the folder is missing or full; no part of the file is left.
        """
        from safetensors.torch import save_file

        path = Path(path)
        samples = sorted(self.tokens)
        tensors = {str(ref): rows.values.contiguous() for ref, rows in self.rows.items()}
        tensors |= {
            "keys": next(iter(self.rows.values())).keys.contiguous(),
            "samples": torch.tensor([[k, len(self.tokens[k])] for k in samples], dtype=torch.int64),
            "tokens": torch.cat([self.tokens[k] for k in samples]),
            "supervised": torch.cat([self.supervised[k].bool() for k in samples]),
        }
        head = {"run": self.run, "step": self.step, "replica": self.replica}
        metadata = {
            "schema": SCHEMA,
            "version": str(VERSION),
            "step": json.dumps(head),
            "layers": json.dumps([[ref.kind, ref.index] for ref in self.rows]),
        }
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, part, metadata)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    @staticmethod
    def load(path: str | Path) -> CapturedStep:
        """Inverse of `save`.

        Raises:
            CaptureError: another kind of file, or one of another version of the schema.
        """
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("schema") != SCHEMA or metadata.get("version") != str(VERSION):
                raise CaptureError(
                    f"{path} is {metadata.get('schema', 'no captured step')} version {metadata.get('version')}, this "
                    f"library reads {SCHEMA} version {VERSION}: use the same release on both sides"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        refs = [LayerRef(kind, index) for kind, index in json.loads(metadata["layers"])]
        samples, lengths = tensors["samples"].unbind(1)

        def by_sample(name: str) -> dict[int, torch.Tensor]:
            return dict(zip(samples.tolist(), tensors[name].split(lengths.tolist()), strict=True))

        rows = {ref: Rows(keys=tensors["keys"], values=tensors[str(ref)]) for ref in refs}
        return CapturedStep(
            **json.loads(metadata["step"]), rows=rows, tokens=by_sample("tokens"), supervised=by_sample("supervised")
        )


class SideThread:
    """One thread for what blocks, so that an event loop need not. Calls run one after another, in their order; a call
    whose awaiter was cancelled is finished all the same, since other ranks take part in it."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="training-hooks")

    async def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`fn(*args, **kwargs)`, its result or its error."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(fn, *args, **kwargs))

    def close(self) -> None:
        """Wait for what was handed in, then end the thread. Idempotent."""
        self._pool.shutdown()
