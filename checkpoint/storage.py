"""What is behind fsspec: whether a place is, and one error in the place of those that each client has of its own.

`checkpoint.durable` (roots of checkpoints) and `converters.offline.remote` (sources of conversions) go through here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["asking", "is_url", "opening"]


def is_url(place: str | Path) -> bool:
    """Whether fsspec has to open it."""
    return "://" in str(place)


@contextlib.contextmanager
def opening(url: object, error: type[Exception]) -> Iterator[None]:
    """Around the look-up of a filesystem: what says that there is none for `url` is raised as `error`."""
    try:
        yield
    except (ImportError, ValueError, TypeError) as e:
        # Nobody knows the protocol, fsspec or the client is not installed, or it does not take the options.
        raise error(
            f"fsspec cannot open {str(url)!r}: {e}; pip install 'weightsync[storage]' and the client of that protocol"
        ) from e


@contextlib.contextmanager
def asking(what: object, error: type[Exception], *, ours: type[Exception]) -> Iterator[None]:
    """Around requests: whatever the client raises becomes `error`, but an object that is missing and errors of `ours`.

    Whoever drains, loads or converts must be able to catch them all.
    """
    try:
        yield
    except (FileNotFoundError, ours):
        raise
    except Exception as e:
        raise error(f"{what}: {type(e).__name__}: {e}") from e
