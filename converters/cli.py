"""`ckpt`: look at checkpoints from a shell.

    ckpt inspect PATH [--json]   a Hugging Face folder: tensors, shapes, dtypes, bytes, its family, the Megatron name of
                                 each tensor, and everything wrong with it. Reads headers only.

Exit codes: 0 all well, 1 problems found (listed), 2 wrong usage (a line on stderr says what).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converters.errors import ConverterError, FolderError, MappingError
from converters.families import rules_for
from converters.hf_folder import HfFolder, read_folder
from converters.rules.ruleset import RuleSet, account

__all__ = ["main"]

SCHEMA_VERSION = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ckpt", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="show a Hugging Face folder and how it maps to Megatron-Core")
    command.add_argument("path", type=Path, metavar="PATH", help="folder with config.json and *.safetensors")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 2
    try:
        report = _inspect(read_folder(arguments.path))
    except FolderError as e:
        print(f"ckpt inspect: {e}", file=sys.stderr)
        return 2
    try:
        if arguments.json:
            print(json.dumps(report, indent=1))
        else:
            _print(report)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; the interpreter must not try to flush again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if report["problems"] else 0


def _inspect(folder: HfFolder) -> dict[str, Any]:
    """The report, as JSON values."""
    problems = list(folder.problems)
    rules: RuleSet | None = None
    unmapped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    # What a broken shard should hold is reported once, by that shard's line.
    names = (*folder.tensors, *folder.unread)
    if folder.config is not None:
        try:
            rules = rules_for(folder.config, names)
        except ConverterError as e:
            problems.append(str(e))
    if rules is not None:
        found = account(rules, names)
        unmapped, missing = found.unmapped, found.missing
        problems += [f"{name} is not known to the {rules.family} rules" for name in unmapped]
        problems += [f"{name} is missing: the {rules.family} rules need it" for name in missing]
        problems += _misfits(folder, rules)
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(folder.path),
        "layout": "huggingface",
        "family": rules.family if rules else None,
        "shards": list(folder.shards),
        "tensor_count": len(folder.tensors),
        "bytes": folder.nbytes,
        "tensors": [
            {
                "name": t.name,
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": list(t.shape),
                "bytes": t.nbytes,
                "file": t.file,
                "megatron": list(mapping.mcore) if rules and (mapping := rules.by_hf(t.name)) else [],
            }
            for t in folder.tensors.values()
        ],
        "unread": list(folder.unread),
        "unmapped": list(unmapped),
        "missing": list(missing),
        "problems": problems,
    }


def _misfits(folder: HfFolder, rules: RuleSet) -> list[str]:
    """Shapes and dtypes that the rules cannot turn into Megatron tensors: every mapping is run without data."""
    problems = []
    for mapping in rules.mappings():
        sources = mapping.hf_sources(folder.tensors)
        if all(name in folder.tensors for name in sources):
            try:
                mapping.mcore_meta({name: (folder.tensors[name].shape, folder.tensors[name].dtype) for name in sources})
            except MappingError as e:
                problems.append(str(e))
    return problems


def _print(report: dict[str, Any]) -> None:
    dtypes: collections.Counter[str] = collections.Counter()
    for tensor in report["tensors"]:
        dtypes[tensor["dtype"]] += tensor["bytes"]
    shares = ", ".join(f"{name} {_size(count)}" for name, count in sorted(dtypes.items()))
    print(f"{report['path']}: Hugging Face folder, family {report['family'] or 'unknown'}")
    print(f"{report['tensor_count']} tensors, {_size(report['bytes'])} in {len(report['shards'])} file(s): {shares}")
    for tensor in report["tensors"]:
        shape = "x".join(str(size) for size in tensor["shape"]) or "scalar"
        target = ", ".join(tensor["megatron"]) or "?"
        print(f"  {tensor['name']}  {tensor['dtype']}  {shape}  {_size(tensor['bytes'])}  {target}")
    for problem in report["problems"]:
        print(f"problem: {problem}")
    print(f"{len(report['problems'])} problem(s)")


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
