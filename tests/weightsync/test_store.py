"""The coordinator's store: where it listens, what waiting costs others, and what clients see when its host is gone."""

from __future__ import annotations

import datetime
import multiprocessing
import signal
import socket
import threading
import time

import psutil
import pytest
import torch.distributed as dist

from tests.support import spawn_ranks
from tests.support.forks import Fork, holdings, observe
from weightsync.errors import ConfigError, PeerLost, TransferTimeout, TransportError
from weightsync.store import (
    Heartbeat,
    HeartbeatReader,
    connect_store,
    decide,
    get_json,
    host_store,
    put_json,
    translated,
    wait_all,
    wait_key,
)

DEADLINE_S = 10.0


@pytest.fixture
def hosted():
    with host_store() as hosted:
        yield hosted


@pytest.fixture
def client(hosted):
    return connect_store(hosted.host, hosted.port, DEADLINE_S)


def listening(port):
    return {
        c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN" and c.laddr.port == port
    }


def test_only_the_bind_address_listens(hosted):
    assert listening(hosted.port) == {"127.0.0.1"}
    with host_store(bind_host="127.0.0.2", advertise_host="trainer.example") as other:
        assert listening(other.port) == {"127.0.0.2"}
        assert other.host == "trainer.example"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", other.port), timeout=1)


def test_a_closed_store_listens_no_more():
    before = holdings()
    hosted = host_store()
    store = connect_store(hosted.host, hosted.port, DEADLINE_S)
    port = hosted.port
    del store
    hosted.close()
    assert listening(port) == set()
    with pytest.raises(TransportError, match="closed"):
        _ = hosted.store
    # Two descriptors are libuv's own signal pipe, made once per process.
    assert holdings()["descriptors"] <= before["descriptors"] + 2
    assert holdings()["threads"] <= before["threads"]


def test_a_taken_port_means_the_next_of_the_range_and_no_free_one_an_error():
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            first = taken.getsockname()[1]
            try:
                hosted = host_store(port_range=(first, first + 1))
            except TransportError:  # somebody else has the next one: choose again
                continue
            with hosted:
                assert hosted.port == first + 1
                with pytest.raises(TransportError, match=rf"{first}\.\.{first + 1}.*widen port_range"):
                    host_store(port_range=(first, first + 1))
            return
    pytest.fail("found no two ports in a row, the second of them free")


def test_addresses_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="advertise_host"):
        host_store(bind_host="0.0.0.0")
    with pytest.raises(ConfigError, match="port_range"):
        host_store(port_range=(20, 10))
    with pytest.raises(TransportError, match=r"192\.0\.2\.1.*: 1 taken or refused.*bind_host"):
        host_store(bind_host="192.0.2.1", port_range=(31000, 31999))
    with pytest.raises(TransportError, match="advertise_host"):
        connect_store("trainer.invalid", 1, 1.0)


def test_connecting_where_nobody_listens_fails_at_once():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(PeerLost, match=f"127.0.0.1:{port} refused") as e:
        connect_store("127.0.0.1", port, 30.0)
    assert time.monotonic() - start < 5
    assert e.value.peer == f"coordinator 127.0.0.1:{port}"


def test_connecting_to_something_that_is_no_store_ends_at_the_deadline(capfd):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(TransferTimeout, match="did not answer"):
            connect_store("127.0.0.1", silent.getsockname()[1], 0.5)
        assert time.monotonic() - start < 5
    capfd.readouterr()  # torch prints its own stack


def test_a_full_backlog_is_unreachable_by_the_deadline():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for s in waiting:
            s.setblocking(False)
            s.connect_ex(full.getsockname())
        start = time.monotonic()
        with pytest.raises(TransferTimeout, match="cannot be reached"):
            connect_store("127.0.0.1", full.getsockname()[1], 0.5)
        assert time.monotonic() - start < 5
        for s in waiting:
            s.close()


def test_values_pass_as_json_also_under_a_prefix(hosted, client):
    put_json(dist.PrefixStore("a/b", client), "k", {"x": [1, None]})
    assert get_json(hosted.store, "a/b/k", DEADLINE_S) == {"x": [1, None]}


def test_a_decision_is_made_once(hosted, client):
    assert decide(client, "d", "commit") == "commit"
    assert decide(hosted.store, "d", "abort: late") == "commit"
    assert decide(client, "d", "commit") == "commit"
    with pytest.raises(ConfigError, match="empty"):
        decide(client, "e", "")


def test_a_decision_of_many_at_once_has_one_winner(hosted):
    winners = []

    def vote(name):
        winners.append(decide(connect_store(hosted.host, hosted.port, DEADLINE_S), "d", name))

    voters = [threading.Thread(target=vote, args=(f"v{i}",)) for i in range(8)]
    for t in voters:
        t.start()
    for t in voters:
        t.join(DEADLINE_S)
    assert len(winners) == 8
    assert len(set(winners)) == 1


def test_waiting_returns_which_key_came(client):
    client.set("no", "why")
    assert wait_key(client, ["yes"], DEADLINE_S, abort_keys=["no"]) == ("no", b"why")
    client.set("yes", "1")
    assert wait_key(client, ["other", "yes"], DEADLINE_S, abort_keys=["no"]) == ("yes", b"1")
    with pytest.raises(PeerLost, match="why"):
        get_json(client, "other", DEADLINE_S, abort_keys=["no"])


def test_a_key_that_does_not_come_is_named_at_the_deadline(client):
    start = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"\['k'\].*0\.2 s"):
        wait_key(client, "k", 0.2)
    assert 0.2 <= time.monotonic() - start < 2


def test_waiting_for_all_names_who_is_missing(client):
    client.set("r0", "a")
    client.set("r2", "c")
    keys = {"r0": "engine 0", "r1": "engine 1", "r2": "engine 2"}
    with pytest.raises(TransferTimeout, match="no word from engine 1 within") as e:
        wait_all(client, keys, 0.2)
    assert e.value.peer == "engine 1"
    client.set("failed", "engine 2 refused")
    with pytest.raises(PeerLost, match="engine 2 refused"):
        wait_all(client, keys, DEADLINE_S, abort_keys=["failed"])
    client.set("r1", "b")
    assert wait_all(client, keys, DEADLINE_S, abort_keys=["failed"]) == {"r0": b"a", "r1": b"b", "r2": b"c"}


def test_other_threads_use_a_store_that_one_waits_on(client):
    waiter = threading.Thread(target=wait_key, args=(client, "late", DEADLINE_S))
    waiter.start()
    start = time.monotonic()
    for i in range(200):
        client.set(f"k{i}", "v")
        assert client.get(f"k{i}") == b"v"
    # A blocking wait of torch holds the connection: the first `set` would take as long as the wait.
    assert time.monotonic() - start < 5
    assert waiter.is_alive()
    client.set("late", "v")
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()


def test_a_wait_of_torch_that_times_out_does_not_cost_the_connection(client):
    with pytest.raises(TransferTimeout, match="asking"), translated(client, "asking"):
        client.wait(["k"], datetime.timedelta(seconds=0.1))
    client.set("k", "v")
    assert wait_key(client, "k", DEADLINE_S)[1] == b"v"


def test_a_heartbeat_is_seen_by_its_counter_and_stops(hosted, client):
    reader = HeartbeatReader(client)
    assert reader.age("hb") is None
    with Heartbeat(hosted.host, hosted.port, "hb", 0.02) as heartbeat:
        first = get_json(client, "hb", DEADLINE_S)
        assert reader.age("hb") == 0.0
        end = time.monotonic() + DEADLINE_S
        while get_json(client, "hb", 1.0)["n"] < first["n"] + 3:
            assert time.monotonic() < end
        assert reader.age("hb") == 0.0
    assert not heartbeat.alive
    assert heartbeat.error is None
    reader.age("hb")
    time.sleep(0.1)
    assert 0.1 <= reader.age("hb") < 5
    # The clock in the beat is the writer's, and may be anything.
    put_json(client, "hb", {"n": first["n"] + 10**6, "time": 0.0})
    assert reader.age("hb") == 0.0


# What clients see when the host dies or stops: in forked processes, see tests.support.forks.


def serve(port_pipe):
    hosted = host_store()
    hosted.store.set("k", "v")
    port_pipe.send(hosted.port)
    time.sleep(60)


def attempts(store, port):
    calls = {
        "wait_key": lambda: wait_key(store, "never", 0.5),
        "wait_all": lambda: wait_all(store, {"never": "engine 0"}, 0.5),
        "decide": lambda: decide(store, "d", "commit"),
        "get_json": lambda: get_json(store, "k", 0.5),
        "connect_store": lambda: connect_store("127.0.0.1", port, 0.5),
    }
    seen = {}
    for name, call in calls.items():
        start = time.monotonic()
        try:
            seen[name] = (None, repr(call()), 0.0)
        except TransportError as e:
            seen[name] = (type(e).__name__, f"{e} <{e.peer}>", time.monotonic() - start)
    return seen


def losing(number):
    here, there = multiprocessing.Pipe()
    with Fork(serve, there) as host:
        port = here.recv()
        store = connect_store("127.0.0.1", port, DEADLINE_S)
        fresh = connect_store("127.0.0.1", port, DEADLINE_S)
        heartbeat = Heartbeat("127.0.0.1", port, "hb", 0.02)
        get_json(store, "hb", DEADLINE_S)
        host.signal(number)
        seen = attempts(store, port)
        # The first call on a connection finds out, the others know: here each of them is the first.
        start = time.monotonic()
        try:
            wait_all(fresh, {"never": "engine 0"}, 0.5)
        except TransportError as e:
            seen["first"] = (type(e).__name__, f"{e} <{e.peer}>", time.monotonic() - start)
        end = time.monotonic() + DEADLINE_S
        while number == signal.SIGKILL and heartbeat.alive and time.monotonic() < end:
            time.sleep(0.01)
        heartbeat.stop()
        seen["heartbeat"] = (heartbeat.alive, heartbeat.error and type(heartbeat.error).__name__, 0.0)
    here.close()
    there.close()
    return port, seen


def scenarios(rank, world_size):
    return observe({"killed": lambda: losing(signal.SIGKILL), "stopped": lambda: losing(signal.SIGSTOP)})


@pytest.fixture(scope="module")
def losses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # a C++ stack for every error that is expected here
        return spawn_ranks(scenarios, 1, deadline_s=90)[0]


@pytest.mark.multiproc
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_every_call_ends_and_names_a_coordinator_that_is_gone(losses, how):
    ok, outcome = losses[how]
    assert ok, outcome
    port, seen = outcome
    heartbeat_alive, heartbeat_error, _ = seen.pop("heartbeat")
    assert not heartbeat_alive
    if how == "killed":
        assert heartbeat_error == "PeerLost"
    for name, (kind, text, seconds) in seen.items():
        assert kind in ("PeerLost", "TransferTimeout"), (name, text)
        assert f"<coordinator 127.0.0.1:{port}>" in text, (name, text)
        assert seconds < 4, (name, seconds)
    assert seen["first"][0] == ("PeerLost" if how == "killed" else "TransferTimeout")
    assert ("exited" if how == "killed" else "stopped") in seen["first"][1]
