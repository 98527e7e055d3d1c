"""What control clients share, whichever engine they drive: its address, a call over HTTP, and one call at a time.

`Endpoint` is built once per engine by `HttpControl`, by SGLang's link and by the client of stock vLLM; `one_call` goes
around each operation of whoever performs them one after the other.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Mapping

from weightsync import errors

__all__ = ["Endpoint", "one_call"]


class Endpoint:
    """The HTTP server of one engine. Each call is a connection of its own.

    Args:
        url: `http://host:port` or `https://host:port`, perhaps with a path in front of the server's own.
        name: for messages; default host:port.
        ssl_context: for https; default verifies against the system's authorities.

    Raises:
        ConfigError: no such address.
    """

    def __init__(self, url: str, *, name: str | None = None, ssl_context: ssl.SSLContext | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as e:  # a port that is no number or none that there is, a bracket that stays open
            raise errors.ConfigError(f"engine address {url!r}: {e}: expected http://host:port") from e
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise errors.ConfigError(f"engine address {url!r}: expected http://host:port or https://host:port")
        self.url = url.rstrip("/")
        self.name = name if name is not None else f"{parts.hostname}:{port}"
        self._host, self._port, self._tls = parts.hostname, port, parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._ssl_context = ssl_context

    def connect(self, deadline_s: float) -> http.client.HTTPConnection:
        if self._tls:
            context = self._ssl_context or ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=deadline_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=deadline_s)

    def exchange(
        self, verb: str, target: str, body: str | None, headers: Mapping[str, str], deadline_s: float
    ) -> tuple[int, bytes]:
        """(HTTP status, what came with it). Raises `EngineError`: out of reach, or silent until the deadline."""
        connection = self.connect(deadline_s)
        try:
            connection.request(verb, self._path + target, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read()
        except TimeoutError as e:
            raise errors.EngineError(
                f"engine {self.name}: no answer to {target.partition('?')[0]} within {deadline_s:g} s: stopped, busy "
                "or unreachable; look at its log, or raise the deadline",
                engine=self.name,
            ) from e
        except (OSError, http.client.HTTPException) as e:
            raise errors.EngineError(
                f"engine {self.name}: cannot reach {self.url}: {type(e).__name__}: {e}: is it up, the address right?",
                engine=self.name,
            ) from e
        finally:
            connection.close()


@contextlib.contextmanager
def one_call(lock: threading.Lock, engine: str, phase: str) -> Iterator[None]:
    """Refuses a second call instead of queueing it: a publisher that gave up must not be followed by its own call.

    Raises:
        EngineError: another call holds `lock`.
    """
    if not lock.acquire(blocking=False):
        raise errors.EngineError(
            f"engine {engine}: {phase}: another control call is in progress: wait for it", engine=engine, phase=phase
        )
    try:
        yield
    finally:
        lock.release()
