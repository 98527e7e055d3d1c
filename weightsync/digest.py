"""A 64-bit digest of a bucket by integer torch ops, on the device where the bucket lies and equal on every device.

Called once per bucket, by the sender after packing and by every engine rank after loading. It finds transport faults
(lost, stale, shifted, reordered, flipped bytes); it is no defence against someone who forges bytes.

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

__all__ = ["digest", "digest_tensor"]

ROW_WORDS = 2039
BAND_ROWS = 48
_WORD = 8
_ROW_BYTES = ROW_WORDS * _WORD
_BAND_BYTES = BAND_ROWS * _ROW_BYTES
# A pass over many bands keeps (ROW_WORDS + BAND_ROWS) sums of each and two products of them: 5 % of the pass's bytes.
_PASS_BANDS = {"cpu": 42}
_PASS_BANDS_DEVICE = 1024

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def digest(bucket: torch.Tensor) -> int:
    """Signed 64-bit digest of a flat uint8 tensor of any length; waits for the device (see `digest_tensor`)."""
    return int(digest_tensor(bucket).item())


def digest_tensor(bucket: torch.Tensor) -> torch.Tensor:
    """`digest` as an int64 tensor of one element on the bucket's device, without waiting for the device.

    Stack those of a whole publish and read them with one `tolist()`: an `item()` per bucket stalls the stream.

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
    total = torch.full((1,), _signed(nbytes * _GOLDEN), dtype=torch.int64, device=bucket.device)
    for start in range(0, nbytes, pass_bytes):
        part = bucket[start : start + pass_bytes]
        if part.data_ptr() % _WORD or part.storage_offset() % _WORD:
            part = part.clone()
        total += _bands(part, first_band=start // _BAND_BYTES)
    return _mix(total)


def _bands(part: torch.Tensor, first_band: int) -> torch.Tensor:
    """Sum of the mixed values of the bands of `part`; the last one may be short and counts as if filled with zeros."""
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
    weights = _weights(device)
    low = (sums * weights[0]).sum(1)
    high = ((sums >> 32) * weights[1]).sum(1)
    number = torch.arange(first_band + 1, first_band + num_bands + 1, dtype=torch.int64, device=device)
    return _mix(_mix(low + number * _signed(_GOLDEN)) + high).sum()


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
