"""Publish to a stock SGLang server (0.5.21 on, nothing of ours installed) by its own begin/end weight update sessions.

`stock_control` gives a `weightsync.engines.relay.Relay`, an engine like any other for `Publisher`. The relay receives
and checks every bucket in the coordinator's process; `_Stock` here names its tensors to the server and broadcasts them
in SGLang's own update group, whose rank 0 it is. Each tensor is sent once, under the selector of its runner, `target`
or `draft`: with SGLang's default, `all`, tensors of the target go over those of a drafter with the same names.

    connect: init_weights_update_group -> pause_generation -> per runner begin, update_weights_from_distributed..., end
    -> flush_cache, update_weight_version, continue_generation

`acceptance_of` reads how well drafts are accepted from finished responses, since such a server tells it nowhere else.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from weightsync import errors
from weightsync.acks import start_call
from weightsync.engines import joint
from weightsync.engines.joint import SLACK_S, Asked, refused
from weightsync.engines.relay import Relay, StockFacts
from weightsync.engines.sglang.control import CALL_S, HttpLink
from weightsync.engines.sglang.rows import stock_row
from weightsync.store import HostedStore, host_store

__all__ = ["MISSING", "stock_control"]

POLL_S = 0.05
_BRIDGE = "start it with `python -m weightsync.engines.sglang.launch`"
MISSING: Mapping[str, str] = {
    "all_rank_acks": f"SGLang answers for rank 0 alone, and counts no bytes: {_BRIDGE}",
    "atomic_commit": (
        "a failed update leaves the server paused with parts of both versions, and only this trainer knows of it: "
        f"{_BRIDGE}"
    ),
    "routing": (
        "tensors go by their role and name alone: names that SGLang does not know are dropped without a word, and the "
        f"draft vocabulary of an EAGLE3 drafter (d2t) stays that of its start: {_BRIDGE}"
    ),
}
"""Of `weightsync.guarantees`, those that SGLang's own way lacks, and how to get them."""
_PAUSES = {"abort": "abort", "keep": "retract"}
_DEVICE = {"gloo": "cpu", "nccl": "cuda"}
_NCCL_TIMEOUT = datetime.timedelta(days=7)
"""Beyond any deadline of ours: when it passes, NCCL's watchdog ends the process."""


def stock_control(
    url: str,
    *,
    api_key: str | None = None,
    name: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    bind_host: str = "127.0.0.1",
    backend: Literal["gloo", "nccl"] | None = None,
) -> Relay:
    """An `EngineControl` for an SGLang server in which nothing of ours is installed.

    Args:
        url: base address of the server itself (not of a router).
        api_key: the server's `--api-key` or `--admin-api-key`; None if it has none.
        name: for messages and reports; default host:port.
        ssl_context: for https; default verifies against the system's authorities.
        bind_host: address of this host that the server, and senders on other hosts, reach.
        backend: of SGLang's update group; default nccl if this process has a CUDA device, else gloo.

    Raises:
        ConfigError: an address or a backend that is none.
    """
    chosen = backend if backend is not None else "nccl" if torch.cuda.is_available() else "gloo"
    if chosen not in _DEVICE:
        raise errors.ConfigError(f"backend is {chosen!r}; expected gloo or nccl")
    link = HttpLink(url, api_key=api_key, name=name, ssl_context=ssl_context)
    return Relay(_Stock(link, bind_host, chosen), bind_host=bind_host)


class _Stock:
    """The `weightsync.engines.relay.StockEngine` of SGLang."""

    def __init__(self, link: HttpLink, bind_host: str, backend: str) -> None:
        self._link, self._bind_host, self._backend = link, bind_host, backend
        self._group: _Group | None = None
        self._facts: StockFacts | None = None
        self._selector = "target"

    @property
    def name(self) -> str:
        return self._link.name

    def describe(self, deadline_s: float) -> StockFacts:
        info = self._get("/server_info", deadline_s)
        version = str(info.get("version"))
        row = stock_row(version)
        if problems := _unsupported(info):
            raise errors.UnsupportedError(f"engine {self.name}, stock SGLang {version}: {'; '.join(problems)}")
        algorithm = info.get("speculative_algorithm")
        has_draft = algorithm is not None and str(algorithm).upper() != "NGRAM"
        self._facts = StockFacts(
            kind="sglang (stock)",
            version=version,
            runners=("target", "draft[0]") if has_draft else ("target",),
            speculation=algorithm,
            weight_version=str(self._get("/model_info", deadline_s).get("weight_version")),
            world_size=int(info.get("tp_size") or 1),
            missing=MISSING,
            row=row.versions,
            evidence=row.evidence,
            how=row.how,
        )
        return self._facts

    def counts(self, deadline_s: float) -> Mapping[str, float]:
        return {}  # not over SGLang's API: see `weightsync.engines.sglang.acceptance.acceptance_of`

    def connect(self, deadline_s: float) -> None:
        if self._group is not None:
            return
        assert self._facts is not None, "status comes first"
        group = _Group(1 + self._facts.world_size, self._backend, self._bind_host)
        asked = self._ask_in_background("/init_weights_update_group", group.words, deadline_s)
        joint.join(self.name, "SGLang's update group", group, asked, deadline_s)
        self._group = group

    def pause(self, mode: str, deadline_s: float) -> None:
        if mode not in _PAUSES:
            raise errors.UnsupportedError(
                f"engine {self.name}: stock SGLang cannot pause in mode {mode!r}: use "
                "PublishConfig(pause_mode='abort') or 'keep'"
            )
        self._ask("/pause_generation", {"mode": _PAUSES[mode]}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        self._ask("/continue_generation", {}, deadline_s)

    def begin(self, runner: str, deadline_s: float) -> None:
        self._selector = "target" if runner == "target" else "draft"
        # A session that a failure, or another trainer, left open would refuse this one.
        self._link.post("/end_weight_update", {}, deadline_s=deadline_s)
        self._ask("/begin_weight_update", {"selector": self._selector}, deadline_s)

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]], deadline_s: float) -> None:
        group = self._group
        if group is None:
            raise errors.EngineError(f"engine {self.name}: SGLang's update group is gone: publish again")
        body = {
            "names": [name for name, _ in pairs],
            "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in pairs],
            "shapes": [list(t.shape) for _, t in pairs],
            "group_name": group.name,
            "selector": self._selector,
            "flush_cache": False,
        }
        asked = self._ask_in_background("/update_weights_from_distributed", body, deadline_s)
        joint.send(self.name, group, pairs, asked, deadline_s)

    def finish(self, runner: str, deadline_s: float) -> None:
        self._ask("/end_weight_update", {}, deadline_s)

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return

        def leave() -> Mapping[str, Any]:
            # The server may wait in the group: it hears of the end first, then gives its side up.
            group.abort()
            self._link.post("/destroy_weights_update_group", {"group_name": group.name}, deadline_s=CALL_S)
            return {}

        start_call(leave)

    def commit(self, weight_version: str, mode: str, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s

        def left() -> float:
            return max(end - time.monotonic(), CALL_S)

        while self._link.post("/flush_cache", {}, deadline_s=left())[0] != 200:
            if time.monotonic() > end:
                raise errors.EngineError(
                    f"engine {self.name}, commit: loaded, but SGLang refuses to flush its prefix cache for "
                    f"{deadline_s:g} s: it stays paused; abort its requests, then publish again",
                    engine=self.name,
                    phase="commit",
                )
            time.sleep(POLL_S)
        self._link.set_weight_version(weight_version, deadline_s=left())
        self.resume(left())

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(errors.WeightSyncError):  # gone: so is its group
                self._link.post("/destroy_weights_update_group", {"group_name": group.name}, deadline_s=CALL_S)
            group.abort()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _get(self, path: str, deadline_s: float) -> dict[str, Any]:
        status, reply = self._link.get(path, deadline_s=deadline_s)
        self._check_key(status)
        if status != 200 or not isinstance(reply, dict):
            raise errors.UnsupportedError(
                f"engine {self.name}: answered {status} to {path}: that is no SGLang server's own address; behind a "
                "router, list the addresses of the servers themselves"
            )
        return reply

    def _ask(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Mapping[str, Any]:
        status, reply = self._link.post(path, body, deadline_s=deadline_s)
        self._check_key(status)
        if status != 200 or (isinstance(reply, dict) and reply.get("success") is False):
            said = reply.get("message", reply) if isinstance(reply, dict) else reply
            raise errors.EngineError(
                f"engine {self.name}: SGLang answered {status} to {path}: {str(said)[:500]}", engine=self.name
            )
        return reply if isinstance(reply, dict) else {}

    def _check_key(self, status: int) -> None:
        if status in (401, 403):
            raise errors.AuthError(f"engine {self.name}: SGLang refuses the key ({status}): pass its api_key")

    def _ask_in_background(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Asked:
        return start_call(self._ask, path, body, deadline_s + SLACK_S)


def _unsupported(info: Mapping[str, Any]) -> list[str]:
    """Why SGLang's own sessions cannot be trusted with this server, from what it was started with."""
    out = [
        f"{name}={info[name]}: its update group has ranks for tensor parallelism only"
        for name in ("pp_size", "dp_size")
        if (info.get(name) or 1) > 1
    ]
    if info.get("enable_multi_layer_eagle"):
        out.append(f"multi-layer MTP: its own loader puts the last layer into every step: {_BRIDGE}")
    if info.get("speculative_token_map"):
        out.append(f"--speculative-token-map: the draft's sliced head stays that of its start: {_BRIDGE}")
    return out


class _Group:
    """Rank 0 of SGLang's update group, in the layout of prefixes that its ranks expect in the store."""

    def __init__(self, size: int, backend: str, bind_host: str) -> None:
        self.name = f"weightsync-{secrets.token_hex(6)}"
        self._size, self._backend, self._bind_host = size, backend, bind_host
        self._hosted: HostedStore | None = host_store(bind_host)
        self.words = {
            "master_address": self._hosted.host,
            "master_port": self._hosted.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": self.name,
            "backend": backend,
        }
        self._pg: Any = None

    def join(self, deadline_s: float, asked: Asked) -> None:
        """Returns once all ranks are there. Raises `TransferTimeout`, at once if the server has refused."""
        made = start_call(self._build, deadline_s)
        end = time.monotonic() + deadline_s
        while not made.done():
            if refused(asked) or time.monotonic() > end:
                raise errors.TransferTimeout(
                    f"{self._size - 1} ranks of SGLang did not join {self.name} within {deadline_s:g} s"
                )
            time.sleep(2e-3)
        try:
            self._pg = made.result()
        except (dist.DistError, RuntimeError) as e:
            raise errors.TransferTimeout(
                f"{self._size - 1} ranks of SGLang did not join {self.name}: {str(e).splitlines()[0]}"
            ) from e

    def _build(self, deadline_s: float) -> Any:
        assert self._hosted is not None
        store: dist.Store = self._hosted.store
        for prefix in (self.name, f"{self.name}/", f"{_DEVICE[self._backend]}/"):
            store = dist.PrefixStore(prefix, store)
        if self._backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = _NCCL_TIMEOUT
            return nccl(store, 0, self._size, options)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._bind_host)]
        options._timeout = datetime.timedelta(seconds=deadline_s)
        return gloo(store, 0, self._size, options)

    def broadcast(self, tensors: Sequence[torch.Tensor], deadline_s: float, asked: Asked) -> None:
        """In order, from here. Returns once the tensors may be overwritten.

        Raises:
            TransferTimeout, PeerLost: also at once if the server has refused.
        """
        end = time.monotonic() + deadline_s
        device = torch.device(_DEVICE[self._backend])
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        options.timeout = _NCCL_TIMEOUT if self._backend == "nccl" else datetime.timedelta(seconds=deadline_s)
        try:
            works = [self._pg.broadcast([t.contiguous().to(device)], options) for t in tensors]
            for i, work in enumerate(works):
                pause = 20e-6
                while not work.is_completed():
                    if refused(asked):
                        raise errors.PeerLost(f"SGLang gave up at tensor {i} of {len(works)}")
                    if time.monotonic() > end:
                        raise errors.TransferTimeout(f"SGLang took {i} of {len(works)} tensors in {deadline_s:g} s")
                    time.sleep(pause)
                    pause = min(2 * pause, 1e-3)
                work.wait()
        except (dist.DistError, RuntimeError) as e:
            if isinstance(e, errors.WeightSyncError):
                raise
            raise errors.PeerLost(f"SGLang left its update group: {str(e).splitlines()[0]}") from e

    def abort(self) -> None:
        """Ends with its last reference: gloo's once the operations in flight have timed out."""
        pg, self._pg = self._pg, None
        if pg is not None and self._backend == "nccl":
            with contextlib.suppress(RuntimeError):
                pg.abort()
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None

    close = abort
