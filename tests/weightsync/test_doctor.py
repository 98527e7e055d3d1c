"""`weightsync doctor`: what it says of an engine of ours, of servers without us, and of nobody."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from tests.weightsync.fleet import Weights, engine, publisher
from weightsync import cli, doctor
from weightsync.guarantees import GUARANTEES


@pytest.fixture
def stock() -> Iterator[dict[str, object]]:
    """An HTTP server that knows the given paths, as an engine without weightsync does; `url` is its address."""
    known: dict[str, object] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(known.get(self.path, {"detail": "Not Found"})).encode()
            self.send_response(200 if self.path in known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    known["url"] = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield known
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.multiproc
def test_an_embedded_engine_is_ready_after_a_publish_and_asks_for_its_key(tmp_path, capsys) -> None:
    with engine("e0") as e:
        with publisher(Weights(1), [e]) as p:
            p.publish(1)
        found = doctor.diagnose(e.url, api_key=e.control().api_key)
        assert (found.engine, found.health) == ("embedded", "ready")
        assert found.guarantees == tuple(GUARANTEES)
        assert found.status["versions"] == {"target": 1, "draft[0]": 1}
        key = tmp_path / "key"
        key.write_text(e.control().api_key + "\n")
        assert cli.main(["doctor", e.url, "--api-key-file", str(key)]) == 0
        shown = capsys.readouterr().out
        assert "embedded, ready" in shown
        assert "target 1, draft[0] 1" in shown
        assert "drafts       draft[0]" in shown
        assert cli.main(["doctor", e.url, "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert said["health"] == "unknown"
        assert "--api-key-file" in said["missing"][0]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.32.0", "--middleware weightsync.engines.vllm.server.Fence"),
        ("0.20.2", "use 0.22 or later"),
        ("0.24.0", "--worker-extension-cls"),
        ("0.40.1", "later"),
    ],
)
def test_a_vllm_without_us_is_told_how(stock: dict[str, object], version: str, says: str) -> None:
    stock["/version"] = {"version": version}
    found = doctor.diagnose(str(stock["url"]))
    assert (found.engine, found.version, found.health) == ("vllm", version, "not ready")
    assert found.guarantees == ()
    assert says in " ".join(found.missing)


def test_a_sglang_without_us_is_told_how(stock: dict[str, object]) -> None:
    stock["/get_server_info"] = {"version": "0.5.23", "model_path": "m"}
    found = doctor.diagnose(str(stock["url"]))
    assert (found.engine, found.version, found.health) == ("sglang", "0.5.23", "not ready")
    assert "weightsync.engines.sglang.launch" in " ".join(found.missing)


def test_what_is_no_engine_and_what_is_not_there_are_unknown(stock: dict[str, object], capsys) -> None:
    found = doctor.diagnose(str(stock["url"]))
    assert (found.engine, found.health) == (None, "unknown")
    assert "is it a router" in found.missing[-1]
    assert cli.main(["doctor", "http://127.0.0.1:1"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2  # what happened; no guarantees of nobody
    assert "cannot reach" in shown[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["engine-7"], "expected http://host:port"),
        (["http://127.0.0.1:99999"], "Port out of range"),
        (["http://[::1:80"], "Invalid IPv6 URL"),
        (["http://127.0.0.1:1", "--deadline", "-3"], "--deadline -3: expected seconds"),
        (["http://127.0.0.1:1", "--deadline", "nan"], "--deadline nan: expected seconds"),
        (["http://127.0.0.1:1", "--api-key-file", "/no/such/key"], "--api-key-file /no/such/key: "),
    ],
)
def test_wrong_arguments_are_one_line(argv: list[str], words: str, capsys) -> None:
    assert cli.main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
