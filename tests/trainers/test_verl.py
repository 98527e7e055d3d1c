"""verl publishes to engines through its own manager, workers and registry; see `verl_sync` for what is replaced."""

from __future__ import annotations

import json
import os
import select
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engines import vllm_models
from tests.engines.vllm_server import KEY, ROOT, Server
from weightsync.embedded.config import resolve_config
from weightsync.embedded.engine import EngineConfig, EngineHandle, launch
from weightsync.embedded.known import known_argmax
from weightsync.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(400)]

PYTHON = ROOT / ".venv-verl" / "bin" / "python"


class Verl:
    """A driver with two trainer workers and one rollout worker."""

    def __init__(
        self, engines: list[dict[str, str]] | str, *, key: str, log: Path, url: str = "", **options: str
    ) -> None:
        if not PYTHON.exists():
            pytest.fail(f"{PYTHON.relative_to(ROOT)} is missing: run `make verl`")
        options = {"deadline_s": 60, **options}
        job = {"engines": engines, "url": url, "actors": 2, "rollouts": 1, "options": options}
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TEST_KEY": key,
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
        }
        self._log = log
        with log.open("wb") as f:
            self._process = subprocess.Popen(
                [str(PYTHON), "-c", "from tests.trainers.verl_sync import main; main()", json.dumps(job)],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=f, bufsize=0,
            )  # fmt: skip
        try:
            assert self._read() == {"ready": "RayWorkerGroup"}
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._process.stdout], [], [], 150)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            pytest.fail(f"verl's driver said nothing:\n{self._log.read_text(errors='replace')[-4000:]}")
        return json.loads(line)

    def sync(self, folder: Path, version: int, **more: str) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"folder": str(folder), "version": version, **more}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        try:
            self._process.stdin.close()
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait(10)
            self._process.stdout.close()


def write(folder: Path, weights: Mapping[str, Mapping[str, torch.Tensor]]) -> Path:
    folder.mkdir()
    tensors = {name: t.clone() for role in weights.values() for name, t in role.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineHandle]:
    with launch(EngineConfig(model="tiny", draft="mtp", tp=2, log=str(tmp_path / "engine"))) as engine:
        yield engine


def test_versions_reach_target_and_draft_and_a_failure_is_an_error_of_verl(
    engine: EngineHandle, tmp_path: Path
) -> None:
    folders = [write(tmp_path / f"v{n}", known_argmax(resolve_config("tiny"), seed=n, draft="mtp")) for n in (1, 2)]
    nbytes = sum(
        t.nbytes for r in known_argmax(resolve_config("tiny"), seed=1, draft="mtp").values() for t in r.values()
    )
    other = tmp_path / "other"
    other.mkdir()
    save_file({"model.norm.weight": torch.zeros(3)}, other / "model.safetensors")
    # As if verl had started the engine: its address is asked of the server's actor, which is told each version.
    verl = Verl(
        "replicas", url=engine.url, api_key_env="TEST_KEY", key=engine.api_key, log=tmp_path / "verl.log"
    )  # fmt: skip
    try:
        for version, folder in enumerate(folders, 1):
            reply = verl.sync(folder, version)
            assert reply["told"] == version
            metrics = reply["metrics"]
            assert metrics["weightsync/version"] == version
            assert metrics["weightsync/payload_bytes"] == nbytes
            assert engine.generate([[1, 2, 3]], max_tokens=16)["acceptance"] == 1.0
        # The trainer exports something else than it planned with: an error, and the engine says that it is fenced.
        assert "ManifestError" in verl.sync(other, 3)["error"]
        with pytest.raises(EngineError, match="fenced"):
            engine.generate([[1, 2, 3]])
        assert "metrics" in verl.sync(folders[0], 4)
        assert engine.status()["versions"] == {"target": 4, "draft[0]": 4}
        # A replica that was replaced: the next synchronisation asks for addresses again.
        config = EngineConfig(model="tiny", draft="mtp", api_key=engine.api_key, log=str(tmp_path / "other-engine"))
        with launch(config) as new:
            assert "metrics" in verl.sync(folders[1], 5, url=new.url)
            assert new.generate([[1, 2, 3]], max_tokens=16)["acceptance"] == 1.0
            assert new.status()["versions"] == {"target": 5, "draft[0]": 5}
    finally:
        verl.close()


def test_a_real_vllm_with_an_mtp_draft_equals_a_fresh_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", vllm_models.weights("mtp", 2))
    server = Server(tmp_path, "mtp")
    try:
        verl = Verl([{"url": server.url, "api_key_env": "TEST_KEY"}], key=KEY, log=tmp_path / "verl.log")
        try:
            assert verl.sync(folder, 2)["metrics"]["weightsync/engines_committed"] == 1
        finally:
            verl.close()
        # What a server that was started from version 2 gives: `test_vllm_mtp` shows that it does.
        assert server.generate() == (vllm_models.expected("mtp", 2, 12), 1.0)
        assert server.get("/weight_info") == {"weight_version": "2"}
    finally:
        server.close()
