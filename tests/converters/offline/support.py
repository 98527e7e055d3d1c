"""Folders and fingerprints of folders for the tests of conversions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.converters.support import same


def write_folder(path, config, tensors, *, shards=2):
    """A Hugging Face folder with index, tokenizer and generation files."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "generation_config.json").write_text('{"do_sample": true}')
    names = sorted(tensors)
    weight_map = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n].contiguous() for n in names[k::shards]}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[k::shards], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def read_tensors(path):
    tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(got, want):
    assert got.keys() == want.keys()
    assert [name for name in want if not same(got[name], want[name])] == []


def fingerprint(path):
    """Name, size and digest of every file below a folder."""
    return {
        str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(path).rglob("*"))
        if p.is_file()
    }
