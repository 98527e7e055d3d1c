"""The only step of a save that holds training: copy a plan's tensors into staging memory, on the caller's thread.

`Stager` belongs to the `Checkpointer`. The memory is made by the first plan (or by preflight) and kept; it grows when a
plan needs more. Views of it are kept as long as the plan's structure stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from checkpoint.plan import Plan
from checkpoint.staging import BATCHES_STAGED, BATCHES_WRITTEN, Staging

__all__ = ["Stager"]


class Stager:
    """Owns the staging memory of one rank; `staging` is None until the first plan."""

    def __init__(self) -> None:
        self.staging: Staging | None = None
        self._views: tuple[Any, list[torch.Tensor]] = (None, [])

    def ensure(self, plan: Plan) -> Staging | None:
        """Make the memory that a plan needs; returns it if it is new, None if there was enough.

        Raises:
            DiskError: there is not so much.
        """
        if self.staging is not None and self.staging.nbytes >= plan.staging_bytes:
            return None
        self.close()
        self.staging = Staging(plan.staging_bytes)
        return self.staging

    def copy(self, plan: Plan, *, ended: Callable[[], bool]) -> None:
        """Copy everything, part by part where the memory is smaller than the plan.

        `ended` says that the save is over, so that nobody will free memory for the next part: then the rest is left.
        """
        staging = self.staging
        assert staging is not None
        if self._views[0] != plan.structure:
            self._views = (plan.structure, _make_views(plan, staging))
        views = self._views[1]
        if any(isinstance(s, torch.Tensor) and s.is_cuda for s in plan.sources):
            staging.register_cuda()
        raw = staging.raw
        for number, batch in enumerate(plan.batches):
            # Of two halves one is free again once the part before the last is written.
            while number >= 2 and staging.header[BATCHES_WRITTEN] < number - 1:
                if ended():
                    return
                time.sleep(0.001)
            on_device = False
            for index, offset in batch:
                source = plan.sources[index]
                if isinstance(source, torch.Tensor):
                    on_device |= source.is_cuda
                    if source.numel():
                        views[index].copy_(source.detach().reshape(views[index].shape), non_blocking=source.is_cuda)
                else:
                    raw[offset : offset + len(source)] = source
            if on_device:
                torch.cuda.synchronize()
            staging.header[BATCHES_STAGED] = number + 1

    def close(self) -> None:
        """Give the memory back."""
        self._views = (None, [])
        if self.staging is not None:
            self.staging.close()


def _make_views(plan: Plan, staging: Staging) -> list[torch.Tensor]:
    views = [torch.empty(0)] * len(plan.items)
    for batch in plan.batches:
        for index, offset in batch:
            item = plan.items[index]
            if item["kind"] == "tensor" and item["nbytes"]:
                flat = staging.data[offset : offset + item["nbytes"]]
                source = plan.sources[index]
                assert isinstance(source, torch.Tensor)
                # Of the source's shape, not of the box: a view that is not contiguous is copied in one pass.
                views[index] = flat.view(source.dtype).view(source.shape if source.dim() else ())
    return views
