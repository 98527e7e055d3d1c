"""Shards read by range are the shards of the whole tensors, for every rule, along every dimension; only their bytes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from converters.hf_folder import read_folder
from converters.live.load import _cut, _Folder, _Memory, _Parts
from converters.live.model import LiveTensor
from converters.semantic.tiny import tiny_config, write_tiny_folder
from tests.converters.live_ranks import load_folder
from tests.converters.support import same, to_megatron
from tests.converters.test_sparse_families import PUBLISHED

MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
QWEN2_TIED = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}


@pytest.fixture(scope="module", params=["mimo", "qwen2", "fp8", *PUBLISHED])
def model(request, tmp_path_factory):
    """(name, config, folder, full Megatron tensors)"""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    known = {"mimo": MIMO, "qwen2": QWEN2_TIED, "fp8": PUBLISHED["deepseek_v3"], **PUBLISHED}
    config = tiny_config(known[name])
    write_tiny_folder(config, folder, dtype=torch.bfloat16)
    tensors = load_folder(folder)
    if name == "qwen2":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if name == "fp8":
        config = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [5, 7]}}
        generator = torch.Generator().manual_seed(1)
        for weight in [n for n in tensors if n.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in n]:
            rows, columns = tensors[weight].shape
            tensors[weight] = tensors[weight].to(torch.float8_e4m3fn)
            tensors[weight + "_scale_inv"] = torch.rand(-(-rows // 5), -(-columns // 7), generator=generator) + 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return name, config, folder, to_megatron(config, tensors)


def shards(mapping, name, full):
    """(dim, number of ranks) in which Megatron might cut the tensor."""
    yield None, 1
    for size in (2, 4):
        for dim in range(full.dim()):
            sizes = mapping.blocks(name) if dim == 0 and mapping.blocks(name) else (full.shape[dim],)
            if all(n % size == 0 for n in sizes) or (dim == 0 and "embed" in name):
                yield dim, size


def test_shards_read_by_range_are_those_of_the_whole(model):
    name, _, path, (rules, megatron) = model
    folder = read_folder(path)
    names = frozenset(folder.tensors)
    whole = set()
    with _Folder(folder.path, folder.tensors) as source:
        for mapping in rules.mappings():
            parts = _Parts(mapping, source, names)
            whole |= {n.split(".")[-2] for n in mapping.mcore if parts.lines is None}
            for mcore in mapping.mcore:
                full = megatron[mcore]
                for dim, size in shards(mapping, mcore, full):
                    for rank in range(size):
                        shape = list(full.shape)
                        if dim is not None:
                            shape[dim] = -(-shape[dim] // size)
                        live = LiveTensor(mcore, torch.empty(shape), dim)
                        before = source.read_bytes
                        got = parts.shard(mcore, live, rank, size)
                        want = _cut(full, dim, mapping.blocks(mcore), shape, rank, size)
                        assert same(got, want), (mcore, dim, rank, size)
                        if parts.lines is not None and mapping.encoding is None:
                            assert source.read_bytes - before == want.nbytes, (mcore, dim, rank, size)
    expected = {"mimo": {"eh_proj"}, "qwen3_next": {"out_norm"}, "qwen3_5": {"out_norm"}, "qwen3_5_moe": {"out_norm"}}
    if name != "gpt_oss":
        assert whole == expected.get(name, set())


def test_tensors_in_memory_give_the_same(model):
    _, _, path, (rules, megatron) = model
    tensors = load_folder(path)
    source = _Memory(tensors)
    for mapping in rules.mappings():
        parts = _Parts(mapping, source, frozenset(tensors))
        for mcore in mapping.mcore:
            live = LiveTensor(mcore, torch.empty(megatron[mcore].shape), None)
            assert same(parts.shard(mcore, live, 0, 1), megatron[mcore])
