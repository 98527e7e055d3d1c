"""The folders of a verl run whose Megatron checkpoints this package saves; needs nothing of verl.

    <root>/                                     verl's trainer.default_local_dir
        latest_checkpointed_iteration.txt       verl's tracker; only committed steps are written to it, or left in it
        shards/actor/iter_0000010/              what was committed, one root of a `Checkpointer` per role
        global_step_10/data.pt                  verl's
        global_step_10/actor/                   verl's; `publish` puts in, once the step is committed:
            model/dist_ckpt -> ../../../shards/actor/iter_0000010       likewise optimizer/ and extra/
            ckpt_contents.json                  verl's manifest, last

verl's own manager loads such a folder as it is. `settle` is called before verl reads the tracker, `publish` after every
commit; both by one process per role.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint.errors import ConfigError, LoadError
from checkpoint.format.files import put_file
from checkpoint.layout import TRACKER, committed_path, committed_steps, step_of, write_tracker
from checkpoint.retention import Retention, doomed

__all__ = ["PARTS", "RunFolders"]

log = logging.getLogger("checkpoint")

PARTS = ("model", "optimizer", "extra")
MANIFEST = "ckpt_contents.json"
_STEP = re.compile(r"global_step_(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunFolders:
    """Of one role of a run.

    Args:
        root: verl's `trainer.default_local_dir`.
        shards: folder of the roles' committed checkpoints; on a disk of each node, if not below `root`.
        role: "actor" or "critic".
    """

    root: Path
    shards: Path
    role: str

    @property
    def own(self) -> Path:
        """Root of this role's `Checkpointer`."""
        return self.shards / self.role

    def step_of(self, local_path: str | Path, step: int | None = None) -> int:
        """The step that one of verl's paths means: `<root>/global_step_<step>`, with or without the role below it.

        Raises:
            ConfigError: it is no such path, or of another step than `step`.
        """
        path = Path(local_path).absolute()
        folder = path.parent if path.name == self.role else path
        match = _STEP.fullmatch(folder.name)
        if match is None or (step is not None and int(match[1]) != step):
            wanted = "<step>" if step is None else step
            raise ConfigError(f"verl's checkpoint path is {path}: expected .../global_step_{wanted}/{self.role}")
        if step is not None and folder.parent != self.root:
            raise ConfigError(
                f"verl saves to {path}, which is not below root {self.root}: set "
                "checkpoint.mbridge_config.weightsync.root='${trainer.default_local_dir}'"
            )
        return int(match[1])

    def source(self, local_path: str | Path) -> Path:
        """The root of shards that a path of verl's is loaded from: this run's, or another one that the path points to.

        Raises:
            LoadError: the path is of another run, and nothing of this package is there.
        """
        path = Path(local_path).absolute()
        if self.root in path.parents:
            return self.own
        for part in PARTS:
            link = path / part / "dist_ckpt"
            if link.is_symlink() and (shards := Path(os.path.realpath(link)).parent).is_dir():
                return shards
        if self.foreign(path):
            return self.own
        raise LoadError(f"{path}: there is no committed checkpoint, neither of this package nor of verl's own manager")

    def publish(
        self,
        local_path: str | Path,
        step: int,
        parts: Sequence[str],
        manifest: Mapping[str, Any],
        retention: Retention | None = None,
    ) -> None:
        """Make a committed step visible to verl, and remove verl's folders of those that retention removes.

        Raises:
            OSError: a folder cannot be written. ConfigError: there are files of verl's own manager.
        """
        local_path = Path(local_path)
        target = committed_path(self.own, step)
        if self.own.is_relative_to(self.root):
            # Relative, so that the whole run can be moved.
            place: Path | str = os.path.relpath(target, local_path.absolute() / "model")
        else:
            place = target
        for part in PARTS:
            link = local_path / part / "dist_ckpt"
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_symlink():
                link.unlink()
            elif link.is_dir():
                _refuse_foreign(link)
                link.rmdir()
            if part in parts:
                link.symlink_to(place)
        put_file(local_path / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True).encode())
        self._remove_stale(retention or Retention())

    def check_foreign(self, local_path: str | Path) -> None:
        """Raises ConfigError: a save would mix with files of verl's own manager."""
        for part in PARTS:
            _refuse_foreign(Path(local_path) / part / "dist_ckpt")

    def foreign(self, local_path: str | Path) -> bool:
        """Whether verl's own manager saved it."""
        try:
            if json.loads((Path(local_path) / MANIFEST).read_text()).get("saved_by") != "checkpoint":
                return True
        except (OSError, ValueError):
            pass  # its manifest is the last file: without it there may be parts of either
        return any(_has_files(Path(local_path) / part / "dist_ckpt") for part in PARTS)

    def move_tracker(self, step: int) -> None:
        """To a step that this role committed; not before all roles have, nor back. The last of them moves it."""
        if step in self._committed() and ((named := self._tracker()) is None or named <= step):
            write_tracker(self.root, step)

    def retention(self, keep_last: int | None, keep_every: int | None) -> Retention:
        """What stays after the next commit of this role.

        Where there are others, that includes the newest step that all of them have: if one of them does not commit
        what is saved next, a resume goes back there.
        """
        if not keep_last:
            return Retention()
        if len(self._roles()) > 1 and (common := self._committed()):
            since = sum(step >= common[-1] for step in committed_steps(self.own))
            keep_last = max(keep_last, since + 1)
        return Retention(keep_last=keep_last, keep_every=keep_every)

    def settle(self) -> int | None:
        """Have verl's tracker name the newest step that every role committed; returns it, None if there is none.

        A tracker that names a step which is not committed (verl's trainers for supervised training write it while the
        save is in flight) goes back to the newest one that is. If a run ended between commit and tracker, it moves
        forward, provided that verl's dataloader state is there. Steps of verl's own manager are believed.
        """
        named = self._tracker()
        if named is not None and any(self.foreign(self._step(named) / role) for role in ("", *self._roles())):
            return named
        steps = [step for step in self._committed() if self._step(step).is_dir()]
        newer = [step for step in steps if (named is None or step > named) and any(self._step(step).glob("data*.pt"))]
        if newer:
            found: int | None = newer[-1]
        elif named in steps or not (older := [step for step in steps if named is not None and step < named]):
            found = named if named in steps else None
        else:
            found = older[-1]
        if found == named:
            return found
        if found is None:
            os.replace(self.root / TRACKER, self.root / f"{TRACKER}.uncommitted")
            log.warning(
                "verl's tracker in %s named step %s, which was never committed; no other step was", self.root, named
            )
            return None
        write_tracker(self.root, found)
        log.warning("verl's tracker in %s named step %s; the newest committed one is %d", self.root, named, found)
        return found

    def _tracker(self) -> int | None:
        try:
            return int((self.root / TRACKER).read_text())
        except (FileNotFoundError, ValueError):
            return None  # torn: verl overwrites it in place

    def _step(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def _roles(self) -> list[str]:
        return sorted(path.name for path in self.shards.iterdir() if path.is_dir()) if self.shards.is_dir() else []

    def _committed(self) -> list[int]:
        """Ascending; what all roles have."""
        found = [set(committed_steps(self.shards / role)) for role in self._roles()]
        return sorted(set.intersection(*found)) if found else []

    def _remove_stale(self, retention: Retention) -> None:
        # The node's writer deletes what is doomed after its word of the commit: it may be there still.
        kept = set(committed_steps(self.own)) - set(doomed(self.own, retention))
        own = os.path.realpath(self.own)
        published: dict[Path, set[int | None]] = {}
        for folder in self.root.glob("global_step_*"):
            for path in (folder / self.role, folder):
                links = [path / part / "dist_ckpt" for part in PARTS if (path / part / "dist_ckpt").is_symlink()]
                targets = [Path(os.path.realpath(link)) for link in links]
                if targets and all(str(t.parent) == own for t in targets):
                    published[path] = {step_of(t.name) for t in targets}
                    break
        # Shards that are gone for another reason leave weights in Hugging Face's format, or a copy elsewhere.
        steps = {step for found in published.values() for step in found if step is not None}
        kept |= retention.keep(sorted(steps | kept))
        for path, found in published.items():
            if not found & kept:
                shutil.rmtree(path)


def _has_files(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and any(path.iterdir())


def _refuse_foreign(path: Path) -> None:
    if _has_files(path):
        raise ConfigError(
            f"{path} was saved by verl's own manager: remove it, or set another trainer.default_local_dir"
        )
