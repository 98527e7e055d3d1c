"""A receiver against a real store and real transports: commit, abort, and everything that goes wrong on the way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import threading
import time

import pytest
import torch

from tests.weightsync.engine.toy import (
    Toy,
    copy_to,
    draft_runner,
    manifest_of,
    parameter,
    random_tensors,
    spec,
    target_runner,
)
from tests.weightsync.engine.trainer import Trainer
from weightsync.engine.receiver import Receiver
from weightsync.plan import build_manifest
from weightsync.protocol import Keys

SPECS = [spec("embed", 300, 8), spec("layer", 8, 8), spec("mtp", 8, 8, role="draft")]
BUCKET = 4096


def models():
    target = Toy(
        {"embed": parameter(300, 8), "layer": parameter(8, 8)}, {"embed": copy_to("embed"), "layer": copy_to("layer")}
    )
    draft = Toy({"embed": target.embed, "mtp": parameter(8, 8)}, {"embed": copy_to("embed"), "mtp": copy_to("mtp")})
    return target, draft


@contextlib.contextmanager
def setting(runners=None, **kwargs):
    """(trainer, receiver, submit): `submit` runs a call of the receiver on its own thread."""
    made = models() if runners is None else None
    runners = runners or [target_runner(made[0]), draft_runner(made[1], roles=("draft", "target"))]
    receiver = Receiver(runners, engine="e0", rank=0, world_size=1, **kwargs)
    trainer = Trainer()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            yield trainer, receiver, pool.submit
        finally:
            trainer.close()
            receiver.close()


def preflight(trainer, receiver, submit, call, manifest):
    """A preflight in which everything goes well."""
    future = submit(receiver.preflight, call)
    assert trainer.ack("preflight").ok
    trainer.allow_connect()
    trainer.open(call, manifest)
    ack = future.result(5)
    assert ack.ok, ack.error
    assert trainer.ack("connected").ok
    return ack


def publish(trainer, receiver, submit, specs=SPECS, tensors=None, decision="commit", corrupt=None, **changes):
    """A publish in which everything goes well, up to the decision."""
    manifest = manifest_of(specs, BUCKET)
    call = trainer.call(manifest, **changes)
    preflight(trainer, receiver, submit, call, manifest)
    future = submit(receiver.receive, call)
    trainer.send(manifest, tensors if tensors is not None else random_tensors(specs), corrupt=corrupt)
    prepared = trainer.ack("prepared")
    assert prepared.ok, prepared.error
    trainer.decide(decision)
    return manifest, prepared, future.result(5)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_publishes_load_target_and_draft_from_one_receive_and_reuse_their_groups(transport):
    target, draft = models()
    finished = []
    runners = [
        target_runner(target, on_finish=lambda: finished.append("target")),
        draft_runner(draft, roles=("draft", "target"), on_finish=lambda: finished.append("draft")),
    ]
    pointers = [p.data_ptr() for p in (target.embed, target.layer, draft.mtp)]
    with setting(runners) as (trainer, receiver, submit):
        assert receiver.status()["versions"] == {"target": None, "draft[0]": None}
        for version in (3, 4):
            tensors = random_tensors(SPECS, seed=version)
            manifest, prepared, ack = publish(
                trainer, receiver, submit, tensors=tensors, version=version, transport=transport, label="step"
            )
            assert ack.ok
            assert ack.phase == "committed"
            assert ack == trainer.ack("committed")
            assert prepared.bytes_received == manifest.wire_bytes
            assert prepared.payload_bytes == manifest.payload_bytes
            assert prepared.num_tensors == 3
            assert list(prepared.digests) == trainer.digests
            assert prepared.loaded == {"target": 2, "draft[0]": 1}
            assert {"wire", "load_target", "load_draft", "verify"} <= set(prepared.timeline["seconds"])
            assert prepared.timeline["nbytes"]["wire"] == manifest.wire_bytes
            assert prepared.peak_extra_bytes is not None
            assert receiver.fenced is None
            assert receiver.versions == {"target": version, "draft[0]": version}
            assert (receiver.run_id, receiver.epoch, receiver.label) == ("run", 1, "step")
            for p, t in zip((target.embed, target.layer, draft.mtp), tensors, strict=True):
                assert torch.equal(p, t)
        assert finished == ["target", "draft"] * 2
        assert pointers == [p.data_ptr() for p in (target.embed, target.layer, draft.mtp)]
        assert list(trainer.senders) == [0]
        key = trainer.keys.heartbeat(0, 0)
        assert json.loads(trainer.hosted.store.get(key))["n"] >= 1


def test_stages_are_received_in_order():
    target, draft = models()
    manifest = build_manifest([[s] for s in SPECS], bucket_bytes=BUCKET)
    tensors = random_tensors(SPECS)
    with setting([target_runner(target), draft_runner(draft, roles=("draft", "target"))]) as (
        trainer,
        receiver,
        submit,
    ):
        call = trainer.call(manifest)
        preflight(trainer, receiver, submit, call, manifest)
        future = submit(receiver.receive, call)
        trainer.send(manifest, tensors)
        assert list(trainer.ack("prepared").digests) == trainer.digests
        trainer.decide()
        assert future.result(5).ok
        assert torch.equal(draft.mtp, tensors[2])


def test_scopes_keep_versions_apart():
    with setting() as (trainer, receiver, submit):
        _, prepared, _ = publish(trainer, receiver, submit, SPECS[:2], version=5, scope="target", full=False)
        assert prepared.loaded == {"target": 2}
        assert receiver.versions == {"target": 5, "draft[0]": None}
        publish(trainer, receiver, submit, SPECS[2:], version=6, scope="draft", full=False)
        assert receiver.versions == {"target": 5, "draft[0]": 6}
        assert receiver.fenced is None


def test_an_abort_leaves_the_engine_fenced_until_a_full_publish():
    aborted = []
    target, draft = models()
    runners = [
        target_runner(target, on_abort=lambda: aborted.append("target")),
        draft_runner(draft, roles=("draft", "target")),
    ]
    with setting(runners) as (trainer, receiver, submit):
        publish(trainer, receiver, submit, version=1)
        _, _, ack = publish(trainer, receiver, submit, version=2, decision="abort: engine e1 died")
        assert not ack.ok
        assert ack.error.startswith("PublishAborted: engine e0 rank 0, committed")
        assert "abort: engine e1 died" in ack.error
        assert "version 2 (run run, epoch 1) was not loaded completely" in receiver.fenced
        assert receiver.versions == {"target": None, "draft[0]": None}
        assert aborted == ["target"]

        trainer.new_epoch()
        manifest = manifest_of(SPECS[:2], BUCKET)
        refused = receiver.preflight(trainer.call(manifest, scope="target", full=False))
        assert refused.error.startswith(
            "EngineFenced: engine e0 rank 0, preflight, checking the call: fenced (version 2"
        )
        assert "publish scope 'both'" in refused.error
        assert "was not loaded completely" in receiver.fenced

        publish(trainer, receiver, submit, version=3)
        assert receiver.fenced is None
        assert receiver.versions == {"target": 3, "draft[0]": 3}


def test_a_publish_that_is_never_decided_ends_fenced_at_its_deadline():
    with setting() as (trainer, receiver, submit):
        manifest = manifest_of(SPECS, BUCKET)
        call = trainer.call(manifest, deadline_s=1.0)
        preflight(trainer, receiver, submit, call, manifest)
        start = time.monotonic()
        future = submit(receiver.receive, call)
        trainer.send(manifest, random_tensors(SPECS))
        ack = future.result(5)
        assert ack.error.startswith("TransferTimeout: engine e0 rank 0, committed, waiting for the decision")
        assert "was not loaded completely" in receiver.fenced
        assert time.monotonic() - start < 3


def test_a_coordinator_that_dies_before_the_decision_is_noticed_at_once():
    with setting() as (trainer, receiver, submit):
        manifest = manifest_of(SPECS, BUCKET)
        call = trainer.call(manifest)
        preflight(trainer, receiver, submit, call, manifest)
        future = submit(receiver.receive, call)
        trainer.send(manifest, random_tensors(SPECS))
        trainer.ack("prepared")
        trainer.close()
        start = time.monotonic()
        ack = future.result(5)
        assert ack.error.startswith("PeerLost")
        assert time.monotonic() - start < 2
        assert receiver.fenced is not None


def test_a_corrupted_bucket_shows_in_its_digest():
    with setting() as (trainer, receiver, submit):
        _, prepared, _ = publish(trainer, receiver, submit, corrupt=1, decision="abort: bucket 1")
        wrong = [i for i, (a, b) in enumerate(zip(prepared.digests, trainer.digests, strict=True)) if a != b]
        assert wrong == [1]


def test_a_sender_that_dies_mid_stream_is_named_and_the_next_epoch_heals():
    target, draft = models()
    with setting([target_runner(target), draft_runner(draft, roles=("draft", "target"))]) as (
        trainer,
        receiver,
        submit,
    ):
        manifest = manifest_of(SPECS, BUCKET)
        call = trainer.call(manifest)
        preflight(trainer, receiver, submit, call, manifest)
        future = submit(receiver.receive, call)
        with pytest.raises(ConnectionAbortedError):
            trainer.send(manifest, random_tensors(SPECS), stop_after=1)
        trainer.drop_groups()
        ack = trainer.ack("prepared")
        # The bucket that was handed over before the death may have arrived or not; where and how much must agree.
        at = int(re.match(r"PeerLost: engine e0 rank 0, prepared, bucket ([01]) of 3, stage 0", ack.error)[1])
        assert f"({at * BUCKET} of {manifest.wire_bytes} bytes received)" in ack.error
        assert "Traceback" in ack.remote
        assert not future.done(), "a failed rank hears the decision before it goes on"
        trainer.decide("abort: sender died")
        assert not future.result(5).ok
        assert "PeerLost" in receiver.fenced

        trainer.new_epoch()
        tensors = random_tensors(SPECS, seed=9)
        publish(trainer, receiver, submit, tensors=tensors, version=2)
        assert receiver.fenced is None
        assert torch.equal(draft.embed, tensors[0])


def test_an_abort_reaches_a_rank_that_waits_for_bytes():
    with setting() as (trainer, receiver, submit):
        manifest = manifest_of(SPECS, BUCKET)
        call = trainer.call(manifest, deadline_s=30.0)
        preflight(trainer, receiver, submit, call, manifest)
        future = submit(receiver.receive, call)
        time.sleep(0.2)
        start = time.monotonic()
        trainer.decide("abort: engine e1 cannot pause")
        ack = future.result(5)
        assert time.monotonic() - start < 3
        assert ack.error.startswith("PublishAborted: engine e0 rank 0, prepared, bucket 0")
        assert "engine e1 cannot pause" in ack.error


class ForeignError(BaseException):
    """Like torch's CheckpointException: not an Exception."""


@pytest.mark.parametrize("where", ["load", "finish", "begin"])
def test_whatever_an_engine_raises_becomes_an_acknowledgement(where):
    target, draft = models()
    live = [False]

    def bad(*_):
        if live[0]:
            raise ForeignError("cudaErrorIllegalAddress")

    def load(pairs):
        bad()
        draft.load_weights(pairs)

    draft_kwargs = {"load": load} if where == "load" else {f"on_{where}": bad}
    runners = [target_runner(target), draft_runner(draft, roles=("draft", "target"), **draft_kwargs)]
    with setting(runners) as (trainer, receiver, submit):
        manifest = manifest_of(SPECS, BUCKET)
        call = trainer.call(manifest)
        preflight(trainer, receiver, submit, call, manifest)
        live[0] = True
        future = submit(receiver.receive, call)
        with contextlib.suppress(Exception):
            trainer.send(manifest, random_tensors(SPECS))
        ack = trainer.ack("prepared")
        assert not ack.ok
        assert ack.error.startswith("ForeignError: engine e0 rank 0, prepared")
        assert "cudaErrorIllegalAddress" in ack.error
        trainer.decide("commit")  # others may commit; this rank must not
        assert not future.result(5).ok
        assert "ForeignError" in receiver.fenced
        assert receiver.versions["target"] is None


def assert_untouched(receiver, before):
    assert (receiver.fenced, receiver.versions, receiver.run_id, receiver.epoch) == before


def test_calls_that_do_not_belong_are_refused_and_change_nothing():
    with setting() as (trainer, receiver, submit):
        trainer.epoch = 4
        publish(trainer, receiver, submit, version=1)
        before = (None, {"target": 1, "draft[0]": 1}, "run", 4)
        manifest = manifest_of(SPECS, BUCKET)

        def refused(call, says):
            ack = receiver.preflight(call)
            assert ack.error.startswith("AuthError: engine e0 rank 0, preflight, checking the call")
            assert says in ack.error
            key = Keys(call.run_id, call.epoch).ack(call.seq, 0, 0, "preflight")
            assert json.loads(trainer.hosted.store.get(key))["error"] == ack.error
            assert_untouched(receiver, before)

        refused(trainer.call(manifest, nonce="wrong"), "the call's is not the one in the store")
        refused(trainer.call(manifest, epoch=9), "nonce of run 'run' epoch 9")
        trainer.epoch = 3
        refused(trainer.call(manifest), "epoch 3 of run 'run' is over, this engine is in epoch 4")
        trainer.epoch = 4
        future = submit(receiver.preflight, trainer.call(manifest, num_buffers=3))
        trainer.allow_connect()
        assert future.result(5).error.startswith("ConfigError: engine e0 rank 0, connected, opening the data groups")
        assert_untouched(receiver, before)
        other = Trainer(run_id="other", nonce="x")
        rival = Trainer(nonce="y")
        rival.epoch = 4
        try:
            ack = receiver.preflight(other.call(manifest))
            assert ack.error.startswith("AuthError")
            assert "belongs to run 'run', the call is of run 'other'" in ack.error
            assert not other.ack("preflight").ok
            ack = receiver.preflight(rival.call(manifest))
            assert "epoch 4 of run 'run' has failed here or belongs to another publisher" in ack.error
            assert_untouched(receiver, before)
            dead = dataclasses.replace(other.call(manifest), store_port=1, epoch=7)
            ack = receiver.preflight(dead)
            assert ack.error.startswith("PeerLost: engine e0 rank 0, preflight, joining the publisher's store")
            assert_untouched(receiver, before)

            publish(other, receiver, submit, version=1, takeover=True)
            assert (receiver.run_id, receiver.epoch) == ("other", 1)
        finally:
            other.close()
            rival.close()


def test_a_refused_manifest_changes_nothing_and_says_why():
    with setting() as (trainer, receiver, submit):
        publish(trainer, receiver, submit, version=1)
        before = (None, {"target": 1, "draft[0]": 1}, "run", 1)
        for specs, says in (
            ([*SPECS, spec("typo", 4)], "RoutingError: engine e0 rank 0, preflight, routing: 1 published tensors"),
            (SPECS[1:], "parameter embed (shape (300, 8), float32)"),
            ([spec("embed", 8), *SPECS[1:]], "AssertionError: embed: got (8,), expected (300, 8)"),
        ):
            ack = receiver.preflight(trainer.call(manifest_of(specs, BUCKET), version=2))
            assert not ack.ok
            assert says in ack.error
            assert trainer.ack("preflight") == ack
            assert_untouched(receiver, before)
        call = trainer.call(manifest_of(SPECS, BUCKET), version=2)
        future = submit(receiver.preflight, call)
        assert trainer.ack("preflight").ok
        trainer.allow_connect(ok=False, error="engine e1 refused")
        ack = future.result(5)
        assert ack.phase == "connected"
        assert "engine e1 refused" in ack.error
        assert_untouched(receiver, before)
        never = receiver.receive(call)
        assert never.error.startswith("AuthError")
        assert "did not pass preflight here" in never.error
        assert_untouched(receiver, before)
        publish(trainer, receiver, submit, version=2)


def test_a_second_call_during_a_publish_is_refused():
    with setting() as (trainer, receiver, submit):
        manifest = manifest_of(SPECS, BUCKET)
        call = trainer.call(manifest)
        future = submit(receiver.preflight, call)
        trainer.ack("preflight")
        assert "another publish is in progress here" in receiver.preflight(call).error
        assert receiver.status()["busy"]
        trainer.allow_connect(ok=False, error="enough")
        future.result(5)


def test_nothing_is_left_running():
    before = {t.ident for t in threading.enumerate()}
    with setting() as (trainer, receiver, submit):
        for version in (1, 2):
            publish(trainer, receiver, submit, version=version)
            trainer.new_epoch()
    deadline = time.monotonic() + 3
    while (left := {t.ident for t in threading.enumerate()} - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
