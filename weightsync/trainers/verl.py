"""verl's checkpoint engine `weightsync`: its trainer workers publish to engines that run as servers of their own.

verl imports this module where its config says so, on every worker, and finds the backend in its own registry:

    actor_rollout_ref.rollout.checkpoint_engine:
        backend: weightsync
        custom_backend_module: weightsync.trainers.verl
        engine_kwargs:
            weightsync: {engines: [{url: "http://10.0.0.7:8000", api_key_env: ENGINE_KEY}], transport: nccl}
    actor_rollout_ref.rollout.name: weightsync   # engines that verl did not start

Order of calls, by verl's `CheckpointEngineManager.update_weights`, once per synchronisation: `prepare` on every worker,
`build_topology` in the driver, `init_process_group` on every worker, then `send_weights` on the trainer's and
`receive_weights` on the rollout's workers at the same time, `finalize` on all. The publisher is built in the first of
them and stays; rollout workers move no bytes, the engines' own processes do. They wait until the engines serve what
was sent, so a failed publish is an error of every worker, not of the trainer alone.

Written against verl 0.9.1 (tested).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout import BaseRollout
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from weightsync import errors
from weightsync.engine.base import EngineControl
from weightsync.engine.control import HttpControl
from weightsync.engines.sglang.control import SglangControl
from weightsync.publisher import PublishConfig, Publisher
from weightsync.sources.iterator import IteratorSource

__all__ = ["BACKEND", "ServerAdapter", "WeightSyncEngine"]

BACKEND = "weightsync"
POLL_S = 0.1

_CONTROLS: Mapping[str, Callable[..., EngineControl]] = {"http": HttpControl, "sglang": SglangControl}
"""By `kind`: the control API of vLLM and of the embedded engine; SGLang's own server with the bridge in it."""
_ENGINE_KEYS = frozenset({"url", "kind", "name", "api_key_env", "api_key_file"})


def controls(engines: Sequence[Mapping[str, Any]]) -> list[EngineControl]:
    """Clients of `engine_kwargs.weightsync.engines`.

    Each has `url`, and optionally `kind` (`http`, the default, or `sglang`), `name`, and where its key is: the
    environment variable `api_key_env`, or the file `api_key_file`. Configs are logged: the key itself is not in one.

    Raises:
        ConfigError: none, an unknown field, or no key where one is said to be.
    """
    if not engines:
        raise errors.ConfigError(
            "checkpoint_engine.engine_kwargs.weightsync.engines is empty: list the servers, each {url: ..., "
            "api_key_env: ...}"
        )
    found: list[EngineControl] = []
    for number, engine in enumerate(engines):
        where = f"checkpoint_engine.engine_kwargs.weightsync.engines[{number}]"
        if unknown := sorted(set(engine) - _ENGINE_KEYS):
            raise errors.ConfigError(f"{where}: unknown {unknown}, expected some of {sorted(_ENGINE_KEYS)}")
        kind = engine.get("kind", "http")
        if kind not in _CONTROLS or "url" not in engine:
            raise errors.ConfigError(f"{where} is {dict(engine)}: expected a url, and a kind of {sorted(_CONTROLS)}")
        found.append(_CONTROLS[kind](engine["url"], api_key=_api_key(engine, where), name=engine.get("name")))
    return found


def _api_key(engine: Mapping[str, Any], where: str) -> str:
    if variable := engine.get("api_key_env"):
        if key := os.environ.get(variable):
            return key
        raise errors.ConfigError(f"{where}: the environment variable {variable} is not set on this worker")
    if path := engine.get("api_key_file"):
        try:
            with open(path, encoding="utf-8") as f:
                return f.read().strip()
        except OSError as e:
            raise errors.ConfigError(f"{where}: cannot read api_key_file: {e}") from e
    raise errors.ConfigError(f"{where}: say where the engine's key is: api_key_env, or api_key_file")


@CheckpointEngineRegistry.register(BACKEND)
class WeightSyncEngine(CheckpointEngine):  # type: ignore[misc]  # verl is not installed where types are checked
    """See the module. verl builds it with `bucket_size`, `is_master` (trainers only) and `engine_kwargs.weightsync`.

    Args:
        bucket_size: bytes; verl's `update_weights_bucket_megabytes`. Its default of 2 GiB is an upper bound only: the
            transport's own size is used unless `bucket_bytes` is given.
        is_master: of trainer workers: rank 0.
        engines: the servers, see `controls`.
        **options: fields of `PublishConfig`, for instance `transport`, `bind_host`, `deadline_s`, `pause_mode`.

    Raises:
        ConfigError: a field that there is not, or one that is wrong.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        engines: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> None:
        try:
            config = PublishConfig(**options)
        except TypeError as e:
            raise errors.ConfigError(f"checkpoint_engine.engine_kwargs.weightsync: {e}") from e
        if config.bucket_bytes is not None and config.bucket_bytes > bucket_size:
            raise errors.ConfigError(
                f"bucket_bytes is {config.bucket_bytes}, but update_weights_bucket_megabytes allows {bucket_size}"
            )
        self._config = config
        self._controls = controls(engines)
        self._is_master = is_master
        self._source: IteratorSource | None = None
        self._publisher: Publisher | None = None
        self._syncs = 0

    # -- what verl calls, in this order ----------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Nothing to allocate; what the driver compares."""
        return {"engines": [control.name for control in self._controls]}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Who is who.

        Raises:
            ConfigError: workers were given different engines.
        """
        named = [tuple(m["engines"]) for m in metadata]
        if len(set(named)) > 1:
            raise errors.ConfigError(f"workers have different engines in their config: {sorted(set(named))}")

        def ranks(size: int, role: str) -> dict[str, list[Any]]:
            return {"role": [role] * size, "rank": list(range(size)), "world_size": [size] * size}

        return ranks(actor_wg_world_size, "trainer"), ranks(rollout_world_size, "rollout")

    def init_process_group(self, *, role: str, rank: int, world_size: int) -> None:
        """On trainer workers, the first time: build the publisher (one broadcast over verl's default process group)."""
        self._role, self._rank, self._world_size = role, rank, world_size
        if role == "trainer" and self._publisher is None:
            self._source = IteratorSource(is_sender=rank == 0)
            self._publisher = Publisher(
                self._source,
                self._controls if rank == 0 else [],
                self._config,
                rank=rank,
                world_size=world_size,
            )
            atexit.register(self._publisher.close)

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish what the trainer exports; returns metrics, which verl logs.

        Every trainer worker runs `weights` to its end (it gathers inside), rank 0 sends. It runs on the caller's
        thread, the one whose device and process groups verl's generators expect. The first time rank 0 copies the
        model while it plans (`IteratorSource.feed`).

        Raises:
            WeightSyncError: nothing was published, or engines are fenced; see `Publisher.publish`.
        """
        assert self._publisher is not None
        assert self._source is not None
        version = self._version(global_steps)
        self._source.feed(weights)
        # verl decides when weights have changed: an engine that holds this number already may hold other weights.
        report = self._publisher.publish(version, force=True)
        return report.metrics() if self._rank == 0 else {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields nothing: the engine's own processes receive. Returns once this worker's engine serves the version.

        Raises:
            EngineError: it does not until the deadline.
        """
        control = self._controls[self._rank % len(self._controls)]
        await self._until_served(control, self._version(global_steps))
        return
        yield  # what makes this a generator, as verl's interface asks

    def finalize(self) -> None:
        """The publisher, its store and its groups stay for the next time."""

    # -- inside ------------------------------------------------------------------------------------------------------

    def _version(self, global_steps: int | None) -> int:
        self._syncs += 1
        return self._syncs if global_steps is None else global_steps

    async def _until_served(self, control: EngineControl, version: int) -> None:
        # The phases of a publish, each of which may take as long.
        end = time.monotonic() + 5 * self._config.deadline_s
        status: Mapping[str, Any] = {}
        while time.monotonic() < end:
            status = await asyncio.to_thread(control.status, deadline_s=self._config.deadline_s)
            if not status.get("fenced") and set(status["versions"].values()) == {version}:
                return
            await asyncio.sleep(POLL_S)
        raise errors.EngineError(
            f"engine {control.name} does not serve version {version} after {5 * self._config.deadline_s:g} s: it holds "
            f"{status.get('versions')}, fenced: {status.get('fenced')}; the trainer's error says why",
            engine=control.name,
        )


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """The rollout of verl's `CheckpointEngineWorker` for engines that run as servers of their own.

    Weights reach them without this worker, and what they keep in memory is theirs to manage.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = 0) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing is released."""

    async def update_weights(
        self, weights: AsyncGenerator[tuple[str, torch.Tensor], None], wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """Wait for the engine (see `WeightSyncEngine.receive_weights`).

        Raises:
            ConfigError: another backend's tensors arrive here, where nobody could load them.
        """
        async for name, _tensor in weights:
            raise errors.ConfigError(
                f"tensor {name!r} arrived at a rollout whose engines are published to: set "
                f"checkpoint_engine.backend={BACKEND}"
            )


# verl has a public way to register replicas, but not yet the rollouts of their workers.
_ROLLOUT_REGISTRY[(BACKEND, "async")] = f"{ServerAdapter.__module__}.{ServerAdapter.__qualname__}"
