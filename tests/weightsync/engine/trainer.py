"""The publisher's side of one publish, step by step, so that each step can go wrong."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from weightsync.digest import digest
from weightsync.plan import BucketPacker
from weightsync.protocol import Ack, Keys, PublishCall
from weightsync.store import host_store, wait_key
from weightsync.timeline import Timeline
from weightsync.transports.base import GroupInfo
from weightsync.transports.registry import get_transport


class Trainer:
    def __init__(self, run_id="run", nonce="n0"):
        self.hosted = host_store()
        self.run_id, self.nonce, self.epoch, self.seq = run_id, nonce, 1, -1
        self.senders = {}
        self.digests = []

    def call(self, manifest, version=1, *, world_size=1, **changes):
        """Post what a publisher posts before it calls, and make the call."""
        self.seq += 1
        keys = Keys(self.run_id, self.epoch)
        self.hosted.store.set(keys.nonce, self.nonce)
        self.hosted.store.set(keys.manifest(manifest.digest), manifest.to_json())
        fields = {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "seq": self.seq,
            "nonce": self.nonce,
            "version": version,
            "manifest_digest": manifest.digest,
            "store_host": self.hosted.host,
            "store_port": self.hosted.port,
            "engine_index": 0,
            "first_group_rank": 1,
            "group_size": 1 + world_size,
            "transport": "gloo",
            "num_buffers": 2,
            "deadline_s": 5.0,
        }
        return PublishCall(**(fields | changes))

    @property
    def keys(self):
        return Keys(self.run_id, self.epoch)

    def ack(self, phase, rank=0, deadline_s=5.0):
        key = self.keys.ack(self.seq, 0, rank, phase)
        return Ack.from_json(wait_key(self.hosted.store, key, deadline_s)[1].decode())

    def allow_connect(self, ok=True, error=""):
        self.hosted.store.set(self.keys.connect(self.seq), json.dumps({"ok": ok, "error": error}))

    def open(self, call, manifest):
        for stage in range(manifest.num_stages):
            if stage not in self.senders:
                group = GroupInfo(
                    store=dist.PrefixStore(self.keys.data_group(stage), self.hosted.store),
                    name=f"stage {stage}",
                    rank=0,
                    size=call.group_size,
                    device=torch.device("cpu"),
                    bucket_bytes=manifest.bucket_bytes,
                    num_buffers=2,
                    bind_host="127.0.0.1",
                    deadline_s=5.0,
                )
                self.senders[stage] = get_transport(call.transport).open_sender(group)

    def send(self, manifest, tensors, *, corrupt=None, stop_after=None):
        self.digests, done = [], 0
        tensors = iter(tensors)
        for stage in range(manifest.num_stages):
            sender = self.senders[stage]
            buckets = manifest.stage_buckets(stage)
            sender.start([manifest.buckets[i].nbytes for i in buckets], 5.0)
            current = []

            def acquire(sender=sender, current=current):
                current[:] = [sender.acquire()]
                return current[0]

            def send(nbytes, bucket, sender=sender, current=current):
                nonlocal done
                if done == stop_after:
                    raise ConnectionAbortedError
                self.digests.append(digest(current[0][:nbytes]))
                if bucket == corrupt:
                    current[0][17] ^= 1
                sender.send(nbytes)
                done += 1

            own = tensors if manifest.num_stages == 1 else iter([next(tensors)])
            BucketPacker(manifest, stage).pack(own, acquire, send, Timeline())
            sender.finish()

    def decide(self, value="commit"):
        self.hosted.store.set(self.keys.decision(self.seq), value)

    def drop_groups(self):
        for sender in self.senders.values():
            sender.abort()
        self.senders = {}

    def new_epoch(self, nonce=None):
        self.drop_groups()
        self.epoch += 1
        self.nonce = nonce or f"n{self.epoch}"

    def close(self):
        self.drop_groups()
        self.hosted.close()
