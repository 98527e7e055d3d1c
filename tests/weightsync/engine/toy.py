"""Small modules that load like engines' do, and a stream of buckets without a network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync.engine.coverage import Loading
from weightsync.engine.routing import build_routes
from weightsync.engine.runner import ModuleRunner
from weightsync.errors import RoutingError
from weightsync.manifest import TensorSpec
from weightsync.plan import BucketPacker, build_manifest, segments_of
from weightsync.timeline import Timeline


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.full(shape, -1.0).to(dtype), requires_grad=False)


class Toy(nn.Module):
    """Parameters by name, and rules: published name -> what the loader does with (module, tensor)."""

    def __init__(self, parameters, rules, *, buffers=None, strict=False):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, value)
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)
        self.rules, self.strict = rules, strict

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name in self.rules:
                self.rules[name](self, tensor)
            elif self.strict:
                raise KeyError(f"no parameter for {name!r}")


def copy_to(name, rows=None, columns=None):
    """A rule: copy the whole tensor into rows (or columns) of a parameter, which must fit."""

    def rule(module, tensor):
        view = getattr(module, name).data
        view = view if rows is None else view[rows]
        view = view if columns is None else view[:, columns]
        assert view.shape == tensor.shape, f"{name}: got {tuple(tensor.shape)}, expected {tuple(view.shape)}"
        view.copy_(tensor)

    return rule


def take(name, dim, rank, size, at=0, check=True):
    """A rule: this rank's slice of the tensor along `dim`, copied into the rows from `at` on."""

    def rule(module, tensor):
        n = tensor.shape[dim] // size
        shard = tensor.narrow(dim, rank * n, n)
        view = getattr(module, name).data
        view = view.narrow(0, at, shard.shape[0]) if dim == 0 else view
        if check:
            assert view.shape == shard.shape
        view.copy_(shard)

    return rule


def vocab_rows(name, rank, per_rank, vocab):
    """A rule: this rank's rows of a vocabulary that doesn't fill the last shard; the rest becomes zero."""

    def rule(module, tensor):
        assert tensor.shape[0] == vocab
        rows = min(per_rank, max(0, vocab - rank * per_rank))
        view = getattr(module, name).data
        view[:rows].copy_(tensor.narrow(0, rank * per_rank, rows))
        view[rows:].fill_(0)

    return rule


def spec(name, *shape, role="target", dtype=torch.float32, group=None):
    return TensorSpec(name=name, dtype=dtype, shape=shape, role=role, group=group)


def manifest_of(specs, bucket_bytes=1 << 20):
    return build_manifest([specs], bucket_bytes=bucket_bytes)


def random_tensors(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = []
    for s in specs:
        numbers = torch.randn(s.shape, generator=generator)
        out.append(numbers.to(s.dtype) if s.dtype.is_floating_point else (numbers * 100).to(s.dtype))
    return out


def target_runner(module, **kwargs):
    return ModuleRunner("target", module, roles=["target"], **kwargs)


def draft_runner(module, i=0, roles=("draft",), **kwargs):
    return ModuleRunner(f"draft[{i}]", module, roles=roles, **kwargs)


def route(specs, runners, **kwargs):
    return build_routes(manifest_of(specs), runners, **kwargs)


def buckets_of(manifest, tensors):
    """(bucket number, its bytes), in order."""
    for stage in range(manifest.num_stages):
        buffers = []

        def acquire(buffers=buffers):
            buffers.append(torch.empty(manifest.bucket_bytes, dtype=torch.uint8))
            return buffers[-1]

        sent = []
        BucketPacker(manifest, stage).pack(iter(tensors), acquire, lambda n, i, sent=sent: sent.append(i), Timeline())
        yield from zip(sent, buffers, strict=True)


def load_all(specs, tensors, runners, *, bucket_bytes=1 << 20, scope="both"):
    """Route and load `tensors` bucket by bucket; returns the finished `Loading` and its routes."""
    manifest = manifest_of(specs, bucket_bytes)
    routes = build_routes(manifest, runners, scope=scope)
    loading = Loading(routes, runners, Timeline())
    for i, buffer in buckets_of(manifest, tensors):
        loading.take(segments_of(manifest, i, buffer))
        buffer.fill_(255)  # views must not be needed after take
    loading.finish()
    return loading, routes


def state(module):
    """Everything that a dry run must leave alone: bytes, addresses, and the objects behind every attribute."""
    tensors = {n: (t.data_ptr(), t.clone()) for n, t in [*module.named_parameters(), *module.named_buffers()]}
    attributes = {
        (prefix, k): (id(v), list(v) if isinstance(v, (list, set, dict)) else None)
        for prefix, m in module.named_modules()
        for k, v in vars(m).items()
    }
    return tensors, attributes


def assert_same_state(before, after):
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    for name, (pointer, value) in before[0].items():
        assert after[0][name][0] == pointer, name
        assert torch.equal(after[0][name][1], value), name


QKV = [spec("q", 8, 4), spec("k", 4, 4), spec("v", 4, 4)]


def qkv_module(rank=0, size=1):
    q, kv = 8 // size, 4 // size
    return Toy(
        {"qkv": parameter(q + 2 * kv, 4)},
        {
            "q": take("qkv", 0, rank, size, check=False),
            "k": take("qkv", 0, rank, size, at=q, check=False),
            "v": take("qkv", 0, rank, size, at=q + kv, check=False),
        },
    )


def refusal(specs, runners, **kwargs):
    before = [state(r.module) for r in runners]
    with pytest.raises(RoutingError) as e:
        route(specs, runners, **kwargs)
    for r, b in zip(runners, before, strict=True):
        assert_same_state(b, state(r.module))
    return str(e.value)
