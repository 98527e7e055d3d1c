"""`VllmControl`: an offline vLLM `LLM` object in this process, as an engine that a publisher drives.

The fence is here: once a publish has begun, the `LLM` takes no request until a full one has committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync import errors
from weightsync.engines.settings import Settings
from weightsync.engines.vllm.leader import Leader, facts_of
from weightsync.engines.vllm.server import speculation_counts
from weightsync.protocol import PublishCall

__all__ = ["VllmControl"]


class VllmControl:
    """An `EngineControl` for `llm`, made with `weight_transfer_config={"backend": "weightsync"}`.

    Publish between calls of `generate`: an `LLM` has no requests then, so every pause mode is the same. With an HTTP
    server use `weightsync.engine.control.HttpControl` instead.

    Raises:
        UnsupportedError: this vLLM, its draft kind or its layout cannot be published to.
    """

    def __init__(self, llm: Any, *, name: str = "vllm", settings: Settings | None = None) -> None:
        from vllm import __version__

        settings = settings if settings is not None else Settings.from_environment()
        self._llm = llm
        facts = facts_of(llm.llm_engine.vllm_config, __version__, settings)
        self._leader = Leader(name, _LocalRpc(llm, by_extension=facts.by_extension), facts, settings)
        self._guard(llm.llm_engine)

    def _guard(self, engine: Any) -> None:
        """Every request passes `add_request`; refuse there, also if `llm.generate` is called past this object."""
        add = engine.add_request

        def add_request(*args: Any, **kwargs: Any) -> Any:
            if self._leader.fenced is not None:
                raise self._leader.fence_error()
            return add(*args, **kwargs)

        engine.add_request = add_request

    @property
    def name(self) -> str:
        return self._leader.name

    def status(self, *, deadline_s: float) -> Mapping[str, Any]:
        return self._leader.status()

    def preflight(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self._leader.preflight(call)

    def pause(self, mode: str, *, deadline_s: float) -> Mapping[str, Any]:
        return self._leader.pause(mode, deadline_s)

    def receive(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self._leader.receive(call)

    def commit(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self._leader.commit(call)

    def resume(self, *, deadline_s: float) -> Mapping[str, Any]:
        return self._leader.resume(deadline_s)


class _LocalRpc:
    """`LLM`'s methods; with the engine in this process a timeout cannot end them, the ranks' own deadlines do."""

    def __init__(self, llm: Any, *, by_extension: bool) -> None:
        self._llm, self._by_extension = llm, by_extension

    def preflight(self, words: Mapping[str, Any], timeout_s: float) -> None:
        if self._by_extension:
            self._rpc("weightsync_preflight", timeout_s, words=dict(words))
        else:
            self._rpc("init_weight_transfer_engine", timeout_s, init_info=dict(words))

    def bind_draft(self, timeout_s: float) -> None:
        self._rpc("start_draft_weight_update", timeout_s)
        self._rpc("finish_weight_update", timeout_s)

    def update(self, words: Mapping[str, Any], timeout_s: float) -> None:
        if self._by_extension:
            self._rpc("weightsync_receive", timeout_s, words=dict(words))
            return
        self._rpc("start_weight_update", timeout_s)
        try:
            self._rpc("update_weights", timeout_s, update_info=dict(words))
        finally:
            # A session left open would refuse the next one, by an exception on every rank.
            self._rpc("finish_weight_update", timeout_s)

    def _rpc(self, method: str, timeout_s: float, **kwargs: Any) -> None:
        self._llm.collective_rpc(method, timeout=timeout_s, kwargs=kwargs)

    def pause(self, mode: str, timeout_s: float) -> list[str]:
        if self._llm.llm_engine.has_unfinished_requests():
            raise errors.EngineError(
                f"pause ({mode}): this LLM is generating: publish between its calls, from the thread that makes them"
            )
        return []

    def resume(self, timeout_s: float) -> None:
        pass

    def running(self) -> list[str]:
        return []

    def abort(self, ids: list[str], timeout_s: float) -> None:
        raise AssertionError("an LLM has no queued requests between its calls")

    def flush(self, reset_running: bool, timeout_s: float) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_running_requests=reset_running))

    def set_version(self, version: str, timeout_s: float) -> None:
        if hasattr(self._llm, "update_weight_version"):  # from 0.28 on
            self._llm.update_weight_version(version)

    def counts(self) -> Mapping[str, float]:
        return speculation_counts()
