"""`weightsync doctor URL`: which engine answers, what a publish to it guarantees, what is missing and how to get it.

Asks only what tells and changes nothing: the control API below `/weightsync/v1/` (embedded engines, vLLM), SGLang's
bridge, and, where neither is there, the addresses under which engines tell of themselves: what a publish by their own
means would lack.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.version import Version

from weightsync import errors
from weightsync.engine.base import EngineControl
from weightsync.engine.control import HttpControl
from weightsync.engines.capabilities import find_row
from weightsync.engines.sglang import stock as sglang_stock
from weightsync.engines.sglang.control import SglangControl
from weightsync.engines.vllm import BACKEND, EXTENSION
from weightsync.engines.vllm import stock as vllm_stock
from weightsync.engines.vllm.rows import NATIVE
from weightsync.guarantees import GUARANTEES
from weightsync.guarantees import missing as missing_guarantees
from weightsync.protocol import PROTOCOL_VERSION

__all__ = ["Diagnosis", "add_arguments", "diagnose", "run"]

# What drives an engine without anything of ours in it.
_STOCK: Mapping[str, Callable[..., EngineControl]] = {
    "sglang": sglang_stock.stock_control,
    "vllm": vllm_stock.stock_control,
}
Health = Literal["ready", "fenced", "not ready", "unknown"]

_FENCE = "--middleware weightsync.engines.vllm.server.Fence --api-key KEY"
_LAUNCH = {
    "vllm": (
        "install weightsync in vLLM's environment and start the server with --weight-transfer-config "
        f"""'{{"backend": "{BACKEND}"}}' {_FENCE}"""
    ),
    "vllm before 0.28": (
        "install weightsync in vLLM's environment and start the server with --worker-extension-cls "
        f"{EXTENSION} {_FENCE}"
    ),
    "sglang": (
        "install weightsync in SGLang's environment and start the server with `python -m "
        "weightsync.engines.sglang.launch`"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What is known of one address."""

    url: str
    engine: str | None
    """`vllm`, `sglang` or `embedded`."""
    version: str | None
    health: Health
    guarantees: tuple[str, ...]
    """Of `weightsync.guarantees`, those that a publish to it gives; none where nothing of ours is at work."""
    missing: tuple[str, ...]
    """What stands in the way, each with the next step."""
    status: Mapping[str, Any]
    """The engine's own words."""


def diagnose(url: str, *, api_key: str | None = None, deadline_s: float = 10.0) -> Diagnosis:
    """Ask the engine at `url`. What it answers, or that it does not, is the diagnosis.

    Raises:
        ConfigError: `url` is no address.
    """
    problems: list[str] = []
    # Without a key, one that no engine has: the answer tells whether anybody checks it.
    control = HttpControl(url, api_key=api_key or "no-key-given")
    try:
        return _from_status(url, control.status(deadline_s=deadline_s))
    except errors.AuthError as e:
        return _sick(url, None, None, [f"{e} (weightsync doctor --api-key-file)"])
    except errors.UnsupportedError as e:
        # Ours is there, and says why it does not work with this engine.
        problems.append(str(e))
    except errors.EngineError as e:
        if "cannot reach" in str(e) or "no answer" in str(e):
            return _sick(url, None, None, [str(e)])
    engine, version = _named(url, api_key, deadline_s)
    if engine == "sglang":
        try:
            return _from_status(url, SglangControl(url, api_key=api_key).status(deadline_s=deadline_s))
        except errors.WeightSyncError as e:
            problems.append(str(e))
    if engine is not None and engine in _STOCK:
        try:
            stock = _STOCK[engine](url, api_key=api_key).status(deadline_s=deadline_s)
        except errors.WeightSyncError as e:
            problems.append(f"nor by its own means: {e}")
        else:
            return _from_status(url, stock, [*problems, f"weightsync has no part in this server: {_LAUNCH[engine]}"])
    if engine is None:
        problems.append("what answers here is no engine that weightsync knows: is it a router? Name the engine itself")
        return _sick(url, None, None, problems)
    try:
        row = find_row(engine, version or "0")
        by_extension = engine == "vllm" and NATIVE not in row.facts
        how = f"{_LAUNCH['vllm before 0.28' if by_extension else engine]} ({row.how})"
    except errors.UnsupportedError as e:
        how = str(e)
    return _sick(url, engine, version, [*problems, f"weightsync has no part in this server: {how}"])


def _from_status(url: str, status: Mapping[str, Any], advice: Sequence[str] = ()) -> Diagnosis:
    lacking = missing_guarantees(status)
    missing = []
    if status.get("protocol") != PROTOCOL_VERSION:
        missing.append(
            f"it speaks weightsync protocol {status.get('protocol')}, this installation {PROTOCOL_VERSION}: install "
            "the same weightsync on both sides"
        )
    theirs, ours = Version(str(status["torch"])), Version(torch.__version__)
    if theirs.release[:2] != ours.release[:2]:
        missing.append(f"it runs torch {theirs}, this environment {ours}: a trainer should run the engine's release")
    health: Health = "not ready" if missing else "fenced" if status["fenced"] else "ready"
    if status["fenced"]:
        missing.append(f"it is fenced and does not serve: {status['fenced']}; publish everything to it")
    return Diagnosis(
        url=url,
        engine=str(status.get("engine_kind", "embedded")),
        version=status.get("engine_version"),
        health=health,
        guarantees=tuple(name for name in GUARANTEES if name not in lacking),
        missing=(*missing, *advice, *(f"{GUARANTEES[name]}: {why}" for name, why in lacking.items())),
        status=dict(status),
    )


def _sick(url: str, engine: str | None, version: str | None, missing: list[str]) -> Diagnosis:
    health: Health = "unknown" if engine is None else "not ready"
    return Diagnosis(
        url=url, engine=engine, version=version, health=health, guarantees=(), missing=tuple(missing), status={}
    )


def _named(url: str, api_key: str | None, deadline_s: float) -> tuple[str | None, str | None]:
    """(engine, version) by what servers say of themselves without anything of ours."""
    sglang = _get(f"{url}/get_server_info", api_key, deadline_s) or _get(f"{url}/server_info", api_key, deadline_s)
    if sglang is not None and "version" in sglang:
        return "sglang", str(sglang["version"])
    vllm = _get(f"{url}/version", api_key, deadline_s)
    if vllm is not None and "version" in vllm:
        return "vllm", str(vllm["version"])
    return None, None


def _get(url: str, api_key: str | None, deadline_s: float) -> dict[str, Any] | None:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=deadline_s) as reply:  # noqa: S310 - HttpControl has checked the scheme
            found = json.loads(reply.read())
    except (OSError, ValueError):
        return None  # not there, or not JSON: not that engine
    return found if isinstance(found, dict) else None


# -- the command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="http://host:port of the engine itself, not of a router")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the engine's API key; - reads stdin")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--deadline", type=float, default=10.0, metavar="S", help="for each question (default: 10)")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; status 0 if a publish can start."""
    if not 0 < args.deadline <= threading.TIMEOUT_MAX:
        raise errors.ConfigError(f"--deadline {args.deadline:g}: expected seconds, more than 0")
    key = None
    if args.api_key_file is not None:
        try:
            key = (sys.stdin.read() if args.api_key_file == "-" else Path(args.api_key_file).read_text()).strip()
        except (OSError, UnicodeDecodeError) as e:
            raise errors.ConfigError(f"--api-key-file {args.api_key_file}: {e}") from e
        if not key:
            raise errors.ConfigError(f"--api-key-file {args.api_key_file}: it is empty")
    found = diagnose(args.url.rstrip("/"), api_key=key, deadline_s=args.deadline)
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _print(found)
    return 0 if found.health in ("ready", "fenced") else 1


def _print(found: Diagnosis) -> None:
    status = found.status
    if found.engine is None:
        # Of guarantees nothing is known either: a table of them would bury the reason.
        print(f"{found.url}: no publish can start")
        for text in found.missing:
            print(f"  missing      {text}")
        return
    print(f"{found.url}: {found.engine} {found.version or ''}".rstrip() + f", {found.health}")
    for label, value in (
        ("ranks", status.get("engine_ranks") or status.get("world_size")),
        ("versions", ", ".join(f"{k} {v}" for k, v in status.get("versions", {}).items()) or None),
        ("speculation", status.get("speculation") or status.get("worker")),
        ("drafts", (", ".join(r for r in status["versions"] if r != "target") or "none") if status else None),
        ("how", status.get("how")),
        ("support", f"{status['row']} ({status['evidence']})" if "evidence" in status else status.get("row")),
        ("run", status.get("run_id")),
    ):
        if value is not None:
            print(f"  {label:12} {value}")
    for name, text in GUARANTEES.items():
        print(f"  {'yes' if name in found.guarantees else 'no ':12} {text}")
    for text in found.missing:
        print(f"  missing      {text}")
