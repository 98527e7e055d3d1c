"""Real servers, both generations of speculative workers, beyond MTP and EAGLE3: draft models, maps of hot tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.engines import sglang_models as models
from tests.engines.sglang_server import RELEASES, Server

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]

WORKERS = {
    ("0.5.10.post1", "standalone"): "StandaloneWorker",
    ("0.5.10.post1", "token-map"): "EAGLEWorker",
    ("0.5.23", "standalone"): "StandaloneWorkerV2",
    ("0.5.23", "token-map"): "EAGLEWorkerV2",
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Server]]:
    with contextlib.ExitStack() as stack:
        started = {}
        for key in WORKERS:
            started[key] = Server(tmp_path_factory.mktemp("-".join(key)), *key)
            stack.callback(started[key].close)
        yield {key: server.wait() for key, server in started.items()}


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_a_draft_model_with_the_targets_names_takes_its_own_role(
    servers: dict[tuple[str, str], Server], release: str
) -> None:
    server = servers[release, "standalone"]
    assert server.control.status(deadline_s=30)["worker"] == WORKERS[release, "standalone"]
    server.serves(1)
    before = server.weights()
    report = server.publish(2)
    assert report.engines[0].bytes_received == (report.wire_bytes,)
    server.serves(2)
    # Everything of one has a name in the other: what was loaded where shows in the digests of the way back.
    server.publish(1, "target")
    tokens, acceptance = server.decode()
    assert tokens == models.expected("standalone", 1, 6)
    assert acceptance < 0.2
    server.publish(1, "draft")
    server.serves(1)
    assert server.weights() == before


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_the_sliced_head_of_a_token_map_follows_the_target(
    servers: dict[tuple[str, str], Server], release: str
) -> None:
    server = servers[release, "token-map"]
    status = server.control.status(deadline_s=30)
    assert status["worker"] == WORKERS[release, "token-map"]
    server.serves(1)
    before = server.weights()
    # The slice is no parameter, so only what it proposes shows it: a stale one knows nothing of the new version.
    assert "lm_head.weight" not in before["draft[0]"]
    report = server.publish(2)
    assert report.engines[0].bytes_received == (report.wire_bytes,)
    server.serves(2)
    server.publish(3, "draft")
    assert server.decode()[1] < 0.2
    server.publish(3, "target")
    server.serves(3)
    server.publish(1)
    server.serves(1)
    assert server.weights() == before
