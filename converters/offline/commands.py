"""`ckpt convert` and `ckpt diff`. `converters.cli` registers them (`add_commands`) and prints what they give back."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator

import torch

from checkpoint.cli.outcome import Commands, Outcome, rate_text, size_text
from converters.offline.compare import CompareReport, compare
from converters.offline.conversion import ConvertReport, convert
from converters.offline.keys import LAYOUTS
from converters.offline.mapping import KEEP_DTYPE
from converters.offline.move import MIN_MEMORY_BYTES

__all__ = ["add_commands"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SHOWN = 10


def add_commands(commands: Commands) -> None:
    command = commands.add_parser(
        "convert", help="a Hugging Face folder to a Megatron checkpoint, or back", description=_DESCRIPTION
    )
    command.add_argument("src", metavar="SRC", help="a folder, or a URL that fsspec opens")
    command.add_argument("dst", metavar="DST", help="must not exist")
    command.add_argument("--to", choices=("hf", "mcore"), help="say the direction (it follows from SRC)")
    command.add_argument("--family", metavar="NAME", help="rules to use, where the architecture is not to decide")
    command.add_argument("--hf", metavar="PATH", help="to HF: config, tokenizer and index of the model")
    command.add_argument(
        "--iteration", type=_iteration, metavar="N", help="of the Megatron side: a number or `release`"
    )
    command.add_argument("--layout", choices=("auto", *LAYOUTS), default="auto", help="of Megatron keys to write")
    command.add_argument("--spec", choices=("te", "local"), default="te", help="layer spec whose names are written")
    command.add_argument("--extra-state", choices=("te", "linear", "none"), help="empty entries beside the weights")
    command.add_argument("--dtype", choices=sorted(_DTYPES), help="cast floating tensors")
    command.add_argument("--keep-dtype", action="append", metavar="PATTERN", default=[], help="but not these")
    command.add_argument("--drop", action="append", metavar="PATTERN", default=[], help="leave source tensors out")
    command.add_argument("--carry", action="append", metavar="PATTERN", default=[], help="copy tensors no rule knows")
    command.add_argument("--shard-size", type=_size, metavar="SIZE", help="of output files, e.g. 5G")
    command.add_argument(
        "--max-memory", type=_memory, metavar="SIZE", default=512 << 20, help="for buffers, e.g. 512Mi"
    )
    command.add_argument("--workers", type=_workers, metavar="N", default=2, help="threads")
    command.add_argument("--resume", action="store_true", help="go on after an interrupted run")
    command.add_argument(
        "--verify",
        nargs="?",
        const="all",
        choices=("all", "bits"),
        help="read the result back and compare it bit by bit; unless `bits`, check the rules by logits, too",
    )
    command.add_argument("--plan", action="store_true", help="say what would be done, from headers alone")
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    command.set_defaults(run=_convert)
    command = commands.add_parser("diff", help="which tensors of two checkpoints differ, and how much")
    command.add_argument("first", metavar="A", help="a Hugging Face folder or a Megatron checkpoint")
    command.add_argument("second", metavar="B", help="likewise; the two need not be of one kind")
    command.add_argument("--headers", action="store_true", help="names, shapes and dtypes alone")
    command.add_argument("--max-memory", type=_memory, metavar="SIZE", default=512 << 20, help="for buffers")
    command.add_argument("--workers", type=_workers, metavar="N", default=2, help="threads")
    command.set_defaults(run=_diff)


_DESCRIPTION = (
    "Converts without a model, a process group or a GPU, in bounded memory. Direction, family and the layout of a "
    "Megatron source are detected."
)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if not match or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 512Mi or 5G")
    return int(float(match[1]) * _UNITS[match[2]])


def _memory(text: str) -> int:
    if (nbytes := _size(text)) < MIN_MEMORY_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least {MIN_MEMORY_BYTES >> 20}Mi")
    return nbytes


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of threads, at least 1")
    return int(text)


def _iteration(text: str) -> str:
    if text != "release" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number or `release`")
    return text


def _convert(args: argparse.Namespace) -> Outcome:
    with _bar(args.quiet or args.plan) as progress:
        report = convert(
            args.src,
            args.dst,
            to=args.to,
            family=args.family,
            hf=args.hf,
            iteration=args.iteration,
            layout=args.layout,
            spec=args.spec,
            extra_state=args.extra_state,
            dtype=getattr(torch, _DTYPES[args.dtype]) if args.dtype else None,
            keep_dtype=(*KEEP_DTYPE, *args.keep_dtype),
            drop=args.drop,
            carry=args.carry,
            shard_bytes=args.shard_size,
            max_memory_bytes=args.max_memory,
            workers=args.workers,
            resume=args.resume,
            verify=args.verify,
            plan=args.plan,
            progress=progress,
        )
    return Outcome(report=report.to_json(), lines=_convert_lines(report, planned=args.plan))


def _convert_lines(report: ConvertReport, *, planned: bool) -> Iterator[str]:
    sides = {"hf": "Hugging Face folder", "mcore": "Megatron torch_dist checkpoint"}
    yield f"{report.source} -> {report.target}: {sides[report.to]}, family {report.family}" + (
        f", layout {report.layout}, spec {report.spec}" if report.layout else ""
    )
    yield (
        f"{report.num_stored} stored tensors, {size_text(report.source_bytes)} -> {report.num_tensors} tensors, "
        f"{size_text(report.target_bytes)} in {len(report.files)} file(s)"
    )
    yield "dtypes: " + ", ".join(f"{dtype} {size_text(n)}" for dtype, n in sorted(report.dtypes.items()))
    if report.casts:
        yield "casts: " + ", ".join(f"{pair} ({n} tensors)" for pair, n in sorted(report.casts.items()))
    if report.decoded:
        yield f"decoded: {report.decoded} quantised weights; they stay decoded on the way back"
    yield f"MTP layers: {report.mtp_layers}"
    for label in ("dropped", "carried", "ignored"):
        if names := getattr(report, label):
            yield f"{label}: {len(names)} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
    if report.optimizer_keys:
        yield f"optimizer and random state left out: {report.optimizer_keys} keys"
    if report.padding_elements:
        yield f"vocabulary padding cut off: {report.padding_elements} elements"
    if report.resumed:
        yield f"already there from an interrupted run: {len(report.resumed)} file(s)"
    if report.verified:
        yield f"verified: {report.verified['tensors']} tensors, {size_text(report.verified['bytes'])} bit by bit"
        if semantic := report.verified["semantic"]:
            yield f"rules: {semantic}"
    if planned:
        yield "nothing was written (--plan)"
    else:
        rate = rate_text(report.target_bytes / max(report.seconds, 1e-9))
        yield f"done in {report.seconds:.1f} s, {rate}"


def _diff(args: argparse.Namespace) -> Outcome:
    report = compare(
        args.first, args.second, headers=args.headers, max_memory_bytes=args.max_memory, workers=args.workers
    )
    return Outcome(report=report.to_json(), lines=_diff_lines(report), status=0 if report.same else 1)


def _diff_lines(report: CompareReport) -> Iterator[str]:
    for label, names in (("only in A", report.only_first), ("only in B", report.only_second)):
        for name in names:
            yield f"{label}: {name}"
    for name, (a, b) in report.shapes.items():
        yield f"shape: {name}  {'x'.join(map(str, a))}  {'x'.join(map(str, b))}"
    for name, (first, second) in report.dtypes.items():
        yield f"dtype: {name}  {first}  {second}"
    for found in report.different:
        yield f"differs: {found['name']}  {found['num_elements']} elements, max {found['max_abs']}"
    if report.same and report.values_compared:
        yield f"same: {report.num_equal} tensors, bit by bit"
    elif report.same:
        yield "same names, shapes and dtypes (--headers: values were not compared)"


@contextlib.contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Progress on a terminal: tqdm where it is installed, else one line that is written over."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        with _line() as progress:
            yield progress
        return
    with tqdm(unit="B", unit_scale=True, desc="convert", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


@contextlib.contextmanager
def _line() -> Iterator[Callable[[int, int], None]]:
    began = last = time.monotonic()
    first: int | None = None

    def progress(done: int, total: int) -> None:
        nonlocal last, first
        first = done if first is None else first
        now = time.monotonic()
        if now - last < 0.2 and done < total:
            return
        last = now
        rate = (done - first) / max(now - began, 1e-9)
        left = f"{(total - done) / rate:.0f} s left" if rate else "..."
        sys.stderr.write(f"\rconvert: {size_text(done)} of {size_text(total)}, {rate_text(rate)}, {left}    ")
        sys.stderr.flush()

    try:
        yield progress
    finally:
        sys.stderr.write("\n")
