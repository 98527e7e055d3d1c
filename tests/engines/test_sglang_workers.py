"""Every kind of SGLang's speculative workers, built in a process of its own and published to from one receive."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines import sglang_models as models
from tests.engines.sglang_server import RELEASES, ROOT, environment, python_of

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]


def published(release: str, kind: str, folder: Path) -> dict[str, Any]:
    """What `sglang_inprocess` says."""
    model = folder / "model"
    if kind == "v2":
        models.write_folders(folder, "mtp", 1)
        model = folder / "target"
    return said_by(release, folder, "sglang_inprocess", kind, str(model))


def said_by(release: str, folder: Path, module: str, *arguments: str) -> dict[str, Any]:
    command = [str(python_of(release)), "-m", f"tests.engines.{module}", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize(
    ("release", "kind", "worker"),
    [
        ("0.5.10.post1", "layers-v1", "MultiLayerEagleWorker"),
        ("0.5.10.post1", "layers-v2", "MultiLayerEagleWorkerV2"),
        ("0.5.23", "layers-v2", "MultiLayerEagleWorkerV2"),
    ],
)
def test_every_step_gets_its_own_layer_from_one_receive(release: str, kind: str, worker: str, tmp_path: Path) -> None:
    said = published(release, kind, tmp_path)
    assert (said["worker"], said["outcome"]) == (worker, "committed")
    assert said["bytes"] == [[said["wire_bytes"]]]
    assert set(said["loaded"]) == {"target", "draft[0]", "draft[1]"}
    assert said["embed"]
    assert said["shared"] == [True, True]
    # Row i: whether step i holds the projection of layer 0, 1.
    assert said["steps"] == [[True, False], [False, True]]
    # Pinned: loaded by name, as SGLang's own fan-out does, step 0 ends with the last layer.
    assert said["steps_by_name"][0] == [False, True]


def test_the_second_generation_of_workers_of_the_oldest_release(tmp_path: Path) -> None:
    said = published("0.5.10.post1", "v2", tmp_path)
    assert (said["worker"], said["outcome"]) == ("EAGLEWorkerV2", "committed")
    assert said["bytes"] == [[said["wire_bytes"]]]
    assert set(said["loaded"]) == {"target", "draft[0]"}
    assert said["embed"]
    assert said["shared"] == [True]
    assert said["steps"] == [True]
    # A forward that runs ahead keeps a pause from coming to rest.
    assert said["idle"] == [False, True]


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_absorbed_projections_of_mla_are_those_of_the_published_weights_in_place(release: str, tmp_path: Path) -> None:
    said = published(release, "mla", tmp_path)
    assert (said["worker"], said["outcome"]) == (None, "committed")
    assert all(said["from_disk"])
    assert said["absorbed"] == [True] * 4
    assert said["in_place"]


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_an_offline_engine_of_two_ranks_is_published_to_from_its_own_process(release: str, tmp_path: Path) -> None:
    models.write_folders(tmp_path, "mtp", 1)
    said = said_by(release, tmp_path, "sglang_offline", str(tmp_path))
    assert said["disk"] == [models.expected("mtp", 1, 6), 1.0]
    assert said["version 2"] == [models.expected("mtp", 2, 6), 1.0]
    assert said["world_size"] == 2
    assert said["bytes"] == [0, 0]
    assert "lm_head.weight" in said["refused"]
    assert said["after refusal"] == said["version 2"]
    # One rank fails, the other does not: both fence, the rank is named, and a full publish heals them.
    assert "rank 1" in said["aborted"]
    assert "a planted fault" in said["aborted"]
    assert "rank 0" in said["fenced"] or "rank 1" in said["fenced"]
    assert "fenced and does not serve" in said["answer"]
    assert said["version 3"] == [models.expected("mtp", 3, 6), 1.0]
