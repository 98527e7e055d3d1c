"""`ckpt ls`, `show` and `verify`: what a root holds, what is in a checkpoint, and whether it is what was sealed."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint.cli.outcome import Commands, Outcome, size_text, table
from checkpoint.cli.places import Step, add_storage_options, existing_folder, open_durable, open_step
from checkpoint.drain import drained_to
from checkpoint.durable import Durable
from checkpoint.errors import CheckpointError, FormatError
from checkpoint.layout import TRACKER, committed_path, committed_steps, leftovers
from checkpoint.seals import CommitRecord, read_commit
from checkpoint.storage import is_url

__all__ = ["add_commands"]

SCHEMA_VERSION = 1


def add_commands(commands: Commands) -> None:
    command = commands.add_parser("ls", help="the checkpoints of a root, and what attempts left behind")
    command.add_argument("root", metavar="ROOT", help="folder given to Checkpointer, or a URL that was drained to")
    add_storage_options(command)
    command.set_defaults(run=_ls)
    command = commands.add_parser("show", help="what is in one checkpoint")
    command.add_argument("place", metavar="PLACE", help="ROOT/iter_<step>, of a folder or a URL")
    command.add_argument("--keys", default="*", metavar="PATTERN", help="only these tensors and objects, as in a shell")
    add_storage_options(command)
    command.set_defaults(run=_show)
    command = commands.add_parser("verify", help="digest every file and compare it with what was sealed")
    command.add_argument("place", metavar="PLACE", help="ROOT/iter_<step>, of a folder or a URL")
    command.add_argument("--peer", action="append", default=[], metavar="FOLDER", help="same step of another node")
    add_storage_options(command)
    command.set_defaults(run=_verify)


def _ls(args: argparse.Namespace) -> Outcome:
    report: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "root": args.root, "tracker": None, "leftovers": []}
    problems: list[str] = []
    if is_url(args.root):
        durable = open_durable(args.root, args)
        listing = durable.listing()
        rows = [
            _row(step, durable.sizes(step), functools.partial(durable.record, step))
            for step, whole in listing.items()
            if whole
        ]
        report["leftovers"] = [_undrained(durable, step) for step, whole in listing.items() if not whole]
    else:
        root = existing_folder(args.root)
        rows = []
        for step in committed_steps(root):
            path = committed_path(root, step)
            row = _row(step, _sizes(path), functools.partial(read_commit, path / "commit.json"))
            rows.append({**row, "drained_to": drained_to(path)})
        report["tracker"] = _tracker(root)
        if report["tracker"] is not None and report["tracker"] not in [r["step"] for r in rows]:
            problems.append(f"{root / TRACKER} points at step {report['tracker']}, which is not there")
        for left in leftovers(root):
            verdict = "an owner may be alive" if left.alive else "complete: `ckpt rebuild`" if left.complete else "dead"
            report["leftovers"].append(
                {
                    "path": str(left.path),
                    "step": left.step,
                    "attempt": left.attempt,
                    "bytes": sum(_sizes(left.path).values()),
                    "seals": left.num_seals,
                    "world_size": left.world_size,
                    "alive": list(left.alive),
                    "verdict": verdict,
                }
            )
    problems += [f"step {row['step']}: {row['error']}" for row in rows if row["error"]]
    report |= {"checkpoints": rows, "problems": problems}
    return Outcome(report=report, lines=_ls_lines(report), status=1 if problems else 0)


def _undrained(durable: Durable, step: int) -> dict[str, Any]:
    sizes = durable.sizes(step)
    marks = sum(name.startswith("drained.") for name in sizes)
    return {
        "path": durable.place(step),
        "step": step,
        "attempt": None,
        "bytes": sum(sizes.values()),
        "seals": 0,
        "world_size": None,
        "alive": [],
        "verdict": f"not drained to its end ({marks} nodes are done): `ckpt drain` goes on",
    }


def _sizes(path: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in path.iterdir() if p.is_file()}


def _row(step: int, sizes: dict[str, int], read: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "bytes": sum(sizes.values()),
        "files": len(sizes),
        "by": "weightsync" if "commit.json" in sizes else "stock",
        "ranks": None,
        "nodes": None,
        "attempt": None,
        "drained_to": None,
        "error": None,
    }
    if row["by"] == "weightsync":
        try:
            record = read()
        except FormatError as e:
            row["error"] = str(e)
        else:
            nodes = {seal.node for seal in record.seals}
            row |= {"ranks": len(record.seals), "nodes": len(nodes), "attempt": record.attempt}
    return row


def _tracker(root: Path) -> int | None:
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def _ls_lines(report: dict[str, Any]) -> Iterator[str]:
    head = ["step", "bytes", "files", "ranks", "nodes", "saved by", "drained to", ""]
    rows = [
        [
            str(row["step"]),
            size_text(row["bytes"]),
            str(row["files"]),
            str(row["ranks"] or "?"),
            str(row["nodes"] or "?"),
            row["by"],
            row["drained_to"] or "-",
            "<- tracker" if row["step"] == report["tracker"] else "",
        ]
        for row in report["checkpoints"]
    ]
    yield from table([head, *rows])
    yield f"{len(report['checkpoints'])} checkpoint(s) in {report['root']}"
    for left in report["leftovers"]:
        alive = f" ({', '.join(left['alive'])})" if left["alive"] else ""
        seals = f"{left['seals']} of {left['world_size'] or '?'} seals  " if left["attempt"] else ""
        yield f"left over: {left['path']}  {size_text(left['bytes'])}  {seals}{left['verdict']}{alive}"
    yield from (f"problem: {problem}" for problem in report["problems"])


def _show(args: argparse.Namespace) -> Outcome:
    place = open_step(args.place, args)
    try:
        report = _contents(place, args.keys)
    except CheckpointError as e:
        # Without metadata it is no checkpoint, but what is known of it helps to decide about `rebuild`.
        report = {**_head(place), "tensors": [], "objects": [], "common": None, "problems": [str(e)]}
    return Outcome(report=report, lines=_show_lines(report), status=1 if report["problems"] else 0)


def _head(place: Step) -> dict[str, Any]:
    record = place.record
    return {
        "schema_version": SCHEMA_VERSION,
        "path": place.place,
        "step": place.step,
        "bytes": sum(place.sizes.values()),
        "files": place.sizes,
        "commit": None if record is None else _commit(record, place.sizes),
    }


def _commit(record: CommitRecord, here: dict[str, int]) -> dict[str, Any]:
    return {
        "attempt": record.attempt,
        "node": record.node,
        "ranks": [
            {
                "rank": seal.rank,
                "host": seal.host,
                "node": seal.node,
                "bytes": sum(file.nbytes for file in seal.files),
                "here": all(file.name in here for file in seal.files),
            }
            for seal in record.seals
        ],
    }


def _contents(place: Step, pattern: str) -> dict[str, Any]:
    problems: list[str] = []
    common: dict[str, Any] = {}
    with place.open() as folder:
        index = folder.index
        try:
            common = folder.common()
        except FormatError as e:
            # Newer Megatron-Core keeps it among the objects.
            if not any(key.startswith("common_state") for key in index.objects):
                problems.append(str(e))
    try:
        index.check()
    except FormatError as e:
        problems.append(str(e))
    missing = sorted(set(index.files()) - place.sizes.keys())
    if missing:
        elsewhere = place.record is not None and len({seal.node for seal in place.record.seals}) > 1
        where = "they may lie on other nodes, see `commit`" if elsewhere else "see `ckpt verify`"
        problems += [] if elsewhere else [f"{len(missing)} data files are not here ({missing[:3]}): {where}"]
    return {
        **_head(place),
        "tensors": [
            {
                "key": key,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "bytes": math.prod(entry.shape) * entry.dtype.itemsize,
                "shards": len(entry.chunks),
            }
            for key, entry in sorted(index.tensors.items())
            if fnmatch.fnmatchcase(key, pattern)
        ],
        "objects": [key for key in sorted(index.objects) if fnmatch.fnmatchcase(key, pattern)],
        "common": {str(key): _brief(value) for key, value in common.items()},
        "not_here": missing,
        "problems": problems,
    }


def _brief(value: Any) -> Any:
    """Plain values as they are, others by their kind: arguments of a run are hundreds of lines."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, list, tuple)) else type(value).__name__


def _show_lines(report: dict[str, Any]) -> Iterator[str]:
    step = "" if report["step"] is None else f", step {report['step']}"
    yield f"{report['path']}{step}: {size_text(report['bytes'])} in {len(report['files'])} files"
    if report["commit"] is None:
        yield "no commit record: saved by stock Megatron-Core or not committed; there are no digests to verify"
    else:
        yield f"attempt {report['commit']['attempt']}, this is the folder of node {report['commit']['node']}"
        for rank in report["commit"]["ranks"]:
            here = "" if rank["here"] else "  (not here)"
            yield f"  rank {rank['rank']} on {rank['host']}, node {rank['node']}: {size_text(rank['bytes'])}{here}"
    if report["common"] is not None:
        yield "common: " + ", ".join(f"{key}={value}" for key, value in report["common"].items())
    yield f"{len(report['tensors'])} tensors, {size_text(sum(t['bytes'] for t in report['tensors']))}"
    for tensor in report["tensors"]:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        shards = f"{tensor['shards']} shard(s)"
        yield f"  {tensor['key']}  {tensor['dtype']}  {shape}  {size_text(tensor['bytes'])}  {shards}"
    yield f"{len(report['objects'])} objects"
    yield from (f"  {key}" for key in report["objects"])
    yield from (f"problem: {problem}" for problem in report["problems"])


def _verify(args: argparse.Namespace) -> Outcome:
    place = open_step(args.place, args)
    found = list(place.prove(args.peer))
    problems = [str(problem) for _, problem in found if problem is not None]
    nodes = set() if place.record is None else {seal.node for seal in place.record.seals}
    report = {
        "schema_version": SCHEMA_VERSION,
        "path": place.place,
        "files": len(found),
        "bytes": sum(nbytes for nbytes, problem in found if problem is None),
        "not_looked_at": "files of other nodes: give their folders with --peer"
        if len(nodes) > 1 and not args.peer and not is_url(args.place)
        else None,
        "problems": problems,
    }

    def lines() -> Iterator[str]:
        yield f"{report['files']} files of {report['path']} digested, {size_text(report['bytes'])} as sealed"  # type: ignore[arg-type]
        if report["not_looked_at"]:
            yield f"not looked at: {report['not_looked_at']}"
        yield from (f"problem: {problem}" for problem in problems)
        yield f"{len(problems)} problem(s)"

    return Outcome(report=report, lines=lines(), status=1 if problems else 0)
