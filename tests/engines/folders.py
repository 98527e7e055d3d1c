"""Models in folders, as real engines load them from disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from weightsync.embedded.config import ModelConfig
from weightsync.embedded.known import write_hf_folder


def write_known(folder: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor], **changes: object) -> None:
    """The embedded engine's folder with `changes` to its config.json: what other engines call its architectures."""
    write_hf_folder(folder, config, {name: t.clone() for name, t in tensors.items()})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_plain(folder: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> None:
    """Any model: `config` is the whole config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
