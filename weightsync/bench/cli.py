"""`weightsync bench`: arguments in, a table or JSON out. `weightsync.cli` calls `add_arguments`, then `run`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from weightsync.bench.config import DRAFTS, ENGINES, TRANSPORTS, BenchConfig, TrainerLayout
from weightsync.errors import ConfigError

__all__ = ["add_arguments", "run"]

STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = BenchConfig()
    parser.add_argument(
        "--trainer", default="state-dict", metavar="LAYOUT",
        help="state-dict, or a live Megatron-Core model with these sizes: tp=2,pp=2 (default: state-dict)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", default=default.engine, metavar="KIND", help=f"{', '.join(ENGINES)} (default: embedded)"
    )
    parser.add_argument(
        "--engine-python", metavar="PATH", help="interpreter of a real engine's environment (default: this one)"
    )
    parser.add_argument(
        "--engine-args", default="", metavar="ARGS", help="more options for a real engine's server, as in a shell"
    )
    parser.add_argument("--engines", type=int, default=default.engines, metavar="N", help="engines (default: 1)")
    parser.add_argument("--engine-tp", type=int, default=1, metavar="N", help="ranks of each, 1 or 2 (default: 1)")
    parser.add_argument("--draft", default=default.draft, metavar="KIND", help=f"{', '.join(DRAFTS)} (default: mtp)")
    parser.add_argument(
        "--transport", default=default.transport, metavar="NAME", help=f"{', '.join(TRANSPORTS)} (default: gloo)"
    )
    parser.add_argument(
        "--model", default=default.model, metavar="NAME",
        help="qwen3-0.6b or tiny (shapes with made-up weights), or a Hugging Face folder (default: qwen3-0.6b)",
    )  # fmt: skip
    parser.add_argument(
        "--bucket-mib", type=float, default=default.bucket_mib, metavar="MIB", help="(default: the transport's)"
    )
    parser.add_argument(
        "--buffers", type=int, default=default.buffers, metavar="N", help="buckets in flight (default: the transport's)"
    )
    parser.add_argument("--publishes", type=int, default=default.publishes, metavar="N", help="to measure (default: 5)")
    parser.add_argument("--warmup", type=int, default=default.warmup, metavar="N", help="not measured (default: 1)")
    parser.add_argument("--compare", action="store_true", help="add the limit and other ways, in the same run")
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, metavar="FILE", help="the result as JSON, to FILE or instead of the table"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of every process")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (PNG; needs matplotlib)")
    parser.add_argument(
        "--launcher", default=default.launcher, metavar="NAME",
        help="local (processes of this machine) or ray (actors of a Ray cluster) (default: local)",
    )  # fmt: skip
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster's head, or auto (default: a cluster for this run)"
    )
    parser.add_argument(
        "--placement", default=default.placement, metavar="HOW",
        help="of actors: spread (engines on nodes without trainer ranks) or pack (few nodes) (default: spread)",
    )  # fmt: skip
    parser.add_argument(
        "--deadline",
        type=float,
        default=default.deadline_s,
        metavar="S",
        help="of each phase, in seconds (default: 120)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr (there is none off a terminal)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, return 0.

    Raises:
        ConfigError: nonsense arguments, before any process is started.
        WeightSyncError: something failed while measuring.
    """
    config = _config(args)
    for path in (args.trace, args.plot, *([Path(args.json)] if args.json not in (None, STDOUT) else [])):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"cannot write {str(path)!r}: it is a folder, or its folder does not exist")
    if args.plot is not None:
        from weightsync.bench.plot import require_matplotlib

        require_matplotlib()
    from weightsync.bench.harness import run_bench
    from weightsync.bench.results import table

    result, events = run_bench(config, progress=_progress(enabled=not args.quiet and sys.stderr.isatty()))
    if args.trace is not None:
        from weightsync.bench.trace import write_trace

        write_trace(args.trace, events)
    if args.plot is not None:
        from weightsync.bench.plot import write_plot

        write_plot(args.plot, result)
    if args.json == STDOUT:
        print(json.dumps(result, indent=1))
        return 0
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


def _config(args: argparse.Namespace) -> BenchConfig:
    return BenchConfig(
        trainer=TrainerLayout.parse(args.trainer),
        engine=args.engine,
        engine_python=args.engine_python,
        engine_args=args.engine_args,
        engines=args.engines,
        engine_tp=args.engine_tp,
        draft=args.draft,
        transport=args.transport,
        model=args.model,
        bucket_mib=args.bucket_mib,
        buffers=args.buffers,
        publishes=args.publishes,
        warmup=args.warmup,
        compare=args.compare,
        trace=args.trace is not None,
        launcher=args.launcher,
        address=args.address,
        placement=args.placement,
        deadline_s=args.deadline,
    )


def _progress(*, enabled: bool) -> Any:
    def show(text: str) -> None:
        if enabled:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    return show
