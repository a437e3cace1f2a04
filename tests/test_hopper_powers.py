"""What the PTX of `powers` computes, word by word, carried out in numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from gluon_interpreter.ptx import carry_out

from sparge.backends.hopper._powers import (
    ARC,
    CHORD,
    EXACT,
    FIRST,
    GROUPS,
    NUMBERS,
    OPERANDS,
    PTX,
    PTX_NEXT,
    WHOLE,
    WORDS,
)

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def powers(exponents: np.ndarray) -> dict[str, np.ndarray]:
    """2^x by each of the three ways, from integers times a factor plus an offset."""
    factor, offset = np.float32(2.0**-12), np.float32(-3)  # any would do
    raw = np.round((exponents - offset) / factor).astype(np.int32)
    row = [raw, factor, offset, np.float32(factor * WHOLE.value), np.float32(offset * WHOLE.value + FIRST.value)]
    return by_way(row, exponents.size)


def by_way(row: list[np.ndarray], count: int) -> dict[str, np.ndarray]:
    """What both groups make of the same operands for all numbers."""
    made: dict[str, list[np.ndarray]] = {EXACT: [], CHORD: [], ARC: []}
    names = [f"${WORDS + n}" for n in range(5 * NUMBERS.value)]
    values = [x for tensor in row for x in np.broadcast_to(tensor, (NUMBERS.value, count))]
    for group, code in zip(GROUPS, (PTX, PTX_NEXT), strict=True):
        words = carry_out(code.value, dict(zip(names, values, strict=True)))
        for word, way in enumerate(group):
            made[way] += [CODES[(words[f"${word}"] >> np.uint32(8 * byte)) & np.uint32(0xFF)] for byte in range(4)]
    return {way: np.stack(x) for way, x in made.items()}


def test_each_way_errs_as_much_as_is_said():
    exponents = np.random.default_rng(0).integers(-5 << 12, int(8.75 * (1 << 12)) + 1, 40000) / (1 << 12)
    made = powers(exponents)
    for way, (spread, largest) in {EXACT: (0.0268, 0.06), CHORD: (0.0318, 0.081), ARC: (0.0272, 0.062)}.items():
        off = made[way] / np.exp2(exponents) - 1
        assert np.abs(off).max() < largest, way
        assert np.sqrt((off**2).mean()) < spread, way
        assert abs(off.mean()) < 0.001, way  # or a mixture would lean towards some keys


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


def test_nothing_overflows_and_what_is_small_is_zero():
    top = 8.75 + np.arange(-64, 1) / (1 << 12)
    small = np.array([-1e5, -4000.0, -300.0, -30.0, -12.0])
    for numbers in powers(top).values():
        assert np.isfinite(numbers).all()
        assert (numbers >= 384).all()
    for numbers in powers(small).values():
        assert (numbers == 0).all()


def test_nan_stays_nan():
    nan = np.full(1, np.nan, np.float32)
    for numbers in by_way([np.ones(1, np.int32), nan, nan, nan, nan], 1).values():
        assert np.isnan(numbers).all()


def test_scores_beyond_all_measure_saturate():
    """Roundings may lift an exponent to 9. Bits that became a sign or an infinity would be wrong without a word."""
    for numbers in powers(np.full(8, 9.0)).values():
        assert (numbers == 448).all()


@pytest.mark.parametrize("code", [PTX, PTX_NEXT])
def test_every_operand_is_there(code):
    """Two of the five are left alone by exact words, the other two by the rest."""
    outputs, inputs = OPERANDS.value.count("=&r"), len(OPERANDS.value.split(","))
    assert all(len(re.findall(rf"mov\.b32 \${word}, ", code.value)) == 1 for word in range(outputs))
    assert outputs == WORDS
    read = sorted({int(n) for n in re.findall(r"\$(\d+)", code.value)} - set(range(WORDS)))
    assert read[: NUMBERS.value] == list(range(WORDS, WORDS + NUMBERS.value))
    assert len(read) == 3 * NUMBERS.value
    assert read[-1] == inputs - 1


def test_all_rows_are_made_alike():
    """A thread's words belong to two rows in turns: in two groups each row has as many of each way."""
    words = [word for group in GROUPS for word in group]
    assert sorted(words[::2]) == sorted(words[1::2])
    assert words.count(EXACT) * 2 == len(words)
    assert words.count(CHORD) * 8 == 3 * len(words)
