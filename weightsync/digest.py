"""A 64-bit digest of a bucket by integer torch ops, on the device where the bucket lies and equal on every device.

`Digests.add` is called once per bucket, by the sender after packing and by every engine rank after loading. It finds
transport faults (lost, stale, shifted, reordered, flipped bytes); it is no defence against someone who forges bytes.

The bucket is read as little-endian int64 words in rows of 2039 words, 48 rows a band. Per band, the sum of every row
and of every column is taken (plain sums are all that memory bandwidth leaves time for on a CPU); these few sums are
then weighted, once whole and once by their upper halves, since a product modulo 2^64 forgets the position of high bits.
Bands are mixed with their number and added up. The row length is an odd prime, so that layouts of tensors do not line
up with it: for certain, any change confined to three words changes some sum, and so does any exchange of two different
matrix rows of 256 bytes to 16 KiB (sums over a power of two would miss it in a table of permutations). What is left is
the 2^-64 of the final mixing, and changes made to cancel out.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["Digests", "digest", "digest_tensor"]

ROW_WORDS = 2039
BAND_ROWS = 48
_WORD = 8
_ROW_BYTES = ROW_WORDS * _WORD
_BAND_BYTES = BAND_ROWS * _ROW_BYTES
# A pass over many bands keeps (ROW_WORDS + BAND_ROWS) sums of each and a product of them: 4 % of the pass's bytes.
_PASS_BANDS = {"cpu": 42}
_PASS_BANDS_DEVICE = 1024

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


class Digests:
    """The digests of the buckets of one publish: their sums are taken as they pass, and mixed once at the end.

    Mixing is some fifty operations on a few words: per bucket it would cost as much as the sums of 2 MiB.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._passes: list[tuple[int, int, torch.Tensor]] = []
        """Bucket, its first band in the pass, and the weighted sums of these bands, [2, bands]."""

    def add(self, bucket: torch.Tensor) -> None:
        """Queue the sums of a flat uint8 tensor of any length on its device; it may be reused as that device's stream
        goes on.

        Raises:
            ValueError: not a flat, contiguous uint8 tensor.
        """
        if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
            raise ValueError(
                f"digest takes a flat contiguous uint8 tensor, got {bucket.dtype} of shape {tuple(bucket.shape)}, "
                f"strides {bucket.stride()}: flatten it with `t.reshape(-1).view(torch.uint8)`"
            )
        nbytes = bucket.numel()
        pass_bytes = _BAND_BYTES * _PASS_BANDS.get(bucket.device.type, _PASS_BANDS_DEVICE)
        for start in range(0, max(nbytes, 1), pass_bytes):  # an empty bucket has one pass without bands
            part = bucket[start : start + pass_bytes]
            if part.data_ptr() % _WORD or part.storage_offset() % _WORD:
                part = part.clone()
            self._passes.append((len(self._sizes), start // _BAND_BYTES, _bands(part)))
        self._sizes.append(nbytes)

    def tensor(self) -> torch.Tensor:
        """int64 [buckets added], on the device of the buckets, which must be one; does not wait for it."""
        if not self._sizes:
            return torch.empty(0, dtype=torch.int64)
        low, high = torch.cat([sums for _, _, sums in self._passes], dim=1)
        counts = [sums.shape[1] for _, _, sums in self._passes]
        numbers = [
            torch.arange(first + 1, first + 1 + n) for (_, first, _), n in zip(self._passes, counts, strict=True)
        ]
        buckets = torch.tensor([bucket for bucket, _, _ in self._passes]).repeat_interleave(torch.tensor(counts))
        number = torch.cat(numbers).to(low.device)
        mixed = _mix(_mix(low + number * _signed(_GOLDEN)) + high)
        total = torch.tensor([_signed(nbytes * _GOLDEN) for nbytes in self._sizes], device=low.device)
        return _mix(total.index_add_(0, buckets.to(low.device), mixed))

    def values(self) -> list[int]:
        """Signed 64-bit digests in the order of `add`; waits for the device."""
        return self.tensor().tolist()


def digest(bucket: torch.Tensor) -> int:
    """Signed 64-bit digest of a flat uint8 tensor of any length; waits for the device."""
    return int(digest_tensor(bucket).item())


def digest_tensor(bucket: torch.Tensor) -> torch.Tensor:
    """`digest` as an int64 tensor of one element on the bucket's device, without waiting for the device.

    Raises:
        ValueError: not a flat, contiguous uint8 tensor.
    """
    digests = Digests()
    digests.add(bucket)
    return digests.tensor()


def _bands(part: torch.Tensor) -> torch.Tensor:
    """Weighted sums of the bands of `part`, [2, bands]; the last may be short and counts as if filled with zeros."""
    device = part.device
    whole = part.numel() // _BAND_BYTES
    num_bands = -(-part.numel() // _BAND_BYTES)
    sums = torch.empty((num_bands, BAND_ROWS + ROW_WORDS), dtype=torch.int64, device=device)
    rows, columns = sums[:, :BAND_ROWS], sums[:, BAND_ROWS:]
    if whole:
        words = part[: whole * _BAND_BYTES].view(torch.int64).view(whole, BAND_ROWS, ROW_WORDS)
        if device.type == "cpu":  # a band at a time is still in the L2 cache when it is summed the other way
            for band, band_rows, band_columns in zip(words.unbind(), rows.unbind(), columns.unbind(), strict=False):
                torch.sum(band, 1, out=band_rows)
                torch.sum(band, 0, out=band_columns)
        else:
            torch.sum(words, 2, out=rows[:whole])
            torch.sum(words, 1, out=columns[:whole])
    if num_bands > whole:
        _short_band(part[whole * _BAND_BYTES :], rows[whole], columns[whole])
    weights, out = _weights(device), torch.empty((2, num_bands), dtype=torch.int64, device=device)
    weighted = sums * weights[0]
    torch.sum(weighted, 1, out=out[0])
    sums >>= 32
    torch.sum(torch.mul(sums, weights[1], out=weighted), 1, out=out[1])
    return out


def _short_band(rest: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Write the sums of a band of fewer bytes than `_BAND_BYTES` (zeros beyond them)."""
    full = rest.numel() // _ROW_BYTES
    last = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=rest.device)
    last[: rest.numel() - full * _ROW_BYTES] = rest[full * _ROW_BYTES :]
    last_row = last.view(torch.int64)
    words = rest[: full * _ROW_BYTES].view(torch.int64).view(full, ROW_WORDS)
    rows.zero_()
    rows[:full] = words.sum(1)
    rows[full] = last_row.sum()
    torch.add(words.sum(0), last_row, out=columns)


@functools.lru_cache(maxsize=32)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd pseudo-random int64 weights of a band's row and column sums, [2, BAND_ROWS + ROW_WORDS]."""
    count = 2 * (BAND_ROWS + ROW_WORDS)
    weights = _mix(torch.arange(1, count + 1, dtype=torch.int64) * _signed(_GOLDEN)) | 1
    return weights.view(2, -1).to(device)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The output function of SplitMix64, a bijection of 64-bit words; `>>` of int64 is arithmetic, so it is masked."""
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX2)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """`value` modulo 2^64 as the signed integer that torch's int64 wants."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
