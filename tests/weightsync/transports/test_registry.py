"""Transports by name: what is known, what is refused, what only torch.distributed knows."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, TransferTimeout, TransportError, UnsupportedError
from weightsync.transports.base import GroupInfo
from weightsync.transports.registry import TRANSPORTS, get_transport


def group(**changes):
    info = GroupInfo(
        store=dist.HashStore(),
        name="epoch 1 stage 0",
        rank=0,
        size=2,
        device=torch.device("cpu"),
        bucket_bytes=4096,
        num_buffers=2,
        bind_host="127.0.0.1",
        deadline_s=0.2,
        peers=("trainer stage 0", "engine 0 rank 0"),
    )
    return dataclasses.replace(info, **changes)


@pytest.mark.parametrize(("name", "same_host"), [("gloo", False), ("shm", True)])
def test_tested_transports_say_what_they_move(name, same_host):
    caps = get_transport(name).caps
    assert (caps.name, caps.devices, caps.same_host, caps.tested) == (name, frozenset({"cpu"}), same_host, True)
    assert name in TRANSPORTS


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"'rdma'.*gloo: .*shm: .*plug-in"):
        get_transport("rdma")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_backend_that_torch_was_built_without_is_refused():
    with pytest.raises(UnsupportedError, match="built without nccl"):
        get_transport("nccl")


def plugged_in(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def test_a_plugged_in_backend_works_by_name_and_is_said_to_be_untested():
    dist.Backend.register_backend("plugged_in", plugged_in, devices=["cpu"])
    transport = get_transport("plugged_in")
    assert transport.caps.devices == {"cpu"}
    assert not transport.caps.tested
    store = dist.HashStore()
    sizes = [4096, 10, 20, 30]
    received = []

    def receive():
        receiver = transport.open_receiver(group(store=store, rank=1, deadline_s=20.0))
        receiver.start(sizes, 20.0)
        for _ in sizes:
            received.append(receiver.receive().clone())
            receiver.release()
        receiver.finish()
        receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    sender = transport.open_sender(group(store=store, deadline_s=20.0))
    sender.start(sizes, 20.0)
    for i, nbytes in enumerate(sizes):
        sender.acquire()[:nbytes].fill_(i)
        sender.send(nbytes)
    sender.finish()
    thread.join(20.0)
    sender.close()
    assert [(t.numel(), t.unique().tolist()) for t in received] == [(n, [i]) for i, n in enumerate(sizes)]
    with pytest.raises(TransportError, match="closed"):
        sender.start([1], 1.0)


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_a_device_that_buckets_cannot_be_on_is_refused(name):
    with pytest.raises(UnsupportedError, match=r"epoch 1 stage 0.*\['cpu'\].*meta"):
        get_transport(name).open_sender(group(device=torch.device("meta")))


def test_gloo_wants_one_address_that_others_can_reach():
    with pytest.raises(ConfigError, match="bind_host must be one address"):
        get_transport("gloo").open_sender(group(bind_host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"gloo cannot listen on '192\.0\.2\.1'.*bind_host of trainer stage 0"):
        get_transport("gloo").open_sender(group(bind_host="192.0.2.1"))


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_a_sender_without_receivers_names_them_at_the_deadline(name):
    with pytest.raises(TransferTimeout, match=r"no word from engine 0 rank 0 within") as e:
        get_transport(name).open_sender(group())
    assert e.value.peer == "engine 0 rank 0"
