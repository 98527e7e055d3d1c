"""The command `weightsync`: exit status and one line for each kind of failure."""

from __future__ import annotations

import pytest

from weightsync import cli
from weightsync.bench import cli as bench
from weightsync.errors import ConfigError, PublishAborted


def fail_with(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr(bench, "run", run)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["publish"], "invalid choice: 'publish'"),
        (["bench", "--engines", "many"], "invalid int value: 'many'"),
        (["bench", "--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(argv, words, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert (e.value.code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert "--help" in err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            ConfigError("--engines 0: expected at least 1"),
            2,
            "weightsync bench: error: --engines 0: expected at least 1",
        ),
        (
            PublishAborted("engine 1 rank 0:\n  gone"),
            1,
            "weightsync bench: error: PublishAborted: engine 1 rank 0: gone",
        ),
        (FileNotFoundError(2, "No such file", "x"), 1, "weightsync bench: error: FileNotFoundError: [Errno 2] No such"),
        (KeyboardInterrupt(), 130, "weightsync bench: error: interrupted"),
    ],
)
def test_failures_are_one_line_with_a_status_of_their_own(error, status, line, monkeypatch, capsys):
    fail_with(monkeypatch, error)
    assert cli.main(["bench"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["--debug", "bench"], ["bench", "--debug"]])
def test_debug_shows_the_traceback(argv, monkeypatch, capsys):
    fail_with(monkeypatch, ConfigError("no"))
    assert cli.main(argv) == 2
    assert "Traceback" in capsys.readouterr().err


def test_what_is_no_domain_error_is_not_hidden(monkeypatch):
    fail_with(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["bench"])


def test_status_is_that_of_the_command(monkeypatch):
    monkeypatch.setattr(bench, "run", lambda args: 0 if args.engines == 3 else 1)
    assert cli.main(["bench", "--engines", "3"]) == 0


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out.startswith("weightsync ")
