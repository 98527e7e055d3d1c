"""What to measure: the bench's configuration, checked when built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

__all__ = ["BenchConfig", "TrainerLayout"]

DRAFTS = ("none", "mtp", "eagle3")
ENGINES = ("embedded", "vllm", "sglang")
LAUNCHERS = ("local", "ray")
PLACEMENTS = ("spread", "pack")
TRANSPORTS = ("gloo", "shm", "nccl", "ipc")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLayout:
    """`kind` is `state-dict` (one process) or `megatron` (tp x pp processes, live Megatron-Core)."""

    kind: str
    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return "state-dict" if self.kind == "state-dict" else f"tp={self.tp},pp={self.pp}"

    @classmethod
    def parse(cls, text: str) -> TrainerLayout:
        """`state-dict`, or `tp=2,pp=2` in any order, each at least 1 (one that is left out is 1).

        Raises:
            ConfigError: anything else.
        """
        if text == "state-dict":
            return cls(kind="state-dict")
        sizes: dict[str, int] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in ("tp", "pp") or key in sizes or not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"--trainer {text!r}: expected state-dict, or sizes such as tp=2,pp=2")
            sizes[key] = int(value)
        return cls(kind="megatron", **sizes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """One bench run; field by field what the command line takes.

    Raises:
        ConfigError: a value, or a combination, that cannot be measured.
    """

    trainer: TrainerLayout = TrainerLayout(kind="state-dict")
    engine: str = "embedded"
    """`embedded`, or a real one, served from a folder made for it."""
    engine_python: str | None = None
    """Interpreter of the environment that a real engine is installed in; None: this one."""
    engine_args: str = ""
    """More options for a real engine's server, as in a shell."""
    engines: int = 1
    engine_tp: int = 1
    draft: str = "mtp"
    transport: str = "gloo"
    model: str = "qwen3-0.6b"
    """A built-in shape with random weights, or a Hugging Face folder."""
    bucket_mib: float | None = None
    buffers: int | None = None
    """None, of either: what the transport recommends."""
    publishes: int = 5
    warmup: int = 1
    compare: bool = False
    trace: bool = False
    launcher: str = "local"
    """`local`: processes of this machine; `ray`: actors of a Ray cluster."""
    address: str | None = None
    """Of the Ray cluster; None: one of this machine, for this run."""
    placement: str = "spread"
    """Of Ray actors. `spread`: engines over the nodes that have no trainer rank; `pack`: all on few nodes."""
    deadline_s: float = 120.0
    """For each phase of a publish, and for each command to a process of the bench."""

    def __post_init__(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        check(self.engine in ENGINES, f"--engine {self.engine!r}: expected one of {', '.join(ENGINES)}")
        check(
            self.engine != "embedded" or not (self.engine_python or self.engine_args),
            "--engine-python and --engine-args are for real engines: add --engine vllm or --engine sglang",
        )
        check(self.engines >= 1, f"--engines {self.engines}: expected at least 1")
        check(self.engine_tp in (1, 2), f"--engine-tp {self.engine_tp}: expected 1 or 2")
        check(self.draft in DRAFTS, f"--draft {self.draft!r}: expected one of {', '.join(DRAFTS)}")
        check(self.transport in TRANSPORTS, f"--transport {self.transport!r}: expected one of {', '.join(TRANSPORTS)}")
        if (bucket := self.bucket_mib) is not None:
            check(math.isfinite(bucket) and bucket * 2**20 >= 4096, f"--bucket-mib {bucket:g}: expected at least 1/256")
            check(bucket <= 4096, f"--bucket-mib {bucket:g}: expected at most 4096")
        if self.buffers is not None:
            check(self.buffers >= 2, f"--buffers {self.buffers}: expected at least 2, so that phases overlap")
        check(self.publishes >= 1, f"--publishes {self.publishes}: expected at least 1")
        check(self.warmup >= 0, f"--warmup {self.warmup}: expected at least 0")
        check(self.deadline_s > 0, f"--deadline {self.deadline_s:g}: expected seconds > 0")
        check(
            not (self.trainer.kind == "megatron" and self.draft == "eagle3"),
            "--trainer with tp/pp trains the target with its MTP layers: --draft eagle3 needs --trainer state-dict",
        )
        ipc = self.transport == "ipc"
        check(not (ipc and self.trainer.kind == "megatron"), "--transport ipc: everything is on one GPU, one trainer")
        check(not (ipc and self.compare), "--compare: other ways of --transport ipc are not measured")
        launcher, placement, ray = self.launcher, self.placement, self.launcher == "ray"
        check(launcher in LAUNCHERS, f"--launcher {launcher!r}: expected one of {', '.join(LAUNCHERS)}")
        check(placement in PLACEMENTS, f"--placement {placement!r}: expected one of {', '.join(PLACEMENTS)}")
        check(
            ray or (self.address is None and placement == "spread"),
            "--address and --placement are for actors: add --launcher ray",
        )
        check(not (ray and ipc), "--transport ipc: Ray gives every actor a GPU of its own: use --launcher local")
        check(
            not (ray and self.compare and self.transport == "nccl"),
            "--compare: Ray gives the other ways no GPU beside the trainer's and the engines': use --launcher local",
        )

    @property
    def engine_ranks(self) -> int:
        return self.engines * self.engine_tp

    @property
    def trainer_device(self) -> str:
        """Of the (one) state-dict trainer's weights."""
        return "cuda:0" if self.transport in ("nccl", "ipc") else "cpu"

    def engine_device(self, engine: int) -> str:
        """As `EngineConfig.device`: the trainer's GPU with ipc, the ones after the senders' with nccl."""
        if self.transport == "ipc":
            return ",".join(["cuda:0"] * self.engine_tp)
        if self.transport != "nccl":
            return "cpu"
        # An actor sees the GPUs that Ray gave it, and no other.
        return "cuda" if self.launcher == "ray" else f"cuda:{self.trainer.pp + engine * self.engine_tp}"

    @property
    def bucket_bytes(self) -> int | None:
        return None if self.bucket_mib is None else int(self.bucket_mib * 2**20)

    @property
    def folder(self) -> Path | None:
        """The Hugging Face folder, if `model` is one."""
        path = Path(self.model)
        return path if path.is_dir() else None

    @property
    def model_name(self) -> str:
        """Of a folder its name alone, not its path: results are published."""
        return self.model if self.folder is None else self.folder.resolve().name

    @property
    def title(self) -> str:
        """One line for tables and plots."""
        draft = "no draft" if self.draft == "none" else f"{self.draft} draft"
        kind = "" if self.engine == "embedded" else f"{self.engine} "
        engines = f"{self.engines} {kind}engine{'s' if self.engines > 1 else ''} TP{self.engine_tp}"
        return f"{self.model_name}, {draft}: {self.trainer} trainer to {engines} over {self.transport}"

    def to_json(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**out, "trainer": str(self.trainer)}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> BenchConfig:
        return cls(**{**obj, "trainer": TrainerLayout.parse(obj["trainer"])})
