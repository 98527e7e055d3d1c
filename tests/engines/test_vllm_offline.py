"""A real offline vLLM `LLM`, published to from its own process: EAGLE with shared memory, and n-grams."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_models as models
from tests.engines.vllm_server import PYTHON, ROOT, environment, require_vllm

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]


def offline(folder: Path, case: str, **env: str) -> dict[str, Any]:
    require_vllm()
    command = [str(PYTHON), "-m", "tests.engines.vllm_offline", str(folder), case]
    done = subprocess.run(command, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=350)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_eagle_in_one_process(tmp_path: Path) -> None:
    out = offline(tmp_path, "eagle", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    for step, version in (("fresh", 1), ("after 2", 2), ("after equal", 1), ("after healed", 2)):
        served = out[step]
        assert served["tokens"] == models.expected("eagle", version, 12), step
        assert served["drafted"] == served["accepted"] > 0, step
    assert [out[s] for s in ("publish 2", "shared, equal", "healed")] == ["committed"] * 3
    assert "PublishAborted" in out["shared, different"]
    assert "embed_tokens.weight" in out["shared, different"]
    assert "bytes differ" in out["shared, different"]
    assert "a full publish heals it" in out["fenced"]
    assert out["after healed"]["weight_version"] == "5"
    assert out["status"]["versions"] == {"target": 5, "draft[0]": 5}


def test_ngram_speculation_has_a_target_only(tmp_path: Path) -> None:
    out = offline(tmp_path, "ngram")
    for step, version in (("fresh", 1), ("after 2", 2)):
        assert out[step]["tokens"] == models.expected("ngram", version, 12), step
    assert out["publish 2"] == "committed"
    assert out["status"]["versions"] == {"target": 2}
    assert out["status"]["draft"] is None


def test_eagle3_by_a_worker_extension(tmp_path: Path) -> None:
    out = offline(tmp_path, "extension", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    for step, version in (("fresh", 1), ("after 2", 2), ("after healed", 1)):
        assert out[step]["tokens"] == models.expected("eagle3", version, 12), step
        assert out[step]["drafted"] == out[step]["accepted"] > 0, step
    assert [out["publish 2"], out["healed"]] == ["committed"] * 2
    assert "cannot be read" in out["broken"]
    assert out["status"]["versions"] == {"target": 4, "draft[0]": 4}
    assert out["status"]["how"] == "a worker extension"
