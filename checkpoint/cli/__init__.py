"""The commands of `ckpt` that look after saved checkpoints; `converters.cli` is their main.

    look      ls, show, verify      what is there and whether it is whole
    mend      rebuild, drain, prune change what is there
    doctor    doctor                what a save will meet on this machine; `--bench` blames the storage or the process

A place is a local folder or a URL that fsspec opens.
"""

from __future__ import annotations

from checkpoint.cli import doctor, look, mend
from checkpoint.cli.outcome import Commands

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Called by `converters.cli`."""
    for group in (look, mend, doctor):
        group.add_commands(commands)
