"""What a call came to, as text: for drivers in verl's environment, whose results travel as JSON."""

from __future__ import annotations


def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as e:  # noqa: BLE001 - the test asserts what it is
        return f"{type(e).__name__}: {e}"
    return "nothing was raised"
