"""Checkpoints of two ranks on two hosts, each with a disk of its own: over two IPv6 addresses, and over a link that
drops.

Rank 0 and the store that it hosts are on host a, rank 1 on host b (`tests.support.net`). Without a word the link drops
while both write, while the verdict is on its way, and between saves: both sides end with names within what the
deadlines allow, and the first save over the mended link is committed on both.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from checkpoint import process
from checkpoint.checkpointer import Checkpointer
from checkpoint.config import SaveConfig
from checkpoint.errors import StoreLost
from checkpoint.format import TorchDistReader
from checkpoint.layout import committed_path, committed_steps
from checkpoint.load import candidates, load_best, verify
from checkpoint.store import Store
from tests.checkpoint import faulty_writer
from tests.checkpoint.support import state
from tests.support.net import NoNetwork, network
from tests.support.net_host import NetHost

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

STORE_PORT = 31000
TIMES = {"deadline_s": 3.0, "grace_s": 1.0, "stall_s": 30.0}
WORST_S = 3.0 + 3.0 + 2 * 1.0 + 2.0
"""Deadline, an answer of the store that does not come (no longer than the deadline), graces, and a busy machine."""

_kept = {}
"""Of the process on a host: its checkpointer."""


# -- what runs on a host -----------------------------------------------------------------------------------------------


def open_checkpointer(rank, root, address, store_host):
    """As torchrun would have it, except that the group is gone as soon as everybody knows the store."""
    os.environ["CHECKPOINT_TEST_FAULTS"] = str(Path(root).parent)
    os.environ["GLOO_SOCKET_IFNAME"] = "net0"
    process.PROGRAM = faulty_writer.PROGRAM
    Path(root).mkdir(parents=True)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{address}:31500", rank=rank, world_size=2)
    _kept["c"] = Checkpointer(
        root,
        rank=rank,
        world_size=2,
        config=SaveConfig(**TIMES, max_consecutive_failures=99),
        bind_host="::",
        advertise_host=store_host,
        port_range=(STORE_PORT, STORE_PORT),
    )
    dist.destroy_process_group()
    return _kept["c"].node


def save(rank, step, fault=None):
    """State, error and seconds of one save; `fault`: (phase, seconds) that this rank's writer sleeps there."""
    c = _kept["c"]
    if fault is not None:
        (c.root.parent / f"fault.{rank}.json").write_text(json.dumps({"phase": fault[0], "do": fault[1]}))
        (c.root.parent / "armed").touch()
    began = time.monotonic()
    handle = c.save(step, state(rank, 2, step))
    c.wait(30)
    return handle.state, handle.error, time.monotonic() - began


def steps():
    """Committed ones, each proved, and what else is in the root."""
    root = _kept["c"].root
    found = committed_steps(root)
    for step in found:
        verify(committed_path(root, step))
    return found, [name for name in os.listdir(root) if name.startswith(".saving")]


def load(rank, number):
    """The newest checkpoint that is whole on both hosts: its step, and whether this rank's rows are what it saved."""
    c = _kept["c"]
    group = c._group(20)

    def read(folder: TorchDistReader):
        return {key: folder.read(key, (64 * rank, 0), (64, 256)) for key in ("weight", "exp_avg")}

    try:
        keys = {"weight", "exp_avg", f"rng/shard_{rank}_2"}
        chosen, tensors, _ = load_best(
            group,
            candidates(c.root),
            f"load/test{number}",
            (0, 1),
            read,
            lambda: keys,
            lambda _: False,
            lambda _: False,
        )
    finally:
        group.store.close()
    expected = {shard.key: shard.tensor for shard in state(rank, 2, chosen.step).shards}
    return chosen.step, all(torch.equal(tensors[key], expected[key]) for key in tensors)


def holdings():
    """Of this process and its writer: descriptors and threads."""
    pids = (os.getpid(), _kept["c"].writer_pid)
    return [len(os.listdir(f"/proc/{pid}/{folder}")) for pid in pids for folder in ("fd", "task")]


def join_on_loopback():
    try:
        Store(f"::1:{STORE_PORT}").close()
    except StoreLost as e:
        return str(e)
    return ""


def close():
    _kept.pop("c").close()


# -- the two hosts -----------------------------------------------------------------------------------------------------


class Hosts:
    def __init__(self, net, a, b, base):
        self.net, self.ranks, self.base = net, (a, b), base
        nodes = self.both(
            open_checkpointer,
            [(r, str(base / "ab"[r] / "root"), net.address("a"), net.address("a", 6)) for r in (0, 1)],
        )
        assert nodes == [0, 1]

    def both(self, fn, args=((), ()), deadline_s=60.0):
        return [p.result(deadline_s) for p in [rank.begin(fn, *a) for rank, a in zip(self.ranks, args, strict=True)]]

    def save(self, step, faults=(None, None), meanwhile=None):
        pending = [rank.begin(save, r, step, faults[r]) for r, rank in enumerate(self.ranks)]
        if meanwhile is not None:
            meanwhile()
        return [p.result(60.0) for p in pending]

    def await_phase(self, rank, phase):
        """Until that rank's writer sleeps there."""
        folder = self.base / "ab"[rank]
        end = time.monotonic() + 20
        while not (folder / "armed").exists() or (folder / f"fault.{rank}.json").exists():
            assert time.monotonic() < end, f"the writer of rank {rank} did not come to {phase}"
            time.sleep(0.002)
        (folder / "armed").unlink()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    try:
        with network() as net, NetHost(net, "a") as a, NetHost(net, "b") as b:
            hosts = Hosts(net, a, b, tmp_path_factory.mktemp("hosts"))
            yield hosts
            hosts.both(close)
    except NoNetwork as e:
        pytest.skip(str(e))


def settled(hosts, before):
    end = time.monotonic() + 10
    while any(
        n > o for now, old in zip(hosts.both(holdings), before, strict=True) for n, o in zip(now, old, strict=True)
    ):
        if time.monotonic() > end:
            return hosts.both(holdings), before
        time.sleep(0.2)
    return None


def test_saves_over_two_addresses_are_committed_and_loaded(hosts):
    net = hosts.net
    assert ("::", STORE_PORT) in net.listening("a")
    assert {port for _, port in net.listening("a")} == {STORE_PORT}
    assert net.listening("b") == set()
    assert "::1 is each host's own" in hosts.ranks[1].call(join_on_loopback)
    for step in (1, 2):
        assert [s for s, _, _ in hosts.save(step)] == ["committed"] * 2
    assert hosts.both(steps) == [([1, 2], [])] * 2
    assert hosts.both(load, [(0, 1), (1, 1)]) == [(2, True)] * 2


def test_a_link_that_drops_while_ranks_write_aborts_on_both_sides_with_names(hosts):
    net, before, step = hosts.net, hosts.both(holdings), 10

    def drop():
        hosts.await_phase(1, "write")
        net.cut()

    try:
        (here, why, took_s), (there, why_there, took_there_s) = hosts.save(step, (None, ("write", 0.5)), drop)
    finally:
        net.mend()
    assert (here, there) == ("failed", "failed")
    assert "rank 1 on" in why
    assert "had not sealed at the deadline" in why
    assert took_s < WORST_S
    assert "rank 0 on" in why_there
    assert f"{net.address('a', 6)}:{STORE_PORT} did not answer" in why_there
    assert took_there_s < WORST_S
    assert [s for s, _, _ in hosts.save(step + 1)] == ["committed"] * 2
    found = hosts.both(steps)
    assert all(step not in committed and step + 1 in committed for committed, _ in found), found
    assert all(not left for _, left in found), found
    assert settled(hosts, before) is None


def test_a_verdict_that_a_host_did_not_hear_is_carried_out_when_it_is_back(hosts):
    net, before = hosts.net, hosts.both(holdings)

    def drop():
        hosts.await_phase(0, "decide")
        time.sleep(0.3)  # rank 1 has written its commit record by now, and waits for the verdict
        net.cut()

    try:
        (here, _, took_s), (there, why_there, took_there_s) = hosts.save(30, (("decide", 1.0), None), drop)
    finally:
        net.mend()
    assert here == "committed"
    assert took_s < WORST_S
    assert there == "failed"
    assert "did not answer" in why_there
    assert took_there_s < WORST_S
    assert [s for s, _, _ in hosts.save(31)] == ["committed"] * 2
    for committed, left in hosts.both(steps):
        assert {30, 31} <= set(committed)
        assert left == []
    assert settled(hosts, before) is None


def test_a_link_that_is_down_between_saves_costs_the_next_one_only(hosts):
    net, before = hosts.net, hosts.both(holdings)
    net.unplug("b")
    try:
        (here, why, took_s), (there, why_there, took_there_s) = hosts.save(40)
    finally:
        net.plug("b")
    assert (here, there) == ("failed", "failed")
    assert "rank 1 on" in why
    assert "never began" in why
    assert "did not answer" in why_there
    assert max(took_s, took_there_s) < WORST_S
    assert [s for s, _, _ in hosts.save(41)] == ["committed"] * 2
    assert hosts.both(load, [(0, 2), (1, 2)]) == [(41, True)] * 2
    assert settled(hosts, before) is None
