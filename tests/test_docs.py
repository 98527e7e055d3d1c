"""The pages say what the code says: links, errors, configuration, messages, environment and command line."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import re

import pytest

from tests.test_structure import PACKAGES, ROOT, package_modules, parsed, tracked
from weightsync.config import PublishConfig
from weightsync.protocol import Ack, PublishCall

REFERENCE = ROOT / "docs" / "reference"
PAGES = [p for p in tracked("*.md") if p.name != "CHANGELOG.md"]


def code_words(page):
    """Every word in backticks, fenced blocks left out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`]+)`", text))))


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_index_leads_to_every_page():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index.read_text())}
    pages = [p for p in PAGES if p.is_relative_to(index.parent) and p != index]
    assert [str(p.relative_to(ROOT)) for p in pages if p not in linked] == []


def test_every_error_is_documented():
    named = code_words(REFERENCE / "errors.md")
    for package in PACKAGES:
        errors = importlib.import_module(f"{package}.errors").__all__
        assert [e for e in errors if e not in named] == []


def test_every_configuration_field_is_documented_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", (REFERENCE / "config.md").read_text(), re.MULTILINE))
    fields = {f.name: f.default for f in dataclasses.fields(PublishConfig)}
    assert list(rows) == list(fields)
    for name, default in fields.items():
        if isinstance(default, (bool, str, int, float)):
            text = rows[name].strip("`")
            said = int(text.removesuffix(" MiB")) << 20 if text.endswith(" MiB") else ast.literal_eval(text)
            assert said == default, name


def test_every_field_of_a_message_is_documented():
    named = code_words(REFERENCE / "formats.md")
    for message in (Ack, PublishCall):
        assert [f.name for f in dataclasses.fields(message) if f.name not in named] == []


def test_every_environment_variable_is_documented():
    named = code_words(REFERENCE / "env.md")
    used = set()
    for path in package_modules():
        if not re.search(r"environ|getenv", path.read_text()):
            continue
        for node in ast.walk(parsed(path)):
            text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript, ast.Dict)) else ""
            if re.search(r"\benviron\b|getenv", text):  # not "environment"
                used |= set(re.findall(r"['\"]([A-Z][A-Z0-9_]{3,})['\"]", text))
    assert used - named == set()


def commands_of(main):
    """The commands that `--help` lists under "commands"."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(["--help"])
    return re.findall(r"^    (\w+)", shown.getvalue(), re.MULTILINE)


def test_every_option_of_the_command_line_is_documented():
    from converters import cli as ckpt
    from weightsync import cli

    # Every command of `ckpt` has these; they stand once, in the section of the whole.
    common = {"ckpt": {"--debug", "--json"}, "weightsync": set()}
    sections = dict(re.findall(r"^## ([\w ]+)$(.*?)(?=^## |\Z)", (REFERENCE / "cli.md").read_text(), re.M | re.S))
    for program, main in (("weightsync", cli.main), ("ckpt", ckpt.main)):
        names = commands_of(main)
        assert names
        if common[program]:
            assert set(re.findall(r"^\| `(--[\w-]+)", sections[program], re.MULTILINE)) == common[program]
        for command in names:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
                main([command, "--help"])
            offered = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown.getvalue()))
            documented = set(re.findall(r"^\| `(--[\w-]+)", sections[f"{program} {command}"], re.MULTILINE))
            assert documented == offered - {"--help"} - common[program], f"{program} {command}"


def test_every_name_of_the_api_page_is_there():
    rows = re.findall(r"^\| (`\w.*?) \| `([\w.]+)` \|", (REFERENCE / "api.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for names, module in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert name in importlib.import_module(module).__all__, f"{module}.{name}"
