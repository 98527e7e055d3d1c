"""Local checkpoints of nvidia-resiliency-ext beside ours, under the same damage; see test_baselines.py.

0.4.1 is the newest that can be installed with Python 3.11 and glibc 2.36: wheels from 0.5 on ask for glibc 2.39.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

from checkpoint import Checkpointer
from tests.checkpoint.stock_ranks import enter_group, part
from weightsync.bench.megatron import cpu_runtime


class Plain(TensorAwareStateDict):
    """The smallest state that the manager takes."""

    def __init__(self, values):
        self.values = values

    tensors = property(lambda self: self.values.values())
    is_hollow = property(lambda self: False)

    def _nothing(self, *args, **kwargs):
        pass

    pop_tensors = insert_tensors = init_tensors = copy_tensors_to_cpu = restore_tensor_device = _nothing


def torn_and_stale(base):
    """T11 and T12: local checkpoints of nvidia-resiliency-ext beside ours under the same damage."""
    base, found = Path(base), {}
    warnings.simplefilter("ignore")
    enter_group(0, base, world_size=1)

    def manager():
        return LocalCheckpointManager(str(base / "nvrx"))

    def attempt(fn):
        try:
            return fn()
        except Exception as e:  # noqa: BLE001 - what it raises is what is looked at
            return f"{type(e).__name__}: {e}"

    with cpu_runtime():
        for step in (10, 20):
            manager().save(Plain({"a": torch.arange(4096.0)}), step)
        files = base / "nvrx/0"
        found["kept"] = sorted(os.listdir(files))
        torn = files / "iter_0000020_0_local.pt"
        os.truncate(torn, 3000)
        again = manager()
        found["T11 latest"] = again.find_latest()
        found["T11 load"] = attempt(again.load)
        torn.unlink()
        (files / "iter_0000030_0_local.dirty.pt").touch()  # what a killed save leaves
        found["T12 save"] = attempt(lambda: manager().save(Plain({"a": torch.arange(4.0)}), 30))
        found["T12 files"] = sorted(os.listdir(files))
    root = base / "ours"
    process_ids = {"host": os.uname().nodename, "boot": "another boot", "pid": 1, "start": "1"}
    with Checkpointer(root, rank=0, world_size=1) as c:
        for step in (10, 20):
            c.save(step, part(0, 1))
            c.wait()
        os.truncate(root / "iter_0000020/__0_0.distcp", 3000)
        got = c.load(part(0, 1, fill=0.0))
        found["ours T11"] = got.step, torch.equal(got.state["w"], part(0, 1)["w"].data), list(got.passed_over)
    shutil.rmtree(root / "iter_0000020")
    stale = root / ".saving-iter_0000030-dead.1"
    stale.mkdir()
    (stale / "owner.0.json").write_text(json.dumps(process_ids))
    (stale / "__0_0.distcp").write_bytes(b"half")
    with Checkpointer(root, rank=0, world_size=1) as c:
        handle = c.save(30, part(0, 1))
        c.wait()
        found["ours T12"] = handle.state, sorted(os.listdir(root))
    dist.destroy_process_group()
    return found
