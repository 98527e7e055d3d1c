"""Start an SGLang server that publishes can reach: `python -m weightsync.engines.sglang.launch --model-path ...`.

Takes every option of `python -m sglang.launch_server` and passes it through, speculative ones too. It only sets the
seam that the installed release needs, and spells NEXTN, which releases treat differently, as EAGLE.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence

from weightsync.engines.sglang.rows import Internals, internals_for
from weightsync.errors import ConfigError, WeightSyncError

__all__ = ["main", "prepare"]

_ENV = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_PACKAGE = "weightsync.engines.sglang.models"
_ALGORITHM = "--speculative-algorithm"


def prepare(version: str, arguments: Sequence[str], env: MutableMapping[str, str]) -> tuple[Internals, list[str]]:
    """Set the seam of this SGLang release in `env`; returns its row, and the arguments for `sglang.launch_server`.

    Raises:
        UnsupportedError: no row names the release.
        ConfigError: the seam is taken by a package that is not ours.
    """
    row = internals_for(version)
    if row.seam == _ENV:
        own = env.setdefault(_ENV, _PACKAGE)
        if own != _PACKAGE:
            raise ConfigError(
                f"{_ENV}={own} is set: SGLang takes one such package; put `import {_PACKAGE}` into yours and start "
                "sglang.launch_server directly"
            )
    elif (plugins := env.get("SGLANG_PLUGINS")) and "weightsync" not in [p.strip() for p in plugins.split(",")]:
        env["SGLANG_PLUGINS"] = f"{plugins},weightsync"
    out = list(arguments)
    for i, a in enumerate(out):
        if a == f"{_ALGORITHM}=NEXTN":
            out[i] = f"{_ALGORITHM}=EAGLE"
        elif a == "NEXTN" and i and out[i - 1] == _ALGORITHM:
            out[i] = "EAGLE"
    return row, out


def main() -> None:
    try:
        import sglang

        _, arguments = prepare(sglang.__version__, sys.argv[1:], os.environ)
    except ModuleNotFoundError as e:
        if e.name != "sglang":
            raise
        sys.exit(f"weightsync.engines.sglang.launch: sglang is not installed for {sys.executable}: use its environment")
    except WeightSyncError as e:
        sys.exit(f"weightsync.engines.sglang.launch: {e}")
    # SGLang spawns its processes, which import this module anew: only the environment reaches them.
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
