"""`ckpt inspect`: a Hugging Face folder, from its headers alone, and how it maps to Megatron-Core.

`converters.cli` registers it (`add_commands`) and prints what it gives back.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint.cli.outcome import Commands, Outcome, size_text
from converters.errors import ConverterError, MappingError
from converters.families import rules_for
from converters.hf_folder import HfFolder, read_folder
from converters.rules.ruleset import RuleSet, account

__all__ = ["add_commands"]

SCHEMA_VERSION = 1


def add_commands(commands: Commands) -> None:
    command = commands.add_parser("inspect", help="a Hugging Face folder and how it maps to Megatron-Core")
    command.add_argument("path", type=Path, metavar="PATH", help="folder with config.json and *.safetensors")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> Outcome:
    report = _inspect(read_folder(args.path))
    return Outcome(report=report, lines=_lines(report), status=1 if report["problems"] else 0)


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


def _lines(report: dict[str, Any]) -> Iterator[str]:
    dtypes: collections.Counter[str] = collections.Counter()
    for tensor in report["tensors"]:
        dtypes[tensor["dtype"]] += tensor["bytes"]
    shares = ", ".join(f"{name} {size_text(count)}" for name, count in sorted(dtypes.items()))
    yield f"{report['path']}: Hugging Face folder, family {report['family'] or 'unknown'}"
    yield f"{report['tensor_count']} tensors, {size_text(report['bytes'])} in {len(report['shards'])} file(s): {shares}"
    for tensor in report["tensors"]:
        shape = "x".join(str(size) for size in tensor["shape"]) or "scalar"
        target = ", ".join(tensor["megatron"]) or "?"
        yield f"  {tensor['name']}  {tensor['dtype']}  {shape}  {size_text(tensor['bytes'])}  {target}"
    for problem in report["problems"]:
        yield f"problem: {problem}"
    yield f"{len(report['problems'])} problem(s)"
