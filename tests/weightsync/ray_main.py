"""A local Ray cluster and what tests/weightsync/test_ray.py does on it: a command per line in, an answer per line out.

Ray lives in this process, not in pytest's: while it is connected it takes signal handlers, threads and descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster as LocalCluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.weightsync import ray_actors
from weightsync import errors
from weightsync.actors import Cluster, EngineActor, RayControl

NODE = {"num_cpus": 8, "object_store_memory": 80 << 20, "include_dashboard": False}
GET_S = 200
"""On a busy machine, where six processes start, each of which imports torch."""


class Driver:
    def __init__(self, folder):
        self.folder = Path(folder)
        # Paths of sockets are short.
        self.ray_folder = tempfile.mkdtemp(prefix="ws-ray-")
        self.cluster = LocalCluster(initialize_head=True, head_node_args=NODE | {"temp_dir": self.ray_folder})
        self.nodes = {"head": self.cluster.head_node}
        self.actors = {}
        self.pids, self.ports = set(), set()
        self.do_add_node("second")
        ray.init(address=self.cluster.address, log_to_driver=False, configure_logging=False)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def do_add_node(self, name):
        self.nodes[name] = self.cluster.add_node(**NODE)
        return self.cluster.address

    def kill_node(self, name):
        """Everything of the node at once, as when a machine is lost: its raylet and all below it."""
        node = self.nodes.pop(name)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        family = raylet.children(recursive=True)
        self.cluster.remove_node(node, allow_graceful=False)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._until(lambda: not any(_runs(p.pid) for p in family))

    def start(self, cls, node, *args, max_restarts=0):
        where = NodeAffinitySchedulingStrategy(self.nodes[node].node_id, soft=False)
        options = {"num_cpus": 1, "scheduling_strategy": where, "max_restarts": max_restarts}
        return ray.remote(cls).options(**options).remote(*args)

    def get(self, *refs):
        return ray.get(list(refs), timeout=GET_S)

    # -- cases -----------------------------------------------------------------------------------------------------

    def do_start(self):
        """Two trainer ranks and two engines, a pair on each node."""
        started = {
            "trainer0": self.start(ray_actors.Trainer, "head", 0, str(self.folder)),
            "trainer1": self.start(ray_actors.Trainer, "second", 1, str(self.folder)),
            "a": self.start(ray_actors.Rollout, "head", "a"),
            "b": self.start(ray_actors.Rollout, "second", "b"),
        }
        self.actors |= started
        for name in "ab":
            self.pids |= set(*self.get(started[name].pids.remote()))
        host, port = self._connect("a", "b")
        self.ports.add((host, port))
        return {"host": host}

    def _connect(self, *names):
        controls = [RayControl(self.actors[n], name=n) for n in names]
        return self.get(self.actors["trainer0"].connect.remote(controls))[0]

    def do_places(self):
        """Where a bench would put things; nothing of it is kept."""
        ids = {node.node_id: name for name, node in self.nodes.items()}
        with Cluster() as cluster:
            trainers = cluster.reserve([{"CPU": 1.0}] * 2, spread=False)
            engines = cluster.reserve([{"CPU": 1.0}] * 2, spread=True, avoid=[trainers[0].node])
            both = cluster.reserve([{"CPU": 1.0}] * 2, spread=True)
            found = [[ids[slot.node] for slot in slots] for slots in (trainers, engines, both)]
            try:
                cluster.reserve([{"CPU": 64.0}], spread=False, deadline_s=0.5)
            except errors.ConfigError as e:
                found.append(str(e))
            member = cluster.start(ray_actors.NoEngine, both[0], name="no member")
            try:
                member.call("weightsync_place", deadline_s=GET_S)
            except AttributeError:
                found.append("no such method")
        assert ray.is_initialized()
        return found

    def do_publish(self, version, background, engines):
        found = self.get(self.actors["trainer0"].publish.remote(version, background=background))[0]
        self.get(*(self.actors[n].serves.remote(version) for n in engines))
        return found

    def do_hand_over(self):
        before = self._objects()
        ref = self.get(self.actors["trainer0"].hand_over.remote(6))[0]
        put = self._objects() - before
        return [self.get(self.actors["trainer1"].take_over.remote([ref]))[0], put]

    def _objects(self):
        # Of the driver's view; an object put by an actor and returned by reference is one reference more here.
        return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())

    def do_open_savers(self):
        trainers = [self.actors["trainer0"], self.actors["trainer1"]]
        store = self.get(trainers[0].host_store.remote())[0]
        host, _, port = store.rpartition(":")
        self.ports.add((host, int(port)))
        roots = [str(self.folder / f"disk{r}") for r in range(2)]
        for found in self.get(*(t.open_checkpointer.remote(r, store, 2) for t, r in zip(trainers, roots, strict=True))):
            self.pids |= set(found)

    def do_save(self, step):
        return self.get(*(self.actors[f"trainer{r}"].save.remote(step, 2) for r in range(2)))

    def do_kill_in_save(self, step):
        """The second node goes while its writer is in the middle of its data."""
        ray_actors.fault(self.folder, 1, phase="write", do=30)
        saving = [self.actors[f"trainer{r}"].save.remote(step, 2) for r in range(2)]
        self._until(lambda: not (self.folder / "fault.1.json").exists())
        time.sleep(1.0)  # by then it has told how far it is
        self.kill_node("second")
        began = time.monotonic()
        verdict = self.get(saving[0])[0]
        try:
            self.get(saving[1])
        except ray.exceptions.RayActorError as e:
            lost = type(e).__name__
        return {"verdict": verdict, "lost": lost, "seconds": time.monotonic() - began, "host": socket.gethostname()}

    def do_kill_in_publish(self, version):
        """A third node with engine c goes in mid-stream."""
        self.do_add_node("third")
        c = self.actors["c"] = self.start(ray_actors.Rollout, "third", "c")
        self.pids |= set(self.get(c.pids.remote())[0])
        place = self.get(c.weightsync_place.remote())[0]
        self._connect("a", "c")
        self.do_publish(version - 1, False, "ac")
        mark, go = self.folder / "mark", self.folder / "go"
        publishing = self.actors["trainer0"].publish_until.remote(version, str(mark), str(go))
        self._until(mark.exists)
        self.kill_node("third")
        go.touch()
        failed = self.get(publishing)[0]
        failed["fenced"] = self.get(self.actors["a"].fenced.remote())[0]
        failed["place"] = str(place)
        self._connect("a")
        failed["healed"] = self.do_publish(version + 1, False, "a")["outcome"]
        return failed

    def do_control_errors(self):
        """What a control client says of engines that are slow, fenced, broken, no engines, and dead."""
        found = {}
        actor = self.start(ray_actors.Busy, "head", max_restarts=1)
        control = RayControl(actor, name="e")
        for _ in range(100):  # as many generations as a pause holds
            actor.hold.remote()
        assert 0 < control.status(deadline_s=GET_S)["deadline_s"] <= GET_S
        for kind, deadline_s in (("slow", 1.0), ("fenced", 30), ("broken", 30), ("fine", 30)):
            found[kind] = _outcome(control.pause, kind, deadline_s=deadline_s)
        before = control.place
        ray.kill(actor, no_restart=False)
        found["restarted"] = [before, self._until(lambda: _moved(control, before))]
        ray.kill(actor)
        found["dead"] = self._until(lambda: _dead(control))
        for cls, *args in ((ray_actors.NoEngine,), (EngineActor, dict)):
            actor = self.start(cls, "head", *args)
            found[cls.__name__] = _outcome(lambda a=actor: RayControl(a).status(deadline_s=GET_S))
            ray.kill(actor)
        return found

    def do_close(self):
        self.get(self.actors["trainer0"].close.remote())
        shm = {name for pid in self.pids if psutil.pid_exists(pid) for name in _shared_files(pid)}
        for name in ("trainer0", "a"):
            ray.kill(self.actors[name])
        end = time.monotonic() + 10
        while (left := [pid for pid in self.pids if _runs(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        open_ports = [p for p in self.ports if _answers(*p)]
        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.ray_folder)
        return {"processes": left, "ports": open_ports, "shm": [name for name in shm if os.path.exists(name)]}

    def _until(self, done, deadline_s=60):
        end = time.monotonic() + deadline_s
        while not (found := done()):
            assert time.monotonic() < end, "not in time"
            time.sleep(0.02)
        return found


def _outcome(call, *args, **kwargs):
    began = time.monotonic()
    try:
        return {"reply": dict(call(*args, **kwargs))}
    except errors.WeightSyncError as e:
        rank, phase = getattr(e, "rank", None), getattr(e, "phase", None)
        return {"kind": type(e).__name__, "error": str(e), "rank": rank, "phase": phase, "s": time.monotonic() - began}


def _moved(control, before):
    """Where it is after a restart: while Ray is at it, calls fail."""
    _outcome(control.status, deadline_s=GET_S)
    return control.place if control.place != before else None


def _dead(control):
    found = _outcome(control.status, deadline_s=5)
    # Before Ray knows it for sure, the actor is merely out of reach.
    return found if "ActorDiedError" in found.get("error", "") else None


def _runs(pid):
    """Zombies do not: orphans wait for whoever inherited them."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _shared_files(pid):
    """Files in shared memory that a process has mapped, Ray's own left out."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line and "plasma" not in line}


def _answers(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def main():
    # Ray prints to stdout, from threads of its own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver(sys.argv[1])
    answers.write(json.dumps({"address": driver.cluster.address}) + "\n")
    answers.flush()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": getattr(driver, "do_" + name)(*arguments)}
        except Exception:  # noqa: BLE001 - the test shows it
            answer = {"traceback": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if name == "close":
            break
    answers.close()


if __name__ == "__main__":
    main()
