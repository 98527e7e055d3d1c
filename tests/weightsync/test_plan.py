"""Layout of buckets, packing and taking apart: every byte once, in order, whatever the tensors are."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigError, ManifestError
from weightsync.manifest import Manifest, TensorSpec
from weightsync.plan import BucketPacker, DtypePolicy, build_manifest, scoped, segments_of
from weightsync.timeline import Timeline

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn)


def spec(name, *shape, dtype=torch.bfloat16, role="target", group=None):
    return TensorSpec(name=name, dtype=dtype, shape=shape, role=role, group=group)


def filled(spec, seed):
    """A tensor of any dtype with random bytes (compared as bytes: some are NaN)."""
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype == torch.bool:
        return torch.randint(0, 2, spec.shape, generator=generator).bool()
    data = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(spec.dtype).view(spec.shape)


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def transfer(manifest, stage, tensors, policy=None):
    """Buckets of a stage, packed into two reused buffers of garbage, copied out when they are sent."""
    ring = [torch.full((manifest.bucket_bytes,), 0xAA, dtype=torch.uint8) for _ in range(2)]
    sent = {}

    def acquire():
        return ring[len(sent) % 2]

    def send(nbytes, bucket_index):
        sent[bucket_index] = acquire()[:nbytes].clone()

    BucketPacker(manifest, stage, policy).pack(iter(tensors), acquire, send, Timeline())
    return sent


def unpack(manifest, buckets):
    """Tensors assembled from their parts, and how often each element was written."""
    out = [torch.zeros(t.shape, dtype=t.dtype) for t in manifest.tensors]
    seen = [torch.zeros(t.shape, dtype=torch.int64) for t in manifest.tensors]
    order = []
    for index, bucket in buckets.items():
        for part in segments_of(manifest, index, bucket):
            order.append((part.tensor, part.row_start))
            target, count = out[part.tensor], seen[part.tensor]
            if part.whole:
                target.copy_(part.view)
                count += 1
            else:
                rows = slice(part.row_start, part.row_end)
                target, count = (target.view(-1), count.view(-1)) if part.flat else (target, count)
                target[rows].copy_(part.view)
                count[rows] += 1
    assert order == sorted(order)
    return out, seen


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
long_shapes = st.tuples(st.integers(1, 6), st.integers(1000, 3000))
tensors = st.tuples(
    st.one_of(shapes, long_shapes),
    st.sampled_from(DTYPES),
    st.sampled_from(["target", "draft"]),
    st.sampled_from([None, "a", "a/x", "a/y", "b"]),
)


@settings(max_examples=150)
@given(st.lists(st.lists(tensors, max_size=8), min_size=1, max_size=3), st.integers(4096, 9000))
@example([[((0,), torch.float32, "target", None)]], 4096)
@example([[((), torch.bool, "target", None), ((3, 3000), torch.complex128, "draft", "a")], []], 4096)
def test_whatever_is_packed_comes_out_once_and_in_order(stages, bucket_bytes):
    stages = [
        [
            spec(f"{i}.{j}", *shape, dtype=dtype, role=role, group=group)
            for j, (shape, dtype, role, group) in enumerate(stage)
        ]
        for i, stage in enumerate(stages)
    ]
    if not any(stages):
        with pytest.raises(ManifestError, match="no tensor to publish"):
            build_manifest(stages, bucket_bytes=bucket_bytes)
        return
    manifest = build_manifest(stages, bucket_bytes=bucket_bytes)
    assert list(manifest.tensors) == [s for stage in stages for s in stage]
    assert manifest.num_stages == len(stages)
    assert [b.stage for b in manifest.buckets] == sorted(b.stage for b in manifest.buckets)
    for bucket in manifest.buckets:
        assert 0 < bucket.nbytes <= bucket_bytes
        end = 0
        for segment in bucket.segments:
            assert segment.bucket_offset >= end
            assert segment.bucket_offset - end < max(16, manifest.tensors[segment.tensor].dtype.itemsize)
            assert segment.bucket_offset % max(16, manifest.tensors[segment.tensor].dtype.itemsize) == 0
            end = segment.bucket_offset + segment.nbytes
        assert end <= bucket.nbytes
    for index, t in enumerate(manifest.tensors):
        parts = [s for b in manifest.buckets for s in b.segments if s.tensor == index]
        assert (len(parts) == 1) == (t.nbytes <= bucket_bytes)
        if len(parts) > 1:
            row = t.nbytes // t.shape[0]
            unit = row if row <= bucket_bytes else t.dtype.itemsize
            assert all(s.nbytes % unit == 0 and s.tensor_offset % unit == 0 for s in parts)
    assert Manifest.from_json(manifest.to_json()) == manifest

    data = [filled(t, seed) for seed, t in enumerate(manifest.tensors)]
    buckets, first = {}, 0
    for stage, specs in enumerate(stages):
        buckets |= transfer(manifest, stage, data[first : first + len(specs)])
        first += len(specs)
    assert list(buckets) == list(range(len(manifest.buckets)))
    assert sum(b.numel() for b in buckets.values()) == manifest.wire_bytes
    out, seen = unpack(manifest, buckets)
    for expected, got, count in zip(data, out, seen, strict=True):
        assert torch.equal(raw(expected), raw(got))
        assert bool((count == 1).all())
    # Padding is zero, whatever the buffers held before.
    payload = sum(int(raw(t).sum(dtype=torch.int64)) for t in data)
    assert sum(int(b.sum(dtype=torch.int64)) for b in buckets.values()) == payload


def buckets_of(manifest):
    """Names by bucket."""
    return [[manifest.tensors[s.tensor].name for s in b.segments] for b in manifest.buckets]


def test_a_group_moves_to_the_next_bucket_together():
    specs = [spec("a", 1500), *(spec(n, 400, group="qkv") for n in "qkv"), spec("o", 100)]
    assert buckets_of(build_manifest([specs], bucket_bytes=4096)) == [["a"], ["q", "k", "v", "o"]]
    alone = [spec(s.name, *s.shape) for s in specs]
    assert buckets_of(build_manifest([alone], bucket_bytes=4096)) == [["a", "q"], ["k", "v", "o"]]


def test_a_group_of_another_role_is_another_group():
    specs = [spec("a", 1000), spec("x", 400, group="g"), spec("y", 700, group="g", role="draft")]
    assert buckets_of(build_manifest([specs], bucket_bytes=4096)) == [["a", "x"], ["y"]]


def test_a_group_too_large_for_a_bucket_falls_back_to_its_parts():
    def layer(i):
        qkv = [spec(f"{i}.{n}", 300, group=f"draft/{i}/qkv") for n in "qkv"]
        return [*qkv, spec(f"{i}.o", 300, group=f"draft/{i}"), spec(f"{i}.d", 300, group=f"draft/{i}")]

    whole = build_manifest([[spec("a", 1000), *layer(0)]], bucket_bytes=4096)
    assert buckets_of(whole) == [["a"], ["0.q", "0.k", "0.v", "0.o", "0.d"]]
    layers = build_manifest([[spec("a", 1000), *layer(0), *layer(1)]], bucket_bytes=4096)
    assert buckets_of(layers) == [["a"], [s.name for s in layer(0)], [s.name for s in layer(1)]]
    wide = [spec("a", 1800), *(spec(n, 500, group="draft/0/qkv") for n in "qkv"), spec("o", 1500, group="draft/0")]
    assert buckets_of(build_manifest([wide], bucket_bytes=4096)) == [["a"], ["q", "k", "v"], ["o"]]


def test_a_tensor_larger_than_a_bucket_is_split_between_rows_and_fills_up():
    manifest = build_manifest([[spec("a", 1000), spec("w", 10, 500), spec("b", 7)]], bucket_bytes=4096)
    assert buckets_of(manifest) == [["a", "w"], ["w"], ["w", "b"]]
    data = [filled(t, i) for i, t in enumerate(manifest.tensors)]
    parts = [p for i, b in transfer(manifest, 0, data).items() for p in segments_of(manifest, i, b) if p.tensor == 1]
    assert [(p.row_start, p.row_end, p.whole, p.flat) for p in parts] == [
        (0, 2, False, False),
        (2, 6, False, False),
        (6, 10, False, False),
    ]
    assert [tuple(p.view.shape) for p in parts] == [(2, 500), (4, 500), (4, 500)]


def test_a_row_larger_than_a_bucket_is_split_between_elements():
    manifest = build_manifest([[spec("w", 2, 3000)]], bucket_bytes=4096)
    data = filled(manifest.tensors[0], 0)
    parts = [p for i, b in transfer(manifest, 0, [data]).items() for p in segments_of(manifest, i, b)]
    assert [(p.row_start, p.row_end, p.flat) for p in parts] == [
        (0, 2048, True),
        (2048, 4096, True),
        (4096, 6000, True),
    ]
    assert torch.equal(raw(torch.cat([p.view for p in parts])), raw(data))


@pytest.mark.parametrize("bucket_mib", [8, 16, 64])
def test_padding_of_real_shapes_is_below_a_thousandth(bucket_mib):
    hidden, inner, vocab = 1024, 3072, 151936
    specs = [spec("embed", vocab, hidden)]
    for i in range(28):
        specs += [
            spec(f"{i}.{n}", rows, hidden, group=f"{i}.qkv") for n, rows in zip("qkv", (2048, 1024, 1024), strict=True)
        ]
        specs += [spec(f"{i}.o", hidden, 2048), spec(f"{i}.norm", hidden), spec(f"{i}.q_norm", 128)]
        specs += [spec(f"{i}.{n}", inner, hidden, group=f"{i}.mlp") for n in ("gate", "up")]
        specs += [spec(f"{i}.down", hidden, inner), spec(f"{i}.bias", 7, dtype=torch.float32)]
    manifest = build_manifest([specs], bucket_bytes=bucket_mib << 20)
    assert manifest.wire_bytes - manifest.payload_bytes < manifest.payload_bytes / 1000
    assert all(len(names & {"0.q", "0.k", "0.v"}) in (0, 3) for names in map(set, buckets_of(manifest)))


def test_a_scope_keeps_order_and_stages():
    stages = [[spec("a"), spec("a", role="draft")], [spec("b")]]
    assert scoped(stages, {"draft"}) == [[spec("a", role="draft")], []]
    manifest = build_manifest(scoped(stages, {"draft"}), bucket_bytes=4096)
    assert manifest.num_stages == 2
    assert manifest.stage_buckets(1) == []
    assert transfer(manifest, 1, []) == {}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "no tensor to publish"),
        ([[], []], "no tensor to publish"),
        ([[spec("a", 1)], [spec("a", 2)]], "'a'.*declared twice, first by stage 0"),
        ([[spec("a", 1, -2)]], "'a'.*non-negative"),
        ([[spec("", 1)]], "empty name"),
    ],
)
def test_declarations_that_cannot_be_planned_are_refused(stages, words):
    with pytest.raises(ManifestError, match=words):
        build_manifest(stages, bucket_bytes=4096)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 4095, 4096.0, True, None])
def test_a_bucket_size_that_cannot_work_is_refused(bucket_bytes):
    with pytest.raises(ConfigError, match="bucket_bytes"):
        build_manifest([[spec("a", 1)]], bucket_bytes=bucket_bytes)


def test_a_stream_that_differs_from_the_plan_is_refused_by_name():
    manifest = build_manifest([[spec("a", 2, 3), spec("b", 4)]], bucket_bytes=4096)
    good = [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)]
    with pytest.raises(ManifestError, match=r"'b'.*planned was bfloat16 \(4,\)"):
        transfer(manifest, 0, [good[0], good[1][:3]])
    with pytest.raises(ManifestError, match=r"'a'.*float32 \(2, 3\), planned was bfloat16"):
        transfer(manifest, 0, [good[0].float(), good[1]])
    with pytest.raises(ManifestError, match="ended before 'b'"):
        transfer(manifest, 0, good[:1])
    with pytest.raises(ManifestError, match=r"goes on after the last.*\(4,\)"):
        transfer(manifest, 0, [*good, good[1]])


def test_a_buffer_shorter_than_its_bucket_is_refused():
    manifest = build_manifest([[spec("a", 100)]], bucket_bytes=4096)
    with pytest.raises(ManifestError, match="bucket 0 has 200 bytes, the buffer holds 199"):
        segments_of(manifest, 0, torch.zeros(199, dtype=torch.uint8))


def test_parameters_and_strided_tensors_are_packed_by_value():
    manifest = build_manifest([[spec("w", 6, 4), spec("big", 1000, 6)]], bucket_bytes=4096)
    data = [torch.randn(4, 6).bfloat16().t(), torch.randn(6, 1000).bfloat16().t()]
    sent = transfer(manifest, 0, [torch.nn.Parameter(data[0]), torch.nn.Parameter(data[1])])
    assert not any(b.requires_grad for b in sent.values())
    for expected, got in zip(data, unpack(manifest, sent)[0], strict=True):
        assert torch.equal(expected, got)


def test_a_dtype_policy_casts_floats_but_not_the_kept_ones_nor_indices():
    policy = DtypePolicy(publish_dtype=torch.bfloat16, keep_fp32=["*.router.bias"])
    held = [
        spec("w", 3, 1000, dtype=torch.float32),
        spec("0.router.bias", 8, dtype=torch.float32),
        spec("d2t", 5, dtype=torch.int64),
        spec("t2d", 5, dtype=torch.bool),
        spec("fp8", 5, dtype=torch.float8_e4m3fn),
    ]
    specs = policy.apply(held)
    assert [s.dtype for s in specs] == [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn]
    manifest = build_manifest([specs], bucket_bytes=4096)
    data = [torch.randn(3, 1000), *(filled(s, i) for i, s in enumerate(held[1:]))]
    out, _ = unpack(manifest, transfer(manifest, 0, data, policy))
    assert torch.equal(out[0], data[0].bfloat16())
    for expected, got in zip(data[1:], out[1:], strict=True):
        assert torch.equal(raw(expected), raw(got))
    with pytest.raises(ConfigError, match="publish_dtype"):
        DtypePolicy(publish_dtype=torch.int8)
    with pytest.raises(ConfigError, match="sequence of patterns"):
        DtypePolicy(publish_dtype=torch.bfloat16, keep_fp32="*bias")


@pytest.mark.gpu
def test_packs_from_and_to_cuda():
    manifest = build_manifest([[spec("a", 100), spec("w", 10, 500)]], bucket_bytes=4096)
    data = [filled(t, i) for i, t in enumerate(manifest.tensors)]
    expected = transfer(manifest, 0, data)
    got = transfer(manifest, 0, [t.cuda() for t in data])
    assert all(torch.equal(got[i], expected[i]) for i in expected)
    sent = {}
    buffer = torch.full((4096,), 0xAA, dtype=torch.uint8, device="cuda")
    BucketPacker(manifest, 0).pack(
        iter(data), lambda: buffer, lambda n, i: sent.update({i: buffer[:n].cpu()}), Timeline()
    )
    assert all(torch.equal(sent[i], expected[i]) for i in expected)
