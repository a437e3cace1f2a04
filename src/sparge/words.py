"""Block bits in int32 words: packed, unpacked and counted, some rows at a time where a mask is large.

A million tokens have 134 million blocks per head: one byte for each, let alone eight, would be many times the mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WORD = 32  # bits per int32 word
WORDS_AT_ONCE = 1 << 21  # of a mask: 8 MB; a handful of temporaries of that size, or twice that, exist at a time
BITS_AT_ONCE = 1 << 22  # of a dense mask; packed through int64

# Counts of neighbouring pairs, quadruples and bytes of bits. The arithmetic wraps at 32 bits on purpose.
PAIRS, QUADRUPLES, BYTES, ALL_BYTES = 0x55555555, 0x33333333, 0x0F0F0F0F, 0x01010101


def pack(dense: Tensor) -> Tensor:
    """bool [..., n] to int32 words [B, H, ..., ceil(n / 32)]."""
    while dense.dim() < 4:
        dense = dense[None]
    batch, heads, rows, bits = dense.shape
    return _joined([_packed(dense[:, :, some]) for some in some_rows(rows, batch * heads * bits, BITS_AT_ONCE)])


def _packed(dense: Tensor) -> Tensor:
    length = dense.shape[-1]
    words = -(-length // WORD)
    padded: Tensor = torch.nn.functional.pad(dense, (0, words * WORD - length)).unflatten(-1, (words, WORD))
    weights = torch.ones(WORD, dtype=torch.int64, device=dense.device) << torch.arange(WORD, device=dense.device)
    return (padded * weights).sum(-1).to(torch.int32)  # wraps into the sign bit on purpose


def unpack(bits: Tensor, length: int) -> Tensor:
    """int32 words [..., ceil(n / 32)] to bool [..., n]."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(-2)[..., :length]


def packed_spans(begin: Tensor, end: Tensor, length: int) -> Tensor:
    """int64 [B, rows], twice, to int32 words [B, 1, rows, ceil(length / 32)]: bits begin to end of each row are set."""
    first = torch.arange(0, length, WORD, device=begin.device)

    def power(edges: Tensor) -> Tensor:
        return 1 << (edges[:, None, :, None] - first).clamp_(0, WORD)

    some = some_rows(begin.shape[1], len(begin) * len(first), WORDS_AT_ONCE)
    return _joined([(power(end[:, rows]) - power(begin[:, rows])).to(torch.int32) for rows in some])


def count_per_row(bits: Tensor, among: Tensor | None = None) -> Tensor:
    """Bits set in each row of words [B, H, rows, words], int64 [B, H, rows]; `among`: only those set there too."""
    shape = bits.shape if among is None else torch.broadcast_shapes(bits.shape, among.shape)
    parts = []
    for rows in some_rows(shape[2], shape[0] * shape[1] * shape[3], WORDS_AT_ONCE):
        part = bits[:, :, rows]
        parts.append(_counted(part if among is None else part & among[:, :, rows]))
    return _joined(parts)


def _counted(x: Tensor) -> Tensor:
    """torch has no instruction for it: bits are added up in ever wider fields of the word."""
    x = x - (x >> 1).bitwise_and_(PAIRS)
    odd = (x >> 2).bitwise_and_(QUADRUPLES)
    x &= QUADRUPLES
    x += odd
    x += x >> 4
    x &= BYTES
    x *= ALL_BYTES
    x >>= 24  # the highest byte now holds the sum of all four
    return x.sum(-1)


def some_rows(rows: int, per_row: int, at_once: int) -> Iterator[slice]:
    """All rows, in ranges of about `at_once` elements."""
    step = max(1, at_once // per_row)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
