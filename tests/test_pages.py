"""Programs that pages show: the `python` blocks of a page are one program, its `text` blocks are what it prints."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys

import pytest

from tests.test_structure import ROOT

PAGES = ["README.md", "docs/quickstart.md", "docs/guides/write-a-runner.md"]

pytestmark = pytest.mark.multiproc


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_shows(page, tmp_path):
    text = (ROOT / page).read_text()
    # What stands before the first program is a picture.
    start = text.index("```python")
    program, shown = "\n".join(blocks(text, "python")), "".join(blocks(text[start:], "text"))
    assert shown, f"{page} does not show what its program prints"
    path = tmp_path / "program.py"
    path.write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert checker.check_output(shown, done.stdout, flags), f"shown:\n{shown}\nprinted:\n{done.stdout}"
