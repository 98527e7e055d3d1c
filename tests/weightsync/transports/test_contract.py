"""What every transport promises, whatever moves the bytes. The members: tests.weightsync.transports.members."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support import spawn_ranks
from tests.support.forks import observe
from tests.weightsync.transports.members import MIB, NUM_BUFFERS, ODD_SIZES, Scenario, peer, play

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

STOP_S = 2.0
SCENARIOS = {
    "one receiver": Scenario(size=2, publishes=3),
    "three receivers": Scenario(size=4),
    "slow receiver": Scenario(victim=2, fate="slow", publishes=1),
    "receiver killed": Scenario(size=4, victim=2, fate="kill"),
    "sender killed": Scenario(victim=0, fate="kill"),
    "receiver stopped": Scenario(size=4, victim=2, fate="stop", deadline_s=STOP_S),
    "sender stopped": Scenario(victim=0, fate="stop", deadline_s=STOP_S),
    "receiver aborts": Scenario(victim=1, fate="abort"),
    "sender aborts": Scenario(victim=0, fate="abort"),
    "member late": Scenario(victim=2, fate="late", publishes=1),
    "member missing": Scenario(victim=2, fate="never", open_s=1.0),
    "coordinator killed": Scenario(victim=1, fate="orphan"),
    "coordinator stopped, receiver killed": Scenario(victim=1, fate="doomed", deadline_s=STOP_S),
}
SHM_SCENARIOS = {
    "other host": Scenario(victim=1, fate="elsewhere"),
    "sender has no memory": Scenario(victim=0, fate="poor", bucket_bytes=32 * MIB),
    "receiver has no memory": Scenario(victim=2, fate="poor", bucket_bytes=32 * MIB),
    "stranger": Scenario(victim=2, fate="stranger", publishes=1),
}


def scenarios(rank, world_size, transport, chosen):
    return observe({name: functools.partial(play, transport, scenario) for name, scenario in chosen.items()})


def run(transport, chosen):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # a C++ stack for every error that is expected here
        seen = spawn_ranks(scenarios, 1, args=(transport, chosen), deadline_s=150)[0]

    def reports(name):
        ok, value = seen[name]
        assert ok, value
        return value

    return reports


@pytest.fixture(scope="module", params=["gloo", "shm", pytest.param("nccl", marks=pytest.mark.gpu)])
def reports(request):
    chosen = SCENARIOS
    if request.param == "nccl":
        gpus = torch.cuda.device_count()
        chosen = {name: scenario for name, scenario in SCENARIOS.items() if scenario.size <= gpus}
        if len(chosen) < len(SCENARIOS):
            pytest.skip(f"NCCL wants a GPU per member: 4, this machine has {gpus}")
    return run(request.param, chosen)


@pytest.fixture(scope="module")
def shm_reports():
    return run("shm", SHM_SCENARIOS)


def assert_all_succeeded(reports):
    for rank, report in reports.items():
        assert report["error"] is None, f"{peer(rank)}: {report['error']}"
        assert report["left"] == {}


def assert_lost(report, kinds, *, naming, within_s):
    kind, message, blamed, bytes_done = report["error"]
    assert kind in kinds, message
    assert blamed == naming, message
    assert naming in message
    assert "epoch 1 stage 0" in message
    assert 0 <= bytes_done < sum(ODD_SIZES)
    assert f"{bytes_done} of {sum(ODD_SIZES)} bytes" in message
    assert report["seconds"] < within_s, message
    # The endpoint stays failed, ends at once, and leaves nothing.
    assert "failed before" in report["again"]
    assert report["end_s"] < 1.0
    assert report["left"] == {}


@pytest.mark.parametrize("name", ["one receiver", "three receivers"])
def test_bytes_are_equal_and_counted_over_several_publishes(reports, name):
    seen = reports(name)
    assert_all_succeeded(seen)  # the members compared the bytes
    assert {r["bytes"] for r in seen.values()} == {SCENARIOS[name].publishes * sum(ODD_SIZES)}


def test_buffers_are_reused(reports):
    for report in reports("three receivers").values():
        assert len(report["buffers"]) == NUM_BUFFERS


def test_a_slow_receiver_holds_the_sender_back(reports):
    seen = reports("slow receiver")
    assert_all_succeeded(seen)
    # The buffers of both sides, and the bucket that the receiver is at.
    assert 0 < seen[0]["lead"] <= 2 * NUM_BUFFERS + 1 < len(ODD_SIZES)


def test_a_killed_receiver_is_named_at_once_by_everybody(reports):
    seen = reports("receiver killed")
    for rank in (0, 1, 3):
        assert_lost(seen[rank], {"PeerLost"}, naming=peer(2), within_s=10)


def test_a_killed_sender_is_named_at_once(reports):
    seen = reports("sender killed")
    for rank in (1, 2):
        assert_lost(seen[rank], {"PeerLost"}, naming=peer(0), within_s=10)


def test_a_stopped_receiver_is_named_by_everybody_within_the_deadline(reports):
    seen = reports("receiver stopped")
    assert_lost(seen[0], {"TransferTimeout"}, naming=peer(2), within_s=STOP_S + 1)
    for rank in (1, 3):
        assert_lost(seen[rank], {"PeerLost", "TransferTimeout"}, naming=peer(2), within_s=STOP_S + 1)


def test_a_stopped_sender_is_named_within_the_deadline(reports):
    seen = reports("sender stopped")
    for rank in (1, 2):
        assert_lost(seen[rank], {"PeerLost", "TransferTimeout"}, naming=peer(0), within_s=STOP_S + 1)


@pytest.mark.parametrize(("name", "victim"), [("receiver aborts", 1), ("sender aborts", 0)])
def test_an_aborting_member_is_named_and_leaves_nothing(reports, name, victim):
    seen = reports(name)
    for rank in {0, 1, 2} - {victim}:
        assert_lost(seen[rank], {"PeerLost"}, naming=peer(victim), within_s=10)
        assert "aborted the transfer" in seen[rank]["error"][1]
    assert "is closed" in seen[victim]["error"][1]
    assert seen[victim]["left"] == {}


def test_a_late_member_is_waited_for(reports):
    seen = reports("member late")
    assert_all_succeeded(seen)
    assert all(report["open_s"] >= 0.4 for report in seen.values())


def test_a_member_that_never_comes_is_named_at_the_deadline(reports):
    for report in reports("member missing").values():
        kind, message, _, _ = report["error"]
        assert kind in ("TransferTimeout", "PeerLost")
        assert f"no word from {peer(2)} within" in message
        assert report["seconds"] < 3
        assert report["left"] == {}


def test_a_transfer_survives_the_store(reports):
    for report in reports("coordinator killed").values():
        assert report["error"] is None


def test_without_the_store_members_still_end_by_the_deadline(reports):
    for report in reports("coordinator stopped, receiver killed").values():
        kind, message, blamed, _ = report["error"]
        assert kind in ("PeerLost", "TransferTimeout"), message
        assert blamed is not None
        assert report["seconds"] < STOP_S + 2
        assert report["left"] == {}


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_cuda_tensors_are_copied_into_and_out_of_host_buckets(transport):
    reports = run(transport, {"cuda": Scenario(tensors="cuda")})("cuda")
    for rank, report in reports.items():
        assert report["error"] is None, f"{peer(rank)}: {report['error']}"
    assert {r["bytes"] for r in reports.values()} == {2 * sum(ODD_SIZES)}


def test_shared_memory_refuses_another_host(shm_reports):
    seen = shm_reports("other host")
    assert seen[1]["error"][0] == "UnsupportedError"
    assert "is on" in seen[1]["error"][1]
    assert "use gloo" in seen[1]["error"][1]
    for rank in (0, 2):
        kind, message, _, _ = seen[rank]["error"]
        assert kind == "PeerLost"
        assert f"{peer(1)} gave up" in message
        assert seen[rank]["seconds"] < 10
    assert all(report["left"] == {} for report in seen.values())


@pytest.mark.parametrize(("name", "victim"), [("sender has no memory", 0), ("receiver has no memory", 2)])
def test_no_memory_for_a_mapping_is_said_and_told_to_the_others(shm_reports, name, victim):
    seen = shm_reports(name)
    for rank, report in seen.items():
        kind, message, _, _ = report["error"]
        assert kind == ("TransportError" if rank == victim else "PeerLost")
        assert f"{peer(victim)} has no memory" in message
        assert "lower bucket_bytes" in message
        assert report["seconds"] < 10
        assert report["left"] == {}


def test_a_stranger_gets_no_memory(shm_reports):
    seen = shm_reports("stranger")
    assert_all_succeeded(seen)
    message, num_fds, rest = seen[2]["stranger"]
    assert message == "wrong token"
    assert (num_fds, rest) == (0, b"")
