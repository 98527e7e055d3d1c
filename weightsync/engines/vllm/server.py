"""vLLM's HTTP server as a publish sees it: the control API below `/weightsync/v1/`, and the fence before everything.

    vllm serve ... --middleware weightsync.engines.vllm.server.Fence --api-key KEY

An ASGI middleware, vLLM's own seam: it needs neither development mode nor a change of a file. The control API asks for
the server's API key. While the engine is fenced, only what tells about it is answered; all else gets 503.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import hmac
import json
import os
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

from weightsync import errors
from weightsync.engine.http import MAX_BODY_BYTES, PREFIX, error_body
from weightsync.engines.settings import Settings
from weightsync.engines.vllm.leader import Leader, facts_of

__all__ = ["Fence"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

# Answered while fenced: they tell about the server and generate nothing. Waking up must work before a publish.
OPEN = frozenset(
    {
        "/health",
        "/is_paused",
        "/is_sleeping",
        "/load",
        "/metrics",
        "/ping",
        "/sleep",
        "/v1/models",
        "/version",
        "/wake_up",
        "/weight_info",
    }
)
# Another way to the weights, or to the versions, than a publish.
TAKEN = frozenset(
    {
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
    }
)


class Fence:
    """See the module. Starlette makes one per server process."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._leader: Leader | None = None

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(f"{PREFIX}/") and scope["type"] == "http":
            status, reply = await self._control(path.removeprefix(f"{PREFIX}/"), scope, receive)
            await _answer(send, status, reply)
            return
        fenced = self._leader is not None and self._leader.fenced is not None
        if path in TAKEN:
            text = f"{path}: this server's weights are published by weightsync: use {PREFIX}"
            await _answer(send, *error_body(errors.UnsupportedError(text)))
        elif fenced and path not in OPEN:
            assert self._leader is not None
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1013})
            else:
                await _answer(send, *error_body(self._leader.fence_error()))
        elif path in ("/sleep", "/wake_up"):
            await self._sleep(path, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # -- the control API -----------------------------------------------------------------------------------------------

    async def _control(
        self, name: str, scope: Scope, receive: Callable[[], Awaitable[Message]]
    ) -> tuple[int, Mapping[str, Any]]:
        try:
            _authenticate(scope)
            body = await _json_body(receive)
            leader = self._leader if self._leader is not None else self._make_leader(scope)
            return 200, dict(await _in_thread(leader.handler(name), body))
        except Exception as e:  # noqa: BLE001 - whatever it was, the caller gets it as JSON
            return error_body(e)

    def _make_leader(self, scope: Scope) -> Leader:
        """Raises `UnsupportedError` for servers that cannot be published to."""
        from vllm import __version__

        state = scope["app"].state
        if (count := getattr(state.args, "api_server_count", None) or 1) > 1:
            raise errors.UnsupportedError(
                f"vLLM runs {count} API server processes, of which each would have a fence of its own: start it with "
                "--api-server-count 1"
            )
        settings = Settings.from_environment()
        facts = facts_of(state.engine_client.vllm_config, __version__, settings)
        rpc = _AsyncRpc(state.engine_client, asyncio.get_running_loop(), by_extension=facts.by_extension)
        host, port = scope.get("server") or ("vllm", 0)
        self._leader = Leader(settings.name or f"{host}:{port}", rpc, facts, settings)
        return self._leader

    async def _sleep(
        self,
        path: str,
        scope: Scope,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Pass it on, and remember what became of the weights."""
        status: list[int] = []

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            await send(message)

        try:
            leader = self._leader if self._leader is not None else self._make_leader(scope)
        except errors.UnsupportedError:
            await self.app(scope, receive, send)  # never published to: there is no version to lose
            return
        query = urllib.parse.parse_qs(scope.get("query_string", b"").decode())
        await self.app(scope, receive, watch)
        if status[:1] != [200]:
            return
        if path == "/wake_up":
            leader.asleep -= set(query.get("tags", ())) or leader.asleep
            return
        level = int(query.get("level", ["1"])[0])
        if level >= 1:
            leader.asleep = frozenset({"weights", "kv_cache"})
        if level >= 2:
            leader.weights_lost("its weights were discarded (sleep level 2)")


def _authenticate(scope: Scope) -> None:
    """Raises `AuthError`. The keys are the server's own, of `--api-key` or `VLLM_API_KEY`."""
    args = scope["app"].state.args
    keys = [k for k in (*(getattr(args, "api_key", None) or ()), os.environ.get("VLLM_API_KEY")) if k]
    if not keys:
        raise errors.AuthError("this server has no API key, so anyone could publish: start it with --api-key")
    headers = {k.lower(): v for k, v in scope["headers"]}
    given = hashlib.sha256(headers.get(b"authorization", b"")).digest()
    matches = [hmac.compare_digest(given, hashlib.sha256(f"Bearer {k}".encode()).digest()) for k in keys]
    if not any(matches):
        raise errors.AuthError(f"{scope['path']}: missing or wrong API key: pass the server's key")


async def _json_body(receive: Callable[[], Awaitable[Message]]) -> dict[str, Any]:
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise errors.ConfigError("the caller is gone")
        data += message.get("body", b"")
        if len(data) > MAX_BODY_BYTES:
            raise errors.ConfigError(f"body of more than {MAX_BODY_BYTES} bytes is not accepted")
        if not message.get("more_body"):
            break
    try:
        body = json.loads(data) if data else {}
    except ValueError as e:
        raise errors.ConfigError(f"body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise errors.ConfigError("body is not a JSON object")
    return body


async def _answer(send: Callable[[Message], Awaitable[None]], status: int, reply: Mapping[str, Any]) -> None:
    data = json.dumps(reply).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _in_thread(handler: Callable[[dict[str, Any]], Mapping[str, Any]], body: dict[str, Any]) -> Mapping[str, Any]:
    """On a thread of its own: the default executor's are few, and a receive holds one for as long as it takes."""
    future: concurrent.futures.Future[Mapping[str, Any]] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(handler(body))
        except BaseException as e:  # noqa: BLE001 - it is raised where the future is awaited
            future.set_exception(e)

    threading.Thread(target=run, name="weightsync-control", daemon=True).start()
    return await asyncio.wrap_future(future)


class _AsyncRpc:
    """vLLM's `AsyncLLM`, called from other threads than that of its event loop."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, *, by_extension: bool) -> None:
        self._client, self._loop, self._by_extension = client, loop, by_extension

    def _wait(self, call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"no answer within {timeout_s:g} s: a worker is stopped, stuck or busy") from None

    def preflight(self, words: Mapping[str, Any], timeout_s: float) -> None:
        call = (
            self._extension("preflight", words)
            if self._by_extension
            else self._client.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": dict(words)})
        )
        self._wait(call, timeout_s)

    def bind_draft(self, timeout_s: float) -> None:
        self._wait(self._session(self._client.start_draft_weight_update), timeout_s)

    def update(self, words: Mapping[str, Any], timeout_s: float) -> None:
        if self._by_extension:
            self._wait(self._extension("receive", words), timeout_s)
            return
        self._wait(self._session(self._client.start_weight_update, {"update_info": dict(words)}), timeout_s)

    def _extension(self, name: str, words: Mapping[str, Any]) -> Coroutine[Any, Any, Any]:
        call: Coroutine[Any, Any, Any] = self._client.collective_rpc(
            f"weightsync_{name}", kwargs={"words": dict(words)}
        )
        return call

    async def _session(self, start: Callable[[], Awaitable[Any]], update: dict[str, Any] | None = None) -> None:
        await start()
        try:
            if update is not None:
                await self._client.collective_rpc("update_weights", kwargs=update)
        finally:
            # A session left open would refuse the next one, by an exception on every rank.
            await self._client.finish_weight_update()

    def pause(self, mode: str, timeout_s: float) -> list[str]:
        # The cache is reset once, at commit.
        self._wait(self._client.pause_generation(mode=mode, clear_cache=False), timeout_s)
        return self.running() if mode == "keep" else []

    def resume(self, timeout_s: float) -> None:
        self._wait(self._client.resume_generation(), timeout_s)

    def running(self) -> list[str]:
        return list(self._client.output_processor.request_states)

    def abort(self, ids: list[str], timeout_s: float) -> None:
        self._wait(self._client.abort(ids, internal=True), timeout_s)

    def flush(self, reset_running: bool, timeout_s: float) -> bool:
        return bool(self._wait(self._client.reset_prefix_cache(reset_running), timeout_s))

    def set_version(self, version: str, timeout_s: float) -> None:
        if hasattr(self._client, "update_weight_version"):  # from 0.28 on
            self._wait(self._client.update_weight_version(version), timeout_s)

    def counts(self) -> Mapping[str, float]:
        return speculation_counts()


def speculation_counts() -> dict[str, float]:
    """vLLM's counters of this process, over all engines in it."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    counts: dict[str, float] = {}
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    }
    for metric in get_metrics_snapshot():
        if metric.name in names:
            counts[names[metric.name]] = counts.get(names[metric.name], 0.0) + float(metric.value)
    return counts
