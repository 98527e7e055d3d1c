"""Drive one SGLang engine from the coordinator: over its HTTP server, or an `sglang.Engine` in this process.

Every operation travels as one call of SGLang's own `init_weights_update_group` with a backend that only the bridge
knows (`weightsync.engines.sglang.bridge`); the operation is JSON in `group_name`, the answer JSON in `message`. A
server without the bridge refuses that backend at once and goes on serving: the first `status` proves that it lives.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from weightsync import errors
from weightsync.engine.calls import Endpoint
from weightsync.engine.control import raised
from weightsync.engines.sglang.rows import BACKEND
from weightsync.protocol import PublishCall

__all__ = ["HttpLink", "InProcessLink", "Link", "SglangControl"]

POLL_S = 0.02
CALL_S = 5.0
"""Least time for one more call, when a deadline is nearly over: an engine in mid-step answers only after it."""
_SENTINEL: Mapping[str, Any] = {
    # A server without the bridge tries to join this group. That this is no port it finds before it touches the network;
    # at an address where nobody listens it would try again until its timeout, and serve nobody meanwhile.
    "master_address": "127.0.0.1",
    "master_port": 65536,
    "rank_offset": 1,
    "world_size": 2,
    "backend": BACKEND,
}
_HOW = (
    "start it with `python -m weightsync.engines.sglang.launch`, or install weightsync in its environment and, for "
    "0.5.10, set SGLANG_EXTERNAL_MODEL_PACKAGE=weightsync.engines.sglang.models; its log says why a bridge was refused"
)


class Link(Protocol):
    """How calls reach one engine."""

    @property
    def name(self) -> str: ...

    def update_group(self, group_name: str, *, deadline_s: float) -> tuple[bool, str]:
        """`init_weights_update_group` with our backend: what SGLang replies. Raises `errors.EngineError`."""
        ...

    def set_weight_version(self, version: str, *, deadline_s: float) -> None:
        """What SGLang reports as `weight_version`. Raises `errors.EngineError`."""
        ...


class SglangControl:
    """One SGLang engine, a `weightsync.engine.base.EngineControl`.

    Args:
        engine: base address of the engine's own HTTP server (not of a router), or an `sglang.Engine` of this process.
        api_key: the server's `--api-key` or `--admin-api-key`; None if it has none.
        name: for messages and reports; default host:port.
        ssl_context: for https; default verifies against the system's authorities.
    """

    def __init__(
        self,
        engine: str | Any,
        *,
        api_key: str | None = None,
        name: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        if isinstance(engine, str):
            self.link: Link = HttpLink(engine, api_key=api_key, name=name, ssl_context=ssl_context)
        else:
            self.link = InProcessLink(engine, name=name or "sglang")

    @property
    def name(self) -> str:
        return self.link.name

    def status(self, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("status", {}, deadline_s=deadline_s)

    def preflight(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("preflight", {"call": call.to_json()}, deadline_s=deadline_s)

    def pause(self, mode: str, *, deadline_s: float) -> Mapping[str, Any]:
        end = time.monotonic() + deadline_s
        reply = self.call("pause", {"mode": mode, "lease_s": 2 * deadline_s + 5}, deadline_s=deadline_s)
        while not reply["idle"]:
            if time.monotonic() > end:
                raise errors.EngineError(
                    f"engine {self.name}, pause: requests still run after {deadline_s:g} s: raise the deadline, or use "
                    "pause_mode='abort'",
                    engine=self.name,
                    phase="pause",
                )
            time.sleep(POLL_S)
            reply = self.call("drain", {}, deadline_s=max(end - time.monotonic(), CALL_S))
        return reply

    def receive(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("receive", {"call": call.to_json()}, deadline_s=deadline_s)

    def commit(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        end = time.monotonic() + deadline_s
        reply = self.call("commit", {"call": call.to_json()}, deadline_s=deadline_s)
        while not reply["flushed"]:
            if time.monotonic() > end:
                raise errors.EngineError(
                    f"engine {self.name}, commit: holds version {call.version}, but its prefix cache could not be "
                    f"flushed within {deadline_s:g} s; it keeps requests back until it is",
                    engine=self.name,
                    phase="commit",
                )
            time.sleep(POLL_S)
            reply = self.call("commit", {"call": call.to_json()}, deadline_s=max(end - time.monotonic(), CALL_S))
        label = call.label if call.label is not None else str(call.version)
        self.link.set_weight_version(label, deadline_s=max(end - time.monotonic(), CALL_S))
        return reply

    def resume(self, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("resume", {}, deadline_s=deadline_s)

    def weights(self, *, deadline_s: float) -> Mapping[str, Any]:
        """Rank 0's runners: parameter or buffer -> `digest`, `data_ptr`, `shape`, `dtype`."""
        runners: Mapping[str, Any] = self.call("weights", {}, deadline_s=deadline_s)["runners"]
        return runners

    def call(self, op: str, body: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """Perform one operation of the bridge.

        Raises:
            errors.UnsupportedError: the engine has no bridge, or cannot take part as it was started.
            errors.WeightSyncError: what the engine raised.
        """
        text = json.dumps({"op": op, "engine": self.name, **body}, separators=(",", ":"))
        success, message = self.link.update_group(text, deadline_s=deadline_s)
        try:
            reply = json.loads(message)["weightsync"]
        except (ValueError, TypeError, KeyError):
            raise errors.UnsupportedError(
                f"engine {self.name}: SGLang answers, but has no weightsync bridge (it said: {message[:200]}): {_HOW}"
            ) from None
        if not success or "error" in reply:
            raise raised(self.name, op, reply.get("error", {}))
        return dict(reply)


class HttpLink:
    """SGLang's HTTP server; each call is a connection of its own."""

    def __init__(
        self, url: str, *, api_key: str | None, name: str | None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._endpoint = Endpoint(url, name=name, ssl_context=ssl_context)
        self._url, self._api_key = url, api_key
        self.name = self._endpoint.name

    def update_group(self, group_name: str, *, deadline_s: float) -> tuple[bool, str]:
        status, reply = self.post(
            "/init_weights_update_group", {**_SENTINEL, "group_name": group_name}, deadline_s=deadline_s
        )
        if status in (401, 403):
            raise errors.AuthError(f"engine {self.name}: SGLang refuses the key ({status}): pass its api_key")
        if not isinstance(reply, dict) or "message" not in reply:
            raise errors.UnsupportedError(
                f"engine {self.name}: {self._url} answered {status} to /init_weights_update_group: that is no SGLang "
                "server's own address; behind a router, list the addresses of the servers themselves"
            )
        return bool(reply.get("success")), str(reply["message"])

    def set_weight_version(self, version: str, *, deadline_s: float) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        status, reply = self.post("/update_weight_version", body, deadline_s=deadline_s)
        if status != 200:
            raise errors.EngineError(
                f"engine {self.name}: serves the new weights, but SGLang did not take weight_version {version!r}: "
                f"{status} {reply}",
                engine=self.name,
                phase="commit",
            )

    def post(self, path: str, body: Mapping[str, Any], *, deadline_s: float) -> tuple[int, Any]:
        """(HTTP status, JSON reply or text)."""
        return self._request("POST", path, body, deadline_s)

    def get(self, path: str, *, deadline_s: float) -> tuple[int, Any]:
        """(HTTP status, JSON reply or text)."""
        return self._request("GET", path, None, deadline_s)

    def _request(self, verb: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        text = None if body is None else json.dumps(body)
        status, raw = self._endpoint.exchange(verb, path, text, headers, deadline_s)
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode(errors="replace")


class InProcessLink:
    """An `sglang.Engine` of this process. Its event loop runs only inside its calls, so calls take turns here."""

    def __init__(self, engine: Any, *, name: str) -> None:
        self.name = name
        self._engine = engine
        self._turn = threading.Lock()

    def update_group(self, group_name: str, *, deadline_s: float) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(**_SENTINEL, group_name=group_name)
        success, message = self._run(
            self._engine.tokenizer_manager.init_weights_update_group(request, None), deadline_s, "the bridge"
        )
        return bool(success), str(message)

    def set_weight_version(self, version: str, *, deadline_s: float) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        manager = self._engine.tokenizer_manager
        update = getattr(manager, "update_weight_version", None)
        if update is None:
            manager.server_args.weight_version = version  # what 0.5.10's HTTP handler does
            return
        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._run(update(request), deadline_s, "update_weight_version")

    def _run(self, work: Any, deadline_s: float, what: str) -> Any:
        loop = self._engine.loop
        late = errors.EngineError(f"engine {self.name}: no answer of {what} within {deadline_s:g} s", engine=self.name)
        if loop.is_running():
            future = asyncio.run_coroutine_threadsafe(work, loop)
            try:
                return future.result(deadline_s)
            except TimeoutError:
                raise late from None
        if not self._turn.acquire(timeout=deadline_s):
            work.close()
            raise late
        try:
            return loop.run_until_complete(asyncio.wait_for(work, deadline_s))
        except asyncio.TimeoutError:
            raise late from None
        finally:
            self._turn.release()
