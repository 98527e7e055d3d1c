"""Two hosts and the router between them, as network namespaces: links that drop, are slow, or let few ports through.

    with network() as net:                        # raises NoNetwork, with the reason, where that cannot be had
        subprocess.run([*net.inside("a"), "ping", "-c1", net.address("b")])
        net.cut()                                 # whatever crosses the router is lost: no FIN, no RST, no ICMP
        net.mend()

Host `a` and host `b` each have one interface with an IPv4 and an IPv6 address; the router forwards. `a` has a second
address, `alias`, under which only the router knows it. Works as root and, where the kernel lets users have namespaces,
without. Each namespace lives as long as a `cat` in it, which ends with this process; nothing is left on the machine.
Needs iproute2 and util-linux. Processes inside: `tests.support.net_host`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["LOCAL_PORTS", "Network", "NoNetwork", "network"]

HOSTS = {"a": 1, "b": 2}
LOCAL_PORTS = (40000, 40999)
"""From which the kernel takes ports that nobody chose, on both hosts (`net.ipv4.ip_local_port_range`)."""
_CUT, _CLOSED, _OPEN = 10, 30, 20
"""Priorities of the router's rules."""


class NoNetwork(Exception):
    """Why no such network can be made here."""


class _Namespace:
    """A network namespace, held by one process; `prefix` is what runs a command inside."""

    def __init__(self, command: Sequence[str], prefix: Sequence[str]) -> None:
        self.holder = subprocess.Popen(
            [*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        pid = str(self.holder.pid)
        self.prefix = [pid if word == "PID" else word for word in prefix]
        assert self.holder.stdin is not None
        assert self.holder.stdout is not None
        try:
            # An answer of cat: the process is through all that it executes on the way.
            self.holder.stdin.write(b"\n")
            self.holder.stdin.flush()
            answered = bool(select.select([self.holder.stdout], [], [], 10)[0]) and os.read(
                self.holder.stdout.fileno(), 1
            )
        except OSError:
            answered = False
        if not answered:
            self.holder.kill()
            said = self.holder.communicate()[1].decode(errors="replace").strip()
            raise NoNetwork(f"no network namespace may be made here: {said or 'no answer'}")

    def run(self, command: str) -> None:
        done = subprocess.run([*self.prefix, *command.split()], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise NoNetwork(f"`{command}` failed in a network namespace: {(done.stderr or done.stdout).strip()}")

    def write(self, path: str, text: str) -> None:
        command = [*self.prefix, "sh", "-c", 'echo "$1" > "$0"', path, text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise NoNetwork(f"{path} cannot be written in a network namespace: {done.stderr.strip()}")

    def end(self) -> None:
        self.holder.kill()
        self.holder.wait()
        for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class Network:
    """See the module. Made by `network`."""

    alias = "10.81.9.9"
    """Of host `a`, not on its interface: what a router or a cluster gives a host beside its own address."""

    def __init__(self, spaces: dict[str, _Namespace]) -> None:
        self._spaces = spaces
        self._router = spaces["router"]

    def address(self, host: str, version: int = 4) -> str:
        number = HOSTS[host]
        return f"10.81.{number}.2" if version == 4 else f"fd00:81:{number}::2"

    def inside(self, host: str) -> list[str]:
        """What to put before a command so that it runs on `host`; the process id stays that of the command."""
        return list(self._spaces[host].prefix)

    def cut(self) -> None:
        """From now on whatever the hosts send to each other is lost without a word."""
        for family in ("-4", "-6"):
            self._router.run(f"ip {family} rule add priority {_CUT} blackhole")

    def mend(self) -> None:
        """End what `cut` began; twice is as good as once."""
        for family in ("-4", "-6"):
            with contextlib.suppress(NoNetwork):
                self._router.run(f"ip {family} rule del priority {_CUT}")

    def unplug(self, host: str) -> None:
        """Its interface goes down: it knows at once, the others learn it from the router after a while."""
        self._spaces[host].run("ip link set net0 down")

    def plug(self, host: str) -> None:
        self._spaces[host].run("ip link set net0 up")
        _route(self._spaces[host], HOSTS[host])

    def slow(self, host: str, bytes_per_s: int) -> None:
        """What goes to `host` crosses a link of this rate. Raises `NoNetwork` where the kernel has no token bucket."""
        self._router.run(f"tc qdisc replace dev {host}0 root tbf rate {8 * bytes_per_s}bit burst 64kb latency 200ms")

    def fast(self, host: str) -> None:
        with contextlib.suppress(NoNetwork):
            self._router.run(f"tc qdisc del dev {host}0 root")

    def close_ports(self, host: str, open_ports: Sequence[tuple[int, int]]) -> None:
        """A firewall before `host`: TCP to other ports than those of the ranges is dropped without a word."""
        to = f"to {self.address(host)} ipproto tcp"
        for first, last in open_ports:
            self._router.run(f"ip rule add priority {_OPEN} {to} dport {first}-{last} lookup main")
        self._router.run(f"ip rule add priority {_CLOSED} {to} dport 1-65534 blackhole")

    def open_ports(self) -> None:
        """End every firewall."""
        for priority in (_OPEN, _CLOSED):
            with contextlib.suppress(NoNetwork):
                while True:
                    self._router.run(f"ip rule del priority {priority}")

    def listening(self, host: str) -> set[tuple[str, int]]:
        """(address, port) of what listens on `host`, whoever it belongs to; from /proc/net."""
        found = set()
        for family in ("tcp", "tcp6"):
            pid = self._spaces[host].holder.pid
            for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == "0A":
                    packed, port = local.split(":")
                    found.add((_readable(packed), int(port, 16)))
        return found

    def end(self) -> None:
        for space in self._spaces.values():
            space.end()


def _readable(packed: str) -> str:
    """An address of /proc/net: words in the order of this machine."""
    raw = b"".join(bytes.fromhex(packed[i : i + 8])[::-1] for i in range(0, len(packed), 8))
    import ipaddress

    return str(ipaddress.ip_address(raw))


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Raises `NoNetwork`: why not here."""
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            raise NoNetwork(f"{tool} is not installed (iproute2 and util-linux)")
    spaces: dict[str, _Namespace] = {}
    try:
        for own_user in ([], ["-U", "-r"]):
            enter = ["-U", "--preserve-credentials"] if own_user else []
            prefix = ["nsenter", "-t", "PID", *enter, "-n"]
            try:
                router = spaces["router"] = _Namespace(["unshare", *own_user, "-n"], prefix)
            except NoNetwork:
                if own_user:
                    raise
                continue
            break
        for host in HOSTS:
            spaces[host] = _Namespace([*router.prefix[:3], *enter, "unshare", "-n"], prefix)
        _wire(spaces)
        net = Network(spaces)
        yield net
    finally:
        for space in spaces.values():
            space.end()


def _wire(spaces: dict[str, _Namespace]) -> None:
    router = spaces["router"]
    router.run("ip link set lo up")
    router.write("/proc/sys/net/ipv4/ip_forward", "1")
    router.write("/proc/sys/net/ipv6/conf/all/forwarding", "1")
    for host, number in HOSTS.items():
        space = spaces[host]
        router.run(f"ip link add name {host}0 type veth peer name net0")
        router.run(f"ip link set net0 netns {space.holder.pid}")
        router.run(f"ip addr add 10.81.{number}.1/24 dev {host}0")
        router.run(f"ip -6 addr add fd00:81:{number}::1/64 dev {host}0 nodad")
        router.run(f"ip link set {host}0 up")
        space.run("ip link set lo up")
        # torch asks for the name of every peer: without a resolver in reach, each connection would take its timeout.
        space.run("ip rule add priority 5 ipproto udp dport 53 unreachable")
        space.run(f"ip addr add 10.81.{number}.2/24 dev net0")
        space.run("ip link set net0 up")
        space.write("/proc/sys/net/ipv6/conf/net0/keep_addr_on_down", "1")
        space.run(f"ip -6 addr add fd00:81:{number}::2/64 dev net0 nodad")
        _route(space, number)
        space.write("/proc/sys/net/ipv4/ip_local_port_range", f"{LOCAL_PORTS[0]} {LOCAL_PORTS[1]}")
    spaces["a"].run(f"ip addr add {Network.alias}/32 dev lo")
    router.run(f"ip route add {Network.alias}/32 via 10.81.1.2")


def _route(space: _Namespace, number: int) -> None:
    space.run(f"ip route replace default via 10.81.{number}.1")
    space.run(f"ip -6 route replace default via fd00:81:{number}::1")
