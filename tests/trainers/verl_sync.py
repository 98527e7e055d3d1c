"""Synchronises weights with verl's own classes, in verl's environment: `main`, of a module that Ray can import.

Real: verl's CheckpointEngineManager, worker groups, Ray actors, `ActorRolloutRefWorker.update_weights`,
`CheckpointEngineWorker`, registry, config classes. Replaced, since verl has none that runs on a CPU: the training
engine (it exports the tensors of a folder) and the replicas (their engines run already, outside of verl).

JOB is JSON: `engines` (or "replicas", and the `url` of one) and further `engine_kwargs`, `actors`, `rollouts`. Each
line of stdin is a JSON `{"folder": ..., "version": ...}` to synchronise (with a `url`: to a replica that is elsewhere
now), each line of stdout what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import ray
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

import weightsync.trainers.verl as ours


class Folder:
    """What `ActorRolloutRefWorker` asks of a training engine when weights go out."""

    def __init__(self):
        self.path = None

    def get_per_tensor_param(self):
        def export():
            dist.barrier()  # a training engine gathers: every rank must run the export to its end
            for file in sorted(Path(self.path).glob("*.safetensors")):
                yield from load_file(file).items()
            dist.barrier()

        return export(), None


class Trainer(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        initialize_global_process_group_ray(timeout_second=60, backend="cpu:gloo")
        self.actor = SimpleNamespace(engine=Folder())
        config = self.config.rollout.checkpoint_engine
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **OmegaConf.to_container(config.engine_kwargs[config.backend]),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use(self, path):
        self.actor.engine.path = path


class Server:
    """What verl's server actors answer, for an engine that runs already."""

    def __init__(self, url):
        self.url, self.steps = urlsplit(url), None

    def move(self, url):
        self.url = urlsplit(url)

    def get_server_address(self):
        return self.url.hostname, self.url.port

    def set_global_steps(self, steps):
        self.steps = steps

    def get_global_steps(self):
        return self.steps


class Replica:
    """A replica whose server verl did not start: nothing to pause, publishing does that."""

    def __init__(self, workers):
        self.workers = workers

    async def nothing(self, **_):
        pass

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing


def group(cls, size, prefix, **kwargs):
    return RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[size], use_gpu=False, name_prefix=prefix),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(cls), **kwargs),
        name_prefix=prefix,
        device_name="cpu",
    )


def main():
    job = json.loads(sys.argv[1])
    ray.init(
        address="local",  # not a cluster that another program has on this machine
        num_cpus=64,  # verl asks for ten per worker, and uses one
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {k: v for k, v in os.environ.items() if k.startswith(("WEIGHTSYNC", "TEST_KEY"))}},
    )
    try:
        kwargs = {"engines": job["engines"], **job.get("options", {})}
        own = job["engines"] == "replicas"  # then addressed as verl addresses the servers that it starts
        server = ray.remote(Server).options(name="vllm_server_0_0").remote(job["url"]) if own else None
        settings = {
            "backend": ours.BACKEND,
            "custom_backend_module": "weightsync.trainers.verl",
            "engine_kwargs": {ours.BACKEND: kwargs},
            "update_weights_bucket_megabytes": 64,
        }
        config = OmegaConf.create(
            {"actor": {"strategy": "fsdp", "profiler": {}}, "rollout": {"checkpoint_engine": settings}}
        )
        rollout_config = RolloutConfig(
            name="vllm" if own else ours.BACKEND,
            free_cache_engine=not own,
            checkpoint_engine=CheckpointEngineConfig(**settings),
        )
        trainers = group(Trainer, job["actors"], "trainer", config=config, role="actor")
        rollouts = group(
            CheckpointEngineWorker,
            job["rollouts"],
            "rollout",
            rollout_config=rollout_config,
            model_config=None,
            replica_rank=0,
        )
        trainers.init_model()
        manager = CheckpointEngineManager(rollout_config.checkpoint_engine, trainers, [Replica(rollouts.workers)])
        print(json.dumps({"ready": type(trainers).__name__}), flush=True)
        for line in sys.stdin:
            wanted = json.loads(line)
            trainers.use(wanted["folder"])
            if "url" in wanted:
                ray.get(server.move.remote(wanted["url"]))
            try:
                metrics = manager.update_weights(global_steps=wanted["version"])
                steps = ray.get(server.get_global_steps.remote()) if own else None
                print(json.dumps({"metrics": metrics, "told": steps}), flush=True)
            except Exception as e:  # noqa: BLE001 - the test asserts what it is
                print(json.dumps({"error": f"{type(e).__name__}: {e}"}), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
