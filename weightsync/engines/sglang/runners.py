"""The models of one SGLang scheduler process as `weightsync` runners: the target, and every draft model runner.

`find_runners` is called by `bridge.Bridge` once, when the first publisher asks; it returns runners whose loaders are
the models' own `load_weights`, with what SGLang derives from weights (hot-token ids, sliced heads, absorbed MLA
projections) refreshed when all tensors are in. Anything that it does not know it refuses by name.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weightsync.engine.runner import ModuleRunner
from weightsync.engines.sglang.rows import NO_PARALLELISM, Internals
from weightsync.errors import RoutingError, UnsupportedError

__all__ = ["describe_speculation", "find_runners", "unsupported"]

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]

_NOT_PUBLISHED = torch.iinfo(torch.int64).min
"""First entry of a `d2t` that a publish has not written."""

_PLAIN_LOAD_FORMATS = ("auto", "safetensors", "pt", "npcache", "mistral", "dummy")


def _value(obj: object, name: str) -> Any:
    """An attribute that not every release has; absent ones have no value."""
    return getattr(obj, name, None)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def describe_speculation(scheduler: Any) -> str | None:
    """Algorithm, draft model and shape of the drafts, as the engine was started; None without speculation."""
    args = scheduler.server_args
    algorithm = _value(args, "speculative_algorithm")
    if not algorithm:
        return None
    path, steps = _value(args, "speculative_draft_model_path"), _value(args, "speculative_num_steps")
    if path is None and _text(algorithm).upper() != "NGRAM":
        path = _value(args, "model_path")  # a head of the model itself
    tokens, topk = _value(args, "speculative_num_draft_tokens"), _value(args, "speculative_eagle_topk")
    facts = {"draft": path, "steps": steps, "top-k": topk, "draft tokens": tokens}
    return f"{_text(algorithm)} ({', '.join(f'{k} {v}' for k, v in facts.items() if v is not None)})"


def unsupported(scheduler: Any, row: Internals) -> list[str]:
    """Why this engine, as it was started, cannot take part in a publish; empty if it can."""
    args = scheduler.server_args
    dp_attention = bool(_value(args, "enable_dp_attention"))
    out = [
        f"{name}={value}: {why}"
        for name, why in NO_PARALLELISM.items()
        # Under DP attention, dp_size counts its groups.
        if int(value := _value(args, name) or 0) > (name != "enable_dp_attention")
        and not (name == "dp_size" and dp_attention)
    ]
    load_format = _text(_value(args, "load_format") or "auto").lower()
    if load_format not in _PLAIN_LOAD_FORMATS:
        out.append(f"load_format={load_format}: its parameters are not those of the checkpoint; use auto")
    quantized = _value(args, "quantization") or _value(args, "torchao_config")
    if quantized:
        out.append(f"quantization={quantized}: its parameters are not those of the checkpoint")
    out += [
        f"LoRA ({name}): adapters would sit on top of weights that they were not made for"
        for name in ("enable_lora", "lora_paths")
        if _value(args, name)
    ]
    for name in ("cpu_offload_gb", "offload_group_size"):
        size = _value(args, name)
        if size is not None and size > 0:
            out.append(f"offloaded weights ({name}={size}): their memory is not where the engine computes")
    cache = _value(args, "weight_cache_mode")
    if cache not in (None, "off"):
        out.append(f"weight_cache_mode={cache}: other processes share this memory; use off")
    disaggregation = _value(args, "disaggregation_mode")
    if disaggregation not in (None, "null"):
        out.append(f"disaggregation_mode={disaggregation}: draining its transfer queues is in no row")
    worker = scheduler.draft_worker
    if worker is not None and type(worker).__name__ not in row.draft_paths:
        known = ", ".join(sorted(row.draft_paths))
        out.append(
            f"speculative worker {type(worker).__name__}: not in the row {row.row.versions}, which knows {known}"
        )
    return out


def find_runners(scheduler: Any, row: Internals) -> list[ModuleRunner]:
    """The target's runner, then `draft[i]` for every draft model runner, in the engine's order.

    Raises:
        UnsupportedError: the speculative worker is not in the row, or has not what the row says.
    """
    target = scheduler.tp_worker.model_runner
    drafts = _draft_model_runners(scheduler.draft_worker, row)
    worker = scheduler.draft_worker
    # Of v2 workers the object that holds `hot_token_id` is one further in.
    holder = worker if worker is None or hasattr(worker, "hot_token_id") else _value(worker, "draft_worker")
    args = scheduler.server_args
    path = _value(args, "speculative_draft_model_path")
    separate = _text(_value(args, "speculative_algorithm") or "").upper() in ("EAGLE3", "STANDALONE") or path not in (
        None,
        _value(args, "model_path"),
    )
    heads: list[Callable[[], None]] = []
    runners = []
    for i, draft in enumerate(drafts):
        model = draft.model
        sliced = _sliced_head(target.model, model, holder)
        if sliced is not None:
            heads.append(sliced)
        own_ids = hasattr(model, "hot_token_id")
        eagle3 = _Eagle3(model, holder) if own_ids else None
        runners.append(
            ModuleRunner(
                f"draft[{i}]",
                model,
                roles=("draft",) if separate else ("draft", "target"),
                load=_on_this_thread(eagle3.load if eagle3 is not None else model.load_weights),
                rename=functools.partial(_draft_name, _value(draft, "draft_model_idx"), sliced is not None),
                frozen=("lm_head.weight",) if sliced is not None else (),
                casts=row.row.casts,
                on_begin=functools.partial(_begin, draft, eagle3),
                on_finish=functools.partial(_finish, draft, [eagle3.refresh] if eagle3 is not None else []),
            )
        )
    first = ModuleRunner(
        "target",
        target.model,
        roles=("target",),
        load=_on_this_thread(target.model.load_weights),
        casts=row.row.casts,
        on_begin=functools.partial(_begin, target, None),
        on_finish=functools.partial(_finish, target, heads),
    )
    return [first, *runners]


class _AtOnce(concurrent.futures.Executor):
    """Runs what is submitted before `submit` returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as e:  # noqa: BLE001 - raised where the future's result is taken
            future.set_exception(e)
        return future


def _on_this_thread(load: Load) -> Load:
    """Loaders of DeepSeek and its kin hand host tensors to a pool of threads, where nobody sees what they write: a dry
    run would not be one, but write to the weights that are being served."""

    def wrapped(pairs: Iterable[tuple[str, torch.Tensor]]) -> Any:
        pool, me = concurrent.futures.ThreadPoolExecutor, threading.get_ident()

        def choose(*args: Any, **kwargs: Any) -> concurrent.futures.Executor:
            return (_AtOnce if threading.get_ident() == me else pool)(*args, **kwargs)

        concurrent.futures.ThreadPoolExecutor = choose  # type: ignore[assignment,misc]
        try:
            return load(pairs)
        finally:
            concurrent.futures.ThreadPoolExecutor = pool  # type: ignore[misc]

    return wrapped


def _draft_model_runners(worker: Any, row: Internals) -> list[Any]:
    if worker is None:
        return []
    name = type(worker).__name__
    path = row.draft_paths.get(name)
    if path is None:
        raise UnsupportedError(f"speculative worker {name} is not in the row {row.row.versions}")
    if not path:
        return []
    found: Any = worker
    for part in path.split("."):
        found = _value(found, part)
    runners = list(found) if isinstance(found, (list, tuple)) else [found]
    if not runners or not all(isinstance(_value(r, "model"), torch.nn.Module) for r in runners):
        raise UnsupportedError(
            f"speculative worker {name} has no model runner at {path!r}: not a release {row.row.versions}"
        )
    return runners


def _draft_name(step: int | None, drop_head: bool, role: str, name: str) -> str | None:
    """Step `i` of multi-layer MTP holds layer `i` as its layer 0; its model's own loader would take any layer."""
    if drop_head and name.endswith("lm_head.weight"):
        return None
    if step is None:
        return name
    from sglang.srt.model_loader.loader import DefaultModelLoader

    for renamed, _ in DefaultModelLoader._filter_mtp_weights([(name, None)], "", step):
        return str(renamed)
    return None


def _begin(runner: Any, eagle3: _Eagle3 | None) -> None:
    # Copies that the last forward queued must not read what is about to be overwritten.
    _synchronize(runner)
    if eagle3 is not None:
        eagle3.begin()


def _finish(runner: Any, refresh: Sequence[Callable[[], None]]) -> None:
    post = _value(runner.model, "post_load_weights")
    if post is not None:
        nextn = "is_nextn" in inspect.signature(post).parameters and type(runner.model).__name__.endswith("NextN")
        post(**({"is_nextn": True} if nextn else {}))
    for step in refresh:
        step()
    _synchronize(runner)


def _synchronize(runner: Any) -> None:
    device = torch.device(str(runner.device))
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _sliced_head(target: Any, draft: Any, holder: Any) -> Callable[[], None] | None:
    """With `--speculative-token-map` the draft's head is a copy of some of the target's rows: how to take it again."""
    ids = _value(holder, "hot_token_id")
    if ids is None or _value(draft, "hot_token_id") is not None:
        return None
    own, whole = draft.lm_head.weight, target.lm_head.weight
    if own.data_ptr() == whole.data_ptr():
        return None

    def take() -> None:
        with torch.no_grad():
            draft.lm_head.weight.data.copy_(target.lm_head.weight.data[holder.hot_token_id])

    return take


class _Eagle3:
    """The draft vocabulary of an EAGLE3 drafter.

    The model's own loader keeps no `d2t`, makes a new `hot_token_id` of it (on the CPU, so that it fails for tensors on
    a GPU) which the worker never sees, and ignores `t2d`. Here both are kept, checked against each other, and written
    to the ids that are in use, in place.
    """

    def __init__(self, model: Any, holder: Any) -> None:
        self._model, self._holder = model, holder
        device = model.lm_head.weight.device
        config = model.config
        rows = int(_value(config, "draft_vocab_size") or config.vocab_size)
        # Plain attributes, not buffers: the loader may write them, and nothing demands that a publish does.
        model.weightsync_d2t = torch.full((rows,), _NOT_PUBLISHED, dtype=torch.int64, device=device)
        model.weightsync_t2d = torch.zeros(int(config.vocab_size), dtype=torch.bool, device=device)

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = {"d2t": self._model.weightsync_d2t, "t2d": self._model.weightsync_t2d}
        for name, tensor in pairs:
            held = own.get(name.removeprefix("model."))
            if held is None:
                self._model.load_weights([(name, tensor)])
                continue
            if held.shape != tensor.shape:
                raise RoutingError(
                    f"{name} has shape {tuple(tensor.shape)}; this engine was built for {tuple(held.shape)}"
                )
            held.copy_(tensor)

    def begin(self) -> None:
        self._model.weightsync_d2t.fill_(_NOT_PUBLISHED)
        self._model.weightsync_t2d.fill_(False)

    def refresh(self) -> None:
        """Raises `RoutingError`: `d2t` and `t2d` do not fit each other, or this engine was built without `d2t`."""
        d2t, t2d = self._model.weightsync_d2t, self._model.weightsync_t2d
        if int(d2t[0]) == _NOT_PUBLISHED:
            return
        ids = torch.arange(len(d2t), device=d2t.device) + d2t
        if bool(((ids < 0) | (ids >= len(t2d))).any()):
            raise RoutingError(f"d2t maps draft ids outside of the target's vocabulary of {len(t2d)}")
        known = int(t2d.sum())
        if known and (known != len(ids) or not bool(t2d[ids].all())):
            raise RoutingError(f"t2d marks {known} target ids, d2t maps {len(ids)} draft ids, and they do not agree")
        used = [x for x in (_value(self._model, "hot_token_id"), _value(self._holder, "hot_token_id")) if x is not None]
        if not used and bool(d2t.any()):
            raise RoutingError(
                "d2t was published, but the engine loaded a drafter without one: restart it from a folder with d2t"
            )
        for held in used:
            held.copy_(ids)
