"""The command `weightsync`: finds the subcommand, turns its errors into one line, and sets the exit status.

Status 0: done; 1: failed; 2: wrong arguments; 130: interrupted. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from weightsync.errors import ConfigError, WeightSyncError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Answers wrong arguments in one line; the usage is what `--help` is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `weightsync ARGV` (default: the process's arguments) and return its exit status.

    Raises:
        SystemExit: after `--help`, `--version` and wrong arguments, as argparse does.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        status = _fail(args, "interrupted", 130)
    except ConfigError as e:
        status = _fail(args, str(e), 2)
    except (WeightSyncError, OSError) as e:
        status = _fail(args, f"{type(e).__name__}: {e}", 1)
    return status


def _parser() -> argparse.ArgumentParser:
    # Only a command line needs the subcommand's modules: `import weightsync.cli` stays cheap.
    from weightsync import doctor
    from weightsync.bench import cli as bench

    parser = _Parser(prog="weightsync", description="Publish the weights of an RL trainer to its inference engines.")
    parser.add_argument("--version", action="version", version=f"weightsync {_version()}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module, text, description in (
        (
            "bench",
            bench,
            "what a publish costs here, beside its limit and other ways",
            "Publish a model to embedded engines on this machine and print what it cost.",
        ),
        (
            "doctor",
            doctor,
            "which engine answers at an address, and what a publish to it guarantees",
            "Ask an engine what it is, what a publish to it guarantees, and what is missing. Changes nothing.",
        ),
    ):
        command = commands.add_parser(name, help=text, description=description)
        # Also accepted behind the command; absent, it must not undo the one before it.
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        module.add_arguments(command)
        command.set_defaults(run=module.run, prog=command.prog)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("weightsync")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _fail(args: argparse.Namespace, message: str, status: int) -> int:
    if args.debug:
        traceback.print_exc()
    # One line: whoever reads a log sees the command, what happened and the next step together.
    print(f"{args.prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
