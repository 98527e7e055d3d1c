"""The wheel, in an environment with its required dependencies and nothing else: what an engine's users install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["checkpoint", "converters", "training_hooks", "weightsync"]
REQUIRED = ["numpy", "packaging", "safetensors", "torch"]

pytestmark = pytest.mark.multiproc


def _run(*command, cwd, timeout_s=60):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _closure(names):
    """Distributions that these need here, extras not included."""
    found, queue = {}, list(names)
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found.values()


@pytest.fixture(scope="module")
def slim(tmp_path_factory):
    """A new environment with the wheel and its required dependencies, which it shares with this one by links."""
    folder = tmp_path_factory.mktemp("wheel")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        # Only tracked files: a wheel must not depend on what lies about in a working tree.
        if name.split("/")[0] in {*PACKAGES, "pyproject.toml", "README.md", "LICENSE"} and (ROOT / name).exists():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, folder / "source", cwd=folder)
    (wheel,) = folder.glob("*.whl")

    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    for distribution in _closure(REQUIRED):
        for top in {f.parts[0] for f in distribution.files if f.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    python = environment / "bin" / "python"
    _run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    _run(*pip, "--python", python, "check", cwd=folder)
    return environment / "bin"


def test_the_wheel_imports_with_its_required_dependencies_only(slim, tmp_path):
    code = (
        "import importlib, importlib.util, json, sys\n"
        f"for name in {PACKAGES}: importlib.import_module(name)\n"
        "import weightsync\n"
        "print(json.dumps({'file': weightsync.__file__,\n"
        "    'present': [m for m in ('megatron', 'mbridge', 'psutil', 'transformers', 'matplotlib')\n"
        "                if importlib.util.find_spec(m)]}))\n"
    )
    seen = json.loads(_run(slim / "python", "-c", code, cwd=tmp_path))
    assert seen["present"] == []
    assert Path(seen["file"]).is_relative_to(slim.parent)


def test_the_wheel_is_typed_and_licensed(slim):
    (info,) = slim.parent.glob("lib/python*/site-packages/weightsync-*.dist-info")
    assert (info / "licenses" / "LICENSE").exists()
    assert [p for p in PACKAGES if not (info.parent / p / "py.typed").exists()] == []
    assert not (info.parent / "tests").exists()


def test_the_wheel_runs_the_embedded_bench(slim, tmp_path):
    options = ["--model", "tiny", "--draft", "mtp", "--publishes", "2", "--warmup", "0", "--json"]
    result = json.loads(_run(slim / "weightsync", "bench", *options, cwd=tmp_path, timeout_s=90))
    summary = result["summary"]
    assert summary["acceptance_after"] == 1.0
    assert summary["wire_bytes_per_engine_rank"] >= summary["unique_bytes"] > 0
    assert "megatron-core" not in result["versions"]
