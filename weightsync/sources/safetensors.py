"""Hugging Face safetensors folders as a source: specs from headers, tensors from mapped files.

For trainers that leave a folder behind, for tests and for the bench. The files are mapped, so a tensor's bytes go from
the page cache into a bucket with one copy, and no more than the mapping is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from converters.errors import FolderError
from converters.hf_folder import StoredTensor, read_folder
from weightsync.errors import ConfigError, ManifestError
from weightsync.manifest import TARGET, TensorSpec
from weightsync.sources.roles import RoleRules, in_load_order
from weightsync.timeline import Timeline

__all__ = ["SafetensorsSource"]


class SafetensorsSource:
    """Publishes the tensors of a Hugging Face folder; `draft_folders` maps role -> folder of a drafter of its own.

    Headers are read again for every publish: the files may have been rewritten with the same tensors. MTP layers in
    `folder` get their role by `roles`, by default those for the `num_hidden_layers` of its config.json. On trainers of
    several ranks, `is_sender` is true on one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        draft_folders: Mapping[str, str | Path] | None = None,
        roles: RoleRules | None = None,
        is_sender: bool = True,
    ) -> None:
        if draft_folders and TARGET in draft_folders:
            raise ConfigError(f"draft_folders has the role {TARGET!r}: pass the target's as `folder`")
        self._folders: list[tuple[str | None, Path]] = [(None, Path(folder))]
        self._folders += [(role, Path(path)) for role, path in (draft_folders or {}).items()]
        self._rules = roles
        self._is_sender = is_sender
        self._specs: tuple[TensorSpec, ...] | None = None

    @property
    def stage(self) -> int:
        return 0

    @property
    def num_stages(self) -> int:
        return 1

    @property
    def is_sender(self) -> bool:
        return self._is_sender

    def specs(self) -> Sequence[TensorSpec]:
        """See `Source.specs`.

        Raises:
            ManifestError: a folder that is none, or is broken: a missing or truncated shard, an index that names what
                no shard holds, a tensor in two shards.
        """
        if self._specs is None:
            self._specs = tuple(in_load_order(list(self._read())))
        return self._specs

    def stream(self, roles: frozenset[str], timeline: Timeline) -> Iterator[torch.Tensor]:
        """See `Source.stream`. A tensor is a view of a mapped file."""
        specs = self.specs()
        stored = self._read()
        for spec in {*specs} ^ {*stored}:
            now = "is no longer in" if spec in specs else "is new or different in"
            raise ManifestError(f"{spec.name!r} (role {spec.role!r}) {now} the folder: build a new publisher")
        if not self._is_sender:
            return
        files: dict[Path, torch.Tensor] = {}
        for spec in specs:
            if spec.role in roles:
                folder, tensor = stored[spec]
                path = folder / tensor.file
                if path not in files:
                    files[path] = _map(path)
                yield _view(files[path], tensor)

    def _read(self) -> dict[TensorSpec, tuple[Path, StoredTensor]]:
        found: dict[tuple[str, str], tuple[TensorSpec, tuple[Path, StoredTensor]]] = {}
        for role, path in self._folders:
            try:
                folder = read_folder(path)
            except FolderError as e:
                raise ManifestError(str(e)) from e
            # Weights alone are enough here: a folder without config.json is no problem, one that is broken is.
            problems = [p for p in folder.problems if p != "config.json is missing"]
            if problems:
                more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
                raise ManifestError(f"{path}: {problems[0]}{more}")
            rules = self._rules or RoleRules(num_hidden_layers=(folder.config or {}).get("num_hidden_layers"))
            tensors = folder.tensors
            for spec in rules.specs(((t.name, t.dtype, t.shape) for t in tensors.values()), role=role):
                if spec.key in found:
                    raise ManifestError(
                        f"{spec.name!r} of role {spec.role!r} is in {path} and in {found[spec.key][1][0]}"
                    )
                found[spec.key] = (spec, (path, tensors[spec.name]))
        return dict(found.values())


def _map(path: Path) -> torch.Tensor:
    """The bytes of a file, mapped privately: nothing is read before it is used, nothing can be written."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _view(file: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    data = file[stored.offset : stored.offset + stored.nbytes]
    if stored.offset % stored.dtype.itemsize:
        data = data.clone()  # a header whose length is no multiple of the itemsize; safetensors pads it to 8
    return data.view(stored.dtype).view(stored.shape)
