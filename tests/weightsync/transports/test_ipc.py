"""CUDA IPC: the protocol on host memory (`hostgpu`), what is refused, and on a GPU the memory itself."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support import spawn_ranks
from tests.weightsync.transports.hostgpu import HostGpu
from tests.weightsync.transports.members import ODD_SIZES, Scenario, peer
from tests.weightsync.transports.test_contract import STOP_S, assert_all_succeeded, assert_lost, run
from tests.weightsync.transports.test_registry import group
from weightsync.errors import TransportError, UnsupportedError
from weightsync.transports import _ring, ipc
from weightsync.transports.ipc import CudaIpcTransport, Handle, allocator_refusal
from weightsync.transports.registry import TRANSPORTS, get_transport

HANDLE = Handle(memory=bytes(range(66)), nbytes=4096, offset=512, counter=b"/torch_1_2", counter_offset=3, word=b"w")
SCENARIOS = {
    "three receivers": Scenario(size=4, publishes=3),
    "receiver killed": Scenario(size=4, victim=2, fate="kill"),
    "receiver killed before it maps": Scenario(victim=2, fate="kill", at=(1, 0)),
    "receiver aborts": Scenario(victim=1, fate="abort"),
    "receiver aborts before it maps": Scenario(victim=1, fate="abort", at=(1, 0)),
    "sender killed": Scenario(victim=0, fate="kill"),
    "sender aborts": Scenario(victim=0, fate="abort"),
    "receiver stopped": Scenario(victim=2, fate="stop", deadline_s=STOP_S),
    "expandable": Scenario(gpus={0: {"expandable": True}}),
    "other allocator": Scenario(gpus={0: {"backend": "cudaMallocAsync"}}),
    "no memory": Scenario(gpus={0: {"faulty": "no memory"}}),
    "no handle": Scenario(gpus={0: {"faulty": "no handle"}}),
    "renumbered": Scenario(gpus={1: {"sees": ("GPU-7", "GPU-0"), "gpu": "GPU-7"}}, publishes=2),
    "hidden": Scenario(gpus={1: {"sees": ("GPU-7",), "gpu": "GPU-7"}}),
    "no peer access": Scenario(gpus={1: {"sees": ("GPU-7", "GPU-0"), "reach": False}}),
    "cannot open": Scenario(gpus={2: {"faulty": "cannot open"}}),
    "other memory": Scenario(gpus={2: {"faulty": "other memory"}}),
    "hung sender": Scenario(gpus={0: {"faulty": "hung"}}, deadline_s=STOP_S),
    "hung receiver": Scenario(gpus={1: {"faulty": "hung"}}, deadline_s=STOP_S),
    "other host": Scenario(victim=1, fate="elsewhere"),
}


def test_a_handle_survives_its_frame():
    frame = HANDLE.encode()
    assert Handle.decode(frame) == HANDLE
    assert len(frame) < 1024
    json.loads(frame)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"nbytes": -1}, "nbytes is -1"),
        ({"nbytes": True}, "nbytes is True"),
        ({"offset": "0"}, "offset is '0'"),
        ({"memory": "%%%"}, "memory is not base64"),
        ({"memory": 7}, "memory is not base64"),
        ({"extra": 1}, "expected"),
    ],
)
def test_a_frame_that_no_handle_made_is_refused(changes, problem):
    with pytest.raises(ValueError, match=problem):
        Handle.decode(json.dumps({**json.loads(HANDLE.encode()), **changes}).encode())


@pytest.mark.parametrize(
    ("frame", "problem"), [(b"", "Expecting value"), (b"[]", "expected"), (b"{}", "expected"), (b"\xff", "decode")]
)
def test_a_frame_that_is_no_object_is_refused(frame, problem):
    with pytest.raises(ValueError, match=problem):
        Handle.decode(frame)


def segment(address, size, **more):
    return {"address": address, "total_size": size, **more}


def test_expandable_segments_are_seen_where_the_memory_lies():
    segments = [segment(0, 100, is_expandable=True), segment(100, 100, is_expandable=False)]
    assert "expandable_segments:True" in allocator_refusal("native", 99, segments, "")
    # The setting may have changed since, either way: what counts is this memory's segment.
    assert allocator_refusal("native", 100, segments, "expandable_segments:True") is None
    assert allocator_refusal("native", 500, segments, "max_split_size_mb:64") is None
    assert "PYTORCH_CUDA_ALLOC_CONF" in allocator_refusal("native", 500, segments, "expandable_segments: True")
    assert "PYTORCH_CUDA_ALLOC_CONF" in allocator_refusal("native", 5, [segment(0, 9)], "expandable_segments:True")


def test_other_allocators_are_refused_by_name():
    assert "'cudaMallocAsync'" in allocator_refusal("cudaMallocAsync", 0, [], "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_use():
    assert "ipc" in TRANSPORTS
    with pytest.raises(UnsupportedError, match=r"'ipc' needs a CUDA device.*use shm"):
        get_transport("ipc")


@pytest.fixture(scope="module")
def reports():
    return run("hostgpu", SCENARIOS)


def assert_nothing_lent(report):
    assert report["held"] == 0
    assert report["collected"] > 0


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["three receivers", "renumbered"])
def test_memory_is_lent_for_one_publish_and_returned(reports, name):
    seen = reports(name)
    assert_all_succeeded(seen)  # bytes compared; no mapping and no descriptor left, though no group was closed yet
    assert {r["bytes"] for r in seen.values()} == {SCENARIOS[name].publishes * sum(ODD_SIZES)}
    assert_nothing_lent(seen[0])
    assert seen[0]["collected"] == 1 + SCENARIOS[name].publishes  # preflight's trial, then once per publish
    assert [r["between"] for r in seen.values()] == [{}] * len(seen)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "victim"), [("receiver killed", 2), ("receiver killed before it maps", 2), ("receiver aborts", 1)]
)
def test_a_lost_receiver_is_named_and_its_loan_returned(reports, name, victim):
    seen = reports(name)
    for rank in seen.keys() - {victim}:
        assert_lost(seen[rank], {"PeerLost"}, naming=peer(victim), within_s=10)
    assert_nothing_lent(seen[0])


@pytest.mark.multiproc
def test_a_receiver_that_aborts_returns_a_loan_that_it_never_mapped(reports):
    seen = reports("receiver aborts before it maps")
    for rank in (0, 2):
        assert_lost(seen[rank], {"PeerLost"}, naming=peer(1), within_s=10)
    assert_nothing_lent(seen[0])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["sender killed", "sender aborts"])
def test_a_lost_sender_is_named_and_nothing_stays_mapped(reports, name):
    seen = reports(name)
    for rank in (1, 2):
        assert_lost(seen[rank], {"PeerLost"}, naming=peer(0), within_s=10)
    if name == "sender aborts":
        assert_nothing_lent(seen[0])


@pytest.mark.multiproc
def test_what_a_stopped_receiver_maps_stays_counted(reports):
    seen = reports("receiver stopped")
    assert_lost(seen[0], {"TransferTimeout"}, naming=peer(2), within_s=STOP_S + 1)
    assert seen[0]["held"] == 1


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "culprit", "text"),
    [
        ("expandable", 0, "expandable segments"),
        ("other allocator", 0, "'cudaMallocAsync'"),
        ("no memory", 0, "has no memory on cpu for 196608 bytes"),
        ("no handle", 0, "cannot share memory on cpu: CUDA error: invalid argument; use shm"),
        ("hidden", 1, r"sees ['GPU-7']: start both with that GPU in CUDA_VISIBLE_DEVICES"),
        ("no peer access", 1, "has no peer access to the GPU of trainer stage 0"),
        ("cannot open", 2, "cannot map the memory of trainer stage 0: CUDA error: invalid resource handle; containers"),
        ("other memory", 2, "mapped other memory than trainer stage 0 shared"),
        ("other host", 1, "'ipc' needs one host"),
    ],
)
def test_what_cannot_work_is_refused_in_preflight_by_everybody(reports, name, culprit, text):
    refused = "TransportError" if name == "no memory" else "UnsupportedError"
    for rank, report in reports(name).items():
        kind, message, _, _ = report["error"]
        assert kind == (refused if rank == culprit else "PeerLost")
        assert text in message
        assert "bytes" not in report  # no endpoint was made
        assert report["left"] == {}


@pytest.mark.multiproc
@pytest.mark.parametrize(("name", "culprit"), [("hung sender", 0), ("hung receiver", 1)])
def test_a_device_that_does_not_finish_is_named_by_its_own_rank(reports, name, culprit):
    report = reports(name)[culprit]
    assert_lost(report, {"TransferTimeout"}, naming=peer(culprit), within_s=STOP_S + 1)
    assert "its device did not finish" in report["error"][1]


def test_both_ends_in_one_process_are_refused():
    receiver = CudaIpcTransport(driver=HostGpu())
    info = group(rank=1, deadline_s=5.0)
    facts = {"name": "n", "token": "t", "gpu": "GPU-0", "process": ipc._process(), **_ring.machine()}
    info.store.set("socket", json.dumps(facts))
    with pytest.raises(UnsupportedError, match="runs in the process of trainer stage 0: use shm"):
        receiver.open_receiver(info)


GPU_SCENARIOS = {
    "one receiver": Scenario(size=2, publishes=3, tensors="cuda"),
    "two receivers": Scenario(size=3, tensors="cuda"),
    "large": Scenario(size=2, sizes=(8 << 20,) * 8, bucket_bytes=8 << 20, tensors="cuda"),
    "receiver killed": Scenario(size=3, victim=2, fate="kill", tensors="cuda"),
    "receiver aborts": Scenario(size=3, victim=1, fate="abort", tensors="cuda"),
    "sender killed": Scenario(size=3, victim=0, fate="kill", tensors="cuda"),
    "receiver stopped": Scenario(size=3, victim=2, fate="stop", deadline_s=STOP_S, tensors="cuda"),
}


@pytest.fixture(scope="module")
def gpu_reports():
    return run("ipc", GPU_SCENARIOS)


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["one receiver", "two receivers", "large"])
def test_bytes_arrive_through_gpu_memory_that_is_returned_between_publishes(gpu_reports, name):
    seen, scenario = gpu_reports(name), GPU_SCENARIOS[name]
    for rank, report in seen.items():
        assert report["error"] is None, f"{peer(rank)}: {report['error']}"
    assert {r["bytes"] for r in seen.values()} == {scenario.publishes * sum(scenario.sizes)}
    assert seen[0]["allocated"] == [0] * scenario.publishes


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "victim"), [("receiver killed", 2), ("receiver aborts", 1), ("sender killed", 0), ("receiver stopped", 2)]
)
def test_lost_members_are_named_on_a_gpu(gpu_reports, name, victim):
    seen = gpu_reports(name)
    for rank in seen.keys() - {victim}:
        kind, message, blamed, _ = seen[rank]["error"]
        assert kind in ("PeerLost", "TransferTimeout")
        assert blamed == peer(victim), message


def expandable(rank, world_size):
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        CudaIpcTransport().open_sender(group(device=torch.device("cuda", 0), bucket_bytes=8 << 20))
    except TransportError as e:
        return f"{type(e).__name__}: {e}"
    except UnsupportedError as e:
        return str(e)
    return "opened"


@pytest.mark.gpu
@pytest.mark.multiproc
def test_expandable_segments_are_refused_on_a_gpu():
    assert "expandable segments" in spawn_ranks(expandable, 1, deadline_s=60)[0]
