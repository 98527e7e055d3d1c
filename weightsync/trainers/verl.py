"""verl's checkpoint engine `weightsync`: its trainer workers publish to engines that run as servers of their own.

verl imports this module where its config says so, on every worker, and finds the backend in its own registry:

    actor_rollout_ref.rollout.checkpoint_engine:
        backend: weightsync
        custom_backend_module: weightsync.trainers.verl
        engine_kwargs:
            weightsync: {engines: [{url: "http://10.0.0.7:8000", api_key_env: ENGINE_KEY}], transport: nccl}
    actor_rollout_ref.rollout.name: weightsync   # engines that verl did not start

or, for the vLLM and SGLang servers that verl starts itself (`rollout.name: vllm`), `engines: replicas`: each rollout
worker knows the server that it belongs to, the driver asks that one for its address.

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
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
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
REPLICAS = "replicas"
"""Of `engines`: the servers that verl has started."""
POLL_S = 0.1
ANSWER_S = 60.0
"""For an actor of one of verl's servers, which may be starting; it is asked for what it knows."""

_CONTROLS: Mapping[str, Callable[..., EngineControl]] = {"http": HttpControl, "sglang": SglangControl}
"""By `kind`: the control API of vLLM and of the embedded engine; SGLang's own server with the bridge in it."""
_ENGINE_KEYS = frozenset({"url", "kind", "name", "api_key_env", "api_key_file"})
_KEYS = ("api_key_env", "api_key_file")
_REPLICA_KINDS = {"vllm": "http", "sglang": "sglang"}
"""Of `rollout.name`, for servers that verl starts itself."""


def controls(engines: Sequence[Mapping[str, Any]]) -> list[EngineControl]:
    """Clients of `engine_kwargs.weightsync.engines`.

    Each has `url`, and optionally `kind` (`http`, the default, or `sglang`), `name`, and where its key is: the
    environment variable `api_key_env`, or the file `api_key_file`. Configs are logged: the key itself is not in one.

    Raises:
        ConfigError: none, an unknown field, or no key where one is said to be.
    """
    if not engines or isinstance(engines, str):
        raise errors.ConfigError(
            f"checkpoint_engine.engine_kwargs.weightsync.engines is {engines!r}: list the servers, each {{url: ..., "
            f"api_key_env: ...}}, or say {REPLICAS!r} for those that verl starts itself"
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


def _api_key(engine: Mapping[str, Any], where: str) -> str | None:
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
    if engine.get("kind") == "sglang":
        return None  # verl starts SGLang's server without the part that asks for one
    raise errors.ConfigError(f"{where}: say where the engine's key is: api_key_env, or api_key_file")


def _addresses(servers: Sequence[str]) -> dict[str, dict[str, str]]:
    """What `controls` takes, by name of a server's Ray actor (verl's `<rollout.name>_server_<replica>_<node>`)."""
    import ray

    found = {}
    for name in servers:
        try:
            host, port = ray.get(ray.get_actor(name).get_server_address.remote(), timeout=ANSWER_S)
        except (ValueError, ray.exceptions.RayError) as e:
            raise errors.ConfigError(f"verl's server {name} does not tell its address: {e}") from e
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        found[name] = {"url": url, "kind": _REPLICA_KINDS[name.partition("_server_")[0]], "name": name}
    return found


@CheckpointEngineRegistry.register(BACKEND)
class WeightSyncEngine(CheckpointEngine):  # type: ignore[misc]  # verl is not installed where types are checked
    """See the module. verl builds it with `bucket_size`, `is_master` (trainers only) and `engine_kwargs.weightsync`.

    Args:
        bucket_size: bytes; verl's `update_weights_bucket_megabytes`. Its default of 2 GiB is an upper bound only: the
            transport's own size is used unless `bucket_bytes` is given.
        is_master: of trainer workers: rank 0.
        engines: the servers, see `controls`; or "replicas", for those that verl has started.
        api_key_env, api_key_file: where the key of verl's servers is.
        **options: fields of `PublishConfig`, for instance `transport`, `bind_host`, `deadline_s`, `pause_mode`.

    Raises:
        ConfigError: a field that there is not, or one that is wrong.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        engines: Sequence[Mapping[str, Any]] | str = (),
        api_key_env: str | None = None,
        api_key_file: str | None = None,
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
        # An OmegaConf list is not equal to any string.
        self._controls = [] if engines == REPLICAS else controls(engines)  # type: ignore[arg-type]
        key = {name: value for name, value in zip(_KEYS, (api_key_env, api_key_file), strict=True) if value}
        if key and engines != REPLICAS:
            raise errors.ConfigError(f"{sorted(key)}: say it with each of `engines`, unless these are {REPLICAS!r}")
        self._key = key if engines == REPLICAS else None
        self._is_master = is_master
        self._servers: list[dict[str, Any]] = []
        self._source: IteratorSource | None = None
        self._publisher: Publisher | None = None
        self._syncs = 0

    # -- what verl calls, in this order ----------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Nothing to allocate; what the driver compares."""
        named = REPLICAS if self._key is not None else [control.name for control in self._controls]
        return {"engines": named, "server": ServerAdapter.server}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Who is who, and where verl's own servers are.

        Raises:
            ConfigError: workers were given different engines; or verl has no servers whose address could be asked for.
        """
        named = {json.dumps(m["engines"]) for m in metadata}
        if len(named) > 1:
            raise errors.ConfigError(f"workers have different engines in their config: {sorted(named)}")

        def ranks(size: int, role: str, engines: list[Any]) -> dict[str, list[Any]]:
            return {"role": [role] * size, "rank": list(range(size)), "world_size": [size] * size, "engines": engines}

        if metadata[0]["engines"] != REPLICAS:
            nothing = [None] * max(actor_wg_world_size, rollout_world_size)
            return (
                ranks(actor_wg_world_size, "trainer", nothing[:actor_wg_world_size]),
                ranks(rollout_world_size, "rollout", nothing[:rollout_world_size]),
            )
        servers = [m["server"] for m in metadata[actor_wg_world_size:]]
        if not servers or None in servers:
            raise errors.ConfigError(
                f"engines={REPLICAS!r} means servers that verl starts, but rollout.name is none of "
                f"{sorted(_REPLICA_KINDS)}: list the servers in engine_kwargs.weightsync.engines"
            )
        found = _addresses(sorted(set(servers)))
        return (
            ranks(actor_wg_world_size, "trainer", [list(found.values())] * actor_wg_world_size),
            ranks(rollout_world_size, "rollout", [[found[server]] for server in servers]),
        )

    def init_process_group(
        self, *, role: str, rank: int, world_size: int, engines: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """On trainer workers, the first time and when replicas came or went: build the publisher.

        That is one broadcast over verl's default process group.
        """
        self._role, self._rank, self._world_size = role, rank, world_size
        if engines is not None and [dict(engine) for engine in engines] != self._servers:
            self._servers = [dict(engine) for engine in engines]
            self._controls = controls([{**engine, **(self._key or {})} for engine in engines])
            if self._publisher is not None:
                atexit.unregister(self._publisher.close)
                self._publisher.close()
                self._publisher = None
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
    """The rollout of verl's `CheckpointEngineWorker`: weights reach the engine without this worker.

    With `rollout.name: vllm` or `sglang` the engine is a server that verl started, which is told the version.

    Raises:
        ConfigError: a setting of verl's under which its servers cannot be published to.
    """

    server: ClassVar[str | None] = None
    """Name of the Ray actor whose server this process belongs to, if verl started it."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = 0) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        name = self.config.name
        if name not in _REPLICA_KINDS:
            return
        wrong = {
            "rollout replicas on the trainer's own GPUs (actor_rollout_ref.hybrid_engine=True)": device_mesh
            is not None,
            "rollout.free_cache_engine=True (weights are discarded before a publish)": self.config.free_cache_engine,
            "rollout.disaggregation.enabled=True": self.config.disaggregation.enabled,
        }
        if refused := [what for what, found in wrong.items() if found]:
            raise errors.ConfigError(f"checkpoint_engine.backend={BACKEND} does not serve {'; '.join(refused)}")
        ServerAdapter.server = f"{name}_server_{replica_rank}_0"

    @property
    def is_leader_rank(self) -> bool:
        """Whether this worker speaks for its replica: verl asks."""
        return self.server is None or not dist.is_initialized() or dist.get_rank() == 0

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing is released."""

    async def update_weights(
        self,
        weights: AsyncGenerator[tuple[str, torch.Tensor], None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Wait for the engine (see `WeightSyncEngine.receive_weights`).

        Raises:
            ConfigError: another backend's tensors arrive here, where nobody could load them.
            EngineError: the server that verl started does not note the version.
        """
        async for name, _tensor in weights:
            raise errors.ConfigError(
                f"tensor {name!r} arrived at a rollout whose engines are published to: set "
                f"checkpoint_engine.backend={BACKEND}"
            )
        if self.server is not None and self.is_leader_rank and global_steps is not None:
            import ray

            # What verl notes at each answer, to know how old a sample is.
            noted = ray.get_actor(self.server).set_global_steps.remote(global_steps)
            try:
                await asyncio.wait_for(asyncio.wrap_future(noted.future()), ANSWER_S)
            except asyncio.TimeoutError as e:
                raise errors.EngineError(
                    f"verl's server {self.server} did not note version {global_steps} within {ANSWER_S:g} s: its actor "
                    "is stopped or busy",
                    engine=self.server,
                ) from e


# verl has a public way to register replicas, but not yet the rollouts of their workers. Workers that verl puts beside
# its servers import this module before they look here; where another backend is configured it is not imported.
for _name in (BACKEND, *_REPLICA_KINDS):
    _ROLLOUT_REGISTRY[(_name, "async")] = f"{ServerAdapter.__module__}.{ServerAdapter.__qualname__}"
