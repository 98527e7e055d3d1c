"""`python -m weightsync.embedded.worker FD`: the process of one engine rank, started by `engine.launch` alone.

FD is a socket pair to the launcher: the first message in is the configuration (never the command line, which every
user of the host can read), the first message out says ready or why not. When the launcher closes it, the process ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from weightsync.embedded.build import build_models, make_runners, plan_models
from weightsync.embedded.leader import Leader
from weightsync.embedded.links import Follower, receive, send
from weightsync.embedded.parallel import TpGroup, rank_device
from weightsync.embedded.rank import Rank
from weightsync.engine.http import ControlServer
from weightsync.engine.receiver import Receiver
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.store import connect_store, host_store

__all__ = ["main"]

EXIT_GRACE_S = 2.0


def main(fd: int) -> int:
    # Ctrl-C reaches the whole process group: the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launcher = Connection(fd)
    config = receive(launcher)
    try:
        torch.set_num_threads(config["num_threads"])
        if config["rank"] == 0:
            _lead(config, launcher)
        else:
            _follow(config, launcher)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # the launcher or rank 0 is gone: nobody to tell
    except Exception as e:  # noqa: BLE001 - the launcher raises it
        text = str(e) if isinstance(e, WeightSyncError) else f"{type(e).__name__}: {e}"
        send(launcher, {"error": text, "type": type(e).__name__, "remote": traceback.format_exc()})
        return 1
    return 0


def _lead(config: Mapping[str, Any], launcher: Connection) -> None:
    peers = {int(rank): Connection(fd) for rank, fd in config["peers"].items()}
    # Only when every rank has imported and said hello: the group's timeout is meant for collectives, not for that.
    pids = {number: int(receive(peer)["pid"]) for number, peer in peers.items()}
    if peers:
        with host_store("127.0.0.1") as hosted:
            for peer in peers.values():
                send(peer, {"store_port": hosted.port})
            tp = TpGroup.connect(hosted.store, 0, config["tp"], timeout_s=config["tp_timeout_s"])
    else:
        tp = TpGroup()
    rank = _make_rank(config, tp)
    leader = Leader(
        config["name"],
        rank,
        pid=os.getpid(),
        command_deadline_s=config["command_deadline_s"],
        num_draft=config["num_draft"],
        instance=config["instance"],
    )
    for number, peer in peers.items():
        if "error" in receive(peer):
            return  # that rank tells the launcher itself
        leader.followers.append(Follower(number, pids[number], peer, leader.lost))
    server = ControlServer(leader.handlers(), api_key=config["api_key"], host=config["host"], port=config["port"])
    server.start()
    try:
        send(launcher, {"ready": True, "url": server.url})
        _stop_with(launcher, leader.stop)
        leader.run()
    finally:
        server.stop()
        rank.receiver.close()
        tp.close()


def _follow(config: Mapping[str, Any], launcher: Connection) -> None:
    leader = Connection(config["peers"]["0"])
    send(leader, {"pid": os.getpid()})
    port = receive(leader)["store_port"]
    store = connect_store("127.0.0.1", port, config["tp_timeout_s"])
    tp = TpGroup.connect(store, config["rank"], config["tp"], timeout_s=config["tp_timeout_s"])
    try:
        rank = _make_rank(config, tp)
    except BaseException:
        send(leader, {"error": True})
        raise
    send(leader, {"ready": True})
    send(launcher, {"ready": True})
    _stop_with(launcher, lambda: None)
    try:
        while True:
            op = receive(leader)
            send(leader, rank.apply(op))
            if op["op"] == "stop":
                break
    finally:
        rank.receiver.close()
        tp.close()


def _make_rank(config: Mapping[str, Any], tp: TpGroup) -> Rank:
    plan = plan_models(config["model"], config["draft"], config["dtype"], tp.size)
    device = _take_device(config["device"], tp)
    decoder = build_models(plan, tp, device=device, seed=config["seed"])
    runners = make_runners(decoder)
    receiver = Receiver(
        runners,
        engine=config["name"],
        rank=tp.rank,
        world_size=tp.size,
        device=device,
        bind_host=config["host"],
        instance=config["instance"],
    )
    return Rank(
        tp.rank,
        decoder,
        list(runners),
        receiver,
        max_running=config["max_running"],
        prefix_entries=config["prefix_entries"],
    )


def _take_device(text: str, tp: TpGroup) -> torch.device:
    """This rank's device, made the current one: kernels and streams of a rank are on its own GPU.

    Raises:
        ConfigError: this process has no such device.
    """
    device = rank_device(text, tp.rank, tp.size)
    if device.type == "cpu":
        return device
    accelerator = torch.accelerator.current_accelerator()
    kind, count = (accelerator.type, torch.accelerator.device_count()) if accelerator is not None else ("none", 0)
    if device.type != kind or (device.index or 0) >= count:
        raise ConfigError(f"device {text!r}: rank {tp.rank} wants {device}, this process sees {count} of kind {kind}")
    torch.accelerator.set_device_index(device.index or 0)
    return device


def _stop_with(launcher: Connection, stop: Any) -> None:
    """End this process when the launcher closes its end: at leisure, then at once."""

    def watch() -> None:
        try:
            receive(launcher)
        except (EOFError, OSError):
            stop()
        time.sleep(EXIT_GRACE_S)
        # The main thread is stuck in a collective or a transfer whose other side is gone.
        os._exit(1)

    threading.Thread(target=watch, name="weightsync-launcher", daemon=True).start()


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; tearing the interpreter down with torch in it takes a second.
    os._exit(code)
