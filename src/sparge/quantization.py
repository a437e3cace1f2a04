"""Number formats: Hadamard-rotated int8 for Q and K, e4m3 for P and V.

The rotation leaves Q K^T unchanged and spreads outlier channels over all of them. A NaN or infinity anywhere in a
scale's group makes the scale NaN: quantised results are NaN where the input was broken, never finite and wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ROTATION = 32  # channels of the shortest product an 8-bit tensor core takes
KEYS_PER_SCALE = 64  # on every backend, whatever the block size
FP8_MAX = 448.0  # largest e4m3 value
SAMPLE_TILE = 64  # tokens sampled together
SAMPLED_TILES = 32  # fewest, where there are that many
SAMPLE_ROOM = 2.0**-4  # values of the sample come to at most 32, of 448
SMALLEST_SCALE = 2.0**-126
LITTLE_VALUE = 0.125  # of the sample's largest: a first token below it draws weight
LITTLE_MEAN = 0.03125  # of the sample's largest: a mean above it shows in sums, and is not that of chance
P_SCALE = 256.0  # probabilities are at most 1: 2^8 uses e4m3's range without overflow


@dataclass(frozen=True)
class Quantized:
    """Q, K and V as the attention kernel reads them."""

    query: Tensor  # int8 [B, Hq, Nq, D rounded up to a power of two, at least 32]
    query_scale: Tensor  # float32 [B, Hq, Nq]
    key: Tensor  # int8, as query: smoothed keys
    key_scale: Tensor  # float32 [B, Hkv, ceil(Nk / 64)]
    key_mean: Tensor  # float32 [B, Hkv, D], of sampled keys: what smoothing took away
    value: Tensor  # fp16 / bf16 ("int8") or e4m3 ("int8-fp8") [B, Hkv, Nk, Dv]
    value_scale: Tensor | None  # float32 [B, Hkv, Dv], for e4m3: powers of two
    value_mean: Tensor | None = None  # float32 [B, Hkv, Dv], for e4m3: what every value lost, and the output gets back
    lse_term: Tensor | None = None  # float32 [B, Hq, Nq]: scale * q . key_mean, for backends that add it in the kernel
    values_transposed: bool = False  # value is [B, Hkv, Dv, Nk]


def hadamard_rotate(x: Tensor) -> Tensor:
    """x times the orthonormal Walsh-Hadamard matrix, channels zero-padded to a power of two, at least 32.

    >>> x = torch.randn(3, 20)
    >>> torch.allclose(hadamard_rotate(x) @ hadamard_rotate(x).T, x @ x.T, atol=1e-4)
    True
    """
    size = max(MIN_ROTATION, 1 << (x.shape[-1] - 1).bit_length())
    matrix = torch.ones(1, 1, dtype=torch.float32, device=x.device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return torch.nn.functional.pad(x.float(), (0, size - x.shape[-1])) @ (matrix / math.sqrt(size))


def to_int8(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Round x to [-127, 127] by the largest magnitude of its group; returns the integers and the scale."""
    scale = torch.where(torch.isfinite(amax), amax, math.nan) / 127.0
    ratio = torch.where(scale > 0, x / scale, 0.0)
    return torch.nan_to_num(ratio).round().clamp(-127, 127).to(torch.int8), scale


def quantize_queries(query: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per query row."""
    rotated = hadamard_rotate(query)
    integers, scale = to_int8(rotated, rotated.abs().amax(-1, keepdim=True))
    return integers, scale.squeeze(-1)


def quantize_keys(smoothed: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per 64 keys."""
    rotated = hadamard_rotate(smoothed)
    length = rotated.shape[2]
    groups = -(-length // KEYS_PER_SCALE)
    padded = torch.nn.functional.pad(rotated, (0, 0, 0, groups * KEYS_PER_SCALE - length))
    amax = padded.unflatten(2, (groups, KEYS_PER_SCALE)).abs().amax((-2, -1))
    per_key = amax.repeat_interleave(KEYS_PER_SCALE, 2)[:, :, :length, None]
    integers, _ = to_int8(rotated, per_key)
    return integers, torch.where(torch.isfinite(amax), amax, math.nan) / 127.0


def sampled(x: Tensor) -> Tensor:
    """Every n-th 64 tokens of [B, H, N, D], at least 32 times where there are as many; what is not finite counts as 0.

    A sample is enough to centre the keys (softmax does not care which vector all of them lose) and to find the range of
    the values, and saves a second read of both.
    """
    tiles = -(-x.shape[2] // SAMPLE_TILE)
    token = torch.arange(x.shape[2], device=x.device)
    few = x[:, :, token // SAMPLE_TILE % max(tiles // SAMPLED_TILES, 1) == 0].float()
    return torch.where(few.isfinite(), few, 0.0)


def sampled_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """float32 [B, H, D]: the mean of the valid tokens in a sample."""
    if valid is None:
        return sampled(x).mean(2)
    there = valid[:, None, :, None]
    mean: Tensor = sampled(torch.where(there, x, 0.0)).sum(2) / sampled(there).sum(2).clamp(min=1)
    return mean


def _power_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above x, or 0 below the normal numbers."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def value_max(value: Tensor) -> Tensor:
    """float32 [B, H, Dv]: the largest magnitude of each channel; NaN and infinity count."""
    return value.abs().amax(2).float()


def value_scale_and_mean(value: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both from a sample, [B, H, Dv]: a power of two well above its values, and what is taken from every value.

    Tensor cores add e4m3 products with few bits, and lose most where all have one sign: hence the mean. In language
    models the first token has most of the weight and next to no value, and must come out exact: what is taken is then
    so far from it that e4m3 holds the difference. Where neither is so, nothing is taken: 16-bit numbers about zero have
    rounding errors that cancel, and none has them about another point.
    """
    few = sampled(value if valid is None else torch.where(valid[:, None, :, None], value, 0.0))
    largest, first, mean = few.abs().amax(2), few[:, :, 0], sampled_mean(value, valid)
    scale = (_power_below(largest) * SAMPLE_ROOM).clamp(min=SMALLEST_SCALE)
    apart = (mean / scale - first / scale).to(torch.float8_e4m3fn).float()
    most = largest.sum(-1, keepdim=True)
    draws_weight = first.abs().sum(-1, keepdim=True) <= LITTLE_VALUE * most
    smooth = draws_weight | (mean.abs().sum(-1, keepdim=True) >= LITTLE_MEAN * most)
    return scale, torch.where(smooth, first + apart * scale, 0.0)


def widened(scale: Tensor, largest: Tensor) -> Tensor:
    """A scale that also holds the largest values; NaN where those are not finite."""
    exact = torch.where(torch.isfinite(largest), _power_below(largest) / 128.0, math.nan)
    return torch.where(largest <= FP8_MAX * scale, scale, exact)


def quantize_values(
    value: Tensor, valid: Tensor | None = None, common: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 with one scale and one mean per channel, and these; those of a longer sequence if they are given."""
    scale, mean = value_scale_and_mean(value, valid) if common is None else common
    smoothed = value.float() - mean[:, :, None]
    if valid is not None:
        smoothed = torch.where(valid[:, None, :, None], smoothed, 0.0)
    if common is None:
        scale = widened(scale, value_max(smoothed))
    per_token = scale[:, :, None]
    ratio = torch.nan_to_num(torch.where(per_token > 0, smoothed / per_token, 0.0))
    return ratio.to(torch.float8_e4m3fn), scale, mean


def sixteen_bit(dtype: torch.dtype) -> torch.dtype:
    """The format of P and V beside int8 scores; float32 callers get bfloat16, which cannot overflow."""
    return torch.bfloat16 if dtype == torch.float32 else dtype
