"""`ckpt inspect`: a Hugging Face folder or a Megatron checkpoint, from headers alone, and what its names are elsewhere.

`converters.cli` registers it (`add_commands`) and prints what it gives back.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from checkpoint.cli.outcome import Commands, Outcome, size_text
from converters.errors import ConverterError, FolderError, MappingError
from converters.families import rules_for
from converters.hf_folder import HfFolder
from converters.offline import places
from converters.offline.keys import Stored, is_optimizer, layout_of, weights_of
from converters.offline.remote import place
from converters.offline.sources import HfSource, TorchDistSource, ZarrSource
from converters.rules.ruleset import RuleSet, account

__all__ = ["add_commands"]

SCHEMA_VERSION = 1
SHOWN = 4


def add_commands(commands: Commands) -> None:
    command = commands.add_parser("inspect", help="a Hugging Face folder or a Megatron checkpoint, and how it maps")
    command.add_argument("path", metavar="PATH", help="its folder, one with iterations, or a URL that fsspec opens")
    command.add_argument("--iteration", metavar="N", help="of a Megatron checkpoint: a number or `release`")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> Outcome:
    source = places.open_source(place(args.path), iteration=args.iteration)
    with contextlib.closing(source):
        report = _inspect(source.folder) if isinstance(source, HfSource) else _inspect_megatron(source)
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


def _inspect_megatron(source: TorchDistSource | ZarrSource) -> dict[str, Any]:
    """The report of a Megatron checkpoint, as JSON values; of optimizer state only how much there is."""
    problems = places.problems(source)
    optimizer = [key for key in source.headers if is_optimizer(key)]
    weights = {key: header for key, header in source.headers.items() if key not in set(optimizer)}
    held = {key: list(weights_of(key, header.shape)) for key, header in weights.items()}
    rules: RuleSet | None = None
    unmapped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    try:
        origin = places.reference(source, None)
    except FolderError:
        origin = None  # checkpoints of trainers do not say which model they are
    if origin is not None:
        try:
            rules = rules_for(origin.config, list(origin.dtypes) or None)
        except ConverterError as e:
            problems.append(str(e))
    if rules is not None:
        # The halves of a weight are one name.
        names = dict.fromkeys(rules.canonical(stored.name) for found in held.values() for stored in found)
        account_ = account(rules, names, "mcore")
        unmapped, missing = account_.unmapped, account_.missing
        problems += [f"{name} is not known to the {rules.family} rules" for name in unmapped]
        problems += [f"{name} is missing: the {rules.family} rules need it" for name in missing]
    chunks = {k: len(e.chunks) for k, e in source.reader.index.tensors.items()} if _is_dist(source) else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(source.path),
        "layout": f"torch_dist, {layout_of(weights)}" if _is_dist(source) else "zarr",
        "family": rules.family if rules else None,
        "shards": list(source.reader.index.files()) if _is_dist(source) else [],
        "tensor_count": len(weights),
        "bytes": sum(header.nbytes for header in weights.values()),
        "tensors": [
            {
                "name": key,
                "dtype": str(header.dtype).removeprefix("torch."),
                "shape": list(header.shape),
                "bytes": header.nbytes,
                "chunks": chunks.get(key),
                "huggingface": _hf_names(rules, held[key]),
            }
            for key, header in weights.items()
        ],
        "optimizer_keys": len(optimizer),
        "optimizer_bytes": sum(source.headers[key].nbytes for key in optimizer),
        "objects": len(source.objects),
        "unread": [],
        "unmapped": list(unmapped),
        "missing": list(missing),
        "problems": problems,
    }


def _is_dist(source: TorchDistSource | ZarrSource) -> TypeGuard[TorchDistSource]:
    return isinstance(source, TorchDistSource)


def _hf_names(rules: RuleSet | None, held: Sequence[Stored]) -> list[str]:
    found = (rules.by_mcore(stored.name) for stored in held) if rules else ()
    return list(dict.fromkeys(name for mapping in found if mapping for name in mapping.hf))


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
    kind = "Hugging Face folder" if report["layout"] == "huggingface" else f"Megatron checkpoint ({report['layout']})"
    yield f"{report['path']}: {kind}, family {report['family'] or 'unknown'}"
    yield f"{report['tensor_count']} tensors, {size_text(report['bytes'])} in {len(report['shards'])} file(s): {shares}"
    for tensor in report["tensors"]:
        shape = "x".join(str(size) for size in tensor["shape"]) or "scalar"
        names = tensor["megatron"] if "megatron" in tensor else tensor["huggingface"]
        target = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "") or "?"
        yield f"  {tensor['name']}  {tensor['dtype']}  {shape}  {size_text(tensor['bytes'])}  {target}"
    if report.get("optimizer_keys"):
        yield f"optimizer state: {report['optimizer_keys']} keys, {size_text(report['optimizer_bytes'])}"
    for problem in report["problems"]:
        yield f"problem: {problem}"
    yield f"{len(report['problems'])} problem(s)"
