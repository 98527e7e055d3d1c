"""Remember a live module tree, find what a call changed in it, and put everything back.

Only Python state and the binding of tensors are kept (no copy of any weight): a dry run skips writes to memory, so what
it can change is attributes, containers, and which memory a parameter points to.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from weightsync.engine.writes import write_key

__all__ = ["Slot", "Snapshot"]

MAX_DEPTH = 4


class Slot(Protocol):
    """One thing that may change."""

    def changed(self) -> bool: ...

    def rebound(self, known: Collection[int]) -> list[str]:
        """Names that now hold a tensor whose id is not in `known`, or other memory than before."""
        ...

    def restore(self) -> None: ...


def _join(label: str, key: Any) -> str:
    return f"{label}{key}" if not label or label.endswith(".") else f"{label}.{key}"


def _new(value: Any, known: Collection[int]) -> bool:
    return isinstance(value, torch.Tensor) and id(value) not in known


class _DictSlot:
    def __init__(self, label: str, value: dict[Any, Any]) -> None:
        self.label, self.value, self.saved = label, value, dict(value)

    def changed(self) -> bool:
        if len(self.value) != len(self.saved):
            return True
        pairs = zip(self.value.items(), self.saved.items(), strict=True)
        return not all(a is b and (k is m or k == m) for (k, a), (m, b) in pairs)

    def rebound(self, known: Collection[int]) -> list[str]:
        return [_join(self.label, k) for k, v in self.value.items() if _new(v, known)]

    def restore(self) -> None:
        self.value.clear()
        self.value.update(self.saved)


class _ListSlot:
    def __init__(self, label: str, value: list[Any] | deque[Any]) -> None:
        self.label, self.value, self.saved = label, value, list(value)

    def changed(self) -> bool:
        return len(self.value) != len(self.saved) or not all(
            a is b for a, b in zip(self.value, self.saved, strict=True)
        )

    def rebound(self, known: Collection[int]) -> list[str]:
        return [f"{self.label}[{i}]" for i, v in enumerate(self.value) if _new(v, known)]

    def restore(self) -> None:
        self.value.clear()
        self.value.extend(self.saved)


class _SetSlot:
    def __init__(self, value: set[Any]) -> None:
        self.value, self.saved = value, set(value)

    def changed(self) -> bool:
        return self.value != self.saved

    def rebound(self, known: Collection[int]) -> list[str]:
        return []

    def restore(self) -> None:
        self.value.clear()
        self.value.update(self.saved)


class _TensorSlot:
    def __init__(self, label: str, value: torch.Tensor) -> None:
        self.label, self.value, self.saved = label, value, value.detach()
        self.key = write_key(value)

    def changed(self) -> bool:
        return write_key(self.value) != self.key

    def rebound(self, known: Collection[int]) -> list[str]:
        return [f"{self.label}.data"] if self.changed() else []

    def restore(self) -> None:
        self.value.data = self.saved


_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.device, torch.dtype, torch.Size)


class Snapshot:
    """The state of `module`, taken when built.

    Covered: attributes of every submodule, their parameters and buffers (attributes and memory binding), dicts, lists
    and sets among the attributes (nested), and the attributes of plain objects held by a submodule (quantisation
    methods, loaders, configurations).
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.slots: list[Slot] = []
        self._seen: set[int] = set()
        # Objects seen must stay alive, or another one could get their id.
        self._alive: list[Any] = []
        for prefix, sub in module.named_modules():
            label = f"{prefix}." if prefix else ""
            self._add(label, vars(sub), 0)

    def _first(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._alive.append(value)
        return True

    def _children(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, child in value.items():
                # The containers of torch.nn.Module itself do not show in names.
                hidden = key in ("_parameters", "_buffers", "_modules")
                yield label if hidden else _join(label, key), child
        else:
            for i, child in enumerate(value):
                yield f"{label}[{i}]", child

    def _add(self, label: str, value: Any, depth: int) -> None:
        if isinstance(value, (str, bytes, int, float, bool, *_OPAQUE)) or value is None or not self._first(value):
            return
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                self.slots.append(_TensorSlot(label, value))
            self.slots.append(_DictSlot(f"{label}.", vars(value)))
        elif isinstance(value, torch.nn.Module):
            return  # every submodule is visited on its own
        elif isinstance(value, dict):
            self.slots.append(_DictSlot(label, value))
            self._descend(label, value, depth)
        elif isinstance(value, (list, deque)):
            self.slots.append(_ListSlot(label, value))
            self._descend(label, value, depth)
        elif isinstance(value, tuple):
            self._descend(label, value, depth)
        elif isinstance(value, set):
            self.slots.append(_SetSlot(value))
        elif depth <= 1 and isinstance(getattr(value, "__dict__", None), dict):
            self.slots.append(_DictSlot(f"{label}.", vars(value)))

    def _descend(self, label: str, value: Any, depth: int) -> None:
        if depth < MAX_DEPTH:
            for child_label, child in self._children(label, value):
                self._add(child_label, child, depth + 1)

    def rebound(self, slots: Sequence[Slot] | None = None) -> list[tuple[Slot, list[str]]]:
        """Slots (default: all) that now hold tensors which did not exist when the snapshot was taken, with their names.

        Other changes (a cache filled on first use, a counter) say nothing about where weights go.
        """
        found = ((s, s.rebound(self._seen)) for s in (self.slots if slots is None else slots) if s.changed())
        return [(s, names) for s, names in found if names]

    def restore(self) -> None:
        """Undo every change."""
        for slot in reversed(self.slots):
            if slot.changed():
                slot.restore()
