"""A vLLM worker extension for tests only: shows what a worker holds, and makes one rank fail where a test says so.

`--worker-extension-cls tests.engines.vllm_probe.Probe`. The adapter itself needs none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from weightsync.digest import digest
from weightsync.engines.vllm import reload

FAULTS = "WEIGHTSYNC_TEST_FAULTS"
"""Environment variable: a JSON file, {rank: number of the bucket at which loading raises}."""

_take = reload._ReloadLoading.take
_start = reload.ReloadReceiver.start_loading


def _start_loading(self, routes, timeline):
    loading = _start(self, routes, timeline)
    loading.test_rank, loading.test_bucket = self.rank, 0
    return loading


def _faulty_take(self, views):
    faults = json.loads(Path(os.environ[FAULTS]).read_text()) if FAULTS in os.environ else {}
    if faults.get(str(self.test_rank)) == self.test_bucket:
        raise RuntimeError(f"test fault on rank {self.test_rank}")
    self.test_bucket += 1
    _take(self, views)


reload.ReloadReceiver.start_loading = _start_loading
reload._ReloadLoading.take = _faulty_take


def facts(runners):
    """Runner -> name -> [digest, address]: of plain tensors their bytes, of packed linear layers what they compute."""
    out = {}
    for role, module in runners.items():
        held = out[role] = {}
        if module is None:
            continue
        for name, p in module.named_parameters():
            if p.numel():
                held[name] = [digest(p.detach().contiguous().reshape(-1).view(torch.uint8)), p.data_ptr()]
        for path, layer in module.named_modules():
            weight = getattr(layer, "weight", None)
            size = getattr(layer, "input_size_per_partition", getattr(layer, "input_size", None))
            if weight is None or weight.numel() or size is None:
                continue
            # One product with the identity shows every element of the packed matrix. A router's is float32.
            eye = torch.eye(size, dtype=weight.dtype)
            made = layer.quant_method.apply(layer, eye, None)
            held[f"{path}.weight (packed)"] = [digest(made.contiguous().reshape(-1).view(torch.uint8)), 0]
    return out


class Probe:
    def test_facts(self):
        target, draft = self.model_runner.get_model(), self.get_draft_model()
        with torch.inference_mode():
            return {"rank": self.rank, **facts({"target": target, "draft": draft})}
