"""Iterators of (name, full tensor) as a source: all that some trainers hand over.

The first pass records the plan, every later one must match it. `IteratorSource` either calls a factory for a fresh
iterator per publish, or is fed a single-use one before each publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from weightsync.errors import ConfigError, ManifestError
from weightsync.manifest import TARGET, TensorSpec, dtype_name
from weightsync.sources.dtensor import describe, full_tensor
from weightsync.sources.roles import RoleRules
from weightsync.timeline import Timeline

__all__ = ["IteratorSource", "NamedTensors"]

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_Meta = tuple[str, torch.dtype, tuple[int, ...]]


class IteratorSource:
    """Publishes (Hugging Face name, full tensor) pairs in the order in which they come.

    `factory()` gives a fresh iterator per publish; `drafts` maps role -> factory of a drafter that is a model of its
    own, streamed after the target. The first call of `specs()` runs each factory once for the metadata. Without a
    `factory`, call `feed` before every publish.

    Every rank of the stage runs the same iterators (they may gather inside) and gets the same names, shapes and dtypes;
    `is_sender` is true on one of them. A DTensor in the stream is made full on all ranks, one collective each.
    """

    def __init__(
        self,
        factory: Callable[[], NamedTensors] | None = None,
        *,
        drafts: Mapping[str, Callable[[], NamedTensors]] | None = None,
        roles: RoleRules | None = None,
        is_sender: bool = True,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        if not 0 <= stage < num_stages:
            raise ConfigError(f"stage is {stage} of {num_stages}, expected 0 <= stage < num_stages")
        if drafts and factory is None:
            raise ConfigError("drafts without a factory: give both, or `feed` both")
        self._check_drafts(drafts)
        self._factories: dict[str | None, Callable[[], NamedTensors]] = {}
        if factory is not None:
            self._factories = {None: factory}
            self._factories.update(drafts or {})
        self._rules = roles or RoleRules()
        self._is_sender = is_sender
        self._stage = stage
        self._num_stages = num_stages
        self._planned: dict[str | None, list[TensorSpec]] | None = None
        self._fed: dict[str | None, NamedTensors | None] = {}
        # None: recorded by a rank that has nothing to send.

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def num_stages(self) -> int:
        return self._num_stages

    @property
    def is_sender(self) -> bool:
        return self._is_sender

    def feed(self, tensors: NamedTensors, *, drafts: Mapping[str, NamedTensors] | None = None) -> None:
        """The weights of the next publish, as iterators that are used up by it.

        The first feed is run here, since the plan has to be known before anything moves: the sender copies every
        tensor and keeps the copies (a whole model in host or device memory, wherever the tensors are) until they are
        streamed. Later feeds are not touched before the publish and are streamed without a copy. Feed again for a
        publish that failed after it began to stream.

        Raises:
            ConfigError: the source has a factory.
        """
        if self._factories:
            raise ConfigError("this source has a factory, which is called for every publish: don't feed it")
        self._check_drafts(drafts)
        fed: dict[str | None, NamedTensors] = {None: tensors}
        fed.update(drafts or {})
        if self._planned is not None:
            self._fed = {**fed}
            return
        planned: dict[str | None, list[TensorSpec]] = {}
        kept: dict[str | None, NamedTensors | None] = {}
        for role, iterator in fed.items():
            metas: list[_Meta] = []
            copies: list[tuple[str, torch.Tensor]] = []
            for name, tensor in iterator:
                full = _full(name, tensor)
                metas.append(_meta(name, full))
                if self._is_sender:
                    copies.append((name, full.clone()))
            planned[role] = self._plan(metas, role)
            kept[role] = _used_up(copies) if self._is_sender else None
        self._planned, self._fed = planned, kept

    def specs(self) -> Sequence[TensorSpec]:
        """See `Source.specs`; the first call runs the factories once.

        Raises:
            ManifestError: a name comes twice, or nothing was fed yet.
        """
        if self._planned is None:
            if not self._factories:
                raise ManifestError("nothing to plan from: call `feed` before the first publish")
            self._planned = {
                role: self._plan([_meta(name, _full(name, tensor)) for name, tensor in factory()], role)
                for role, factory in self._factories.items()
            }
        return [spec for specs in self._planned.values() for spec in specs]

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        """See `Source.stream`. What the iterators do counts as `gather`. Iterators without a role in `roles` don't run.
        Closed early, it runs on all the same, so that no rank waits in a gather for this one.

        Raises:
            ManifestError: names, order, shapes or dtypes differ from the first pass, or nothing was fed.
        """
        self.specs()
        assert self._planned is not None
        closed = False
        for role, specs in self._planned.items():
            if any(spec.role in roles for spec in specs):
                for tensor in self._stream_one(role, specs, roles, timeline):
                    if not closed:
                        try:
                            yield tensor
                        except GeneratorExit:
                            closed = True

    def _stream_one(
        self, role: str | None, specs: Sequence[TensorSpec], roles: frozenset[str], timeline: Timeline
    ) -> Iterator[torch.Tensor]:
        what = "the iterator" if role is None else f"the iterator of {role!r}"
        if not self._factories and role not in self._fed:
            raise ManifestError(f"{what} is used up: `feed` the source before every publish")
        tensors = self._factories[role]() if self._factories else self._fed.pop(role)
        if tensors is None:
            return
        iterator = iter(tensors)
        for i in range(len(specs) + 1):
            with timeline.span("gather"):
                item = next(iterator, None)
                tensor = _full(*item) if item is not None else None
            spec = specs[i] if i < len(specs) else None
            if item is None or tensor is None or spec is None:
                if item is None and spec is None:
                    return
                got = f"ended after {i} tensors" if item is None else f"goes on after {i} tensors with {item[0]!r}"
                expected = "the end" if spec is None else repr(spec.name)
                raise ManifestError(f"{what} {got}, in its first pass came {expected}: build a new publisher")
            if _meta(item[0], tensor) != (spec.name, spec.dtype, spec.shape):
                raise ManifestError(
                    f"{what} gives as number {i} {_describe(_meta(item[0], tensor))}, in its first pass came "
                    f"{_describe((spec.name, spec.dtype, spec.shape))}: build a new publisher"
                )
            if self._is_sender and spec.role in roles:
                yield tensor.contiguous()

    def _plan(self, metas: Sequence[_Meta], role: str | None) -> list[TensorSpec]:
        specs = self._rules.specs(metas, role=role)
        seen: dict[tuple[str, str], int] = {}
        for i, spec in enumerate(specs):
            if spec.key in seen:
                raise ManifestError(
                    f"the iterator gives {spec.name!r} (role {spec.role!r}) twice, as numbers {seen[spec.key]} and {i}"
                )
            seen[spec.key] = i
        return specs

    @staticmethod
    def _check_drafts(drafts: Mapping[str, object] | None) -> None:
        if drafts and TARGET in drafts:
            raise ConfigError(f"drafts has the role {TARGET!r}: pass the target first")


def _meta(name: str, tensor: torch.Tensor) -> _Meta:
    return (name, tensor.dtype, tuple(tensor.shape))


def _describe(meta: _Meta) -> str:
    name, dtype, shape = meta
    return f"{name!r} as {dtype_name(dtype)} {shape}"


def _full(name: str, tensor: torch.Tensor) -> torch.Tensor:
    held = describe(name, tensor)
    return held.local if held.whole else full_tensor(held)


def _used_up(copies: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The copies of a first feed, each released when the next one is asked for."""
    copies.reverse()
    while copies:
        yield copies.pop()
