"""A real vLLM HTTP server for tests, in its own environment and process group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines import vllm_models as models
from tests.engines.vllm_stock_gloo import GlooGroup
from weightsync.config import PublishConfig
from weightsync.engine.base import EngineControl
from weightsync.engine.control import HttpControl
from weightsync.engines.relay import Relay
from weightsync.engines.vllm.stock import stock_control
from weightsync.publisher import Publisher

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
KEY = "test-key"
START_S = 300.0
DEADLINE_S = 20.0


def require_vllm() -> None:
    """Fail, do not skip: `make vllm` makes the environment, and `make test` calls it."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON.relative_to(ROOT)} is missing: run `make vllm`")


def environment(**more: str) -> dict[str, str]:
    """vLLM on two shared cores: no core binding, no hub, no usage reports."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


class Server:
    """`vllm serve` with our middleware and the model of `draft`, started from disk at `version`."""

    block_size = 32

    def __init__(self, folder: Path, draft: str, *, version: int = 1, tp: int = 1, stock: bool = False) -> None:
        """`stock`: nothing of ours is in it but the stand-in for NCCL (`vllm_stock_gloo`)."""
        require_vllm()
        self.draft, self.tp, self.folder, self.stock = draft, tp, folder, stock
        self.faults = folder / "faults.json"
        self.faults.write_text("{}")
        # Held but not listened on: nobody else is given the port, and vLLM, which reuses addresses, gets it.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: Relay | None = None
        try:
            self.start(version)
        except BaseException:
            self.close()
            raise

    def folders(self, version: int) -> tuple[Path, Mapping[str, object]]:
        """What `version` starts from: the target's folder and the speculative config."""
        return models.write_folders(self.folder / f"v{version}", self.draft, version)

    def start(self, version: int) -> None:
        target, speculation = self.folders(version)
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target),
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "m", "--api-key", KEY,
            *([] if self.stock else ["--middleware", "weightsync.engines.vllm.server.Fence"]),
            "--weight-transfer-config", json.dumps({"backend": "nccl" if self.stock else "weightsync"}),
            "--speculative-config", json.dumps(speculation), "--tensor-parallel-size", str(self.tp),
            "--worker-extension-cls",
            "tests.engines.vllm_stock_gloo.Extension" if self.stock else "tests.engines.vllm_probe.Probe",
            "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512",
            "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details",
            "--enable-prefix-caching", "--block-size", str(self.block_size),
        ]  # fmt: skip
        env = environment(VLLM_SERVER_DEV_MODE="1", WEIGHTSYNC_TEST_FAULTS=str(self.faults))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            if self._process.poll() is not None or time.monotonic() > end:
                text = self.log.read_text(errors="replace")
                self.stop()
                pytest.fail(f"vLLM did not start:\n{text[-4000:]}")
            time.sleep(0.25)

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        family = [psutil.Process(self._process.pid)] if self._process.poll() is None else []
        family += [c for p in family for c in p.children(recursive=True)]
        self._process.send_signal(sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for p in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        self._process.wait(10)
        psutil.wait_procs(family, timeout=10)
        self._process = None

    def close(self) -> None:
        self.stop()
        self._held.close()

    # -- what clients ask ----------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), headers, method="POST")
        return self._ask(request, timeout_s)

    @staticmethod
    def _ask(request: urllib.request.Request, timeout_s: float = 60.0) -> Any:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            raw = reply.read()
        try:
            return json.loads(raw)
        except ValueError:
            return raw.decode()

    def refused(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """(status, body) of an answer that must be an error."""
        with pytest.raises(urllib.error.HTTPError) as error:
            self.post(path, body)
        with error.value as reply:
            return reply.code, reply.read().decode()

    def complete(self, prompt: list[int] = models.PROMPT, n: int = 12) -> Any:
        body = {"model": "m", "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", body | {"return_token_ids": True, "detokenize": False})

    def counts(self) -> dict[str, float]:
        return dict(self.control().status(deadline_s=10)["speculation_counts"])

    def generate(self, n: int = 12) -> tuple[list[int], float | None]:
        """(tokens, acceptance) of one greedy completion."""
        before = self.counts()
        tokens = self.complete(n=n)["choices"][0]["token_ids"]
        after = self.counts()
        drafted = after.get("draft_tokens", 0) - before.get("draft_tokens", 0)
        accepted = after.get("accepted_tokens", 0) - before.get("accepted_tokens", 0)
        return tokens, accepted / drafted if drafted else None

    def serves(self, version: int) -> None:
        tokens, acceptance = self.generate()
        assert tokens == models.expected(self.draft, version, 12)
        assert acceptance == 1.0
        assert set(self.status()["versions"].values()) == {version}

    def facts(self) -> list[dict[str, Any]]:
        """Of every rank: runner -> parameter -> [digest, address]."""
        results = self.post("/collective_rpc", {"method": "test_facts"})["results"]
        return sorted(results, key=lambda r: r["rank"])

    # -- publishing ----------------------------------------------------------------------------------------------------

    def control(self, key: str = KEY) -> EngineControl:
        if self.stock:
            self._relay = self._relay or stock_control(self.url, api_key=key, name="vllm", open_group=GlooGroup)
            return self._relay
        return HttpControl(self.url, api_key=key, name="vllm")

    def hang_up(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def status(self) -> Mapping[str, Any]:
        return self.control().status(deadline_s=10)

    def publisher(self, source: models.Weights, **config: Any) -> Publisher:
        values = {"deadline_s": DEADLINE_S, "run_id": "test", "takeover": True, "bucket_bytes": 64 << 10} | config
        return Publisher(source, [self.control()], PublishConfig(**values))

    def fail(self, **rank_to_bucket: int) -> None:
        """`fail(r1=2)`: rank 1 raises at its bucket 2, in every publish until `fail()`."""
        self.faults.write_text(json.dumps({name[1:]: bucket for name, bucket in rank_to_bucket.items()}))
