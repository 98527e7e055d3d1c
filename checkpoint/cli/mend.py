"""`ckpt rebuild`, `drain` and `prune`: make a checkpoint of what is left, copy it away, remove what nobody needs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint.cli.outcome import Commands, Outcome, size_text
from checkpoint.cli.places import add_storage_options, existing_folder, storage_options
from checkpoint.drain import drain, drained_to, refuse_root
from checkpoint.errors import CheckpointError, ConfigError
from checkpoint.layout import (
    LeftOver,
    clean_up,
    committed_path,
    committed_steps,
    leftovers,
    saving_step,
    useless,
)
from checkpoint.rebuild import rebuild
from checkpoint.retention import Retention, doomed, prune
from checkpoint.storage import is_url

__all__ = ["add_commands"]

SCHEMA_VERSION = 1


def add_commands(commands: Commands) -> None:
    command = commands.add_parser("rebuild", help="make a checkpoint of complete data without metadata")
    command.add_argument("folder", metavar="FOLDER", help="with the data files of all ranks, or of a node's")
    command.add_argument(
        "--sibling", metavar="FOLDER", help="a loadable checkpoint of the same structure, where seals are missing"
    )
    command.add_argument(
        "--keep-name", action="store_true", help="do not rename .saving-iter_<step>-... to iter_<step> afterwards"
    )
    command.add_argument(
        "--peer", action="append", default=[], metavar="FOLDER", help="same attempt on another node; becomes one, too"
    )
    command.set_defaults(run=_rebuild)
    command = commands.add_parser("drain", help="copy committed steps to durable storage")
    command.add_argument("root", metavar="ROOT", help="folder given to Checkpointer")
    command.add_argument("url", metavar="URL", help="what fsspec opens: s3://bucket/run, file:///mnt/durable")
    command.add_argument("--step", type=int, action="append", metavar="N", help="these (default: all not drained yet)")
    command.add_argument("--mb-per-s", type=float, metavar="MB", help="upper bound of the rate, in 10^6 bytes")
    add_storage_options(command)
    command.set_defaults(run=_drain)
    command = commands.add_parser("prune", help="remove committed steps that need not stay, and dead attempts")
    command.add_argument("root", metavar="ROOT", help="folder given to Checkpointer")
    command.add_argument("--keep-last", type=int, metavar="N", help="the newest N steps stay (default: all)")
    command.add_argument("--keep-every", type=int, metavar="N", help="multiples of N stay, too")
    command.add_argument("--leftovers", action="store_true", help="also attempts whose owners are provably gone")
    command.add_argument("--undrained", action="store_true", help="also steps that were drained nowhere")
    command.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")
    command.set_defaults(run=_prune)


def _rebuild(args: argparse.Namespace) -> Outcome:
    folder = existing_folder(args.folder)
    if args.sibling is not None:
        existing_folder(args.sibling)
    step = saving_step(folder.name)
    peers = [existing_folder(peer).absolute() for peer in args.peer]
    commit_as = None if args.keep_name else step
    found = rebuild(folder.absolute(), sibling=args.sibling, peers=peers, commit_as=commit_as)
    report = {
        "schema_version": SCHEMA_VERSION,
        **dataclasses.asdict(found),
        "path": str(found.path),
        "not_proved": list(found.not_proved),
    }

    def lines() -> Iterator[str]:
        yield f"{found.path} is a checkpoint: {found.num_tensors} tensors"
        yield f"digested and as sealed: {size_text(found.bytes_verified)}"
        yield from (f"not proved: {doubt}" for doubt in found.not_proved)

    return Outcome(report=report, lines=lines())


def _drain(args: argparse.Namespace) -> Outcome:
    root = existing_folder(args.root)
    if not is_url(args.url):
        raise ConfigError(f"{args.url} is no URL: a mounted folder is file://{Path(args.url).absolute()}")
    refuse_root(root, args.url)
    if args.mb_per_s is not None and not args.mb_per_s > 0:
        raise ConfigError(f"--mb-per-s must be positive, got {args.mb_per_s}")
    known = [step for step in committed_steps(root) if (committed_path(root, step) / "commit.json").exists()]
    steps = args.step or [step for step in known if drained_to(committed_path(root, step)) != args.url]
    options, rate = storage_options(args), None if args.mb_per_s is None else args.mb_per_s * 1e6
    done: list[dict[str, Any]] = []
    problems: list[str] = []
    for step in steps:
        try:
            drained = drain(root, step, args.url, storage_options=options, bytes_per_s=rate)
        except (CheckpointError, OSError) as e:
            # The others may be fine; a step that cannot be drained must not keep them from it.
            problems.append(f"step {step}: {type(e).__name__}: {e}")
        else:
            done.append(dataclasses.asdict(drained))
    report = {"schema_version": SCHEMA_VERSION, "root": str(root), "url": args.url, "drained": done}

    def lines() -> Iterator[str]:
        for row in done:
            whole = "complete" if row["committed"] else "waits for the other nodes"
            copied = f"{row['files_copied']} files ({size_text(row['bytes_copied'])}) copied"
            yield f"step {row['step']}: {copied}, {row['files_there']} were there, {whole}"
        yield from (f"problem: {problem}" for problem in problems)
        yield f"{len(done)} step(s) drained to {args.url}"

    return Outcome(report={**report, "problems": problems}, lines=lines(), status=1 if problems else 0)


def _prune(args: argparse.Namespace) -> Outcome:
    root = existing_folder(args.root)
    retention = Retention(keep_last=args.keep_last, keep_every=args.keep_every)
    if args.keep_every is not None and args.keep_last is None:
        raise ConfigError("--keep-every without --keep-last removes nothing: say how many of the newest stay")
    if args.keep_last is None and not args.leftovers:
        raise ConfigError("say what may go: --keep-last N, --leftovers, or both")
    durable = {step: drained_to(committed_path(root, step)) for step in committed_steps(root)}
    # Only where something was drained at all: a run without durable storage has nothing to wait for.
    safe = [s for s, url in durable.items() if url is None] if any(durable.values()) and not args.undrained else []
    spared = sorted(set(doomed(root, retention)) & set(safe))
    steps = doomed(root, retention, safe)
    dead = useless(root) if args.leftovers else []
    sizes = {str(path): _bytes(path) for path in [*(committed_path(root, s) for s in steps), *(d.path for d in dead)]}
    if not args.dry_run:
        prune(root, retention, safe)
        if args.leftovers:
            clean_up(root)
    left_over = [left for left in leftovers(root) if args.leftovers and left.path not in [d.path for d in dead]]
    report = {
        "schema_version": SCHEMA_VERSION,
        "root": str(root),
        "dry_run": args.dry_run,
        "removed": sizes,
        "bytes": sum(sizes.values()),
        "spared_undrained": spared,
        "spared_leftovers": {str(left.path): _why(left) for left in left_over},
        "kept": [step for step in committed_steps(root) if step not in steps],
    }

    def lines() -> Iterator[str]:
        yield from (f"{'would go' if args.dry_run else 'removed'}: {path}  {size_text(n)}" for path, n in sizes.items())
        yield from (f"spared: step {step} was drained nowhere (--undrained removes it)" for step in spared)
        yield from (f"spared: {left.path}: {_why(left)}" for left in left_over)
        freed = size_text(sum(sizes.values()))
        yield f"{freed} {'would be freed' if args.dry_run else 'freed'}; kept: {report['kept']}"

    return Outcome(report=report, lines=lines())


def _why(left: LeftOver) -> str:
    if left.alive:
        return f"may still be written by {', '.join(left.alive)}"
    return "its data is complete: `ckpt rebuild` makes a checkpoint of it"


def _bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
