"""Conversions between folders: `convert` and what `ckpt convert`, `ckpt inspect` and `ckpt diff` are made of.

    places -> sources    what is there          mapping (layout, keys)   what becomes of it
    targets              which files            move, journal            writing them
    check                comparing              conversion               all of it, in order

No Megatron-Core, no process group, no model: rules run on layouts (`layout`), bytes move by position.
"""

from __future__ import annotations

from converters.offline.conversion import ConvertReport, convert

__all__ = ["ConvertReport", "convert"]
