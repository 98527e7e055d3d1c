"""What a command of `ckpt` gives back, and the few words that its commands share. `converters.cli` prints it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any, TypeAlias

__all__ = ["Commands", "Outcome", "rate_text", "size_text", "table"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""To which each group adds its commands, with `run=` a function of the arguments that returns an `Outcome`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`report` is what `--json` prints, `lines` what a person reads; `status` 0: all well, 1: problems, listed."""

    report: dict[str, Any]
    lines: Iterable[str]
    status: int = 0


def size_text(count: float) -> str:
    """Bytes in binary units, four digits."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def rate_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.4g} MB/s"


def table(rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines with aligned columns; the first row is the head."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
