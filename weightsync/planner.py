"""Every trainer rank plans the same manifest: specs of all stages meet in the store, the layout is a pure function.

Called by `Publisher` on every rank, once per attempt; specs and manifests are cached, so that from the second publish
on one short digest per stage is all that crosses ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from weightsync import errors
from weightsync.manifest import Manifest, TensorSpec
from weightsync.plan import ALIGNMENT, MIN_BUCKET_BYTES, DtypePolicy, build_manifest, scoped
from weightsync.protocol import TrainerKeys
from weightsync.request import Scope, roles_in_scope
from weightsync.store import translated, wait_all

if TYPE_CHECKING:
    from weightsync.sources.base import Source

__all__ = ["Planner"]


class Planner:
    """Plans for one source. `policy` gives the published dtypes."""

    def __init__(
        self, source: Source, policy: DtypePolicy, bucket_bytes: int, store: dist.Store, keys: TrainerKeys
    ) -> None:
        self._source = source
        self._policy = policy
        self._bucket_bytes = bucket_bytes
        self._store = store
        self._keys = keys
        self._declared: Sequence[TensorSpec] | None = None
        self._own: list[TensorSpec] = []
        self._own_digest = ""
        self._manifests: dict[tuple[str, ...], Manifest] = {}

    def plan(self, scope: Scope, seq: int, deadline_s: float) -> Manifest:
        """The manifest of what `scope` covers. Collective over the trainer.

        Raises:
            errors.ManifestError: nothing in scope, or specs that cannot be laid out.
            errors.TransferTimeout: a stage declared nothing by then.
        """
        self._declare()
        source = self._source
        if source.num_stages == 1:
            digests: tuple[str, ...] = (self._own_digest,)
        else:
            if source.is_sender:
                with translated(self._store, "declaring tensors"):
                    self._store.set(self._keys.specs(seq, source.stage), self._own_digest)
            wanted = {self._keys.specs(seq, s): f"trainer stage {s}" for s in range(source.num_stages)}
            try:
                found = wait_all(self._store, wanted, deadline_s, poll_s=0.005)
            except errors.TransferTimeout as e:
                raise errors.TransferTimeout(
                    f"declaring tensors: {e}: is every trainer rank calling publish, in the same order?", peer=e.peer
                ) from e
            digests = tuple([found[key].decode() for key in wanted])
        cache_key = (*digests, scope)
        if cache_key not in self._manifests:
            self._manifests[cache_key] = self._build(scope, self._stages(digests))
        return self._manifests[cache_key]

    def _declare(self) -> None:
        """Take the source's specs; hash and post them only when the source hands out new ones."""
        specs = self._source.specs()
        if specs is self._declared:
            return
        own = self._policy.apply(specs)
        text = json.dumps([t.to_json() for t in own], separators=(",", ":"))
        self._own_digest = hashlib.sha256(text.encode()).hexdigest()
        self._declared, self._own = specs, own
        if self._source.num_stages > 1 and self._source.is_sender:
            with translated(self._store, "declaring tensors"):
                self._store.set(self._keys.spec_list(self._own_digest), text)

    def _stages(self, digests: Sequence[str]) -> list[list[TensorSpec]]:
        if self._source.num_stages == 1:
            return [self._own]
        with translated(self._store, "reading declared tensors"):
            texts = [self._store.get(self._keys.spec_list(d)) for d in digests]
        return [[TensorSpec.from_json(t) for t in json.loads(text)] for text in texts]

    def _build(self, scope: Scope, stages: Sequence[Sequence[TensorSpec]]) -> Manifest:
        roles = frozenset(t.role for specs in stages for t in specs)
        in_scope = scoped(stages, roles_in_scope(scope, roles))
        if not any(in_scope):
            raise errors.ManifestError(
                f"scope {scope!r}: the source publishes roles {sorted(roles)} and none is in scope"
            )
        # Buffers are as large as a bucket and touched when opened: no larger than what a stage can fill, whatever the
        # scope, since all scopes of an epoch use the same ones.
        largest = max(sum(t.nbytes + ALIGNMENT for t in specs) for specs in stages)
        needed = max(-(-largest // MIN_BUCKET_BYTES) * MIN_BUCKET_BYTES, MIN_BUCKET_BYTES)
        return build_manifest(in_scope, bucket_bytes=min(self._bucket_bytes, needed))
