"""What the stock control client makes of addresses, keys, certificates, routers and silence; no vLLM is needed."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.server
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync import errors
from weightsync.engine.control import HttpControl
from weightsync.engines.nccl import NcclGroup
from weightsync.engines.relay import Relay
from weightsync.engines.vllm.stock import MISSING, stock_control

KEY = "secret"
CONFIG: dict[str, Any] = {
    "weight_transfer_config": {"backend": "nccl"},
    "parallel_config": {"world_size": 2, "data_parallel_size": 1},
    "model_config": {"quantization": None},
    "speculative_config": {"method": "mtp"},
}
METRICS = (
    'vllm:spec_decode_num_drafts_total{engine="0"} 4.0\nvllm:spec_decode_num_draft_tokens_total{engine="0"} 1e+01\n'
)


class Fake:
    """Answers as a vLLM server's development API does; `known` is path -> reply, `asked` what was asked."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.known: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/server_info": {"vllm_config": CONFIG},
            "/weight_info": {"weight_version": "default"},
            "/metrics": METRICS,
        }
        self.delay_s = 0.0
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(fake.delay_s)
                path = self.path.partition("?")[0]
                status = 200 if path in fake.known else 404
                if self.headers.get("Authorization") != f"Bearer {KEY}":
                    status = 401
                body = json.dumps(fake.known.get(path)) if path != "/metrics" else METRICS
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the client may have lost patience
                    self.wfile.write(body.encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.do_GET()

            def log_message(self, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *args: object) -> None:
                pass  # a client that refuses the certificate hangs up

        self.server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def control(self, **changes: Any) -> Relay:
        return stock_control(self.url, **{"api_key": KEY, "name": "v", **changes})


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    try:
        yield fake
    finally:
        fake.close()


def test_status_says_what_the_server_is_and_what_is_missing(fake: Fake) -> None:
    status = fake.control().status(deadline_s=5)
    assert (status["engine_kind"], status["engine_version"], status["engine_ranks"]) == ("vllm (stock)", "0.32.0", 2)
    assert status["missing_guarantees"] == MISSING
    assert status["versions"] == {"target": None, "draft[0]": None}
    assert status["speculation_counts"] == {"drafts": 4.0, "draft_tokens": 10.0}
    fake.known["/server_info"] = {"vllm_config": CONFIG | {"speculative_config": {"method": "ngram"}}}
    status = fake.control().status(deadline_s=5)
    assert status["versions"] == {"target": None}
    assert "one_receive" not in status["missing_guarantees"]


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"/version": None}, "is no vLLM server's own address; behind a router, list the addresses"),
        ({"/version": {"router": "r"}}, "is no vLLM server's own address"),
        ({"/version": {"version": "0.30.0"}}, "weightsync's adapter"),
        ({"/server_info": None}, "set VLLM_SERVER_DEV_MODE=1"),
        ({"/server_info": {"vllm_config": CONFIG | {"weight_transfer_config": None}}}, "--weight-transfer-config"),
        (
            {"/server_info": {"vllm_config": CONFIG | {"weight_transfer_config": {"backend": "weightsync"}}}},
            "use weightsync.engine.control.HttpControl",
        ),
        ({"/server_info": {"vllm_config": CONFIG | {"model_config": {"quantization": "fp8"}}}}, "quantised weights"),
        ({"/server_info": {"vllm_config": CONFIG | {"speculative_config": {"method": "medusa"}}}}, "'medusa'"),
    ],
)
def test_what_cannot_be_published_to_says_why(fake: Fake, known: dict[str, Any], says: str) -> None:
    for path, reply in known.items():
        fake.known.pop(path)
        if reply is not None:
            fake.known[path] = reply
    with pytest.raises(errors.UnsupportedError, match=says):
        fake.control().status(deadline_s=5)


def test_a_wrong_key_a_late_answer_and_nobody_at_all_are_told_apart(fake: Fake) -> None:
    for key in (None, "guess"):
        with pytest.raises(errors.AuthError, match="pass its api_key"):
            fake.control(api_key=key).status(deadline_s=5)
    fake.delay_s = 1.0
    began = time.monotonic()
    with pytest.raises(errors.EngineError, match=r"no answer to /version within 0.2 s"):
        fake.control().status(deadline_s=0.2)
    assert time.monotonic() - began < 0.9
    with pytest.raises(errors.EngineError, match="is it up, the address right"):
        stock_control("http://127.0.0.1:1").status(deadline_s=5)
    with pytest.raises(errors.ConfigError, match="expected http"):
        stock_control("engine-7")


def test_certificates_are_verified_by_every_control_client(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    fake = Fake(context)
    fake.known["/weightsync/v1/status"] = {"engine": "e"}
    ours = ssl.create_default_context(cafile=str(cert))
    try:
        assert fake.control(ssl_context=ours).status(deadline_s=5)["engine_version"] == "0.32.0"
        assert HttpControl(fake.url, api_key=KEY, ssl_context=ours).status(deadline_s=5) == {"engine": "e"}
        for control in (fake.control(), HttpControl(fake.url, api_key=KEY)):
            with pytest.raises(errors.EngineError, match="CERTIFICATE_VERIFY_FAILED"):
                control.status(deadline_s=5)
    finally:
        fake.close()


def test_without_a_gpu_the_data_group_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(errors.ConfigError, match="use weightsync's adapter in the engine"):
        NcclGroup(2)


@pytest.mark.gpu
def test_a_group_of_one_on_a_gpu_joins_sends_and_ends() -> None:
    group = NcclGroup(1)
    asked: concurrent.futures.Future[Any] = concurrent.futures.Future()
    assert len(base64.b64decode(group.words["nccl_unique_id_b64"])) == 128
    group.join(30.0, asked)
    group.broadcast([torch.ones(5, dtype=torch.bfloat16), torch.arange(3)], 30.0, asked)
    with pytest.raises(errors.TransportError, match="cannot carry"):
        group.broadcast([torch.ones(2, dtype=torch.bool)], 30.0, asked)
    group.close()


def test_a_relay_that_nobody_asked_its_status_or_that_did_not_load_says_so(fake: Fake) -> None:
    relay = fake.control()
    with pytest.raises(errors.EngineError, match="nobody has asked its status"):
        relay.preflight(None, deadline_s=1)  # type: ignore[arg-type]
    with pytest.raises(errors.EngineError, match="this publish was not loaded"):
        relay.commit(None, deadline_s=1)  # type: ignore[arg-type]
    relay.close()
