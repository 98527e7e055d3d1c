"""The bucket digest: equal to its definition in plain Python, sensitive to every change of content or position."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync import digest as digest_module
from weightsync.digest import BAND_ROWS, ROW_WORDS, Digests, digest, digest_tensor
from weightsync.protocol import PROTOCOL_VERSION

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROW_BYTES = 8 * ROW_WORDS
BAND_BYTES = BAND_ROWS * ROW_BYTES


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signed(z):
    z &= MASK
    return z - (1 << 64) if z >> 63 else z


def reference(data):
    """The definition, one word at a time."""
    count = BAND_ROWS + ROW_WORDS
    weights = [mix(i * GOLDEN & MASK) | 1 for i in range(1, 2 * count + 1)]
    total = len(data) * GOLDEN
    for number, start in enumerate(range(0, len(data), BAND_BYTES), start=1):
        band = data[start : start + BAND_BYTES]
        sums = [0] * count
        for i in range(0, len(band), 8):
            word = int.from_bytes(band[i : i + 8].ljust(8, b"\0"), "little")
            sums[i // ROW_BYTES] += word
            sums[BAND_ROWS + i // 8 % ROW_WORDS] += word
        low = sum(s * w for s, w in zip(sums, weights[:count], strict=True))
        high = sum((signed(s) >> 32) * w for s, w in zip(sums, weights[count:], strict=True))
        total += mix((mix((low + number * GOLDEN) & MASK) + high) & MASK)
    return signed(mix(total & MASK))


def random_bytes(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        1,
        7,
        8,
        9,
        ROW_BYTES - 1,
        ROW_BYTES,
        3 * ROW_BYTES + 5,
        BAND_BYTES - 3,
        BAND_BYTES,
        2 * BAND_BYTES + ROW_BYTES + 9,
    ],
)
def test_equals_its_definition(nbytes):
    data = random_bytes(nbytes)
    assert digest(data) == reference(data.numpy().tobytes())


@given(st.binary(max_size=4000))
def test_equals_its_definition_on_any_bytes(data):
    bucket = torch.tensor(list(data), dtype=torch.uint8)
    assert digest(bucket) == reference(data)


def test_a_bucket_longer_than_a_pass_is_the_sum_of_its_bands(monkeypatch):
    data = random_bytes(5 * BAND_BYTES + 1234)
    whole = digest(data)
    monkeypatch.setattr("weightsync.digest._PASS_BANDS", {"cpu": 2})
    assert digest(data) == whole


def test_the_address_of_the_bytes_does_not_matter():
    data = random_bytes(BAND_BYTES + 77)
    for shift in (1, 4, 8, 16):
        moved = torch.empty(data.numel() + shift, dtype=torch.uint8)[shift:]
        moved.copy_(data)
        assert digest(moved) == digest(data)


def test_every_single_bit_counts():
    data = random_bytes(3 * ROW_BYTES + 3)
    before = digest(data)
    generator = torch.Generator().manual_seed(1)
    positions = [0, 7, 8, data.numel() - 1, *torch.randint(0, data.numel(), (50,), generator=generator).tolist()]
    for position in positions:
        for bit in (1, 16, 128):
            data[position] ^= bit
            assert digest(data) != before
            data[position] ^= bit
    assert digest(data) == before


@given(st.integers(0, 3 * BAND_BYTES // 8 - 1), st.integers(0, 3 * BAND_BYTES // 8 - 1), st.integers(0, 63))
def test_a_lone_bit_is_found_at_its_place(first, second, bit):
    # One bit in a field of zeros: weights modulo 2^64 alone would lose the place of the high ones.
    def lone(position):
        words = torch.zeros(3 * BAND_BYTES // 8, dtype=torch.int64)
        words[position] = signed(1 << bit)
        return digest(words.view(torch.uint8))

    assert (lone(first) == lone(second)) == (first == second)


@pytest.mark.parametrize("row_bytes", [256, 2048, ROW_BYTES + 8, 65536])
def test_exchanged_one_hot_rows_are_noticed(row_bytes):
    # Tables of permutations: every row and every column of them has the same sum.
    rows = min(1024, (8 << 20) // row_bytes)
    table = torch.zeros(rows, row_bytes // 2, dtype=torch.bfloat16)
    table[torch.arange(rows), torch.arange(rows) * 4 % (row_bytes // 2) + 3] = 1.0
    before = digest(table.view(-1).view(torch.uint8))
    for distance in (1, 2, 3, 8, 32, rows // 2):
        swapped = table.clone()
        swapped[[0, distance]] = table[[distance, 0]]
        assert torch.equal(swapped, table) == (digest(swapped.view(-1).view(torch.uint8)) == before)
    shifted = {digest(table.roll(s, 0).view(-1).view(torch.uint8)) for s in range(8)}
    assert len(shifted) == len({bytes(table.roll(s, 0).view(torch.uint8).numpy()) for s in range(8)})


def test_order_length_and_shift_count():
    a, b = random_bytes(BAND_BYTES, 1), random_bytes(BAND_BYTES, 2)
    assert digest(torch.cat([a, b])) != digest(torch.cat([b, a]))
    assert digest(torch.cat([a[:4096], a[4096:8192]])) != digest(torch.cat([a[4096:8192], a[:4096]]))
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert len({digest(zeros[:n]) for n in range(65)}) == 65
    assert digest(a.roll(1)) != digest(a)
    assert digest(a.roll(8)) != digest(a)
    assert digest(torch.cat([a, zeros])) != digest(a)


def test_what_is_not_flat_bytes_is_refused():
    for wrong in (torch.zeros(8), torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="flat contiguous uint8"):
            digest(wrong)


def test_keeps_up_with_memory():
    bucket = random_bytes(16 << 20)

    def best_seconds(function):
        times = []
        for _ in range(8):
            start = time.perf_counter()
            function(bucket)
            times.append(time.perf_counter() - start)
        return min(times)

    other = torch.empty_like(bucket)
    # Alone on this kind of machine about as fast as a copy; far slower means that some operation is not vectorised.
    assert best_seconds(digest) < 4 * best_seconds(other.copy_)


def test_digests_of_a_publish_are_those_of_its_buckets(monkeypatch):
    monkeypatch.setitem(digest_module._PASS_BANDS, "cpu", 2)  # several passes per bucket
    buckets = [random_bytes(n, seed=n) for n in (5 * BAND_BYTES + 9, 0, 1, 2 * BAND_BYTES, 3 * BAND_BYTES + 1)]
    digests = Digests()
    for bucket in buckets:
        digests.add(bucket)
    kept = [bucket.clone() for bucket in buckets]
    for bucket in buckets:
        bucket.zero_()  # a buffer is reused before the digests are read
    assert digests.values() == [signed(reference(b.numpy().tobytes())) for b in kept]
    assert Digests().values() == []


def test_a_digest_that_is_defined_otherwise_needs_another_protocol_version():
    # Engines of another version are named in preflight; else every publish to them would report corrupted bytes.
    data = (torch.arange(1_000_003) * 37 % 251).to(torch.uint8)
    assert (PROTOCOL_VERSION, digest(data)) == (1, -9016745386509670312)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [0, 9, ROW_BYTES, BAND_BYTES + 1234, 1100 * BAND_BYTES + 5])
def test_has_the_same_value_on_cuda(nbytes):
    data = random_bytes(nbytes)
    on_device = data.cuda()
    assert digest_tensor(on_device).device.type == "cuda"
    assert digest(on_device) == digest(data)
