"""The page about families says what the registry has and what the semantic tests run."""

from __future__ import annotations

import re
from pathlib import Path

from converters.families import FAMILIES, family_of
from tests.converters.test_semantic import MODELS, MTP

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "families.md"


def rows():
    cells = [
        re.split(r"\s*\|\s*", line.strip("| ")) for line in PAGE.read_text().splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in cells}


def test_the_table_has_every_family_with_its_architectures():
    assert list(rows()) == [family.name for family in FAMILIES]
    for family in FAMILIES:
        assert tuple(re.findall(r"`(\w+)`", rows()[family.name][1])) == family.architectures


def test_semantic_are_those_that_the_semantic_tests_run():
    tested = {family_of(published).name for published, _ in MODELS.values()}
    assert {name for name, row in rows().items() if "semantic" in row[3]} == tested
    assert {name for name, row in rows().items() if row[3] == "bitwise"} == {f.name for f in FAMILIES} - tested
    with_mtp = {family_of(MODELS[model][0]).name for model in MTP}
    assert {name for name, row in rows().items() if row[2]} - {"qwen3_5_multimodal"} == with_mtp
