import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import randn

from sparge.quantization import (
    hadamard_rotate,
    quantize_keys,
    quantize_queries,
    quantize_values,
    sampled,
    sampled_mean,
    sixteen_bit,
    to_int8,
)

BROKEN = [math.nan, math.inf, -math.inf]


@given(st.integers(1, 256), st.integers(0, 99))
def test_the_rotation_keeps_products_and_pads_to_a_power_of_two_from_32(dim, seed):
    x, y = randn(seed, 5, dim), randn(seed + 1, 7, dim)
    a, b = hadamard_rotate(x), hadamard_rotate(y)
    assert a.shape[-1] >= dim
    assert a.shape[-1].bit_count() == 1
    assert a.shape[-1] == 32 or 32 < a.shape[-1] < 2 * dim
    torch.testing.assert_close(a @ b.T, x @ y.T, atol=1e-4, rtol=1e-5)


def test_the_rotation_spreads_an_outlier_evenly():
    spike = torch.zeros(1, 64)
    spike[0, 17] = 8.0
    assert hadamard_rotate(spike).abs().tolist() == [[1.0] * 64]


def test_int8_rounds_to_the_nearest_of_255_steps():
    x = randn(0, 50, 16)
    amax = x.abs().amax(-1, keepdim=True)
    integers, scale = to_int8(x, amax)
    assert integers.dtype == torch.int8
    assert integers.abs().amax(-1).tolist() == [127] * 50
    assert integers.min() >= -127
    assert ((integers * scale - x).abs() <= scale * 0.5001).all()


def test_queries_have_one_scale_per_row():
    query = randn(0, 2, 3, 70, 20) * torch.logspace(-3, 3, 70)[:, None]
    integers, scale = quantize_queries(query)
    assert integers.shape == (2, 3, 70, 32)
    assert scale.shape == (2, 3, 70)
    rotated = hadamard_rotate(query)
    torch.testing.assert_close(scale, rotated.abs().amax(-1) / 127)
    assert ((integers * scale[..., None] - rotated).abs() <= 0.5001 * scale[..., None]).all()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_keys_have_one_scale_per_64(length):
    key = randn(0, 2, 3, length, 16) * torch.logspace(-2, 2, length)[:, None]
    integers, scale = quantize_keys(key)
    rotated = hadamard_rotate(key)
    assert scale.shape == (2, 3, -(-length // 64))
    for group in range(scale.shape[-1]):
        part = slice(64 * group, 64 * group + 64)
        torch.testing.assert_close(scale[..., group], rotated[:, :, part].abs().amax((-2, -1)) / 127)
        step = scale[..., group, None, None]
        assert ((integers[:, :, part] * step - rotated[:, :, part]).abs() <= 0.5001 * step).all()


def assert_e4m3_of(quantized, scale, mean, value):
    """Three mantissa bits; the smallest subnormal step."""
    smoothed = value - mean[:, :, None]
    error = (quantized.float() * scale[:, :, None] - smoothed).abs()
    assert (error <= smoothed.abs() / 16 + scale[:, :, None] * 2**-9).all()


def test_value_scales_are_powers_of_two_that_leave_room():
    value = randn(0, 2, 3, 100, 16) * torch.logspace(-4, 4, 16)
    quantized, scale, mean = quantize_values(value)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.shape == mean.shape == (2, 3, 16)
    assert (scale.log2() % 1 == 0).all()
    largest = value.abs().amax(2) / scale
    assert ((largest >= 16) & (largest < 32)).all()
    assert quantized.float().abs().max() <= 64
    assert_e4m3_of(quantized, scale, mean, value)


def test_values_lose_about_their_mean_and_a_first_token_near_zero_nothing_else():
    value = randn(0, 2, 3, 100, 16) * torch.logspace(-4, 4, 16) + randn(1, 2, 3, 1, 16)
    value[:, :, 0] *= 0.1
    quantized, scale, mean = quantize_values(value)
    exact, first = value.mean(2), value[:, :, 0]
    assert ((mean - exact).abs() <= (exact - first).abs() / 16 + scale * 2**-9).all()
    assert not torch.allclose(mean, exact)
    restored = quantized[:, :, 0].float() * scale + mean
    assert ((restored - first).abs() <= 1e-6 * value.abs().amax(2)).all()


def test_values_about_zero_lose_nothing():
    """Their rounding errors cancel: what they sum up to is no further off than their number lets expect."""
    value = randn(0, 2, 3, 30_000, 16, dtype=torch.bfloat16)
    quantized, scale, mean = quantize_values(value)
    assert not mean.any()
    off = quantized.float() * scale[:, :, None] - value.float()
    assert (off.mean(2).abs() <= 5 * off.std(2) / 30_000**0.5).all()


@pytest.mark.parametrize("shift", [0.2, 2.0])  # a twentieth of the largest value, and a third
def test_values_beside_zero_lose_their_mean(shift):
    value = randn(0, 2, 3, 5000, 16) + shift
    _, _, mean = quantize_values(value)
    exact, first = sampled_mean(value, None), value[:, :, 0]
    assert ((mean - exact).abs() <= (exact - first).abs() / 16 + 2**-9).all()


def test_values_that_are_all_equal_are_their_mean():
    value = randn(0, 2, 3, 1, 16).expand(-1, -1, 5000, -1)
    quantized, _, mean = quantize_values(value)
    assert torch.equal(mean, value[:, :, 0])
    assert not quantized.float().any()


@pytest.mark.parametrize("hidden", [0, 7])
def test_hidden_values_do_not_count(hidden):
    """Nor does the first token, where it is hidden: then the mean itself is rounded."""
    value, valid = randn(0, 2, 3, 100, 16) + 3.0, torch.ones(2, 100, dtype=torch.bool)
    valid[1, hidden] = False
    results = []
    for garbage in (0.0, 1e4, *BROKEN):
        value[1, :, hidden] = garbage
        results.append(quantize_values(value, valid))
    quantized, _, mean = results[0]
    assert not quantized[1, :, hidden].float().any()
    exact = sampled_mean(value, valid)
    assert ((mean - exact).abs() <= exact.abs() / 8).all()
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("factor", [1.0, 10.0, 1e5, 1e30])
def test_values_outside_the_sample_are_within_range_too(factor):
    value = randn(0, 1, 2, 64 * 70, 4)
    value[0, 1, 64 * 3 + 5, 2] = factor * value[0, 1, :, 2].abs().max()  # every second 64 tokens are sampled
    quantized, scale, mean = quantize_values(value)
    assert_e4m3_of(quantized, scale, mean, value)
    assert torch.equal(scale[0, 0], quantize_values(value[:, :1])[1][0, 0])


def test_the_sample_is_spread_and_bounded():
    for length, count in ((1, 1), (2000, 2000), (64 * 63, 64 * 63), (64 * 64, 64 * 32), (64 * 1000, 64 * 33)):
        x = torch.arange(length, dtype=torch.float32).view(1, 1, length, 1)
        few = sampled(x)[0, 0, :, 0]
        assert len(few) == min(length, -(-count // 64) * 64)
        assert few[0] == 0
        assert few[-1] >= 0.95 * (length - 1)


@pytest.mark.parametrize("quantize", [quantize_queries, quantize_keys, quantize_values])
def test_zeros_stay_zeros(quantize):
    quantized, *others = quantize(torch.zeros(1, 1, 70, 16))
    assert not quantized.float().any()
    assert all(torch.isfinite(x).all() for x in others)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("token", [0, 130])
def test_a_broken_number_spoils_its_own_scale_and_no_other(broken, token):
    x = randn(0, 2, 2, 200, 16)
    x[1, 0, token, 5] = broken

    _, scale = quantize_queries(x)
    want = torch.zeros(2, 2, 200, dtype=torch.bool)
    want[1, 0, token] = True
    assert torch.equal(scale.isnan(), want)

    _, scale = quantize_keys(x)
    want = torch.zeros(2, 2, 4, dtype=torch.bool)
    want[1, 0, token // 64] = True
    assert torch.equal(scale.isnan(), want)

    quantized, scale, mean = quantize_values(x)
    want = torch.zeros(2, 2, 16, dtype=torch.bool)
    want[1, 0, 5] = True
    assert torch.equal(scale.isnan(), want)
    assert quantized.float().isfinite().all()
    assert mean.isfinite().all()


def test_sixteen_bit_values_keep_their_format_and_float32_cannot_overflow():
    assert sixteen_bit(torch.float16) == torch.float16
    assert sixteen_bit(torch.bfloat16) == torch.bfloat16
    assert sixteen_bit(torch.float32) == torch.bfloat16
