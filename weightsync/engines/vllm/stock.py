"""Publish to a stock vLLM through its own weight transfer API: nothing of weightsync is installed in the engine.

    vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'      (with VLLM_SERVER_DEV_MODE=1)
    Publisher(source, [stock_control("http://host:8000")])

Target and draft get a session each, over vLLM's NCCL group, of which this process is rank 0. What that cannot promise
is in `MISSING`, and in every report. Runs in the trainer: vLLM itself is imported nowhere.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from weightsync import errors
from weightsync.acks import start_call
from weightsync.engine.calls import Endpoint
from weightsync.engines import joint
from weightsync.engines.joint import SLACK_S, Group
from weightsync.engines.nccl import NcclGroup
from weightsync.engines.relay import Relay, StockFacts
from weightsync.engines.vllm.rows import stock_row

__all__ = ["MISSING", "stock_control"]

_ADAPTER = "start vLLM with weightsync's backend and middleware (docs/guides/vllm.md)"
MISSING: Mapping[str, str] = {
    "all_rank_acks": f"vLLM's reply does not say what its ranks hold: {_ADAPTER}",
    "atomic_commit": "a failure leaves vLLM paused with parts of two versions, and whoever resumes "
    f"it gets a mixture, or a crash: {_ADAPTER}",
    "one_receive": f"target and draft take a session each: {_ADAPTER}",
    "routing": f"vLLM's loaders go by names and skip what they do not know: {_ADAPTER}",
}
_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
FLUSH_TRIES = 20
FLUSH_WAIT_S = 0.1


def stock_control(
    engine: str | Any,
    *,
    api_key: str | None = None,
    name: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    bind_host: str = "127.0.0.1",
    open_group: Callable[[int], Group] = NcclGroup,
) -> Relay:
    """An `EngineControl` for a vLLM server, or an `LLM` of this process, in which nothing of ours is installed.

    Args:
        engine: `http(s)://host:port` of the server itself (not of a router), or the `LLM`.
        api_key: the server's, if it has one.
        ssl_context: for https; default verifies against the system's authorities.
        open_group: makes rank 0 of vLLM's data group from its size; default NCCL.

    Raises:
        ConfigError: an address that is none.
    """
    api: _Api
    if isinstance(engine, str):
        api = _HttpApi(engine, api_key=api_key, name=name, ssl_context=ssl_context)
    else:
        api = _LocalApi(engine, name=name or "vllm")
    return Relay(_Stock(api, open_group), bind_host=bind_host)


class _Api(Protocol):
    """vLLM's methods, by its HTTP names, wherever it runs."""

    name: str

    def call(self, path: str, deadline_s: float, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """POST. Raises `EngineError`, `AuthError`, `UnsupportedError` (there is no such path)."""
        ...

    def config(self, deadline_s: float) -> tuple[str, Mapping[str, Any]]:
        """(version, configuration)."""
        ...

    def weight_version(self, deadline_s: float) -> str: ...

    def counts(self, deadline_s: float) -> Mapping[str, float]: ...


class _Stock:
    """The `StockEngine` of vLLM."""

    def __init__(self, api: _Api, open_group: Callable[[int], Group]) -> None:
        self._api, self._open_group = api, open_group
        self._group: Group | None = None
        self._facts: StockFacts | None = None
        # What opened a session that is not closed; whether vLLM has raised in it.
        self._begun: str | None = None
        self._raised = False

    @property
    def name(self) -> str:
        return self._api.name

    def describe(self, deadline_s: float) -> StockFacts:
        version, config = self._api.config(deadline_s)
        row = stock_row(version)
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if backend != "nccl":
            fix = """start it with --weight-transfer-config '{"backend": "nccl"}'"""
            if backend == "weightsync":
                fix = "weightsync's adapter is in it: use weightsync.engine.control.HttpControl"
            raise errors.UnsupportedError(f"engine {self.name}: vLLM's weight transfer backend is {backend!r}: {fix}")
        parallel, model = config["parallel_config"], config["model_config"]
        if model.get("quantization"):
            raise errors.UnsupportedError(
                f"engine {self.name}: vLLM serves quantised weights ({model['quantization']}): serve the "
                "unquantised model"
            )
        speculative = config.get("speculative_config") or {}
        method = speculative.get("method")
        if method is not None and method not in (*row.drafts, *row.no_draft):
            raise errors.UnsupportedError(
                f"engine {self.name}: vLLM speculates with method {method!r}; supported are "
                f"{', '.join((*row.drafts, *row.no_draft))}"
            )
        self._facts = StockFacts(
            kind="vllm (stock)",
            version=version,
            runners=("target", "draft[0]") if method in row.drafts else ("target",),
            speculation=method,
            weight_version=self._api.weight_version(deadline_s),
            world_size=int(parallel["world_size"]) * int(parallel.get("data_parallel_size") or 1),
            missing={k: v for k, v in MISSING.items() if k != "one_receive" or method in row.drafts},
            row=row.versions,
            evidence=row.evidence,
            how=row.how,
        )
        return self._facts

    def counts(self, deadline_s: float) -> Mapping[str, float]:
        return self._api.counts(deadline_s)

    def connect(self, deadline_s: float) -> None:
        if self._begun is not None:
            self._close_session(self._begun, deadline_s)
        if self._group is not None:
            return
        assert self._facts is not None, "status comes first"
        size = 1 + self._facts.world_size
        group = self._open_group(size)
        words = {**group.words, "rank_offset": 1, "world_size": size, "packed": False}
        asked = start_call(self._api.call, "/init_weight_transfer_engine", deadline_s + SLACK_S, {"init_info": words})
        joint.join(self.name, "vLLM's data group", group, asked, deadline_s)
        self._group = group

    def pause(self, mode: str, deadline_s: float) -> None:
        self._api.call("/pause", deadline_s, mode=mode, clear_cache="false")

    def resume(self, deadline_s: float) -> None:
        self._api.call("/resume", deadline_s)

    def begin(self, runner: str, deadline_s: float) -> None:
        self._begun = "/start_weight_update" if runner == "target" else "/start_draft_weight_update"
        self._api.call(self._begun, deadline_s)

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]], deadline_s: float) -> None:
        group = self._group
        assert group is not None
        info = {
            "names": [name for name, _ in pairs],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in pairs],
            "shapes": [list(t.shape) for _, t in pairs],
        }
        asked = start_call(self._api.call, "/update_weights", deadline_s + SLACK_S, {"update_info": info})
        try:
            joint.send(self.name, group, pairs, asked, deadline_s)
        except errors.EngineError:
            self._raised = joint.refused(asked)
            raise

    def finish(self, runner: str, deadline_s: float) -> None:
        self._api.call("/finish_weight_update", deadline_s)
        self._begun = None

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def commit(self, weight_version: str, mode: str, deadline_s: float) -> None:
        frozen = "true" if mode == "keep" else "false"
        for attempt in range(FLUSH_TRIES):
            done = self._api.call("/reset_prefix_cache", deadline_s, reset_running_requests=frozen)
            if done is True or (isinstance(done, dict) and done.get("success")):
                break
            time.sleep(FLUSH_WAIT_S if attempt + 1 < FLUSH_TRIES else 0)
        else:
            raise errors.EngineError(
                f"engine {self.name}: commit: vLLM refused to reset its prefix cache {FLUSH_TRIES} times and stays "
                "paused: requests that hold blocks of the old version still run; publish again, with "
                "pause_mode='keep' or 'abort'",
                engine=self.name,
                phase="commit",
            )
        self._api.call("/update_weight_version", deadline_s, {"new_version": weight_version})
        self._api.call("/resume", deadline_s)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _close_session(self, path: str, deadline_s: float) -> None:
        """End what an earlier publish left open. Layers that it left half loaded would count the elements of both
        tries; closed, they hold garbage until the full publish that follows.

        Raises:
            EngineError: vLLM does not answer, or cannot: its ranks may still wait for a broadcast.
        """
        assert self._facts is not None, "status comes first"
        if self._raised and self._facts.world_size > 1:
            raise errors.EngineError(
                f"engine {self.name}, preflight: its ranks raised in an earlier publish, after which vLLM takes "
                "the answer of one call for that of another: restart vLLM, then publish",
                engine=self.name,
                phase="preflight",
            )
        try:
            if self._raised:
                # vLLM drops the session of an update that raised, but leaves its layers open.
                self._api.call(path, deadline_s)
            self._api.call("/finish_weight_update", deadline_s)
        except errors.EngineError as e:
            raise errors.EngineError(
                f"engine {self.name}, preflight: a publish was cut off while vLLM was loading, and its session cannot "
                f"be closed ({e}): restart vLLM, then publish",
                engine=self.name,
                phase="preflight",
            ) from e
        self._begun, self._raised = None, False


class _HttpApi:
    """vLLM's HTTP server in development mode; each call is a connection of its own."""

    def __init__(self, url: str, *, api_key: str | None, name: str | None, ssl_context: ssl.SSLContext | None) -> None:
        self._endpoint = Endpoint(url, name=name, ssl_context=ssl_context)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = self._endpoint.name

    def call(self, path: str, deadline_s: float, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        return self._ask("POST", target, deadline_s, json.dumps(body or {}))

    def config(self, deadline_s: float) -> tuple[str, Mapping[str, Any]]:
        said = self._ask("GET", "/version", deadline_s)
        if not isinstance(said, dict) or "version" not in said:
            raise self._no_vllm("/version says nothing of one")
        info = self._ask("GET", "/server_info?config_format=json", deadline_s)
        return str(said["version"]), info["vllm_config"]

    def weight_version(self, deadline_s: float) -> str:
        return str(self._ask("GET", "/weight_info", deadline_s)["weight_version"])

    def counts(self, deadline_s: float) -> Mapping[str, float]:
        counts: dict[str, float] = {}
        for name, value in re.findall(
            r"^([\w:]+)(?:\{[^}]*\})? ([\d.e+]+)$", str(self._ask("GET", "/metrics", deadline_s)), re.M
        ):
            if (key := _COUNTERS.get(name)) is not None:
                counts[key] = counts.get(key, 0.0) + float(value)
        return counts

    def _no_vllm(self, why: str) -> errors.UnsupportedError:
        return errors.UnsupportedError(
            f"engine {self.name}: {self._endpoint.url}: {why}: that is no vLLM server's own address; behind a "
            "router, list the addresses of the servers themselves"
        )

    def _ask(self, method: str, target: str, deadline_s: float, body: str | None = None) -> Any:
        path = target.partition("?")[0]
        status, raw = self._endpoint.exchange(method, target, body, self._headers, deadline_s)
        text = raw.decode(errors="replace")
        if status in (401, 403):
            raise errors.AuthError(f"engine {self.name}: vLLM refuses the key ({status}): pass its api_key")
        if status == 404 and path == "/version":
            raise self._no_vllm("there is no /version")
        if status == 404:
            raise errors.UnsupportedError(
                f"engine {self.name}: this vLLM has no {path}: set VLLM_SERVER_DEV_MODE=1 in its environment, which "
                f"opens its weight transfer API, or {_ADAPTER}"
            )
        if status != 200:
            raise errors.EngineError(
                f"engine {self.name}: vLLM answered {status} to {path}: {text[:300]}: look at its log",
                engine=self.name,
            )
        try:
            return json.loads(text)
        except ValueError:
            return text


class _LocalApi:
    """An `LLM` of this process. Its calls take turns; publish between its calls of `generate`."""

    def __init__(self, llm: Any, *, name: str) -> None:
        self._llm, self.name = llm, name
        self._turn = threading.Lock()

    def config(self, deadline_s: float) -> tuple[str, Mapping[str, Any]]:
        from vllm import __version__

        c = self._llm.llm_engine.vllm_config
        return __version__, {
            "weight_transfer_config": None if (w := c.weight_transfer_config) is None else {"backend": w.backend},
            "parallel_config": {
                "world_size": c.parallel_config.world_size,
                "data_parallel_size": c.parallel_config.data_parallel_size,
            },
            "model_config": {"quantization": c.model_config.quantization},
            "speculative_config": None if (s := c.speculative_config) is None else {"method": str(s.method)},
        }

    def call(self, path: str, deadline_s: float, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        if path in ("/pause", "/resume"):
            if path == "/pause" and self._llm.llm_engine.has_unfinished_requests():
                raise errors.EngineError(
                    f"engine {self.name}: pause: this LLM is generating: publish between its calls"
                )
            return None
        if not self._turn.acquire(timeout=deadline_s):
            raise errors.EngineError(f"engine {self.name}: {path}: another call is not done after {deadline_s:g} s")
        try:
            if path == "/reset_prefix_cache":
                return self._llm.reset_prefix_cache(reset_running_requests=query["reset_running_requests"] == "true")
            if path == "/update_weight_version":
                return self._llm.update_weight_version((body or {})["new_version"])
            return self._llm.collective_rpc(path.removeprefix("/"), timeout=deadline_s, kwargs=dict(body or {}))
        except errors.WeightSyncError:
            raise
        except Exception as e:
            raise errors.EngineError(f"engine {self.name}: {path}: vLLM: {type(e).__name__}: {e}") from e
        finally:
            self._turn.release()

    def weight_version(self, deadline_s: float) -> str:
        return str(self._llm.get_weight_version())

    def counts(self, deadline_s: float) -> Mapping[str, float]:
        from weightsync.engines.vllm.server import speculation_counts

        return speculation_counts()
