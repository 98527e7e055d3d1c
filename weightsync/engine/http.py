"""The control channel's server side: JSON over HTTP with a bearer key, in a helper thread of an engine process.

An engine hands in one callable per path; what they raise from `weightsync.errors` travels back as JSON and is raised
again by `weightsync.engine.control.HttpControl`. Handlers run on server threads: they pass work on to the thread that
owns the model and wait for it with a deadline.
"""

from __future__ import annotations

import hmac
import http.server
import json
import logging
import socket
import socketserver
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from weightsync import errors

__all__ = ["PREFIX", "ControlServer", "Handler"]

PREFIX = "/weightsync/v1"
MAX_BODY_BYTES = 64 << 20
IDLE_S = 30.0

Handler = Callable[[dict[str, Any]], Mapping[str, Any]]

_HTTP_STATUS: tuple[tuple[type[BaseException], int], ...] = (
    (errors.AuthError, 401),
    (errors.EngineFenced, 503),
    (errors.UnsupportedError, 501),
    (errors.ConfigError, 400),
    (errors.ManifestError, 400),
    (errors.RoutingError, 400),
    (errors.VersionError, 409),
    (errors.WeightSyncError, 500),
)

_log = logging.getLogger(__name__)


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON body of an exception; the traceback of an unexpected one travels as text."""
    status = next((code for kind, code in _HTTP_STATUS if isinstance(error, kind)), 500)
    body = {
        "type": type(error).__name__,
        "message": str(error),
        "engine": getattr(error, "engine", None),
        "rank": getattr(error, "rank", None),
        "phase": getattr(error, "phase", None),
        "remote": getattr(error, "remote", None),
    }
    if not isinstance(error, errors.WeightSyncError):
        body["remote"] = "".join(traceback.format_exception(error))
    return status, {"error": body}


class ControlServer:
    """Serves `handlers` (path below `/weightsync/v1/`, e.g. `"status"`) on one address, to holders of the key only.

    Args:
        handlers: name -> callable(JSON body) -> JSON reply.
        api_key: compared in constant time with the `Authorization: Bearer` header; must not be empty.
        host: the only address that is listened on.
        port: 0 takes a free one; it is bound and held from construction on.

    Raises:
        errors.ConfigError: empty key.
        errors.TransportError: the address cannot be bound.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], *, api_key: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        if not api_key:
            raise errors.ConfigError("control server: api_key is empty: anyone could publish; pass a random string")
        outer = self

        class _Request(_RequestHandler):
            handlers_by_path: ClassVar[Mapping[str, Handler]] = {
                f"{PREFIX}/{name}": handler for name, handler in handlers.items()
            }
            expected = f"Bearer {api_key}".encode()

        class _Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            # A restarted engine must get its port back while old connections still linger in TIME_WAIT.
            allow_reuse_address = True

            def server_bind(self) -> None:
                # HTTPServer looks up its own name here: seconds, where no resolver answers, for nothing.
                socketserver.TCPServer.server_bind(self)

            def handle_error(self, request: Any, client_address: Any) -> None:
                _log.debug("control connection from %s broke", client_address, exc_info=True)

        try:
            self._server = _Server((host, port), _Request)
        except OSError as e:
            raise errors.TransportError(
                f"control server cannot listen on {host}:{port}: {e}: choose another port, or 0 for a free one"
            ) from e
        self.host = host
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=outer._server.serve_forever, kwargs={"poll_interval": 0.05}, name="weightsync-control", daemon=True
        )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and close the socket; requests that are being answered are not waited for."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _RequestHandler(http.server.BaseHTTPRequestHandler):
    handlers_by_path: ClassVar[Mapping[str, Handler]]
    expected: ClassVar[bytes]
    timeout = IDLE_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_BODY_BYTES:
            self.close_connection = True
            self._send(400, {"error": {"type": "ConfigError", "message": f"body length {length} is not accepted"}})
            return
        raw = self.rfile.read(length)
        try:
            body = json.loads(raw) if raw else {}
        except ValueError as e:
            self._send(400, {"error": {"type": "ConfigError", "message": f"body is not JSON: {e}"}})
            return
        if not isinstance(body, dict):
            self._send(400, {"error": {"type": "ConfigError", "message": "body is not a JSON object"}})
            return
        self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        given = (self.headers.get("Authorization") or "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.expected):
            self._send(
                401, error_body(errors.AuthError(f"{self.path}: missing or wrong API key: pass the engine's key"))[1]
            )
            return
        handler = self.handlers_by_path.get(self.path)
        if handler is None:
            known = ", ".join(sorted(self.handlers_by_path))
            self._send(404, error_body(errors.UnsupportedError(f"no such path {self.path}; there are: {known}"))[1])
            return
        try:
            status, reply = 200, dict(handler(body))
        except Exception as e:  # noqa: BLE001 - whatever it was, the caller gets it as JSON
            status, reply = error_body(e)
        self._send(status, reply)

    def _send(self, status: int, reply: Mapping[str, Any]) -> None:
        data = json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            # The caller gave up at its deadline; its next status call learns what became of the request.
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("control: " + format, *args)
