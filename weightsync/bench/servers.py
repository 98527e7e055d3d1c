"""Real engines for a bench: vLLM's or SGLang's own HTTP server, in the engine's environment, from a folder made for it.

`harness` starts them instead of embedded ones for `--engine vllm|sglang`; a `ServerHandle` has the same methods as an
`EngineHandle`. What each engine needs to be told stands in `_VLLM` and `_SGLANG`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightsync.embedded.config import ModelConfig
from weightsync.embedded.known import write_hf_folder
from weightsync.engine.base import EngineControl
from weightsync.engine.control import HttpControl
from weightsync.engines.sglang.control import SglangControl
from weightsync.errors import ConfigError, EngineError, WeightSyncError

__all__ = ["ServerConfig", "ServerHandle", "control_of", "launch_server", "servable", "write_folders"]

POLL_S = 0.25
STOP_GRACE_S = 15.0
NUM_DRAFT = 1
"""Draft tokens per step: with more, an engine that decodes on the CPU shows nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """One engine to start."""

    name: str
    kind: str
    """`vllm` or `sglang`."""
    python: str
    """Of the environment that the engine is installed in."""
    folder: Path
    """The target, as Hugging Face folder."""
    draft: str
    """`none`, `mtp`, or `eagle3` with its folder in `drafter`."""
    drafter: Path | None
    tp: int
    device: str
    """`cpu` or `cuda`."""
    dtype: torch.dtype
    host: str = "127.0.0.1"
    """The only address that it listens on, and the one that it receives at."""
    arguments: str = ""
    """More options of the engine's own, as in a shell."""
    log: str
    start_deadline_s: float


def servable(kind: str, draft: str, target: ModelConfig) -> ModelConfig:
    """A built-in shape that this engine can serve with that draft: heads and families that its models know."""
    head_dim = min(max(32, target.head_dim), target.hidden_size)
    heads = target.hidden_size // head_dim
    layers = target.num_layers
    if kind == "sglang" and draft == "eagle3":
        layers = max(4, layers)  # it reads three layers' inputs, of which the first one's cannot be taken
    return dataclasses.replace(
        target,
        family="mimo" if draft == "mtp" else "llama",
        num_heads=heads,
        num_kv_heads=min(target.num_kv_heads, heads),
        head_dim=head_dim,
        num_layers=layers,
        tie_word_embeddings=False,
    )


def write_folders(
    kind: str,
    path: Path,
    target: ModelConfig,
    drafter: ModelConfig | None,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
) -> tuple[Path, Path | None]:
    """Write role -> name -> tensor as `kind` loads it; (target, drafter of its own)."""
    roles = {role: {n: t.clone() for n, t in named.items()} for role, named in tensors.items()}
    inside = {} if drafter is not None else roles.get("draft", {})
    folder = write_hf_folder(path / "target", target, roles["target"] | inside)
    if target.family == "mimo":
        # Neither Transformers nor these engines have a configuration class for MiMo: Qwen2 with an MTP layer.
        _edit(folder, model_type="qwen2")
    if drafter is None:
        return folder, None
    own = write_hf_folder(path / "draft", drafter, roles["draft"])
    more: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"]}
    if kind == "sglang":
        aux = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
        more |= {"model_type": "llama", "eagle_config": aux}
    _edit(own, **more)
    return folder, own


def _edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def control_of(kind: str, url: str, api_key: str, name: str) -> EngineControl:
    """What a `Publisher` takes for such an engine."""
    if kind == "sglang":
        return SglangControl(url, api_key=api_key, name=name)
    return HttpControl(url, api_key=api_key, name=name)


def _vllm(c: ServerConfig, port: int, key: str) -> list[str]:
    speculation: dict[str, Any] | None = None
    if c.draft != "none":
        speculation = {"method": c.draft, "num_speculative_tokens": NUM_DRAFT}
        if c.drafter is not None:
            speculation["model"] = str(c.drafter)
    return [
        "vllm.entrypoints.openai.api_server", "--model", str(c.folder), "--host", c.host, "--port", str(port),
        "--served-model-name", "m", "--api-key", key, "--middleware", "weightsync.engines.vllm.server.Fence",
        "--weight-transfer-config", '{"backend": "weightsync"}', "--tensor-parallel-size", str(c.tp),
        "--skip-tokenizer-init", "--dtype", str(c.dtype).removeprefix("torch."), "--max-model-len", "256",
        "--max-num-seqs", "4", *(["--speculative-config", json.dumps(speculation)] if speculation else []),
        *(["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)] if c.device == "cpu" else []),
    ]  # fmt: skip


def _sglang(c: ServerConfig, port: int, key: str) -> list[str]:
    speculation = ["--speculative-num-steps", str(NUM_DRAFT), "--speculative-eagle-topk", "1"]
    speculation += ["--speculative-num-draft-tokens", str(NUM_DRAFT + 1)]
    match c.draft:
        case "none":
            speculation = []
        case "mtp":
            speculation += ["--speculative-algorithm", "NEXTN"]
        case _:
            speculation += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(c.drafter)]
    cpu = [
        "--device", "cpu", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend",
        "none", "--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.1",
        "--max-total-tokens", "2048", "--sleep-on-idle",
    ]  # fmt: skip
    return [
        "weightsync.engines.sglang.launch", "--model-path", str(c.folder), "--host", c.host, "--port", str(port),
        "--api-key", key, "--tp-size", str(c.tp), "--dtype", str(c.dtype).removeprefix("torch."),
        "--skip-tokenizer-init", "--skip-server-warmup", "--context-length", "256", "--max-running-requests", "4",
        "--log-level", "warning", *speculation, *(cpu if c.device == "cpu" else []),
    ]  # fmt: skip


# Of both engines on shared cores: no hub, no usage reports, no binding of cores.
_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_ENVIRONMENT_OF: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("sglang", "cpu"): {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"},
}
_COMMANDS: Mapping[str, Callable[[ServerConfig, int, str], list[str]]] = {"sglang": _sglang, "vllm": _vllm}


def launch_server(config: ServerConfig) -> ServerHandle:
    """Start one engine and wait until a publish could start.

    Raises:
        ConfigError: there is no such interpreter.
        EngineError: it did not start; its last words are in the message.
    """
    handle = ServerHandle(config)
    try:
        handle._start()
    except BaseException:
        handle.stop()
        raise
    return handle


class ServerHandle:
    """A running engine. Made by `launch_server`."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.name = config, config.name
        self.api_key = secrets.token_urlsafe(24)
        self.kind = config.kind
        self.pids: list[int] = []
        """The server and the processes below it, once it is ready."""
        # Held but not listened on: nobody else is given the port, and engines, which reuse addresses, get it.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((config.host, 0))
        port = self._held.getsockname()[1]
        self.url = f"http://{config.host}:{port}"
        self.control = control_of(config.kind, self.url, self.api_key, config.name)
        env = {**os.environ, **_ENVIRONMENT, **_ENVIRONMENT_OF.get((config.kind, config.device), {})}
        env["WEIGHTSYNC_BIND_HOST"] = config.host
        root = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(p for p in (env.get("PYTHONPATH"), root) if p)
        # Absolute, since it starts elsewhere; not resolved, since the link is what makes it the environment's.
        python = os.path.abspath(config.python) if os.sep in config.python else config.python
        command = [python, "-m", *_COMMANDS[config.kind](config, port, self.api_key)]
        command += shlex.split(config.arguments)
        try:
            with open(config.log, "ab") as log:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Away from a source tree: engines put the working directory first on their path.
                    cwd=config.folder,
                )
        except OSError as e:
            self._held.close()
            raise ConfigError(f"--engine-python {config.python}: {e}") from e
        # Ends the server if this process is killed: it would keep its GPU.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -KILL "-$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _start(self) -> None:
        process, end = self._process, time.monotonic() + self.config.start_deadline_s
        assert process is not None
        problem = ""
        while True:
            try:
                self.control.status(deadline_s=10.0)
            except WeightSyncError as e:
                problem = str(e)
            else:
                self.pids = _family(process.pid)
                return
            if process.poll() is not None or time.monotonic() > end:
                what = f"ended with code {process.returncode}" if process.poll() is not None else "is not ready in time"
                tail = Path(self.config.log).read_text(errors="replace").splitlines()[-12:]
                raise EngineError(
                    f"{self.name}: the {self.kind} server {what} ({problem}); its last output:\n  " + "\n  ".join(tail),
                    engine=self.name,
                    phase="start",
                )
            time.sleep(POLL_S)

    @property
    def version(self) -> str:
        return str(self.control.status(deadline_s=10.0)["engine_version"])

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, deadline_s: float) -> dict[str, Any]:
        """Decode greedily; `proposed` and `accepted` by the engine's own counters."""
        before = self._counts(deadline_s)
        for prompt in prompts:
            if self.kind == "sglang":
                sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
                self._post("/generate", {"input_ids": list(prompt), "sampling_params": sampling}, deadline_s)
            else:
                body = {"model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
                self._post("/v1/completions", body | {"ignore_eos": True, "detokenize": False}, deadline_s)
        after = self._counts(deadline_s)
        return {
            "proposed": after.get("draft_tokens", 0.0) - before.get("draft_tokens", 0.0),
            "accepted": after.get("accepted_tokens", 0.0) - before.get("accepted_tokens", 0.0),
        }

    def _counts(self, deadline_s: float) -> Mapping[str, float]:
        return self.control.status(deadline_s=deadline_s).get("speculation_counts") or {}

    def _post(self, path: str, body: Mapping[str, Any], deadline_s: float) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)  # noqa: S310 - http, built above
        try:
            with urllib.request.urlopen(request, timeout=deadline_s) as reply:  # noqa: S310 - as above
                reply.read()
        except (OSError, urllib.error.HTTPError) as e:
            raise EngineError(f"engine {self.name}: {path}: {type(e).__name__}: {e}", engine=self.name) from e

    def stop(self) -> None:
        """End it and all that it started; may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        self._guard.kill()  # before the process ids that it knows are others'
        self._guard.communicate()
        family = _family(process.pid)
        for sig, grace_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sig)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        for pid in family[1:]:  # workers may have sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._held.close()


def _family(pid: int) -> list[int]:
    """A process and those below it."""
    found = [pid]
    for one in found:  # grows while it is walked
        with contextlib.suppress(OSError):
            for task in (Path("/proc") / str(one) / "task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found
