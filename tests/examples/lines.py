"""The command lines with which the pages run examples, as they stand there; tests run these and no copies of them.

first, second = lines("examples.megatron_rl")      # fails when a page has more, fewer or others
done = run(first, folder)                           # by bash, with this environment's programs first on PATH
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.test_structure import ROOT, tracked

PAGES = [page for page in tracked("*.md") if page.name != "CHANGELOG.md"]
_RUNS = re.compile(r"(?:^|\s)(?:-m (examples\.\w+)|(make demo)\b)")
_MAKE = {"make demo": "examples.demo"}
_OF_MAKE = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


def of_text(text: str) -> list[str]:
    """Shell lines of a page: fenced `sh` and `console` blocks (there after `$ `), and commands in backticks."""
    found: list[str] = []
    rest = text
    for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        rest = rest.replace(block[0], "")
        body = block[2].replace("\\\n", " ")
        if block[1] == "sh":
            found += body.splitlines()
        elif block[1] == "console":
            found += [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]
    found += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", rest)]
    stripped = [re.sub(r"\s+#.*$", "", line).strip() for line in found]
    return [line for line in stripped if program_of(line) is not None]


def program_of(line: str) -> str | None:
    """`examples.<module>` that a line runs."""
    match = _RUNS.search(line)
    return None if match is None else match[1] or _MAKE[match[2]]


def all_lines() -> list[str]:
    """Of all pages, each once, in their order."""
    return list(dict.fromkeys(line for page in PAGES for line in of_text(page.read_text())))


def lines(program: str) -> list[str]:
    return [line for line in all_lines() if program_of(line) == program]


def command(line: str, folder: Path) -> dict[str, object]:
    """Arguments of `subprocess` that run `line` as a reader would: in `folder`, or, with make, in the repository."""
    binaries = Path(sys.executable).parent
    # The make that runs these tests may have been told more (ARGS=...), and another within it says where it works.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_MAKE} | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        # The environment is made already.
        "MAKEFLAGS": f"BIN={binaries} READY=",
    }
    return {
        "args": ["bash", "-c", line],
        "cwd": ROOT if line.startswith("make ") else folder,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def run(line: str, folder: Path, *, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(line, folder), timeout=timeout)  # type: ignore[call-overload,no-any-return]
