"""Hold the bytes that the gloo transport counts against those that the kernel counts on the loopback interface.

    python benchmarks/loopback.py [--model qwen3-0.6b] [--engines 1] [--draft mtp] [--publishes 3]

Runs in a network namespace of its own, so that nobody else's traffic is counted. Prints one line per publish; status 1
if interface and transport differ by more than 3 %, 77 with the reason where no namespace may be made.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
TOLERANCE = 0.03
SKIPPED = 77


def enter_namespace():
    """A fresh network namespace with its loopback interface up, for this process and its children.

    To be called while the process has one thread, before torch is imported. Raises OSError where it is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"no network namespace may be made here: {os.strerror(code)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def received_bytes():
    """Of `lo`, from /proc; in this process's namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise OSError("this network namespace has no loopback interface")


def measure(config, publishes, say=print):
    """Largest relative difference between interface and transport over some publishes."""
    from weightsync.bench.harness import Session

    worst = 0.0
    with Session(config) as session:
        session.publish("both")  # groups and plan are made here: control traffic that a run has once
        for _ in range(publishes):
            before = received_bytes()
            _, report = session.publish("both")
            on_interface = received_bytes() - before
            counted = sum(n for engine in report.engines for n in engine.bytes_received)
            difference = on_interface / counted - 1
            worst = max(worst, abs(difference))
            say(f"interface {on_interface:>14,}  transport {counted:>14,}  difference {difference:+.3%}")
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--draft", default="mtp")
    parser.add_argument("--publishes", type=int, default=3)
    args = parser.parse_args()
    try:
        enter_namespace()
    except OSError as e:
        print(f"skipped: {e}", file=sys.stderr)
        return SKIPPED
    from weightsync.bench.config import BenchConfig

    worst = measure(BenchConfig(model=args.model, engines=args.engines, draft=args.draft), args.publishes)
    if worst > TOLERANCE:
        print(f"loopback: {worst:.2%} apart, allowed are {TOLERANCE:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
