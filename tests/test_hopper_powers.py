"""What the PTX of `powers` computes, word by word, carried out in numpy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from gluon_interpreter.ptx import carry_out

from sparge.backends.hopper._powers import (
    ARC,
    CHORD,
    EXACT,
    FACTORS,
    GROUPS,
    KINDS,
    NUMBERS,
    OFFSET,
    OPERANDS,
    PTX,
    RAWS,
    UNITS,
    WORDS,
)

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
# Factors that count single steps, four at once, and that make all words exact; close to the largest of the first two
FINE, BROAD, BROADEST = np.float32(2.0**-12), np.float32(2.0**-10), np.float32(2.0**-6)
LAST_FINE, LAST_BROAD = np.float32(0.000488), np.float32(0.00195)


def powers(exponents: np.ndarray, factor: np.float32 = FINE, offset: float = -3.0) -> dict[str, np.ndarray]:
    """2^x by each of the three ways, from integers times a factor plus an offset."""
    raw = np.round((exponents - offset) / np.float64(factor)).astype(np.int32)
    return by_way(raw, factor, np.float32(offset), exponents.size)


def by_way(raw: np.ndarray, factor: Any, offset: Any, count: int) -> dict[str, np.ndarray]:
    """What all units make of the same operands for all numbers."""
    row = {**dict.fromkeys(RAWS, raw), **dict.fromkeys(FACTORS, factor), OFFSET: offset}
    made: dict[str, list[np.ndarray]] = {EXACT: [], CHORD: [], ARC: []}
    names = [f"${UNITS * WORDS + n}" for n in range(len(KINDS) * NUMBERS.value)]
    values = [np.broadcast_to(row[n // NUMBERS.value], count) for n in range(len(names))]
    words = carry_out(PTX.value, dict(zip(names, values, strict=True)))
    for unit in range(UNITS):
        for word, way in enumerate(GROUPS[unit % len(GROUPS)]):
            codes = words[f"${WORDS * unit + word}"]
            made[way] += [CODES[(codes >> np.uint32(8 * byte)) & np.uint32(0xFF)] for byte in range(4)]
    return {way: np.stack(x) for way, x in made.items()}


@pytest.mark.parametrize("factor", [FINE, LAST_FINE, BROAD, LAST_BROAD], ids=str)
def test_each_way_errs_as_much_as_is_said(factor):
    rng = np.random.default_rng(0)
    offset = rng.uniform(-4, -2, 200_000).astype(np.float32)
    raw = np.round((rng.uniform(-5, 8.75, offset.size) - offset) / np.float64(factor)).astype(np.int32)
    exponents = raw * np.float64(factor) + offset
    made = by_way(raw, factor, offset, offset.size)
    for way, (spread, largest) in {EXACT: (0.0268, 0.06), CHORD: (0.0318, 0.086), ARC: (0.0272, 0.067)}.items():
        off, off_exact = (made[x] / np.exp2(exponents) - 1 for x in (way, EXACT))
        assert np.abs(off).max() < largest, way
        assert np.sqrt((off**2).mean()) < spread, way
        assert abs(off.mean() - off_exact.mean()) < 0.002, way  # or a mixture would lean towards some keys


@pytest.mark.parametrize("octave", range(-9, -5))
def test_small_numbers_are_as_heavy_as_they_should_be(octave):
    """A long text has many, next to a first token that takes most of a row: together they must not get lost."""
    exponents = octave + np.arange(1 << 12) / (1 << 12)
    for way, numbers in powers(exponents).items():
        assert abs(numbers.mean() / np.exp2(exponents).mean() - 1) < (0.03 if octave == -9 else 0.01), way


def test_whole_exponents_are_exact():
    """Most of a row's weight may lie with the score that the others are relative to."""
    for numbers in powers(np.arange(-5.0, 9.0)).values():
        assert (numbers == np.exp2(np.arange(-5.0, 9.0))).all()


@pytest.mark.parametrize("factor", [FINE, LAST_FINE, BROAD, LAST_BROAD, BROADEST], ids=str)
def test_the_score_that_others_are_relative_to_is_exact(factor):
    raw = np.random.default_rng(1).integers(-(1 << 15), 1 << 15, 20_000).astype(np.int32)
    offset = (8 - raw * np.float64(factor)).astype(np.float32)
    for way, numbers in by_way(raw, factor, offset, raw.size).items():
        assert (numbers == 256).all(), way


def test_the_mixture_adds_little_to_the_error_of_attention():
    """Over random inputs, relative L1 against float64, with int8 scores and e4m3 values."""
    rng, rows, keys, dim = np.random.default_rng(2), 64, 8192, 128
    q, k, v = (rng.standard_normal((n, dim)) for n in (rows, keys, keys))
    weights = np.exp(q @ k.T / dim**0.5)
    want = weights @ v / weights.sum(1, keepdims=True)
    q_scale, k_scale = np.abs(q).max(1) / 127, np.abs(k).reshape(-1, 64 * dim).max(1) / 127
    raw = (np.round(q / q_scale[:, None]) @ np.round(k / k_scale.repeat(64)[:, None]).T).astype(np.int32)
    factors = (q_scale[:, None] * k_scale * (1.4426950408889634 / dim**0.5)).astype(np.float32)
    offset = (8 - (raw * factors.repeat(64, 1)).max(1)).astype(np.float32)
    # Of each thread two rows and, of each 64 keys, sixteen: words of four belong to the rows in turns.
    threads = raw.reshape(rows // 2, 2, keys // 256, UNITS, 4, 4, 4).transpose(
        3, 5, 1, 6, 0, 2, 4
    )  # then pair, step, lane
    row_of = np.arange(4 * WORDS) // 4 % 2
    shape = threads.shape[4:]
    given = {}
    for unit in range(UNITS):
        numbers = threads[unit].reshape(4 * WORDS, -1)
        own = factors.reshape(rows // 2, 2, keys // 256, UNITS)[..., unit].transpose(1, 0, 2)[..., None]
        for n in range(4 * WORDS):
            given[f"${UNITS * WORDS + 4 * WORDS * RAWS[unit] + n}"] = numbers[n]
            given[f"${UNITS * WORDS + 4 * WORDS * FACTORS[unit] + n}"] = np.broadcast_to(own[row_of[n]], shape).reshape(
                -1
            )
    for n in range(4 * WORDS):
        own = offset.reshape(-1, 2)[:, row_of[n], None, None]
        given[f"${UNITS * WORDS + 4 * WORDS * OFFSET + n}"] = np.broadcast_to(own, shape).reshape(-1)
    words = carry_out(PTX.value, given)
    codes = np.stack([words[f"${n}"] for n in range(UNITS * WORDS)]).astype(np.uint32)
    numbers = CODES[codes[:, None] >> np.uint32(8) * np.arange(4, dtype=np.uint32)[:, None] & np.uint32(0xFF)]
    made = numbers.reshape(UNITS, 4, 2, 4, *shape).transpose(4, 2, 5, 0, 6, 1, 3).reshape(rows, keys)
    exact = np.exp2(raw * factors.repeat(64, 1) + offset[:, None])
    values = torch.from_numpy(v / 0.01).to(torch.float8_e4m3fn).double().numpy() * 0.01

    def error(p: np.ndarray) -> float:
        return np.abs(p @ values / p.sum(1, keepdims=True) - want).sum() / np.abs(want).sum()

    rounded = torch.from_numpy(exact).float().to(torch.float8_e4m3fn).double().numpy()
    assert 0.03 < error(rounded) < 0.041
    assert error(rounded) < error(made) < 1.03 * error(rounded)


@pytest.mark.parametrize("offset", [-300.0, -70000.0, -(2.0**20)])
@pytest.mark.parametrize("factor", [FINE, LAST_FINE, LAST_BROAD, np.float32(0.3), np.float32(40.0)], ids=str)
def test_only_what_is_near_a_large_score_counts(factor, offset):
    """Scores as large as products can make them: in whole steps they go far beyond sixteen bits."""
    raw = np.clip(np.round((4.0 - offset) / np.float64(factor)) - np.array([0, 1, 3]), -(2**21), 2**21)
    exponents = raw * np.float64(factor) + offset
    kept = exponents < 9
    made = by_way(raw.astype(np.int32), factor, np.float32(offset), raw.size)
    for way, numbers in made.items():
        want = np.exp2(exponents)
        bound = np.where(want < 2.0**-6, 2.0**-9, 0.09 * want) + want * 2e-7 * abs(offset)
        assert (np.abs(numbers - want)[:, kept] <= bound[kept]).all(), way
    lowest = by_way(np.full(1, -(2**21), np.int32), factor, np.float32(offset), 1)
    assert all((numbers == 0).all() for numbers in lowest.values())


def test_nothing_overflows_and_what_is_small_is_zero():
    top = 8.75 + np.arange(-64, 1) / (1 << 12)
    small = np.array([-500.0, -300.0, -30.0, -12.0])
    for numbers in powers(top).values():
        assert np.isfinite(numbers).all()
        assert (numbers >= 384).all()
    for numbers in powers(small).values():
        assert (numbers == 0).all()


@pytest.mark.parametrize(("factor", "offset"), [(np.nan, 0.0), (0.001, np.nan)])
def test_nan_stays_nan_in_exact_words(factor, offset):
    """Which every row of every unit has."""
    numbers = by_way(np.ones(1, np.int32), np.float32(factor), np.float32(offset), 1)
    assert np.isnan(numbers[EXACT]).all()
    assert all({group[word] for word in (0, 1)} == {EXACT} for group in GROUPS)


@pytest.mark.parametrize("factor", [FINE, BROAD, BROADEST], ids=str)
def test_scores_beyond_all_measure_saturate(factor):
    """Roundings may lift an exponent to 9. Bits that became a sign or an infinity would be wrong without a word."""
    for numbers in powers(np.full(8, 9.0), factor).values():
        assert (numbers == 448).all()


@pytest.mark.parametrize(("large", "alike"), [(BROAD, 0.9), (BROADEST, 0.4)], ids=str)
def test_one_thread_of_many_with_a_large_factor_takes_its_warp_along(large, alike):
    """The others' numbers are made otherwise then, and no worse."""
    exponents = np.linspace(-5, 8, 32)
    raw = np.round((exponents + 3) / np.float64(FINE)).astype(np.int32)
    factor = np.where(np.arange(32) == 7, large, FINE)
    with_one, without = (by_way(raw, x.astype(np.float32), np.float32(-3), 32) for x in (factor, np.full(32, FINE)))
    others = np.arange(32) != 7
    for way in (EXACT, CHORD, ARC):
        assert np.isclose(with_one[way][:, others], without[way][:, others], rtol=0.13).all()
        assert (with_one[way] == without[way])[:, others].mean() > alike
    assert (with_one[EXACT][:, others] == without[EXACT][:, others]).all()


@pytest.mark.parametrize("path", range(3))
def test_every_operand_is_there(path):
    inputs = OPERANDS.value.split(",")
    assert inputs.count("=&r") == UNITS * WORDS
    assert len(inputs) == UNITS * WORDS + len(KINDS) * NUMBERS.value
    code = PTX.value.split("bra.uni MADE")[path]
    assert all(len(re.findall(rf"mov\.b32 \${word}, ", code)) == 1 for word in range(UNITS * WORDS))
    read = [int(n) - UNITS * WORDS for n in re.findall(r"\$(\d+)", code) if int(n) >= UNITS * WORDS]
    assert sorted(n for n in read if n // NUMBERS.value in RAWS) == list(range(UNITS * NUMBERS.value))


def test_all_rows_are_made_alike():
    """A thread's words belong to two rows in turns: in two groups each row has as many of each way."""
    words = [word for group in GROUPS for word in group]
    assert sorted(words[::2]) == sorted(words[1::2])
    assert words.count(CHORD) * 8 == len(words)
