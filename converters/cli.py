"""The command `ckpt`: gathers the groups of commands, prints what they find, turns errors into one line.

    checkpoint.cli           ls, show, verify, rebuild, drain, prune, doctor: saved checkpoints
    converters.inspection    inspect: a Hugging Face folder or a Megatron checkpoint
    converters.offline       convert, diff: between and across the two

Each group offers `add_commands`; every command gets `--json` (one object on stdout) and `--debug` here.
Exit status: 0 all well; 1 problems found (listed on stdout) or the command failed; 2 wrong arguments, or a path that
is not what the command reads; 130 interrupted. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from checkpoint.cli.outcome import Outcome
from checkpoint.errors import CheckpointError
from checkpoint.errors import ConfigError as CheckpointConfigError
from converters.errors import ConverterError, FolderError

__all__ = ["main"]

GROUPS = ("checkpoint.cli", "converters.inspection", "converters.offline.commands")
USAGE_ERRORS = (CheckpointConfigError, FolderError)


class _Parser(argparse.ArgumentParser):
    """Answers wrong arguments in one line; the usage is what `--help` is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ckpt ARGV` (default: the process's arguments) and return its exit status.

    Raises:
        SystemExit: after `--help` and wrong arguments, as argparse does.
    """
    args = _parser().parse_args(argv)
    try:
        outcome: Outcome = args.run(args)
        _print(outcome, as_json=args.json)
    except KeyboardInterrupt:
        return _fail(args, "interrupted", 130)
    except USAGE_ERRORS as e:
        return _fail(args, str(e), 2)
    except (CheckpointError, ConverterError, OSError) as e:
        return _fail(args, f"{type(e).__name__}: {e}", 1)
    return outcome.status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ckpt", description="Look at, mend, move and convert checkpoints.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in GROUPS:
        # Only a command line needs the groups' modules: `import converters.cli` stays cheap.
        importlib.import_module(group).add_commands(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
        command.set_defaults(prog=command.prog)
    return parser


def _print(outcome: Outcome, *, as_json: bool) -> None:
    try:
        if as_json:
            print(json.dumps(outcome.report, indent=1))
        else:
            for line in outcome.lines:
                print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; the interpreter must not try to flush again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(args: argparse.Namespace, message: str, status: int) -> int:
    if args.debug:
        traceback.print_exc()
    # One line: whoever reads a log sees the command, what happened and the next step together.
    print(f"{args.prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
