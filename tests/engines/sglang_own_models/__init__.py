"""A package for `SGLANG_EXTERNAL_MODEL_PACKAGE` as a user may have one: it imports the bridge's seam from its own.

It also plants a fault: while the file that `TEST_FAULT` names exists, rank 1 fails when all tensors are in.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import weightsync.engines.sglang.models  # noqa: F401 - puts the bridge in
from weightsync.engines.sglang import runners

_finish = runners._finish


def finish(runner: Any, refresh: Any) -> None:
    if os.path.exists(os.environ["TEST_FAULT"]) and torch.distributed.get_rank() == 1:
        raise RuntimeError("a planted fault")
    _finish(runner, refresh)


runners._finish = finish
