"""Every example is run from a line of a page, and every line of a page is run by a test of its example."""

from __future__ import annotations

import ast
import re

from tests.examples import lines
from tests.test_structure import ROOT, tracked

EXAMPLES = {f"examples.{path.stem}": path for path in tracked("examples/*.py")}


def is_program(path):
    return 'if __name__ == "__main__":' in path.read_text()


def test_pages_run_every_example_that_is_a_program_and_no_other():
    programs = {name for name, path in EXAMPLES.items() if is_program(path)}
    assert programs == {lines.program_of(line) for line in lines.all_lines()}


def test_every_program_on_a_page_is_run_by_a_test():
    """Tests unpack `lines(program)` into as many names: a line more on a page is one that nobody runs, and an error."""
    asked: list[str] = []
    for path in tracked("tests/examples/test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("lines('"):
                assert isinstance(node.targets[0], ast.Tuple), path
                names = [n.id for n in node.targets[0].elts]
                program = ast.literal_eval(node.value.args[0])
                assert len(names) == len(lines.lines(program)), program
                text = path.read_text()
                assert [n for n in names if len(re.findall(rf"\b{n}\b", text)) < 2] == [], path
                asked.append(program)
    assert sorted(asked) == sorted({lines.program_of(line) for line in lines.all_lines()})


def test_what_is_no_program_is_named_by_a_page_or_imported_by_one():
    texts = [page.read_text() for page in lines.PAGES] + [path.read_text() for path in EXAMPLES.values()]
    for name, path in EXAMPLES.items():
        if not is_program(path):
            link = f"/{name.replace('.', '/')}.py)"
            assert any(f"from {name} import" in text or link in text for text in texts), name


def test_pages_name_no_example_that_is_not_there():
    for page in lines.PAGES:
        for module in re.findall(r"\bexamples\.(\w+)", page.read_text()):
            assert f"examples.{module}" in EXAMPLES, page
        for file in re.findall(r"\bexamples/(\w+\.py)", page.read_text()):
            assert (ROOT / "examples" / file).exists(), page


def test_lines_are_found_as_they_stand():
    page = """
```sh
python -m examples.a --n 1 \\
    --m 2      # what for
python -m other
```

```console
$ make demo     # or
shown: make demo
```

Say `make demo
ARGS=--x` or `examples/a.py`.
"""
    assert lines.of_text(page) == ["python -m examples.a --n 1      --m 2", "make demo", "make demo ARGS=--x"]
