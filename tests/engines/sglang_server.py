"""A real SGLang HTTP server on the CPU for tests, in the environment of its release and a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomllib
import torch
from safetensors.torch import save_file

from tests.engines import sglang_models as models
from tests.engines.sglang_stock import in_order
from weightsync import errors
from weightsync.config import PublishConfig
from weightsync.engines.sglang.control import HttpLink, SglangControl
from weightsync.engines.sglang.stock import stock_control
from weightsync.publisher import Publisher

ROOT = Path(__file__).resolve().parents[2]
RELEASES = {"0.5.10.post1": ".venv-sglang-0510", "0.5.23": ".venv-sglang-0523"}
KEY = "test-key"
START_S = 240.0
DEADLINE_S = 40.0

OPTIONS = [
    "--device", "cpu", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--dtype", "float32", "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-tokenizer-init",
    "--skip-server-warmup", "--mem-fraction-static", "0.1", "--max-total-tokens", "2048",
    "--max-running-requests", "4", "--context-length", "256", "--log-level", "warning", "--api-key", KEY,
    "--sleep-on-idle",
]  # fmt: skip


def python_of(release: str) -> Path:
    """Fail, do not skip: `make sglang` makes the environments, and `make test` calls it."""
    python = ROOT / RELEASES[release] / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python.relative_to(ROOT)} is missing: run `make sglang`")
    return python


def environment(folder: Path) -> dict[str, str]:
    """With the stand-ins of `stubs/sglang`, and this project's entry points as if it were installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "installed" / f"weightsync-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: weightsync\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    path = [ROOT / "tests" / "engines" / "stubs" / "sglang", info.parent, ROOT]
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_INTERPRET": "1",
    }


class Server:
    """Started from disk at version 1; `wait` returns once it answers. Several may start at the same time.

    `stock`: as SGLang's own users start it, with nothing of ours in its processes. `options`: of its command, with the
    models' folders, where they are not those of `sglang_models`.
    """

    def __init__(
        self, folder: Path, release: str, draft: str, *, stock: bool = False, options: Sequence[str] | None = None
    ) -> None:
        self.draft, self.release, self.log, self.stock = draft, release, folder / "server.log", stock
        # Bound, but not listening: nobody else is given the port, and SGLang, which reuses addresses, gets it.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        module = "sglang.launch_server" if stock else "weightsync.engines.sglang.launch"
        self._command = [
            str(python_of(release)), "-m", module, "--host", "127.0.0.1", "--port", str(port),
            *OPTIONS, *(options if options is not None else models.write_folders(folder, draft, 1)),
        ]  # fmt: skip
        self._folder, self._env = folder, environment(folder)
        if stock:
            self._env["PYTHONPATH"] = str(ROOT / "tests" / "engines" / "stubs" / "sglang")
        self.start()
        control: Any = stock_control if stock else SglangControl
        self.link = HttpLink(self.url, api_key=KEY, name=None)
        self.control = control(self.url, api_key=KEY, name=f"{draft}-{release}")

    def start(self) -> None:
        """Again after `kill`: at the same address, with the version of its folder."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait(self) -> Server:
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(errors.EngineError):
                if self.link.get("/health", deadline_s=30)[0] == 200:
                    return self
            if self._process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"SGLang did not start:\n{self.log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.25)

    @property
    def pids(self) -> list[int]:
        try:
            me = psutil.Process(self._process.pid)
            return [me.pid, *(p.pid for p in me.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """All of its processes at once, without a word."""
        family = [psutil.Process(pid) for pid in self.pids[1:]]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        for p in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        psutil.wait_procs(family, timeout=10)

    def close(self) -> None:
        self._held.close()
        self.kill()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.link.post(path, body, deadline_s=150)

    def generate(self, n: int = 6) -> tuple[int, Any]:
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        return self.post("/generate", input_ids=models.PROMPT, sampling_params=sampling)

    def decode(self, n: int = 6) -> tuple[list[int], float]:
        """(tokens, acceptance of the draft tokens)."""
        status, reply = self.generate(n)
        assert status == 200, reply
        return reply["output_ids"], reply["meta_info"]["spec_accept_rate"]

    def serves(self, version: int) -> None:
        assert self.decode() == (models.expected(self.draft, version, 6), 1.0)

    def weights(self) -> dict[str, dict[str, dict[str, Any]]]:
        return dict(self.control.weights(deadline_s=60))

    def publisher(self, source: Any, **config: Any) -> Publisher:
        values = {"deadline_s": DEADLINE_S, "control_s": 30.0, "run_id": "test", "takeover": True, **config}
        if self.stock:
            values = {"pause_mode": "abort", **values}
        return Publisher(source, [self.control], PublishConfig(**values))

    def publish(self, version: int, scope: str = "both", *, changes: Any = None, **config: Any) -> Any:
        with self.publisher(models.Weights(self.draft, version, changes), **config) as p:
            return p.publish(version, scope, force=True)  # type: ignore[arg-type]


def stock_update(server: Server, tensors: dict[str, torch.Tensor], folder: Path) -> tuple[int, Any]:
    """Publish `tensors` by SGLang's own distributed update; returns (HTTP status, reply) of the update itself."""
    file, group = folder / "stock.safetensors", f"stock-{folder.name}"
    save_file({name: t.clone() for name, t in tensors.items()}, file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.sglang_stock", str(port), group, str(file)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    try:
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        assert server.post("/init_weights_update_group", **body, group_name=group, backend="gloo")[0] == 200
        sessions = server.release != "0.5.10.post1"
        if sessions:
            assert server.post("/begin_weight_update")[0] == 200
        names = in_order(tensors)
        update = {
            "names": names,
            "dtypes": [str(tensors[n].dtype).removeprefix("torch.") for n in names],
            "shapes": [list(tensors[n].shape) for n in names],
            "group_name": group,
        }
        reply = server.post("/update_weights_from_distributed", **update)
        if sessions:
            assert server.post("/end_weight_update")[0] == 200
        server.post("/destroy_weights_update_group", group_name=group)
        return reply
    finally:
        assert trainer.stdin is not None
        trainer.stdin.close()
        try:
            trainer.wait(10)
        except subprocess.TimeoutExpired:
            trainer.kill()
            trainer.wait()
