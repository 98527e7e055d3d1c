"""One vLLM engine's part in a publish, in its front end: what the control API asks, as calls of vLLM's own RPCs.

`server` (HTTP) and `local` (an `LLM` object) each hold one `Leader` and give it a `Rpc`. It holds the fence: closed
from the moment a publish may write until a full one has committed on every rank, the prefix cache is reset and the
version set. What the ranks did it reads where they wrote it, in the publisher's store: vLLM's replies do not tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from weightsync import errors
from weightsync.engine.calls import one_call
from weightsync.engines.capabilities import Row, find_row
from weightsync.engines.settings import Settings
from weightsync.engines.vllm import BACKEND, EXTENSION
from weightsync.engines.vllm.rows import NATIVE
from weightsync.protocol import PROTOCOL_VERSION, Ack, Keys, Phase, PublishCall
from weightsync.store import connect_store

__all__ = ["EngineFacts", "Leader", "Rpc", "facts_of"]

_BY_EXTENSION = f"--worker-extension-cls {EXTENSION}"
PAUSE_MODES = ("abort", "wait", "keep")
_PHASES: tuple[Phase, ...] = ("committed", "prepared", "connected", "preflight")
SLACK_S = 5.0
"""How much longer than the ranks' own deadlines an RPC may take."""
STORE_S = 3.0
"""For the publisher's store to answer after a call."""
FLUSH_TRIES = 20
FLUSH_WAIT_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What the front end knows of its engine."""

    version: str
    world_size: int
    method: str | None
    """vLLM's speculation method."""
    has_draft: bool
    by_extension: bool
    """Our worker extension is there, and receives; else our transfer engine."""
    row: Row


class Rpc(Protocol):
    """vLLM's methods, blocking. Each raises what vLLM raises, or `TimeoutError`."""

    def preflight(self, words: Mapping[str, Any], timeout_s: float) -> None: ...

    def bind_draft(self, timeout_s: float) -> None:
        """One empty draft session."""
        ...

    def update(self, words: Mapping[str, Any], timeout_s: float) -> None:
        """One session: start, update, finish."""
        ...

    def pause(self, mode: str, timeout_s: float) -> list[str]:
        """Returns the ids of the requests that are frozen."""
        ...

    def resume(self, timeout_s: float) -> None: ...

    def running(self) -> list[str]:
        """Ids of the requests that have not ended."""
        ...

    def abort(self, ids: list[str], timeout_s: float) -> None: ...

    def flush(self, reset_running: bool, timeout_s: float) -> bool:
        """Reset the prefix cache; False if vLLM refused."""
        ...

    def set_version(self, version: str, timeout_s: float) -> None: ...

    def counts(self) -> Mapping[str, float]:
        """Since the start: `draft_tokens`, `accepted_tokens`, `drafts`; empty if there is no speculation."""
        ...


def facts_of(vllm_config: Any, version: str, settings: Settings) -> EngineFacts:
    """Check an engine's configuration (vLLM's `VllmConfig`) against the table.

    Raises:
        UnsupportedError: this version, draft kind or layout is not supported; says why.
    """
    row = find_row("vllm", version, allow_untested=settings.allow_untested)
    parallel, model, speculative = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    by_extension = parallel.worker_extension_cls == EXTENSION
    transfer = vllm_config.weight_transfer_config
    backend = None if transfer is None else transfer.backend
    if not by_extension and NATIVE not in row.facts:
        raise errors.UnsupportedError(f"vLLM {version} needs our worker extension: start it with {_BY_EXTENSION}")
    if not by_extension and backend != BACKEND:
        raise errors.UnsupportedError(
            f"vLLM runs with weight transfer backend {backend!r}: start it with "
            f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}'"""
        )
    for what, got, advice in (
        ("data parallelism", parallel.data_parallel_size, "run one engine per replica and list all of them"),
        ("pipeline parallelism", parallel.pipeline_parallel_size, "use tensor parallelism"),
    ):
        if got > 1:
            raise errors.UnsupportedError(f"vLLM runs with {what} of {got}, which was not tested here: {advice}")
    if model.quantization is not None:
        raise errors.UnsupportedError(
            f"vLLM serves quantised weights ({model.quantization}): publishing to them was not tested here; serve the "
            "unquantised model"
        )
    if vllm_config.lora_config is not None:
        raise errors.UnsupportedError("vLLM serves LoRA adapters: publishing under them was not tested here")
    method = None if speculative is None else str(speculative.method)
    if method is not None and method not in (*row.drafts, *row.no_draft):
        raise errors.UnsupportedError(
            f"vLLM speculates with method {method!r}; supported are {', '.join((*row.drafts, *row.no_draft))}"
        )
    return EngineFacts(
        version=version,
        world_size=int(parallel.world_size),
        method=method,
        has_draft=method in row.drafts,
        by_extension=by_extension,
        row=row,
    )


class Leader:
    """The state of one engine; methods named like those of `EngineControl` are its control API, JSON in and out.

    Called from any thread; what changes something runs one at a time.
    """

    def __init__(self, name: str, rpc: Rpc, facts: EngineFacts, settings: Settings) -> None:
        self.name, self.rpc, self.facts, self._settings = name, rpc, facts, settings
        self.instance = secrets.token_hex(8)
        self.fenced: str | None = None
        names = ["target", "draft[0]"] if facts.has_draft else ["target"]
        self.versions: dict[str, int | None] = dict.fromkeys(names)
        self.label: str | None = None
        self.run_id: str | None = None
        self.epoch = 0
        self.asleep: frozenset[str] = frozenset()
        """Of `weights`, `kv_cache`: what vLLM has put to sleep."""
        self._bound = not facts.has_draft or facts.by_extension
        self._pause_mode: str | None = None
        self._kept: list[str] = []
        self._committed: tuple[tuple[str, int, int], dict[str, Any]] | None = None
        self._busy = threading.Lock()

    def handler(self, name: str) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
        """What answers `/weightsync/v1/<name>`, of a JSON body. Raises `UnsupportedError` for an unknown one."""
        handlers: dict[str, Callable[[dict[str, Any]], Mapping[str, Any]]] = {
            "commit": lambda body: self.commit(PublishCall.from_json(body)),
            "pause": lambda body: self.pause(str(body.get("mode")), float(body.get("deadline_s") or 60.0)),
            "preflight": lambda body: self.preflight(PublishCall.from_json(body)),
            "receive": lambda body: self.receive(PublishCall.from_json(body)),
            "resume": lambda body: self.resume(float(body.get("deadline_s") or 60.0)),
            "status": lambda body: self.status(),
        }
        if name not in handlers:
            raise errors.UnsupportedError(f"no such path {name}; there are: {', '.join(sorted(handlers))}")
        return handlers[name]

    def fence_error(self) -> errors.EngineFenced:
        return errors.EngineFenced(
            f"engine {self.name} is fenced and does not serve: {self.fenced}; a full publish heals it", engine=self.name
        )

    def weights_lost(self, why: str) -> None:
        """The weights are gone (sleep level 2): no version is held, nothing is served."""
        self.fenced = why
        self.versions = dict.fromkeys(list(self.versions))

    # -- the control API -----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Answered at once, also while a publish runs."""
        facts = self.facts
        return {
            "engine": self.name,
            "engine_kind": "vllm",
            "engine_version": facts.version,
            "instance": self.instance,
            "world_size": facts.world_size,
            "fenced": self.fenced,
            "state": "fenced" if self.fenced else "paused" if self._pause_mode else "serving",
            "versions": dict(self.versions),
            "label": self.label,
            "run_id": self.run_id,
            "epoch": self.epoch,
            "torch": torch.__version__,
            "protocol": PROTOCOL_VERSION,
            "pause_mode": self._pause_mode,
            "asleep": sorted(self.asleep),
            "speculation": facts.method,
            "draft": "bound" if facts.has_draft and self._bound else "not bound yet" if facts.has_draft else None,
            "row": facts.row.versions,
            "evidence": facts.row.evidence,
            "how": facts.row.how if NATIVE not in facts.row.facts or not facts.by_extension else "a worker extension",
            "speculation_counts": dict(self.rpc.counts()),
        }

    def preflight(self, call: PublishCall) -> dict[str, Any]:
        with self._one("preflight"):
            if "weights" in self.asleep:
                raise errors.EngineError(
                    f"engine {self.name}: preflight: its weights are asleep: wake them first (POST /wake_up)",
                    engine=self.name,
                    phase="preflight",
                )
            limit_s = 2 * call.deadline_s + SLACK_S
            if not self._bound:
                self._do("preflight", lambda: self.rpc.bind_draft(limit_s))
                self._bound = True
            words = {
                "call": call.to_json(),
                "engine": self.name,
                "instance": self.instance,
                "bind_host": self._settings.bind_host,
            }
            self._do("preflight", lambda: self.rpc.preflight(words, limit_s))
            acks = self._acks(call)
            if any(a.ok for a in acks if a is not None and a.phase == "connected"):
                self.run_id, self.epoch = call.run_id, call.epoch
            return self._reply(acks)

    def pause(self, mode: str, deadline_s: float) -> dict[str, Any]:
        if mode not in PAUSE_MODES:
            raise errors.ConfigError(f"pause mode is {mode!r}; expected one of {', '.join(PAUSE_MODES)}")
        with self._one("pause"):
            self._kept = list(self._do("pause", lambda: self.rpc.pause(mode, deadline_s)))
            self._pause_mode = mode
            return {"mode": mode, "kept": [{"id": i} for i in self._kept]}

    def resume(self, deadline_s: float) -> dict[str, Any]:
        if self.fenced is not None:
            raise self.fence_error()
        with self._one("resume"):
            self._do("resume", lambda: self.rpc.resume(deadline_s))
            self._pause_mode, self._kept = None, []
            return {}

    def receive(self, call: PublishCall) -> dict[str, Any]:
        with self._one("receive"):
            # Before the first rank may write: a front end that learnt of it afterwards would serve a mixture.
            was = self.fenced
            self._committed = None
            self.fenced = f"version {call.version} (run {call.run_id}, epoch {call.epoch}) is being loaded"
            for runner in self._in_scope(call):
                self.versions[runner] = None
            try:
                self._do("receive", lambda: self.rpc.update({"call": call.to_json()}, 3 * call.deadline_s + SLACK_S))
                acks = self._acks(call)
            except errors.WeightSyncError as e:
                self._stay_fenced(call, str(e))
                raise
            bad = [
                f"rank {r}: " + ("no acknowledgement" if a is None else a.error or f"ended in phase {a.phase}")
                for r, a in enumerate(acks)
                if a is None or not a.ok or a.phase != "committed"
            ]
            if bad:
                self._stay_fenced(call, "; ".join(bad))
            elif was is not None and not call.full:
                self._stay_fenced(call, f"it did not lift an earlier fence: {was}")
            else:
                try:
                    # At once, not when the coordinator says commit: it may be dead, and the decision is final.
                    self._committed = ((call.run_id, call.epoch, call.seq), self._switch(call))
                except errors.WeightSyncError as e:
                    self._stay_fenced(call, str(e))
                    raise
            return self._reply(acks)

    def commit(self, call: PublishCall) -> dict[str, Any]:
        committed = self._committed
        if committed is not None and committed[0] == (call.run_id, call.epoch, call.seq):
            return committed[1]
        if self.fenced is not None:
            raise self.fence_error()
        raise errors.EngineError(
            f"engine {self.name}: commit: nothing was received for publish {call.seq} of epoch {call.epoch} of run "
            f"{call.run_id}: receive first",
            engine=self.name,
            phase="commit",
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _switch(self, call: PublishCall) -> dict[str, Any]:
        """Every rank holds the new version: no cached prefix of the old one survives, then serve."""
        deadline_s = call.deadline_s
        # Frozen requests hold blocks of the old version: vLLM must compute them anew, or it refuses the reset.
        frozen = self._pause_mode == "keep"
        for attempt in range(FLUSH_TRIES):
            if self._do("commit", lambda: self.rpc.flush(frozen, deadline_s)):
                break
            time.sleep(FLUSH_WAIT_S if attempt + 1 < FLUSH_TRIES else 0)
        else:
            raise errors.EngineError(
                f"engine {self.name}: commit: vLLM refused to reset its prefix cache {FLUSH_TRIES} times: requests "
                "that hold blocks of the old version still run; publish again, with pause_mode='keep' or 'abort'",
                engine=self.name,
                phase="commit",
            )
        label = call.label if call.label is not None else str(call.version)
        self._do("commit", lambda: self.rpc.set_version(label, deadline_s))
        running = set(self.rpc.running())
        spanning = [{"id": i} for i in self._kept if i in running]
        self._do("commit", lambda: self.rpc.resume(deadline_s))
        for runner in self._in_scope(call):
            self.versions[runner] = call.version
        self.label = call.label
        self.fenced = None
        self._pause_mode, self._kept = None, []
        return {
            "version": call.version,
            "versions": dict(self.versions),
            "spanning": spanning,
            "ranks": self.facts.world_size,
            "speculation_counts": dict(self.rpc.counts()),
        }

    def _stay_fenced(self, call: PublishCall, why: str) -> None:
        self.fenced = f"version {call.version} (run {call.run_id}, epoch {call.epoch}) was not loaded completely: {why}"
        # Whoever waits for a first token would wait for the next publish; frozen requests go on after it.
        queued = [i for i in self.rpc.running() if i not in self._kept]
        if queued:
            self._do("receive", lambda: self.rpc.abort(queued, call.deadline_s))

    def _in_scope(self, call: PublishCall) -> list[str]:
        return [r for r in self.versions if call.scope == "both" or (r == "target") == (call.scope == "target")]

    def _acks(self, call: PublishCall) -> list[Ack | None]:
        """The last acknowledgement of every rank in this publish."""
        # The ranks have just used it: it answers at once, or its trainer is gone.
        store = connect_store(call.store_host, call.store_port, min(call.deadline_s, STORE_S))
        keys = Keys(call.run_id, call.epoch)
        acks: list[Ack | None] = []
        for rank in range(self.facts.world_size):
            found = [k for p in _PHASES if store.check([k := keys.ack(call.seq, call.engine_index, rank, p)])]
            acks.append(Ack.from_json(store.get(found[0]).decode()) if found else None)
        return acks

    def _reply(self, acks: list[Ack | None]) -> dict[str, Any]:
        return {
            "ok": all(a is not None and a.ok for a in acks),
            "acks": [None if a is None else dataclasses.asdict(dataclasses.replace(a, timeline={})) for a in acks],
        }

    def _do(self, phase: str, call: Callable[[], Any]) -> Any:
        """One RPC; whatever vLLM raises becomes an `EngineError`."""
        try:
            return call()
        except errors.WeightSyncError:
            raise
        except Exception as e:
            raise errors.EngineError(
                f"engine {self.name}: {phase}: vLLM: {type(e).__name__}: {e}: look at its log",
                engine=self.name,
                phase=phase,
            ) from e

    def _one(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return one_call(self._busy, self.name, phase)
