"""Names in a checkpoint root, and who may remove what.

    iter_0000100/                       committed: `commit.json`, `.metadata`, `common.pt`, `metadata.json`, seals, data
    .saving-iter_0000100-<attempt>/     in flight, or left behind by an attempt that was not decided
    .removing-iter_0000100-<nonce>/     being deleted
    latest_checkpointed_iteration.txt   the newest committed step, as Megatron-LM's tracker

A folder is committed by one rename, so a committed name is always complete. An attempt has its own folder, named by a
run id and a number that no other run shares: what a late rank writes after an abort never meets the next attempt. Every
rank leaves `owner.<rank>.json` in the folder of its attempt; a later run removes such a folder only if each of its
owners is provably gone (same host, and another boot or no process of that pid and start time).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
import socket
from pathlib import Path
from typing import Any

from checkpoint.format.files import fsync_dir, put_file

__all__ = [
    "TRACKER",
    "LeftOver",
    "clean_up",
    "committed_path",
    "committed_steps",
    "leftovers",
    "owner_record",
    "remove_folder",
    "remove_older_attempts",
    "saving_path",
    "saving_step",
    "step_of",
    "useless",
    "write_tracker",
]

TRACKER = "latest_checkpointed_iteration.txt"
_COMMITTED = re.compile(r"iter_(\d{7,})")
_SAVING = re.compile(r"\.saving-iter_(\d{7,})-([0-9a-zA-Z.]+)")


def committed_path(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def saving_path(root: str | Path, step: int, attempt: str) -> Path:
    return Path(root) / f".saving-iter_{step:07d}-{attempt}"


def step_of(name: str) -> int | None:
    """The step of a committed folder's name; None for another name."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def saving_step(name: str) -> int | None:
    """The step of an attempt's folder; None for another name."""
    match = _SAVING.fullmatch(name)
    return int(match[1]) if match else None


def committed_steps(root: str | Path) -> list[int]:
    """Steps of the committed checkpoints in a root, ascending; read from the disk."""
    found = [(step_of(entry.name), entry.path) for entry in os.scandir(root)]
    return sorted(step for step, path in found if step is not None and os.path.exists(Path(path) / "metadata.json"))


def write_tracker(root: str | Path, step: int) -> None:
    """Point the tracker at a committed step."""
    put_file(Path(root) / TRACKER, str(step).encode())


def boot_id() -> str:
    """Changes with every boot of this kernel; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """When a process of this host began, in its kernel's ticks; None if there is no such process, or it is dead."""
    try:
        # The name of the program may hold spaces and parentheses: count from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # In many containers nobody reaps orphans: dead writers would stay for ever.
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def owner_record(pid: int) -> bytes:
    """What `owner.<rank>.json` says about a process of this host."""
    record = {"host": socket.gethostname(), "boot": boot_id(), "pid": pid, "start": start_time(pid)}
    return json.dumps(record).encode()


def _is_gone(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname():
        return False
    return owner.get("boot") != boot_id() or start_time(int(owner["pid"])) != owner.get("start")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeftOver:
    """A folder of an attempt that did not become a checkpoint."""

    path: Path
    step: int
    attempt: str
    alive: tuple[str, ...]
    """Owners that may still write: "rank 3 on host-b (pid 12)"; those of other hosts always count."""
    num_seals: int
    world_size: int | None
    """As the seals say; None without any."""

    prepared: bool = False
    """Its commit record is written: if all of its nodes have theirs, the next start makes a checkpoint of it."""

    @property
    def complete(self) -> bool:
        """All ranks sealed here: `rebuild` makes a checkpoint of it."""
        return self.world_size is not None and self.num_seals == self.world_size


def leftovers(root: str | Path) -> list[LeftOver]:
    """Folders of undecided or aborted attempts, oldest step first."""
    found = []
    for entry in os.scandir(root):
        match = _SAVING.fullmatch(entry.name)
        if match is None:
            continue
        path, alive, seals, world, prepared = Path(entry.path), [], 0, None, False
        for name in sorted(os.listdir(path)):
            if owned := re.fullmatch(r"owner\.(\d+)\.json", name):
                try:
                    owner = json.loads((path / name).read_text())
                    gone = _is_gone(owner)
                except (OSError, ValueError, KeyError):
                    alive.append(f"rank {owned[1]} (unreadable {name})")
                    continue
                if not gone:
                    alive.append(f"rank {owned[1]} on {owner['host']} (pid {owner['pid']})")
            elif name == "commit.json":
                prepared = True
            elif re.fullmatch(r"seal\.\d+\.json", name):
                seals += 1
                if world is None:
                    try:
                        world = int(json.loads((path / name).read_text())["world_size"])
                    except (OSError, ValueError, KeyError, TypeError):
                        continue  # a damaged seal counts for nothing; `rebuild` names it
        found.append(
            LeftOver(
                path=path,
                step=int(match[1]),
                attempt=match[2],
                alive=tuple(alive),
                num_seals=seals,
                world_size=world,
                prepared=prepared,
            )
        )
    return sorted(found, key=lambda left: (left.step, left.attempt))


def clean_up(root: str | Path) -> list[LeftOver]:
    """Remove half-deleted folders and what is `useless`; returns the attempts that were removed."""
    for entry in os.scandir(root):
        if entry.name.startswith(".removing-"):
            shutil.rmtree(entry.path, ignore_errors=True)  # whatever stays is looked at again next time
    removed = useless(root)
    for left in removed:
        remove_folder(left.path)
    return removed


def useless(root: str | Path) -> list[LeftOver]:
    """Attempts whose owners are provably gone and that no `rebuild` could save.

    Those with complete seals count only when a newer step is committed.
    """
    newest = max(committed_steps(root), default=-1)
    return [
        left
        for left in leftovers(root)
        if not left.alive and (not (left.complete or left.prepared) or left.step <= newest)
    ]


def remove_older_attempts(root: str | Path, attempt: str) -> None:
    """Delete what earlier attempts of the run of `attempt`, which is committed, have left behind.

    All of its ranks have sealed this one, so none of them works on an earlier one any more.
    """
    run, number = _attempt_number(attempt)
    if not run:
        return
    for entry in list(os.scandir(root)):
        match = _SAVING.fullmatch(entry.name)
        if match is not None and _attempt_number(match[2])[0] == run and _attempt_number(match[2])[1] < number:
            remove_folder(entry.path)


def _attempt_number(attempt: str) -> tuple[str, tuple[int, ...]]:
    """(run, (save, try)) of "<run>.<save>" or "<run>.<save>r<try>"; a foreign name belongs to no run."""
    match = re.fullmatch(r"(.*)\.(\d+)(?:r(\d+))?", attempt)
    return (match[1], (int(match[2]), int(match[3] or 0))) if match else ("", ())


def remove_folder(path: str | Path) -> None:
    """Delete a folder so that no half of it is ever found under its name.

    Raises:
        OSError: it could not be renamed or deleted.
    """
    path = Path(path)
    name = path.name.lstrip(".").removeprefix("saving-")
    doomed = path.with_name(f".removing-{name}-{secrets.token_hex(4)}")
    os.rename(path, doomed)
    fsync_dir(path.parent)
    shutil.rmtree(doomed)
