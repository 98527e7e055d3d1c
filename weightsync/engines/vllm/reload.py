"""Loading a publish through vLLM's layerwise reload: every runner with its own model config, in one receive.

`reload_runner` makes the runners of a worker, `ReloadReceiver` receives for them. What differs from loading in place:

- Routes are learnt on the modules in load format (`shadow`), so what is proved element by element in preflight is what
  loaders write *before* vLLM transforms it. While loading, the elements that vLLM counts per layer must equal, call by
  call, those that the dry run saw; vLLM itself loads, transforms and copies into the live tensors.
- The live tensors must be the same memory afterwards, wherever vLLM keeps plain ones. What it keeps packed (linear
  layers on the CPU) has no address to promise: it is made anew from the loaded elements, and `weight` stays empty.
- vLLM holds on to loaded views until a layer is complete: those that outlive their bucket are copied.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from weightsync.digest import digest_tensor
from weightsync.engine.base import Runner
from weightsync.engine.coverage import Loading
from weightsync.engine.dryrun import DryLoad
from weightsync.engine.receiver import Receiver
from weightsync.engine.routing import Action, Routes, build_routes, describe
from weightsync.engine.runner import ModuleRunner
from weightsync.engine.writes import Places
from weightsync.engines.vllm.shadow import load_format
from weightsync.errors import RoutingError
from weightsync.manifest import Manifest
from weightsync.plan import SegmentView
from weightsync.timeline import Timeline

__all__ = ["ReloadReceiver", "ReloadRoutes", "reload_runner"]

try:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
except ImportError:  # before 0.28, where MTP is refused (`rows`)
    disable_mtp_completeness_check = contextlib.nullcontext
SKIP_LOAD_TENSORS = getattr(meta, "SKIP_LOAD_TENSORS", SKIP_TENSORS)
"""One set for both before 0.28."""

_Layers = tuple[torch.nn.Module, ...]

NOT_HELD = frozenset({"t2d"})
"""Names of a drafter that vLLM's loaders drop on purpose: it maps draft tokens by `d2t` alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReloadRoutes(Routes):
    """Routes of modules in load format, and what ties them to the live modules."""

    live: Places
    """The live tensors, which must not move."""
    counts: Mapping[tuple[int, int], Mapping[_Layers, int]]
    """(tensor, runner) -> elements that its loader copies, by layer (by all of several that are tied)."""
    equal_to: Mapping[int, int]
    """Tensor that is verified -> the tensor, loaded into the same memory, that it must equal."""

    def moved(self, runners: Sequence[Runner]) -> list[tuple[int, str]]:
        return self.live.moved(runners)


class ReloadReceiver(Receiver):
    """A `Receiver` whose runners come from `reload_runner`."""

    def build_routes(self, manifest: Manifest, scope: str) -> Routes:
        live = Places(self.runners)
        with load_format([r.module for r in self.runners]):
            routes = build_routes(manifest, self.runners, scope=scope, device=self.device)
            counts = _Counter(routes, self.runners).counts()
        actions = dict(routes.actions)
        for i, spec in enumerate(manifest.tensors):
            for j in routes.in_scope:
                if i not in actions and spec.name in NOT_HELD and spec.role == self.runners[j].roles[0]:
                    actions[i] = (Action(i, j, DryLoad(spec.name)),)
        parts = collections.Counter(s.tensor for bucket in manifest.buckets for s in bucket.segments)
        split = [i for i, n in parts.items() if n > 1 and i in actions]
        return ReloadRoutes(
            **{f.name: getattr(routes, f.name) for f in dataclasses.fields(Routes)}
            | {
                "actions": actions,
                # vLLM's loaders need tensors whole, whatever they do with them.
                "assembly_bytes": max((manifest.tensors[i].nbytes for i in split), default=0),
            },
            live=live,
            counts=counts,
            equal_to=_equal_to(routes),
        )

    def start_loading(self, routes: Routes, timeline: Timeline) -> Loading:
        assert isinstance(routes, ReloadRoutes)
        return _ReloadLoading(routes, self.runners, timeline)


def reload_runner(
    name: str,
    module: torch.nn.Module,
    model_config: Any,
    *,
    roles: Sequence[str],
    casts: Collection[tuple[torch.dtype, torch.dtype]],
) -> ModuleRunner:
    """The runner of one model of a worker; `model_config` is its own (vLLM's `ModelConfig`)."""

    load_weights: Any = module.load_weights
    kernels: list[tuple[Any, Any, Any]] = []

    def begin() -> None:
        initialize_layerwise_reload(module)
        kernels.extend(_take_packing_kernels(module))

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        # Buckets are parts of a checkpoint: that a bucket lacks MTP tensors says nothing.
        with disable_mtp_completeness_check():
            load_weights(iter(pairs))

    def finish() -> None:
        infos = [(id(m), get_layerwise_info(m)) for m in module.modules()]
        # Complete ones, and those that vLLM completes now: rows that pad a vocabulary are never loaded.
        loaded = {i for i, info in infos if not info.can_load() or info.load_numel > 0}
        finalize_layerwise_reload(module, model_config)
        _put_back(kernels)
        _refresh_tied(module, loaded)

    def abort() -> None:
        # Layers that are not complete get their live tensors back, as they were. Without this, a retry would count
        # the elements of both tries, and transform a layer that is half of each.
        for layer in module.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(module, model_config)
        _put_back(kernels)

    return ModuleRunner(
        name,
        module,
        roles=roles,
        load=load,
        casts=casts,
        on_begin=begin,
        on_finish=finish,
        on_abort=abort,
    )


def _take_packing_kernels(module: torch.nn.Module) -> list[tuple[Any, Any, Any]]:
    """Hide the kernels of expert layers on the CPU, for `_put_back`: (method, kernel, its config).

    Such a kernel pads and packs experts when it is made, and never again: stock 0.32 takes a kernel that is there as a
    sign that addresses must stay, and leaves plain experts where the kernel reads packed ones. Without one it makes a
    new one, which packs into the tensors that the reload copies to the live ones; those the old kernel reads.
    """
    taken = []
    for layer in module.modules():
        method: Any = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and getattr(kernel, "fused_experts", None) is not None and _on_cpu(layer):
            taken.append((method, kernel, method.moe_quant_config))
            method.moe_kernel = None
    return taken


def _put_back(kernels: list[tuple[Any, Any, Any]]) -> None:
    for method, kernel, config in kernels:
        method.moe_kernel, method.moe_quant_config = kernel, config
    kernels.clear()


def _on_cpu(layer: torch.nn.Module) -> bool:
    # While a reload is open, the live tensors are in its record and the layer has meta ones.
    parameters, _ = get_layerwise_info(layer).kernel_tensors or (layer._parameters, {})
    return any(p is not None and p.device.type == "cpu" for p in parameters.values())


def _refresh_tied(module: torch.nn.Module, loaded: Collection[int]) -> None:
    """An output layer tied to the embedding is never loaded by name, but may keep a packed copy of it."""
    memory = {
        p.data_ptr() for m in module.modules() if id(m) in loaded for p in m._parameters.values() if p is not None
    }
    for layer in module.modules():
        method = getattr(layer, "quant_method", None)
        if id(layer) in loaded or method is None or not hasattr(method, "process_weights_after_loading"):
            continue
        if any(p is not None and p.numel() and p.data_ptr() in memory for p in layer._parameters.values()):
            method.process_weights_after_loading(layer)


class _Counter:
    """What vLLM will count for each load, from the writes of the dry run. Call in load format."""

    def __init__(self, routes: Routes, runners: Sequence[Runner]) -> None:
        self._routes, self._runners = routes, runners
        # Layer -> (runner, path with a dot behind it): a shared one is loaded through the first runner that holds it.
        self._paths: dict[int, tuple[int, str]] = {}
        for j in routes.in_scope:
            for path, layer in runners[j].module.named_modules():
                self._paths.setdefault(id(layer), (j, f"{path}." if path else ""))

    def counts(self) -> dict[tuple[int, int], dict[_Layers, int]]:
        """Raises `RoutingError` where the reload would put memory that was never loaded into live tensors."""
        counts: dict[tuple[int, int], dict[_Layers, int]] = {}
        written: set[str] = set()
        for actions in self._routes.actions.values():
            for a in actions:
                if a.mode == "load":
                    counts[a.tensor, a.runner] = self._count(a, written)
        for layers in {layers for by_layers in counts.values() for layers in by_layers}:
            self._check(layers, written)
        return counts

    def _count(self, a: Action, written: set[str]) -> dict[_Layers, int]:
        found: dict[_Layers, int] = {}
        for w in a.load.writes:
            (b,) = self._routes.places.find_key(w.key)
            places = [p for p in self._routes.places.blocks[b].places if p.runner == a.runner and p.kind != "attribute"]
            written |= {f"{p.runner}:{p.name}" for p in places}
            layers = {}
            for p in places:
                path, _, name = p.name.rpartition(".")
                if name not in SKIP_LOAD_TENSORS:
                    layer = self._runners[p.runner].module.get_submodule(path)
                    layers[id(layer)] = layer
            if layers and w.kind != "fill":
                key = tuple(layers.values())
                found[key] = found.get(key, 0) + w.target.numel
        return found

    def _check(self, layers: _Layers, written: Collection[str]) -> None:
        """vLLM makes a loaded layer's tensors anew, all of them: each must be loaded, or not copied back."""
        for layer in layers:
            names = [n for n, t in [*layer._parameters.items(), *layer._buffers.items()] if t is not None]
            made_anew = [n for n in names if n not in SKIP_TENSORS and n not in layer._non_persistent_buffers_set]
            if len(layers) > 1 and len(made_anew) > 1:
                raise RoutingError(
                    f"layer {type(layer).__name__} has {made_anew}, of which one is tied to another layer's: the "
                    "reload would overwrite tied memory; such models are not supported on vLLM"
                )
            j, path = self._paths[id(layer)]
            lost = [n for n in made_anew if f"{j}:{path}{n}" not in written]
            if lost and len(layers) == 1:
                raise RoutingError(
                    f"runner {self._runners[j].name}: {path}{lost[0]} would not be loaded while the rest of its layer "
                    "is, and vLLM's reload would leave it undefined: publish it, too"
                )


def _equal_to(routes: Routes) -> dict[int, int]:
    loads = [a for actions in routes.actions.values() for a in actions if a.mode == "load"]
    pairs: dict[int, int] = {}
    for actions in routes.actions.values():
        for a in actions:
            if a.mode != "verify":
                continue
            spec = routes.manifest.tensors[a.tensor]
            wanted = {(w.key, w.source) for w in a.load.writes}
            for x in loads:
                other = routes.manifest.tensors[x.tensor]
                same_kind = (other.dtype, tuple(other.shape)) == (spec.dtype, tuple(spec.shape))
                if x.tensor < a.tensor and same_kind and wanted <= {(w.key, w.source) for w in x.load.writes}:
                    pairs[a.tensor] = x.tensor
            if a.tensor not in pairs:
                raise RoutingError(
                    f"tensor {describe(spec)} shares memory with a tensor of another role that is not of the same "
                    "shape and dtype, and cannot be compared with it: leave one of them out"
                )
    return pairs


class _ReloadLoading(Loading):
    """See the module: whole tensors to vLLM's wrapped loaders, elements counted layer by layer."""

    def __init__(self, routes: ReloadRoutes, runners: Sequence[Runner], timeline: Timeline) -> None:
        super().__init__(routes, runners, timeline)
        self._reload = routes
        self._wanted = set(routes.equal_to.values()) | set(routes.equal_to)
        self._digests: dict[int, torch.Tensor] = {}

    def take(self, views: Sequence[SegmentView]) -> None:
        pairs: dict[int, list[tuple[Action, torch.Tensor]]] = {}
        verify: list[Action] = []
        for view in views:
            self._seen[view.tensor] += view.view.numel()
            actions = self._routes.actions.get(view.tensor, ())
            whole = view.view if view.whole else self._assemble(view) if actions else None
            if whole is None:
                continue
            if view.tensor in self._wanted:
                self._digests[view.tensor] = digest_tensor(whole.reshape(-1).view(torch.uint8))
            for a in actions:
                if a.mode == "verify":
                    verify.append(a)
                elif a.load.taken:
                    pairs.setdefault(a.runner, []).append((a, whole))
                else:
                    self._done[a.tensor, a.runner] += 1  # in NOT_HELD
        bucket = {v.view.untyped_storage().data_ptr() for v in views}
        for j in sorted(pairs):
            self._load_counted(j, pairs[j], bucket)
        for a in verify:
            with self._timeline.span("verify"):
                self._compare_digests(a)

    def finish(self) -> None:
        # Whether everything stayed in place is known once vLLM has put the live tensors back.
        self.check_complete()

    def _load_counted(self, j: int, pairs: Sequence[tuple[Action, torch.Tensor]], bucket: Collection[int]) -> None:
        expected: dict[_Layers, int] = {}
        for a, _ in pairs:
            for layers, n in self._reload.counts[a.tensor, a.runner].items():
                expected[layers] = expected.get(layers, 0) + n
        before = {layers: [_progress(layer) for layer in layers] for layers in expected}
        start = time.perf_counter()
        try:
            self._runners[j].load([(a.load.name, tensor) for a, tensor in pairs])
        finally:
            nbytes = sum(t.nbytes for _, t in pairs)
            self._timeline.add(self._phase(j), start, time.perf_counter(), nbytes, tensors=len(pairs))
        for layers, n in expected.items():
            got = sum(_counted(layer, was) for layer, was in zip(layers, before[layers], strict=True))
            if got != n:
                raise RoutingError(
                    f"runner {self._runners[j].name}: vLLM loaded {got} elements of layer {type(layers[0]).__name__} "
                    f"from {self._names(pairs)}; the dry run showed {n}: its loader does not do what it did before"
                )
            for layer in layers:
                _keep(layer, bucket)
        for a, _ in pairs:
            self._done[a.tensor, j] += 1

    def _compare_digests(self, a: Action) -> None:
        other = self._reload.equal_to[a.tensor]
        if not torch.equal(self._digests[a.tensor], self._digests[other]):
            raise RoutingError(
                f"tensor {describe(self._tensors[a.tensor])}: in runner {self._routes.runners[a.runner]} it has the "
                f"memory of {describe(self._tensors[other])}, which has been loaded, and their bytes differ; expected "
                "equal bytes: leave it out of the source, or give the draft memory of its own"
            )
        self._done[a.tensor, a.runner] += 1


def _progress(layer: torch.nn.Module) -> tuple[int, int] | None:
    """(elements loaded so far, elements in all), or None if the layer is complete."""
    info = get_layerwise_info(layer)
    return (info.load_numel, info.load_numel_total) if info.can_load() else None


def _counted(layer: torch.nn.Module, was: tuple[int, int] | None) -> int:
    """Elements loaded since `was`; a complete layer drops what comes later, which counts as nothing."""
    if was is None:
        return 0
    now = _progress(layer)
    return (now[0] if now is not None else was[1]) - was[0]


def _keep(layer: torch.nn.Module, bucket: Collection[int]) -> None:
    """Copy what an incomplete layer still holds of a bucket, whose memory is about to be reused."""
    info = get_layerwise_info(layer)
    if not info.can_load():
        return
    for _, call in info.loaded_weights:
        for name, value in call.arguments.items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in bucket:
                call.arguments[name] = value.clone()
