"""A worker extension for vLLM before 0.28, whose weight transfer shows a transfer engine no draft.

    --worker-extension-cls weightsync.engines.vllm.extension.Extension

vLLM adds the class to its workers' bases; `leader` calls the methods by `collective_rpc`, past vLLM's own sessions.
Later versions take it, too, but need it only if somebody else's transfer backend is configured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Extension"]


class Extension:
    """Names begin with `weightsync_`: vLLM refuses an extension that has a name of its worker's."""

    def weightsync_preflight(self, words: Mapping[str, Any]) -> None:
        self._weightsync_call("preflight", words)

    def weightsync_receive(self, words: Mapping[str, Any]) -> None:
        self._weightsync_call("receive", words)

    def _weightsync_call(self, name: str, words: Mapping[str, Any]) -> None:
        import torch

        from weightsync.engines.vllm.worker import WorkerSide

        worker: Any = self
        if not hasattr(worker, "weightsync_side"):
            model = worker.model_runner.get_model()
            worker.weightsync_side = WorkerSide(worker.vllm_config, worker.device, model, lambda: _draft_of(worker))
        # Layers of a reload are made anew on the current device.
        with torch.device(worker.device):
            getattr(worker.weightsync_side, name)(words)


def _draft_of(worker: Any) -> tuple[Any, Any] | None:
    """What speculates with a model of its own."""
    module = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    if module is None or not hasattr(module, "load_weights"):
        return None
    return module, worker.vllm_config.speculative_config.draft_model_config
