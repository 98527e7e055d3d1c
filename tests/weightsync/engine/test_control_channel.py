"""The keyed HTTP control channel, client and server over loopback."""

from __future__ import annotations

import http.client
import http.server
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from weightsync import errors
from weightsync.engine.control import HttpControl
from weightsync.engine.http import PREFIX, ControlServer


def _raise(error: BaseException) -> Mapping[str, Any]:
    raise error


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer(
        {
            "status": lambda body: {"seen": body},
            "routing": lambda _: _raise(errors.RoutingError("model.norm.weight: nobody takes it")),
            "fenced": lambda _: _raise(
                errors.EngineFenced("no complete version", engine="e0", rank=1, phase="receive")
            ),
            "bug": lambda _: _raise(ZeroDivisionError("oops")),
        },
        api_key="right",
    )
    server.start()
    yield server
    server.stop()


def test_reply_and_body_round_trip(server: ControlServer) -> None:
    control = HttpControl(server.url, api_key="right")
    assert control.call("status", {"a": [1, "x"]}, deadline_s=5) == {"seen": {"a": [1, "x"]}}
    assert control.status(deadline_s=5) == {"seen": {}}


@pytest.mark.parametrize("key", ["wrong", "righ", "right "])
def test_wrong_key_is_refused_before_any_handler_runs(server: ControlServer, key: str) -> None:
    with pytest.raises(errors.AuthError, match="API key"):
        HttpControl(server.url, api_key=key).status(deadline_s=5)


def test_errors_keep_their_class_and_place(server: ControlServer) -> None:
    control = HttpControl(server.url, api_key="right", name="e0")
    with pytest.raises(errors.RoutingError, match=r"e0.*model\.norm\.weight"):
        control.call("routing", {}, deadline_s=5)
    with pytest.raises(errors.EngineFenced, match="no complete version") as fenced:
        control.call("fenced", {}, deadline_s=5)
    assert (fenced.value.engine, fenced.value.rank, fenced.value.phase) == ("e0", 1, "receive")
    with pytest.raises(errors.EngineError, match="ZeroDivisionError: oops") as bug:
        control.call("bug", {}, deadline_s=5)
    assert "Traceback" in (bug.value.remote or "")


def test_unknown_path_lists_the_known_ones(server: ControlServer) -> None:
    with pytest.raises(errors.UnsupportedError, match="/weightsync/v1/status"):
        HttpControl(server.url, api_key="right").call("nope", {}, deadline_s=5)


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({}, b"not json", "not JSON"),
        ({}, b"[1]", "not a JSON object"),
        ({"Content-Length": "-5"}, b"", "length"),
        ({"Content-Length": str(1 << 40)}, b"", "length"),
        ({"Content-Length": "many"}, b"", "length"),
    ],
)
def test_malformed_requests_get_a_clear_400(
    server: ControlServer, headers: dict[str, str], body: bytes, says: str
) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    connection.request("POST", f"{PREFIX}/status", body, {"Authorization": "Bearer right", **headers})
    response = connection.getresponse()
    reply = json.loads(response.read())
    connection.close()
    assert response.status == 400
    assert says in reply["error"]["message"]


def test_taken_port_and_empty_key_are_named(server: ControlServer) -> None:
    with pytest.raises(errors.TransportError, match=f"{server.port}.*another port"):
        ControlServer({}, api_key="k", port=server.port)
    with pytest.raises(errors.ConfigError, match="api_key is empty"):
        ControlServer({}, api_key="")
    with pytest.raises(errors.ConfigError, match="api_key is empty"):
        HttpControl(server.url, api_key="")
    with pytest.raises(errors.ConfigError, match="expected http"):
        HttpControl("localhost:80", api_key="k")


def test_a_router_in_front_of_several_engines_is_refused_with_advice() -> None:
    instances = itertools.count()
    with_several = ControlServer({"status": lambda _: {"instance": str(next(instances))}}, api_key="k")
    with_several.start()
    try:
        with pytest.raises(
            errors.UnsupportedError, match=r"two different engines .* list the addresses of the engines"
        ):
            HttpControl(with_several.url, api_key="k").status(deadline_s=5)
    finally:
        with_several.stop()


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (404, b'{"detail": "Not Found"}', errors.EngineError, "behind a router, list the addresses"),
        (404, b'{"error": {"type": "NotFoundError", "code": 404}}', errors.EngineError, "weightsync's part in it"),
        (502, b"<html>Bad Gateway</html>", errors.EngineError, "behind a router, list the addresses"),
        (401, b'{"error": "Unauthorized"}', errors.AuthError, "pass the engine's api_key"),
    ],
)
def test_servers_that_do_not_know_us_get_advice_in_the_error(
    status: int, body: bytes, kind: type[Exception], says: str
) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    other = http.server.HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with pytest.raises(kind, match=says):
            HttpControl(f"http://127.0.0.1:{other.server_address[1]}", api_key="k").status(deadline_s=5)
    finally:
        other.shutdown()
        thread.join()
        other.server_close()


def test_only_the_given_address_listens(server: ControlServer) -> None:
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.port), timeout=2)


def test_unreachable_engine_says_so_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(errors.EngineError, match="cannot reach"):
            HttpControl(url, api_key="k").status(deadline_s=5)


def test_stopped_engine_costs_one_deadline_and_no_more() -> None:
    code = (
        "import sys, weightsync.engine.http as h\n"
        "s = h.ControlServer({'status': lambda b: {}}, api_key='k'); s.start()\n"
        "print(s.url, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        control = HttpControl(child.stdout.readline().strip(), api_key="k", name="frozen")
        assert control.status(deadline_s=20) == {}
        os.kill(child.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(errors.EngineError, match=r"frozen.*no answer within 0\.5 s"):
            control.status(deadline_s=0.5)
        assert time.monotonic() - started < 5
    finally:
        child.kill()
        child.communicate(timeout=10)
