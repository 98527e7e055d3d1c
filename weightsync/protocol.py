"""The words that trainer and engines exchange: one JSON call over the control channel, JSON values in the store.

No pickle anywhere. Keys live under one prefix per (run id, epoch); `Keys` is the only place that spells them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from weightsync.errors import ConfigError

__all__ = ["PROTOCOL_VERSION", "Ack", "Keys", "Phase", "PublishCall", "TrainerKeys", "field_names", "plain"]

PROTOCOL_VERSION = 1

Phase = Literal["preflight", "connected", "prepared", "committed"]
"""What an engine rank acknowledges: joined and routed; data groups open; loaded and verified; switched over.

`connected` comes only after the coordinator's `connect` key said that every rank passed preflight: a group is never
opened towards a rank that already refused, since the others would wait for it until their deadline.
"""


_field_names: dict[Any, tuple[str, ...]] = {}


def field_names(cls: Any) -> tuple[str, ...]:
    """Of a dataclass. Asked once per class: `dataclasses.fields` makes a tuple from a generator, and CPython keeps each
    of these for reuse without ever reusing it (2000 of a length), so that a process seems to leak."""
    if cls not in _field_names:
        _field_names[cls] = tuple(f.name for f in dataclasses.fields(cls))
    return _field_names[cls]


def plain(message: Any) -> dict[str, Any]:
    """A dataclass instance as a dict of its fields, not copied."""
    return {name: getattr(message, name) for name in field_names(type(message))}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishCall:
    """What an engine needs to take part in one publish; sent with preflight, receive and commit alike."""

    run_id: str
    epoch: int
    """Rises with every rebuild of the groups; an engine refuses a lower one than it has seen."""
    seq: int
    """Number of this publish within the epoch."""
    nonce: str
    """Must equal the store's: proves that call and store belong together."""
    version: int
    label: str | None = None
    scope: Literal["target", "draft", "both"] = "both"
    full: bool = True
    """True if this publish lifts a fence: everything that the engine's runners hold is in its scope."""
    manifest_digest: str
    store_host: str
    store_port: int
    engine_index: int
    first_group_rank: int
    """Data-group rank of the engine's rank 0; its rank r is `first_group_rank + r`."""
    group_size: int
    transport: str
    num_buffers: int
    deadline_s: float
    """For each phase: connect, stream, decision."""
    takeover: bool = False
    """Take the engine from another run id."""
    trace: bool = False

    def to_json(self) -> dict[str, Any]:
        return plain(self)

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> PublishCall:
        """Raises `ConfigError` if fields are missing or unknown."""
        unknown = sorted(set(obj) - set(field_names(cls)))
        if unknown:
            raise ConfigError(f"publish call has unknown fields {unknown}: install the same weightsync on both sides")
        try:
            return cls(**obj)
        except TypeError as e:
            raise ConfigError(f"publish call is incomplete: {e}: install the same weightsync on both sides") from e


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """What one engine rank says about one phase of one publish."""

    engine: str
    rank: int
    phase: Phase
    ok: bool
    error: str | None = None
    """`Type: message`, with engine, rank and bytes done in it."""
    remote: str | None = None
    """Traceback, as text."""
    bytes_received: int = 0
    """Counted by the transport in this publish, padding included."""
    payload_bytes: int = 0
    """Of these, bytes of tensors."""
    num_tensors: int = 0
    digests: tuple[int, ...] = ()
    """One per bucket, in order (see `weightsync.digest`)."""
    loaded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Runner name -> tensors it loaded."""
    routes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Preflight: runner name -> indices of the manifest's tensors that this rank will load into it."""
    partial: Mapping[str, tuple[tuple[int, int, int], ...]] = dataclasses.field(default_factory=dict)
    """Preflight: runner name -> (tensor, first, stop) elements that this rank reads of tensors that it shards."""
    assembly_bytes: int = 0
    """Preflight: extra memory for a tensor larger than a bucket that the engine's loader needs whole."""
    peak_extra_bytes: int | None = None
    """Peak resident memory during the publish minus that before it, shared pages counted once."""
    timeline: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(plain(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Ack:
        obj = json.loads(text)
        obj["digests"] = tuple(obj["digests"])
        obj["routes"] = {k: tuple(v) for k, v in obj["routes"].items()}
        obj["partial"] = {k: tuple([(i, a, b) for i, a, b in v]) for k, v in obj["partial"].items()}
        return cls(**obj)


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """Store keys of one publisher epoch."""

    run_id: str
    epoch: int

    @property
    def prefix(self) -> str:
        return f"weightsync/{self.run_id}/{self.epoch}"

    @property
    def nonce(self) -> str:
        return f"{self.prefix}/nonce"

    def manifest(self, digest: str) -> str:
        return f"{self.prefix}/manifest/{digest}"

    def data_group(self, stage: int) -> str:
        """Prefix of the store that the data group of one stage rendezvous over."""
        return f"{self.prefix}/data/{stage}"

    def ack(self, seq: int, engine_index: int, rank: int, phase: Phase) -> str:
        return f"{self.prefix}/{seq}/ack/{engine_index}/{rank}/{phase}"

    def sender(self, seq: int, stage: int, phase: str) -> str:
        """What the sender of a stage says of a phase (`connected`, `sent`)."""
        return f"{self.prefix}/{seq}/sender/{stage}/{phase}"

    def connect(self, seq: int) -> str:
        """Coordinator to senders and engine ranks: `{"ok": true}` once all have passed preflight, else the reason."""
        return f"{self.prefix}/{seq}/connect"

    def go(self, seq: int) -> str:
        """Coordinator to senders: `{"ok": true}` once every engine is paused and receives, else the reason."""
        return f"{self.prefix}/{seq}/go"

    def decision(self, seq: int) -> str:
        """Compare-and-set once from absent: `commit` or `abort: <reason>`."""
        return f"{self.prefix}/{seq}/decision"

    def verdict(self, seq: int) -> str:
        """The report, JSON, for every trainer rank."""
        return f"{self.prefix}/{seq}/verdict"

    def heartbeat(self, engine_index: int, rank: int) -> str:
        return f"{self.prefix}/heartbeat/{engine_index}/{rank}"

    def attempt(self, seq: int, world_sizes: Mapping[int, int], num_stages: int) -> list[str]:
        """Every key of attempt `seq`; `world_sizes`: engine index -> ranks."""
        ranks = [(index, rank) for index, size in world_sizes.items() for rank in range(size)]
        return [
            *(self.ack(seq, index, rank, phase) for index, rank in ranks for phase in get_args(Phase)),
            *(self.sender(seq, s, phase) for s in range(num_stages) for phase in ("connected", "sent")),
            self.connect(seq),
            self.go(seq),
            self.decision(seq),
            self.verdict(seq),
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerKeys:
    """Store keys among trainer ranks; they outlive an epoch, since the order of an attempt names its epoch."""

    run_id: str

    def specs(self, seq: int, stage: int) -> str:
        """Digest of the tensor specs that a stage's sender declares for this attempt."""
        return f"weightsync/{self.run_id}/trainer/{seq}/specs/{stage}"

    def spec_list(self, digest: str) -> str:
        """The specs themselves, JSON, posted once."""
        return f"weightsync/{self.run_id}/trainer/specs/{digest}"

    def order(self, seq: int) -> str:
        """What the coordinator decided after preflight: epoch, manifest, group size; or the error for every rank."""
        return f"weightsync/{self.run_id}/trainer/{seq}/order"

    def attempt(self, seq: int, num_stages: int) -> list[str]:
        """Every key of attempt `seq`."""
        return [self.order(seq), *(self.specs(seq, s) for s in range(num_stages))]
