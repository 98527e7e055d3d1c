"""Brings the captured rows of one model replica together, on a process group of its own, after the pipeline's schedule.

    exchange = Exchange(store, rank, size, run="my-run", replica=dp_rank)      # every rank of the replica, once
    merged = exchange.merge(capture.take(), step=7, expected={sample: length}, layers=[...])

`merge` is collective over the replica: headers (run, step, replica) are compared, the keys of all ranks are checked
against what the batch should have given, exactly once each, and only then do the rows travel to rank 0, which gets the
merged tensors; the others get None. What is wrong raises `CaptureError` on every rank with the same text; a rank that
is missing does so at the deadline, by number. Replicas have store prefixes and groups of their own: they cannot mix.
Frames are JSON and raw tensors. After an error the group is gone: build a new `Exchange` with the next epoch.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from training_hooks.capture import LayerRef, Rows
from training_hooks.errors import CaptureError, SettingsError
from training_hooks.shared_rows import offered, opened

__all__ = ["Exchange"]

_TAG = 7
_SHIFT = 32


class Exchange:
    """One replica's ranks: `rank` of `size`, the first of which collects.

    `store`: reachable by all of them and outliving the exchange. `run`: the same text on every rank; `replica`: number
    of this replica (the data parallel rank); `epoch`: rises with every rebuild. `rows`: how they travel, over gloo, or
    through memory that the ranks of one node share (no file: see `shared_rows`). Building it connects all ranks.

    Raises:
        CaptureError: a rank did not come within `deadline_s`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        run: str,
        replica: int = 0,
        epoch: int = 0,
        deadline_s: float = 60.0,
        rows: Literal["gloo", "memory"] = "gloo",
    ) -> None:
        if rows not in ("gloo", "memory"):
            raise SettingsError(f"rows is {rows!r}: expected 'gloo', or 'memory' where all ranks share one node")
        self._rank, self._size = rank, size
        self._rows = rows
        self._run, self._replica = run, replica
        self._deadline = datetime.timedelta(seconds=deadline_s)
        self._store = dist.PrefixStore(f"capture/{run}/{replica}/{epoch}", store)
        self._round = 0
        self._group: Any = None
        with self._failing("connect"):
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("group", self._store), rank, size, self._deadline)

    def close(self) -> None:
        """Drop the group. Idempotent; a failed exchange is closed already."""
        self._group = None

    def merge(
        self,
        rows: Mapping[LayerRef, Rows],
        *,
        step: int,
        expected: Mapping[int, int] | Mapping[int, Sequence[int]],
        layers: Sequence[LayerRef],
    ) -> dict[LayerRef, Rows] | None:
        """The rows of all ranks, per layer, sorted by key; on rank 0, None elsewhere.

        Args:
            rows: what this rank captured; may lack layers that other stages own.
            step: of this rank's batch; must be the same on all of them.
            expected: sample -> its length, or the positions that were to be captured. Of the whole replica.
            layers: what was to be captured, over all stages.

        Raises:
            CaptureError: on every rank: another step, run or expectation somewhere, rows missing, doubled or unknown, a
                rank lost or late.
        """
        if self._group is None:
            raise CaptureError("this exchange is closed (or failed before): build a new one with the next epoch")
        self._round += 1
        wanted_layers = sorted({ref.canonical for ref in layers})
        wanted = torch.tensor(sorted(_wanted_keys(expected)), dtype=torch.int64)
        mine = {ref.canonical: r for ref, r in rows.items() if len(r.keys)}
        order = sorted(mine)
        header = {
            "run": self._run,
            "replica": self._replica,
            "step": step,
            "way": self._rows,
            "layers": [str(ref) for ref in wanted_layers],
            "rows": len(wanted),
            "crc": zlib.crc32(wanted.numpy().tobytes()),
            "parts": [
                [str(r), len(mine[r].keys), mine[r].values.shape[1], str(mine[r].values.dtype).split(".")[1]]
                for r in order
            ],
        }
        with self._failing("exchange headers"):
            headers = [json.loads(bytes(h.tolist())) for h in self._gather(_as_bytes(header))]
        packed = [(mine[r].keys[:, 0] << _SHIFT) | mine[r].keys[:, 1] for r in order]
        with self._failing("exchange keys"):
            keys = self._gather(torch.cat(packed) if packed else torch.zeros(0, dtype=torch.int64))
        # All ranks hold the same headers and keys from here on, so all of them come to the same verdict.
        self._compare(headers)
        places = self._check(headers, keys, wanted, wanted_layers)
        with self._failing("move rows"):
            return self._move(headers, mine, order, wanted, wanted_layers, places)

    # ---- inside ----

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The one-dimensional tensors of all ranks, which may differ in length."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        self._wait(self._group.allgather([lengths], [torch.tensor([tensor.numel()])]))
        longest = max(int(n) for n in lengths)
        if longest == 0:
            return [tensor[:0] for _ in lengths]
        padded = torch.zeros(longest, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor
        out = [torch.empty_like(padded) for _ in range(self._size)]
        self._wait(self._group.allgather([out], [padded]))
        return [t[: int(n)] for t, n in zip(out, lengths, strict=True)]

    def _compare(self, headers: Sequence[Mapping[str, Any]]) -> None:
        for field in ("run", "replica", "step", "way", "layers", "rows", "crc"):
            values = [h[field] for h in headers]
            if any(v != values[0] for v in values):
                self._refuse(
                    f"ranks do not agree on {field}: {dict(enumerate(values))}; every rank must merge the same "
                    "batch of the same step"
                )

    def _check(
        self,
        headers: Sequence[Mapping[str, Any]],
        keys: Sequence[torch.Tensor],
        wanted: torch.Tensor,
        layers: Sequence[LayerRef],
    ) -> dict[tuple[int, str], torch.Tensor]:
        """(rank, layer) -> index of its rows among the wanted ones; raises unless each is there exactly once."""
        places: dict[tuple[int, str], torch.Tensor] = {}
        counts = {str(ref): torch.zeros(len(wanted), dtype=torch.int64) for ref in layers}
        sources: dict[str, set[int]] = {str(ref): set() for ref in layers}
        forms: dict[str, tuple[int, str]] = {}
        for rank, (header, own) in enumerate(zip(headers, keys, strict=True)):
            start = 0
            for layer, count, width, dtype in header["parts"]:
                if forms.setdefault(layer, (width, dtype)) != (width, dtype):
                    self._refuse(f"rank {rank} has {layer} as {dtype} x {width}, others as {forms[layer]}")
                part = own[start : start + count]
                start += count
                if layer not in counts:
                    self._refuse(f"rank {rank} captured {layer}, which nobody asked for (asked: {sorted(counts)})")
                index = torch.searchsorted(wanted, part).clamp(max=max(len(wanted) - 1, 0))
                unknown = part[wanted[index] != part] if len(wanted) else part
                if len(unknown):
                    self._refuse(
                        f"rank {rank} has {len(unknown)} rows of {layer} that were not expected, {_say(unknown)}"
                    )
                counts[layer] += torch.bincount(index, minlength=len(wanted))
                sources[layer].add(rank)
                places[rank, layer] = index
        for layer, count in counts.items():
            for verdict, bad in (("missing", count == 0), ("there more than once", count > 1)):
                if bool(bad.any()):
                    self._refuse(
                        f"{int(bad.sum())} of {len(wanted)} rows of {layer} are {verdict}, {_say(wanted[bad])} (rows "
                        f"of this layer came from ranks {sorted(sources[layer])} of {self._size})"
                    )
        return places

    def _move(
        self,
        headers: Sequence[Mapping[str, Any]],
        mine: Mapping[LayerRef, Rows],
        order: Sequence[LayerRef],
        wanted: torch.Tensor,
        layers: Sequence[LayerRef],
        places: Mapping[tuple[int, str], torch.Tensor],
    ) -> dict[LayerRef, Rows] | None:
        if self._rank != 0:
            values = [mine[ref].values for ref in order]
            if self._rows == "memory":
                with offered(values) as address:
                    self._gather(_as_bytes(address))
                    self._conclude(None)
                return None
            for value in values:
                self._wait(self._group.send([_raw(value)], 0, _TAG))
            self._conclude(None)
            return None
        out: dict[str, torch.Tensor] = {}

        def place(rank: int, layer: str, values: torch.Tensor) -> None:
            shape = (len(wanted), values.shape[1])
            out.setdefault(layer, torch.empty(shape, dtype=values.dtype))[places[rank, layer]] = values

        for ref in order:
            place(0, str(ref), mine[ref].values)
        problem: str | None = None
        if self._rows == "memory":
            addresses = [json.loads(bytes(a.tolist())) for a in self._gather(_as_bytes({}))]
            try:
                for rank in range(1, self._size):
                    with opened(addresses[rank]) as parts:
                        for raw, (layer, count, width, dtype) in zip(parts, headers[rank]["parts"], strict=True):
                            place(rank, layer, raw.view(getattr(torch, dtype)).view(count, width))
            except CaptureError as error:
                problem = str(error)
        else:
            for rank in range(1, self._size):
                for layer, count, width, dtype in headers[rank]["parts"]:
                    received = torch.empty(count, width, dtype=getattr(torch, dtype))
                    self._wait(self._group.recv([_raw(received)], rank, _TAG))
                    place(rank, layer, received)
        self._conclude(problem)
        merged_keys = torch.stack([wanted >> _SHIFT, wanted & ((1 << _SHIFT) - 1)], 1)
        empty = torch.zeros(0, 0)
        return {ref: Rows(keys=merged_keys, values=out.get(str(ref), empty)) for ref in layers}

    def _conclude(self, problem: str | None) -> None:
        """The others wait for this: a collector that failed must not leave them believing that all is well."""
        verdicts = [json.loads(bytes(v.tolist())) for v in self._gather(_as_bytes({"problem": problem}))]
        if verdicts[0]["problem"] is not None:
            self._refuse(verdicts[0]["problem"])

    def _wait(self, work: Any) -> None:
        work.wait(self._deadline)

    def _refuse(self, what: str) -> None:
        self.close()
        raise CaptureError(f"replica {self._replica}: {what}")

    @contextlib.contextmanager
    def _failing(self, phase: str) -> Any:
        """Marks this rank as present in `phase`; what breaks in it becomes a CaptureError that names who is not."""
        mark = f"{self._round}/{phase}/"
        try:
            self._store.set(mark + str(self._rank), "1")
            yield
        except CaptureError:
            raise
        except Exception as error:
            self.close()
            raise CaptureError(
                f"replica {self._replica}: could not {phase} within {self._deadline.total_seconds():g} s"
                f"{self._absent(mark)}; look at what those ranks do, then build a new exchange with the next "
                f"epoch ({error})"
            ) from error

    def _absent(self, mark: str) -> str:
        try:
            absent = [rank for rank in range(self._size) if not self._store.check([mark + str(rank)])]
        except Exception as error:  # noqa: BLE001 - the store itself is gone, which is the answer
            return f", and the store does not answer either ({error})"
        return f": rank {', '.join(map(str, absent))} did not come" if absent else ": a rank was lost on the way"


def _wanted_keys(expected: Mapping[int, Any]) -> list[int]:
    out = []
    for sample, positions in expected.items():
        for position in range(positions) if isinstance(positions, int) else positions:
            out.append((sample << _SHIFT) | int(position))  # noqa: PERF401 - two loops read better
    if len(set(out)) != len(out):
        raise CaptureError("a position is expected twice: list each position of a sample once")
    return out


def _say(keys: torch.Tensor) -> str:
    first = int(keys[0])
    return f"e.g. sample {first >> _SHIFT}, position {first & ((1 << _SHIFT) - 1)}"


def _as_bytes(header: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)


def _raw(values: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: gloo knows few dtypes."""
    return values.contiguous().view(-1).view(torch.uint8)
