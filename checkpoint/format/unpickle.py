"""Pickles of checkpoints, read without executing anything.

`.metadata`, `common.pt` and the objects inside `.distcp` files are pickles, and a pickle may call any function. Here
the unpickler knows a short table of constructors that do nothing but build values; every other class or function
becomes a `Foreign` that records how it was called. So an unknown class of an older Megatron-Core (or one that is not
installed) does not prevent reading the rest, and a hostile pickle gets its call recorded and not run.

Used by `checkpoint.format.saved` and `checkpoint.format.index`; nothing else of the package unpickles.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from checkpoint.errors import FormatError

__all__ = ["Foreign", "loads"]


class Foreign:
    """An instance of a class, or the result of a function, that was not loaded.

    `path` is "module.name", `args` what it was called with, `state` what was set afterwards (None if nothing), `items`
    what was appended or set by key. Attributes of a state that is a mapping can be read as attributes.
    """

    path = "?"

    def __new__(cls, *args: Any, **kwargs: Any) -> Foreign:
        self = object.__new__(cls)
        self.__dict__.update(args=args, kwargs=kwargs, state=None, items=[])
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping) and name in part:
                return part[name]
        raise AttributeError(f"{self.path} was recorded without {name!r}")

    # APPENDS, SETITEMS and ADDITEMS call these.
    def append(self, item: Any) -> None:
        self.__dict__["items"].append(item)

    def extend(self, items: Any) -> None:
        self.__dict__["items"].extend(items)

    def add(self, item: Any) -> None:
        self.__dict__["items"].append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["items"].append((key, value))

    def __repr__(self) -> str:
        return f"Foreign({self.path}, args={self.__dict__['args']!r})"


def _plain_array(subtype: Any, shape: Any, code: Any) -> Any:
    import numpy as np

    if subtype is not np.ndarray:
        raise FormatError(f"an array of class {subtype!r} in a pickle: only plain numpy arrays are read")
    return np.ndarray((0,), np.int8)


def _plain_dtype(code: Any, *flags: Any) -> Any:
    import numpy as np

    dtype = np.dtype(code)
    if dtype.hasobject:
        raise FormatError(f"a numpy dtype that holds objects ({code!r}) in a pickle is not read")
    return _Dtype(dtype)


class _Dtype:
    """A numpy dtype under construction: its pickled state may only choose the byte order."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        if len(state) > 3 and (state[2] is not None or state[3] is not None):
            raise FormatError("a structured numpy dtype in a pickle is not read")
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """A numpy array under construction (`ndarray.__setstate__` would take a dtype object; this one takes `_Dtype`)."""

    value: Any

    def __setstate__(self, state: Any) -> None:
        import numpy as np

        _, shape, dtype, fortran, data = state
        raw = data if isinstance(data, bytes) else bytes(data, "latin1")
        self.value = np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if fortran else "C").copy()


def _new_array(subtype: Any, shape: Any, code: Any) -> _Array:
    _plain_array(subtype, shape, code)
    return _Array()


def _scalar(dtype: _Dtype, data: Any) -> Any:
    import numpy as np

    raw = data if isinstance(data, bytes) else bytes(data, "latin1")
    return np.frombuffer(raw, dtype.dtype)[0]


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise FormatError(f"text encoded as {encoding!r} in a pickle is not read")
    return text.encode("latin1")


def _layout(name: str) -> str:
    return name


def _numpy_globals() -> dict[tuple[str, str], Any]:
    import numpy as np

    table: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): _plain_dtype}
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table[core, "_reconstruct"] = _new_array
        table[core, "scalar"] = _scalar
    return table


_GLOBALS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("_io", "BytesIO"): io.BytesIO,
    ("io", "BytesIO"): io.BytesIO,
    ("argparse", "Namespace"): argparse.Namespace,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("builtins", "slice"): slice,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): _layout,
}


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        more: Mapping[tuple[str, str], Any],
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._more = more
        self._persistent = persistent_load
        self._foreign: dict[tuple[str, str], type[Foreign]] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        for table in (self._more, _GLOBALS):
            if key in table:
                return table[key]
        if module == "__builtin__":  # what protocols 0 to 2 call it
            return self.find_class("builtins", name)
        if module.startswith("numpy") and key in (table := _numpy_globals()):
            return table[key]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if key not in self._foreign:
            self._foreign[key] = type(name.rpartition(".")[2], (Foreign,), {"path": f"{module}.{name}"})
        return self._foreign[key]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise FormatError(f"the pickle refers to data outside itself ({pid!r})")
        return self._persistent(pid)


def loads(
    data: bytes,
    *,
    what: str,
    more: Mapping[tuple[str, str], Any] | None = None,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of a pickle, with `Foreign` in place of every class that is not in the table.

    Args:
        data: the pickle.
        what: its name for messages.
        more: further (module, name) -> constructor, which must do nothing but build values.
        persistent_load: resolves references to data outside the pickle.

    Raises:
        FormatError: not a complete pickle, or it builds something that is refused.
    """
    try:
        return _resolve(_Unpickler(data, more or {}, persistent_load).load(), {})
    except FormatError:
        raise
    except Exception as e:  # a damaged pickle can raise anything; nothing of ours runs inside
        raise FormatError(f"{what} is not a readable pickle ({type(e).__name__}: {e}): is it truncated?") from e


def _resolve(value: Any, seen: dict[int, Any]) -> Any:
    """Replace the arrays under construction by the arrays, in containers and foreign states."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, _Dtype):
        return value.dtype
    if id(value) in seen or not isinstance(value, (dict, list, tuple, Foreign, argparse.Namespace)):
        return value
    seen[id(value)] = value
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _resolve(value[key], seen)
    elif isinstance(value, list):
        value[:] = [_resolve(item, seen) for item in value]
    elif isinstance(value, tuple):
        parts = [_resolve(item, seen) for item in value]
        # Size and named tuples hold no arrays; a tuple is rebuilt only if something in it changed.
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            return tuple(parts)
    else:
        inner = value.__dict__
        for name in list(inner):
            inner[name] = _resolve(inner[name], seen)
    return value
