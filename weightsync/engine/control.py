"""The control channel's client side: drive one engine over HTTP, from the coordinator (trainer rank 0) or a shell."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from weightsync import errors
from weightsync.engine.calls import Endpoint
from weightsync.engine.http import PREFIX
from weightsync.protocol import PublishCall

__all__ = ["HttpControl", "raised"]

_RAISED_AS_IS: dict[str, type[errors.WeightSyncError]] = {
    kind.__name__: kind
    for kind in (
        errors.AuthError,
        errors.ConfigError,
        errors.ManifestError,
        errors.RoutingError,
        errors.UnsupportedError,
        errors.VersionError,
    )
}


_ROUTER = "behind a router, list the addresses of the engines themselves"


class HttpControl:
    """One engine behind `url`, an `EngineControl`. Each call is a connection of its own.

    Args:
        url: `http://host:port` or `https://host:port` of the engine itself, not of a router in front of several.
        api_key: sent as `Authorization: Bearer`.
        name: for messages and reports; default host:port.
        ssl_context: for https; default verifies against the system's authorities.

    Every method raises `errors.EngineError` (engine unreachable, silent until the deadline, or failed; `EngineFenced`
    if it refuses because it is fenced), or the class that the engine itself named (`AuthError`, `RoutingError`, ...).
    """

    def __init__(
        self, url: str, *, api_key: str, name: str | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._endpoint = Endpoint(url, name=name, ssl_context=ssl_context)
        if not api_key:
            raise errors.ConfigError(f"engine {url}: api_key is empty; pass the key that the engine was started with")
        self.url = self._endpoint.url
        self.api_key = api_key
        self._direct = False

    @property
    def name(self) -> str:
        return self._endpoint.name

    def status(self, *, deadline_s: float) -> Mapping[str, Any]:
        status = self.call("status", {}, deadline_s=deadline_s)
        if not self._direct:
            # A router would send the steps of one publish to several engines; asked twice, two answer.
            again = self.call("status", {}, deadline_s=deadline_s)
            if again.get("instance") != status.get("instance"):
                raise errors.UnsupportedError(
                    f"engine {self.name}: two different engines answer at {self.url} (instances "
                    f"{status.get('instance')} and {again.get('instance')}): {_ROUTER}"
                )
            self._direct = True
        return status

    def preflight(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("preflight", call.to_json(), deadline_s=deadline_s)

    def pause(self, mode: str, *, deadline_s: float) -> Mapping[str, Any]:
        # Other engines may take as long to pause; then receive follows at once.
        return self.call("pause", {"mode": mode, "lease_s": 2 * deadline_s + 5}, deadline_s=deadline_s)

    def receive(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("receive", call.to_json(), deadline_s=deadline_s)

    def commit(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("commit", call.to_json(), deadline_s=deadline_s)

    def resume(self, *, deadline_s: float) -> Mapping[str, Any]:
        return self.call("resume", {}, deadline_s=deadline_s)

    def call(self, name: str, body: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """POST `body` to `/weightsync/v1/<name>` and return the reply. Raises as the class says."""
        connection = self._endpoint.connect(deadline_s)
        where = f"engine {self.name}, {name}"
        try:
            connection.request(
                "POST",
                f"{PREFIX}/{name}",
                json.dumps(body),
                {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
            )
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError as e:
            raise errors.EngineError(
                f"{where}: no answer within {deadline_s:g} s: the engine is stopped, overloaded or unreachable; "
                f"look at its log, or raise the deadline",
                engine=self.name,
                phase=name,
            ) from e
        except (OSError, http.client.HTTPException, socket.gaierror) as e:
            raise errors.EngineError(
                f"{where}: cannot reach {self.url}: {type(e).__name__}: {e}: is the engine up, the address right?",
                engine=self.name,
                phase=name,
            ) from e
        finally:
            connection.close()
        try:
            reply = json.loads(raw)
        except ValueError as e:
            raise errors.EngineError(
                f"{where}: {self.url} answered {response.status} without JSON: is it an engine's control port? "
                f"{_ROUTER}",
                engine=self.name,
                phase=name,
            ) from e
        if response.status == 200 and isinstance(reply, dict):
            return reply
        error = reply.get("error", {}) if isinstance(reply, dict) else {}
        if not isinstance(error, dict) or (response.status == 404 and error.get("type") != "UnsupportedError"):
            error = {}
        if not error and response.status in (401, 403):
            raise errors.AuthError(
                f"{where}: {self.url} refuses the key ({response.status}): pass the engine's api_key"
            )
        if not error:
            raise errors.EngineError(
                f"{where}: {self.url} answered {response.status}, not in weightsync's words ({str(reply)[:200]}): "
                f"start the engine with weightsync's part in it (docs/guides); {_ROUTER}",
                engine=self.name,
                phase=name,
            )
        raise raised(self.name, name, error, f"HTTP {response.status}")


def raised(engine: str, phase: str, error: Mapping[str, Any], default: str = "failed") -> errors.WeightSyncError:
    """The exception that an engine described (`weightsync.engine.http.error_body`), to be raised by its client."""
    kind, message = error.get("type"), error.get("message", default)
    text = f"engine {engine}, {phase}: {message}"
    if kind in _RAISED_AS_IS:
        return _RAISED_AS_IS[kind](text)
    cls = errors.EngineFenced if kind == "EngineFenced" else errors.EngineError
    return cls(
        text if cls is errors.EngineFenced else f"engine {engine}, {phase}: {kind}: {message}",
        engine=engine,
        rank=error.get("rank"),
        phase=error.get("phase") or phase,
        remote=error.get("remote"),
    )
