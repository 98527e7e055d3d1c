"""Publish between two hosts: addresses, ports, a firewall, a link that drops without a word, one that is slow.

The trainer and the engine `near` are on host a, the engine `far` on host b (`tests.support.net`): real publishers,
engines driven over HTTP, gloo between them. What is expected of a lost link: a verdict that names who is out of reach
within the deadlines, engines on one version or fenced, and the first publish over the mended link heals all.
"""

from __future__ import annotations

import contextlib
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.net import LOCAL_PORTS, NoNetwork, network
from tests.support.net_host import NetHost, ask
from tests.weightsync.fleet import MODEL, Weights, serves
from weightsync import _sockets, errors, store
from weightsync.config import PublishConfig
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.engine.control import HttpControl
from weightsync.engine.http import ControlServer
from weightsync.publisher import Publisher
from weightsync.store import connect_store, host_store
from weightsync.transports.base import GroupInfo
from weightsync.transports.registry import get_transport

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

DEADLINE_S = 3.0
"""Of the publishes that a fault befalls; the others have time."""
STORE_PORTS = (31000, 31004)
WORST_S = 5 * DEADLINE_S

_kept = {}
"""Of the process on a host: its engines, its publisher, its source."""


# -- what runs on a host -----------------------------------------------------------------------------------------------


def start_engine(name, host):
    _kept[name] = launch(EngineConfig(model=MODEL, draft="mtp", name=name, seed=99, host=host))
    return _kept[name].url, _kept[name].api_key, name


def engine_state(name):
    """(fenced, versions), asked on its own host."""
    status = _kept[name].status()
    return status["fenced"], set(status["versions"].values())


def check_serves(name, version):
    serves(_kept[name], version)


def await_fenced(name, deadline_s):
    """Why it is fenced, once its publish has ended; seconds that took."""
    began = time.monotonic()
    while True:
        status = _kept[name].status()
        if status["fenced"] and "not loaded completely" in status["fenced"]:
            return status["fenced"], time.monotonic() - began
        assert time.monotonic() < began + deadline_s, status
        time.sleep(0.05)


def open_publisher(engines, config, rank=0, world_size=1, store_address=None):
    source = _kept["source"] = Weights(1, stage=rank, num_stages=world_size)
    values = {"run_id": "two-hosts", "deadline_s": 30.0, "control_s": 3.0, "heartbeat_s": 3.0, "takeover": True}
    controls = [HttpControl(url, api_key=key, name=name) for url, key, name in engines]
    config = PublishConfig(**values | config)
    if rank:  # that waits for a verdict hears nothing of a link that drops: this is how long it then waits
        store.REPLY_TIMEOUT_S = DEADLINE_S
    _kept["publisher"] = Publisher(
        source, controls, config, rank=rank, world_size=world_size, store_address=store_address
    )


def close_publisher():
    _kept.pop("publisher").close()
    _kept.pop("source")


def publish(version, at=None, deadline_s=None, force=False):
    """Outcome, error, seconds, name -> outcome of each engine, and the report. `at`: where to `ask("now")`."""
    source, publisher = _kept["source"], _kept["publisher"]
    source.version = version
    if isinstance(at, int):
        source.at[at] = lambda: ask("now")
    elif at is not None:
        step = getattr(publisher._coordinator, at)

        def struck(*args, **kwargs):
            setattr(publisher._coordinator, at, step)
            ask("now")
            return step(*args, **kwargs)

        setattr(publisher._coordinator, at, struck)
    began, error = time.monotonic(), None
    try:
        report = publisher.publish(version, deadline_s=deadline_s, force=force)
    except errors.PublishError as e:
        report, error = e.report, f"{type(e).__name__}: {e}"
    except errors.WeightSyncError as e:
        report, error = None, f"{type(e).__name__}: {e}"
    took = time.monotonic() - began
    outcomes = {} if report is None else {e.name: e.outcome for e in report.engines}
    return {
        "outcome": report.outcome if report else None,
        "error": error,
        "took_s": took,
        "engines": outcomes,
        "phases": {} if report is None else dict(report.phases),
        "bytes": 0 if report is None else report.wire_bytes,
    }


def probe_every(*times):
    """How connections that are made from now on notice that the other host is gone; returns what was."""
    before = _sockets.IDLE_S, _sockets.PROBE_EVERY_S, _sockets.MAX_PROBES
    _sockets.IDLE_S, _sockets.PROBE_EVERY_S, _sockets.MAX_PROBES = times
    return before


def await_broken(deadline_s):
    end = time.monotonic() + deadline_s
    while _kept["publisher"]._sender.connected:
        assert time.monotonic() < end, "the idle connections of the data group are still thought to be there"
        time.sleep(0.05)


def open_group(rank, store_at, bind_host):
    """Open and close a data group of two hosts, without a publisher: why not, or None."""
    joined = connect_store(store_at, STORE_PORTS[1], 10) if rank else _kept["store"].store
    group = GroupInfo(
        store=dist.PrefixStore("group", joined),
        name="epoch 1 stage 0",
        rank=rank,
        size=2,
        device=torch.device("cpu"),
        bucket_bytes=4096,
        num_buffers=2,
        bind_host=bind_host,
        deadline_s=10.0,
        peers=["trainer stage 0", "engine far rank 0"],
    )
    transport = get_transport("gloo")
    try:
        endpoint = (transport.open_receiver if rank else transport.open_sender)(group)
    except errors.WeightSyncError as e:
        return type(e).__name__, str(e)
    sizes = [4096, 1, 4095]
    endpoint.start(sizes, 10.0)
    for nbytes in sizes:
        if rank:
            assert torch.equal(endpoint.receive(), torch.full((nbytes,), 7, dtype=torch.uint8))
            endpoint.release()
        else:
            endpoint.acquire().fill_(7)
            endpoint.send(nbytes)
    endpoint.finish()
    endpoint.close()
    return None


def serve_control(host):
    server = _kept["control"] = ControlServer({"status": lambda _: {"it": "answers"}}, api_key="key", host=host)
    server.start()
    return server.url


def ask_control(url):
    return HttpControl(url, api_key="key").call("status", {}, deadline_s=10)


def end_control():
    _kept.pop("control").stop()


def keep_store(host):
    _kept["store"] = host_store(host, (STORE_PORTS[1], STORE_PORTS[1]))


def drop_store():
    _kept.pop("store").close()


def holdings():
    """Of this process and the engines it has: descriptors and threads."""
    pids = [os.getpid(), *(pid for kept in _kept.values() if hasattr(kept, "pids") for pid in kept.pids)]
    return {
        what: [len(os.listdir(f"/proc/{pid}/{folder}")) for pid in pids]
        for what, folder in (("descriptors", "fd"), ("threads", "task"))
    }


def stop_engine(name):
    _kept.pop(name).stop()


# -- the two hosts -----------------------------------------------------------------------------------------------------


class Hosts:
    def __init__(self, net, a, b):
        self.net, self.a, self.b = net, a, b
        near = a.begin(start_engine, "near", net.address("a"))
        far = b.begin(start_engine, "far", net.address("b"))
        self.near, self.far = near.result(90), far.result(90)
        self.engines = [self.near, self.far]

    @contextlib.contextmanager
    def publisher(self, engines=None, **config):
        config = {"bind_host": self.net.address("a"), "port_range": STORE_PORTS} | config
        self.a.call(open_publisher, engines or self.engines, config)
        try:
            yield
        finally:
            self.a.call(close_publisher)

    def publish(self, version, *, at=None, deadline_s=None, force=False, on=None):
        return self.a.call(publish, version, at, deadline_s, force, on=on)

    def serve(self, version):
        self.a.call(check_serves, "near", version)
        self.b.call(check_serves, "far", version)


@pytest.fixture(scope="module")
def hosts():
    try:
        with network() as net, NetHost(net, "a") as a, NetHost(net, "b") as b:
            yield Hosts(net, a, b)
            a.call(stop_engine, "near")
            b.call(stop_engine, "far")
    except NoNetwork as e:
        pytest.skip(str(e))


def settled(hosts, before, deadline_s=10.0):
    """What is left on both hosts more than `before`, once that is nothing or at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        now = (hosts.a.call(holdings), hosts.b.call(holdings))
        left = [
            (host, what, old[what], new[what])
            for host, old, new in zip("ab", before, now, strict=True)
            for what in old
            if any(n > o for o, n in zip(old[what], new[what], strict=True))
        ]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def first(hosts):
    done = hosts.publish(1, force=True)
    assert done["outcome"] == "committed", done["error"]
    return hosts.a.call(holdings), hosts.b.call(holdings)


def test_a_publish_crosses_hosts_on_the_ports_that_were_promised(hosts):
    net = hosts.net
    listened = net.listening("a")
    with hosts.publisher():
        net.close_ports("a", [STORE_PORTS, LOCAL_PORTS])
        net.close_ports("b", [LOCAL_PORTS])
        try:
            done = hosts.publish(1)
            new = net.listening("a") - listened
        finally:
            net.open_ports()
        assert done["engines"] == {"near": "committed", "far": "committed"}, done["error"]
        hosts.serve(1)
        assert {host for host, _ in new} == {net.address("a")}
        stores = {port for _, port in new if STORE_PORTS[0] <= port <= STORE_PORTS[1]}
        assert stores == {STORE_PORTS[0]}
        # Those of gloo, of the sender and of the engine here.
        assert len(new) == 3
        assert all(LOCAL_PORTS[0] <= port <= LOCAL_PORTS[1] for _, port in new if port not in stores)
    assert {host for host, _ in net.listening("b")} == {net.address("b")}


def test_a_store_on_every_address_is_advertised_under_one(hosts):
    with hosts.publisher(bind_host="0.0.0.0", advertise_host=hosts.net.alias):
        done = hosts.publish(1, force=True)
        assert done["outcome"] == "committed", done["error"]
        here = hosts.net.listening("a")
        assert ("0.0.0.0", STORE_PORTS[0]) in here
        assert any(host == hosts.net.alias for host, _ in here)  # the data plane
    hosts.serve(1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bind_host": "127.0.0.1"}, ["127.0.0.1 is each host's own", "bind_host", "advertise_host", "engine far"]),
        ({"transport": "shm"}, ["needs one network namespace", "use gloo", "engine far"]),
    ],
)
def test_what_cannot_cross_hosts_is_refused_with_the_way_out(hosts, config, said):
    with hosts.publisher():
        first(hosts)
    with hosts.publisher(**config):
        done = hosts.publish(2, deadline_s=DEADLINE_S)
        assert done["outcome"] == "refused"
        assert done["error"].startswith("PreflightError")
        for words in said:
            assert words in done["error"], done["error"]
        assert done["took_s"] < 2 * DEADLINE_S + 3
    hosts.serve(1)


def test_a_firewall_before_the_store_is_named(hosts):
    hosts.net.close_ports("a", [LOCAL_PORTS])
    try:
        with hosts.publisher():
            done = hosts.publish(2, deadline_s=DEADLINE_S)
    finally:
        hosts.net.open_ports()
    assert done["outcome"] == "refused"
    assert f"{hosts.net.address('a')}:{STORE_PORTS[0]} cannot be reached" in done["error"]
    assert "firewall" in done["error"]
    assert "engine far" in done["error"]
    hosts.serve(1)


@pytest.mark.parametrize(
    ("at", "fault", "outcome", "far"),
    [
        ("_gather_statuses", "cut", "refused", "old"),
        ("allow_connect", "cut", "refused", "old"),
        (9, "cut", "aborted", "fenced"),
        ("decide_commit", "unplug", "committed", "fenced"),
    ],
)
def test_a_link_that_drops_ends_in_a_verdict_and_the_next_publish_heals(hosts, at, fault, outcome, far):
    net = hosts.net
    with hosts.publisher():
        before = first(hosts)
        try:
            done = hosts.publish(
                2, at=at, deadline_s=DEADLINE_S, on=lambda _: net.cut() if fault == "cut" else net.unplug("b")
            )
            assert done["took_s"] < WORST_S, done
            assert done["outcome"] == outcome, done
            assert "engine far" in done["error"], done
            if far == "fenced":
                why, waited_s = hosts.b.call(await_fenced, "far", WORST_S)
                assert waited_s < DEADLINE_S + 2, why
            else:
                hosts.b.call(check_serves, "far", 1)
        finally:
            net.mend()
            net.plug("b")
        healed = hosts.publish(3)
        assert healed["engines"] == {"near": "committed", "far": "committed"}, healed["error"]
        hosts.serve(3)
        assert settled(hosts, before) == []


def opened_group(hosts, store_at, binds):
    hosts.a.call(keep_store, store_at)
    try:
        pending = [h.begin(open_group, r, store_at, binds[r]) for r, h in enumerate((hosts.a, hosts.b))]
        return [p.result(30) for p in pending]
    finally:
        hosts.a.call(drop_store)


def test_loopback_addresses_on_two_hosts_are_named_and_not_tried(hosts):
    began = time.monotonic()
    for kind, message in opened_group(hosts, hosts.net.address("a"), ["127.0.0.1"] * 2):
        assert kind == "ConfigError"
        assert "trainer stage 0 (127.0.0.1 of " in message
        assert "engine far rank 0 (127.0.0.1 of " in message
        assert "give each bind_host" in message
    assert time.monotonic() - began < 5


def test_ipv6_addresses_serve_like_others(hosts):
    addresses = [hosts.net.address(h, 6) for h in "ab"]
    assert opened_group(hosts, addresses[0], addresses) == [None, None]
    url = hosts.b.call(serve_control, addresses[1])
    assert url.startswith(f"http://[{addresses[1]}]:")
    assert hosts.a.call(ask_control, url) == {"it": "answers"}
    hosts.b.call(end_control)


def test_connections_that_broke_while_idle_are_replaced_before_a_publish(hosts):
    net, usual = hosts.net, hosts.a.call(probe_every, 1, 1, 2)
    try:
        with hosts.publisher():
            before = first(hosts)
            net.cut()
            try:
                hosts.a.call(await_broken, 15)
            finally:
                net.mend()
            done = hosts.publish(2)
            assert done["engines"] == {"near": "committed", "far": "committed"}, done["error"]
            hosts.serve(2)
            assert settled(hosts, before) == []
    finally:
        hosts.a.call(probe_every, *usual)


def test_trainer_ranks_on_two_hosts_both_learn_the_verdict(hosts):
    net = hosts.net
    address = (net.address("a"), STORE_PORTS[1])
    ranks = (hosts.a, hosts.b)

    def both(fn, *args, on=None):
        return [p.result(90) for p in [rank.begin(fn, *a, on=on) for rank, a in zip(ranks, args, strict=True)]]

    def opened():
        mine = [{"bind_host": net.address(h), "deadline_s": 2 * DEADLINE_S} for h in "ab"]
        both(open_publisher, *[(hosts.engines[: 2 - 2 * r], mine[r], r, 2, address) for r in (0, 1)])

    opened()
    try:
        done = both(publish, (1, None, None, True), (1, None, None, True))
        assert [d["outcome"] for d in done] == ["committed"] * 2, done
        hosts.serve(1)
        try:
            here, there = both(publish, (2, 3, DEADLINE_S), (2, None, DEADLINE_S), on=lambda _: net.cut())
        finally:
            net.mend()
        assert here["outcome"] == "aborted"
        assert "engine far" in here["error"] or "stage 1" in here["error"], here
        assert here["took_s"] < WORST_S
        assert "did not answer" in there["error"], there
        assert there["took_s"] < WORST_S
    finally:
        both(close_publisher, (), ())
    with hosts.publisher():
        first(hosts)


def test_a_slow_link_costs_time_or_a_deadline_that_is_too_short(hosts):
    net = hosts.net
    with hosts.publisher():
        nbytes = (fast := hosts.publish(1, force=True))["bytes"]
        assert fast["outcome"] == "committed", fast["error"]
        try:
            net.slow("b", nbytes // 2)
        except NoNetwork as e:
            pytest.skip(str(e))
        try:
            slow = hosts.publish(2)
            late = hosts.publish(3, deadline_s=1.0)
        finally:
            net.fast("b")
        assert slow["outcome"] == "committed", slow["error"]
        # What fits the bucket of the link and the buffers of the kernel comes at once.
        assert 1.0 < slow["phases"]["wire"] < slow["took_s"] < 20, (fast, slow)
        # On a busy machine its preflight may already take longer.
        assert late["outcome"] in ("aborted", "refused"), late
        assert "deadline" in late["error"] or "within" in late["error"], late
        if late["outcome"] == "aborted":
            hosts.b.call(await_fenced, "far", 10)
        done = hosts.publish(4)
        assert done["outcome"] == "committed", done["error"]
    hosts.serve(4)
