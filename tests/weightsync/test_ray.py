"""Ray: engines and async trainer ranks as actors of a cluster of two nodes; killed nodes; the bench's launcher.

One cluster for all of it (tests/weightsync/ray_main.py), so the tests stand in the order in which things happen to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.weightsync.ray_actors import DEADLINE_S, SLOW_S
from weightsync import cli
from weightsync.bench.config import BenchConfig

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 240
SOON_S = 0.6 * DEADLINE_S
"""A lost node is noticed by its silence, before the deadline."""
TICKS = 5
"""A loop that waited would run once or twice, one that is free a hundred times; on a busy machine a few of these."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15: beside anything else on the machine they would hardly run
}


class Cluster:
    """The cluster's process: a method call is a command, its result the answer."""

    def __init__(self, folder):
        self.log = folder / "driver.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.weightsync.ray_main", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
            )
        self.address = self._hear()["address"]

    def __call__(self, name, *arguments):
        self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        answer = self._hear()
        assert "traceback" not in answer, answer["traceback"]
        return answer["result"]

    def _hear(self):
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        line = self.process.stdout.readline() if ready else b""
        assert line, f"no answer: {self.log.read_text()[-3000:]}"
        return json.loads(line)

    def close(self):
        """By the end of its input; if it hangs, Ray's processes end with it, since they watch their parent."""
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(running, no_leftovers):
    """What lives in the cluster goes on to the next test; the last one looks at what is left."""
    yield running
    for process in psutil.Process(running.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            no_leftovers([process.pid])


def bench(folder, *arguments):
    command = ["bench", "--launcher", "ray", "--model", "tiny", "--json", *arguments]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "weightsync.cli", *command],
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(300)]


def test_places_keep_engines_away_from_trainers_and_say_what_is_missing(cluster):
    trainers, engines, both, error, _ = cluster("places")
    assert len(set(trainers)) == 1
    assert set(engines) == {"head", "second"} - set(trainers)
    assert set(both) == {"head", "second"}
    assert re.search(
        r"no places within 0.5 s for \[{'CPU': 64.0}\]: \S+ has 8 CPU, 0 GPU; \S+ has 8 CPU, 0 GPU; is", error
    )


def test_an_async_trainer_publishes_to_engines_in_actors_of_both_nodes(cluster):
    cluster("start")
    for version, background in ((1, False), (2, True)):
        found = cluster("publish", version, background, "ab")
        assert found["outcome"] == "committed"
        assert found["seconds"] > SLOW_S
        assert found["ticks"] > TICKS, "the actor's event loop stood still"


def test_an_object_store_carries_a_captured_step_as_one_object(cluster):
    (same, step), objects = cluster("hand_over")
    assert (same, step, objects) == (True, 6, 1)


def test_async_actors_save_a_checkpoint_of_both_nodes(cluster):
    cluster("open_savers")
    for saved in cluster("save", 1):
        assert saved["state"] == "committed", saved["error"]
        assert saved["seconds"] > SLOW_S / 2
        assert saved["ticks"] > TICKS, "the actor's event loop stood still"


def test_the_bench_runs_over_the_nodes_of_a_cluster(cluster, tmp_path):
    result = bench(tmp_path, "--address", cluster.address, "--trainer", "tp=2", "--publishes", "2", "--compare")
    summary, on = result["summary"], result["cluster"]["on_node"]
    assert (summary["acceptance_before"], summary["acceptance_after"]) == (0.0, 1.0)
    assert summary["wire_bytes_per_engine_rank"] == summary["unique_bytes"] + summary["padding_bytes"]
    assert summary["ratio_to_limit"] > 0
    assert {"per_tensor_broadcast", "two_pass_full"} <= {way["name"] for way in result["compare"]}
    assert set(summary["peak_extra_bytes"]) == {"trainer rank 0", "trainer rank 1", "engine0 rank 0"}
    assert on["trainer rank 0"] == on["trainer rank 1"] == on["lane sender"]
    assert on["engine0"] == on["lane receiver 0"] != on["trainer rank 0"]
    assert len(result["cluster"]["nodes"]) == 2
    assert cluster.address.split(":")[0] not in json.dumps(result), "results are published: no addresses"


def test_a_node_that_is_killed_in_a_save_is_named_by_its_rank(cluster):
    found = cluster("kill_in_save", 2)
    assert found["verdict"]["state"] == "failed"
    assert re.match(
        rf"rank 1 on {re.escape(found['host'])}: said nothing for 5 s \(phase write, \d+ of \d+ bytes",
        found["verdict"]["error"],
    )
    assert found["seconds"] < SOON_S
    assert found["lost"] in ("ActorDiedError", "ActorUnavailableError")


def test_a_node_that_is_killed_in_a_publish_is_named_by_engine_actor_node_and_phase(cluster):
    found = cluster("kill_in_publish", 4)
    assert found["kind"] == "PublishAborted"
    assert found["seconds"] < SOON_S
    assert re.search(r"engine c[^;]*(prepared|receive): ", found["error"])
    assert f"on {found['place']}" in found["error"]
    assert found["engines"]["c"][0] == "fenced"
    assert found["fenced"], "the engine that lives holds parts of a version"
    assert found["healed"] == "committed"


def test_a_control_client_names_what_is_wrong_with_an_actor(cluster):
    found = cluster("control_errors")
    assert found["fine"] == {"reply": {"kind": "fine"}}
    where = r"Ray actor [0-9a-f]{8} on node \S+ \([0-9a-f]{8}\), pid \d+"
    assert re.match(rf"engine e, pause: {where}: no answer within 1.5 s", found["slow"]["error"])
    assert 1.0 < found["slow"]["s"] < 4.0
    assert found["fenced"]["kind"] == "EngineFenced"
    assert (found["fenced"]["rank"], found["fenced"]["phase"]) == (1, "receive")
    assert found["broken"]["error"] == "engine e, pause: KeyError: 'world_size'"
    assert re.match(
        rf"engine e, status: {where}: ActorDiedError: .*killed by `ray.kill`.*start it anew", found["dead"]["error"]
    )
    before, after = (re.fullmatch(where, place) for place in found["restarted"])
    assert before
    assert after
    assert "derives from EngineActor" in found["NoEngine"]["error"]
    assert "dict is no engine: it has no commit" in found["EngineActor"]["error"]


def test_nothing_of_ours_is_left_in_the_cluster(cluster):
    assert cluster("close") == {"processes": [], "ports": [], "shm": []}


def test_the_bench_makes_a_cluster_of_this_machine_for_one_run(tmp_path):
    result = bench(tmp_path, "--publishes", "1", "--transport", "shm", "--placement", "pack", "--draft", "none")
    assert set(result["cluster"]["on_node"].values()) == {0}
    assert result["summary"]["wire_bytes_per_engine_rank"] >= result["summary"]["unique_bytes"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--launcher", "slurm"], "--launcher 'slurm': expected one of local, ray"),
        (["--placement", "near", "--launcher", "ray"], "--placement 'near': expected one of spread, pack"),
        (["--address", "auto"], "--address and --placement are for actors: add --launcher ray"),
        (["--launcher", "ray", "--transport", "ipc"], "Ray gives every actor a GPU of its own"),
        (["--launcher", "ray", "--transport", "nccl", "--compare"], "Ray gives the other ways no GPU"),
        (["--launcher", "ray", "--address", "ray://head:10001"], "Ray's client protocol is not used here"),
        (["--launcher", "ray", "--address", "head"], "expected host:port of the cluster's head, or auto"),
        (["--launcher", "ray", "--address", "127.0.0.1:1"], "nobody answers there"),
    ],
)
def test_nonsense_about_clusters_is_one_line_and_status_2(arguments, says, capsys):
    assert cli.main(["bench", "--model", "tiny", *arguments]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert (err.count("\n"), out) == (1, "")


def test_without_ray_the_launcher_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["bench", "--model", "tiny", "--launcher", "ray"]) == 2
    assert "pip install 'weightsync[ray]'" in capsys.readouterr().err


def test_devices_of_actors_are_those_that_ray_gives_them():
    config = BenchConfig(launcher="ray", transport="nccl", engines=2, engine_tp=2)
    assert config.engine_device(1) == "cuda"
    assert dataclasses.replace(config, launcher="local").engine_device(1) == "cuda:3"
