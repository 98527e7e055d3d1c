"""Puts the bridge into a process of SGLang by wrapping one method, `init_weights_update_group`.

`register` is the entry point of the group `sglang.srt.plugins` (0.5.11 on); releases without plugins import
`weightsync.engines.sglang.models`, which calls `install`. Requests of any other backend than ours go to SGLang
untouched, and nothing else of SGLang is changed before a publisher has called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from typing import Any

from weightsync.engines.sglang.rows import BACKEND, Internals, internals_for
from weightsync.errors import UnsupportedError

__all__ = ["install", "register"]

_METHOD = "init_weights_update_group"
_log = logging.getLogger(__name__)


def register() -> None:
    """Entry point. A release that no row names stays as it is: the publisher hears that there is no bridge."""
    try:
        install()
    except UnsupportedError as e:
        _log.error("weightsync is not active in this engine: %s", e)


def install() -> None:
    """Wrap the patch point of this release, once per process.

    Raises:
        UnsupportedError: no row names this release, or its patch point is not what the row says.
    """
    import sglang

    row = internals_for(sglang.__version__)
    module, _, name = row.patch_point.partition(":")
    try:
        owner = getattr(importlib.import_module(module), name)
        original = getattr(owner, _METHOD)
    except (ImportError, AttributeError) as e:
        raise UnsupportedError(
            f"SGLang {sglang.__version__}: row {row.row.versions} expects {row.patch_point}: {e}"
        ) from e
    if hasattr(original, "weightsync_row"):
        return
    got = list(inspect.signature(original).parameters)
    if got != ["self", "recv_req"]:
        raise UnsupportedError(f"SGLang {sglang.__version__}: {name}.{_METHOD} takes {got}; expected self, recv_req")
    setattr(owner, _METHOD, _wrap(original, row))


def _wrap(original: Any, row: Internals) -> Any:
    @functools.wraps(original)
    def init_weights_update_group(self: Any, recv_req: Any) -> Any:
        if recv_req.backend != BACKEND:
            return original(self, recv_req)
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqOutput

        from weightsync.engines.sglang.bridge import answer

        # The mixin is a base of the scheduler; the manager holds its methods.
        scheduler = self.flush_cache.__self__
        return InitWeightsUpdateGroupReqOutput(success=True, message=answer(scheduler, row, recv_req.group_name))

    init_weights_update_group.weightsync_row = row  # type: ignore[attr-defined]
    return init_weights_update_group
