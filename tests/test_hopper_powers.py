"""What the PTX of both halves of a step computes, number by number, carried out in numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from gluon_interpreter.ptx import carry_out

from sparge.backends.hopper import launch
from sparge.backends.hopper._powers import (
    ALL_OPERANDS,
    ARC,
    AT_BEST,
    CHORD,
    FAR,
    FIRST_OPERANDS,
    GROUPS,
    HALVES,
    NUMBERS,
    OCTAVE,
    OF_KNOWN_BEST,
    ONE_OPERANDS,
    ONE_UNIT,
    SECOND_OPERANDS,
    SLACK,
    STATE,
    TWO_OPERANDS,
    TWO_UNITS,
    WORDS,
    Program,
    _ptx,
    _row,
)

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
# Factors that count single steps, four at once, and that make exponentials; close to the largest of the first two
FINE, BROAD, BROADEST = np.float32(2.0**-12), np.float32(2.0**-10), np.float32(2.0**-6)
LAST_FINE, LAST_BROAD = np.float32(0.000488), np.float32(0.00195)
UNSET = -1.0e30
AHEAD = 2  # octaves of a first best
ROW_OF = np.arange(NUMBERS) // 4 % 2  # of a thread's two


PTX = {program: _ptx(program) for program in (*HALVES, OF_KNOWN_BEST, ONE_UNIT, TWO_UNITS)}
UNITS = range(4)
MOVING = {"halves": HALVES, "one": (ONE_UNIT,), "two": (TWO_UNITS,)}


class Step(NamedTuple):
    """What a step makes: numbers [units, 32, ...], as many of each as a thread holds, the rest [2, ...] of its rows."""

    numbers: np.ndarray
    best: np.ndarray
    start: np.ndarray
    alpha: np.ndarray


def start_of(best: np.ndarray) -> np.ndarray:
    return (AT_BEST - np.rint(np.clip(best, -FAR, FAR).astype(np.float64) * OCTAVE)).astype(np.int32)


def step(raws: np.ndarray, q: Any, k: Any, best: Any, programs: tuple[Program, ...] = HALVES) -> Step:
    """Of raw scores [units, 32, ..., 32 lanes], of which four hold a row, scales [2, ...] of rows and [units, ...]."""
    shape = raws.shape[2:]
    q, best = (np.broadcast_to(np.asarray(x, np.float32), (2, *shape)) for x in (q, best))
    k = [np.broadcast_to(np.asarray(x, np.float32), shape) for x in k]
    with np.errstate(all="ignore"):
        most = q * np.maximum.reduce(k)
    state = {"best": best, "start": start_of(best), "alpha": np.ones((2, *shape), np.float32)}
    words: dict[str, list[np.ndarray]] = {}
    ahead = np.full((2, *shape), AHEAD, np.int32)
    for program in programs:
        outputs, inputs = program.places()
        units = {"raw": raws.astype(np.int32), "k": k, "logs": [words.get(f"logs{unit}") for unit in UNITS]}
        given = {}
        for name, registers in inputs.items():
            for n, register in enumerate(registers):
                if name[:-1] in units:
                    x = units[name[:-1]][int(name[-1])]
                    given[register] = x if name[:-1] == "k" else x[n]
                else:
                    given[register] = {
                        "q": q,
                        "most": most,
                        "peak": words.get("peak", [])[::4],
                        "ahead": ahead,
                        **state,
                    }[name][_row(n)]
        after = carry_out(PTX[program], given)
        words = {name: [np.broadcast_to(after[x], shape) for x in registers] for name, registers in outputs.items()}
        for name in STATE if program.moves else ():
            state[name] = np.stack([words[name][4 * row] for row in (0, 1)])
            # all that a thread holds of a row is told the same
            assert all(np.array_equal(x, words[name][4 * _row(n)], equal_nan=True) for n, x in enumerate(words[name]))
    made = [np.stack([words[f"made{unit}"][n // 4] >> (8 * (n % 4)) for n in range(NUMBERS)]) for unit in program.made]
    return Step(CODES[np.stack(made).astype(np.uint32) & 255], *(state[name] for name in ("best", "start", "alpha")))


def by_way(raw: np.ndarray, factor: Any, best: Any) -> dict[str, np.ndarray]:
    """What each way makes of one number, for many of them: none may exceed its own best by more than the slack."""
    count = -raw.size % 32
    raw, best = (np.pad(np.broadcast_to(x, raw.shape), (0, count), "edge").reshape(-1, 32) for x in (raw, best))
    made = step(np.broadcast_to(raw, (4, NUMBERS, *raw.shape)), factor, np.ones(4), best).numbers
    ways = np.array([[GROUPS[unit % 2][n // 4] for n in range(NUMBERS)] for unit in UNITS])
    return {way: made[ways == way].reshape(-1, raw.size)[:, : raw.size - count] for way in (CHORD, ARC)}


def of_exponents(exponents: np.ndarray, factor: np.float32 = FINE, best: float = 11.0) -> dict[str, np.ndarray]:
    """2^x by each way, from whole numbers times a factor."""
    return by_way(np.round((exponents - 8 + best) / np.float64(factor)).astype(np.int32), factor, np.float32(best))


@pytest.mark.parametrize("factor", [FINE, LAST_FINE, BROAD, LAST_BROAD, BROADEST], ids=str)
def test_each_way_errs_as_much_as_is_said(factor):
    rng = np.random.default_rng(0)
    best = rng.uniform(10, 12, 100_000).astype(np.float32)
    raw = np.round((rng.uniform(-5, 8.74, best.size) - 8 + best) / np.float64(factor)).astype(np.int32)
    exponents = raw * np.float64(factor) + 8 - best
    kept = exponents < 8.75
    made = by_way(raw[kept], factor, best[kept])
    bounds = {CHORD: (0.0318, 0.086), ARC: (0.0272, 0.067)}
    for way, numbers in made.items():
        spread, largest = (0.0268, 0.06) if factor == BROADEST else bounds[way]
        off = numbers / np.exp2(exponents[kept]) - 1
        assert np.abs(off).max() < largest, way
        assert np.sqrt((off**2).mean()) < spread, way
        assert abs(off.mean()) < 0.0025, way  # or a mixture would lean towards some keys


@pytest.mark.parametrize("octave", range(-9, -5))
def test_small_numbers_are_as_heavy_as_they_should_be(octave):
    """A long text has many, next to a first token that takes most of a row: together they must not get lost."""
    exponents = octave + np.arange(1 << 12) / (1 << 12)
    for way, numbers in of_exponents(exponents).items():
        assert abs(numbers.mean() / np.exp2(exponents).mean() - 1) < (0.03 if octave == -9 else 0.01), way


@pytest.mark.parametrize("factor", [FINE, BROAD, BROADEST], ids=str)
def test_whole_exponents_are_exact(factor):
    """Most of a row's weight may lie with the score that the others are relative to."""
    for numbers in of_exponents(np.arange(-5.0, 9.0), factor).values():
        assert (numbers == np.exp2(np.arange(-5.0, 9.0))).all()


@pytest.mark.parametrize("factor", [FINE, LAST_FINE, BROAD, LAST_BROAD, BROADEST], ids=str)
def test_the_score_that_others_are_relative_to_is_exact(factor):
    raw = np.random.default_rng(1).integers(-(1 << 15), 1 << 15, 20_000).astype(np.int32)
    best = (raw * np.float64(factor)).astype(np.float32)
    for way, numbers in by_way(raw, factor, best).items():
        assert (numbers == 256).all(), way


@pytest.mark.parametrize("programs", MOVING)
@pytest.mark.parametrize("factor", [FINE, BROAD, BROADEST], ids=str)
def test_a_score_far_above_all_others_is_exact(factor, programs):
    """Four threads hold a row: one of them has it, in any unit. If it is in the first, the best is ahead of it."""
    rng, units = np.random.default_rng(2), len(MOVING[programs][-1].made)
    for _ in range(8):
        raws = np.full((units, NUMBERS, 32), -(1 << 17), np.int32)
        unit, n, lane, raw = rng.integers(units), rng.integers(NUMBERS), rng.integers(32), rng.integers(-99, 1 << 16)
        raws[unit, n, lane] = raw
        made = step(raws, factor, np.ones(units), UNSET, MOVING[programs])
        row, score = _row(n), raw * np.float64(factor)
        best = made.best[row, lane // 4 * 4 : lane // 4 * 4 + 4]
        ahead = np.round(best - score)
        assert (np.abs(best - score - ahead) <= (4 if factor == BROAD else 1) / OCTAVE).all()
        assert made.numbers[unit, n, lane] == 256 / 2 ** ahead[0]
        assert ahead[0] in (0, AHEAD) if unit else ahead[0] == AHEAD
        assert (made.alpha == 0).all()  # nothing was seen before


@pytest.mark.parametrize("size", [2.0, 12.0, 60.0, 900.0])
@pytest.mark.parametrize("before", ["nothing", "less", "all"])
@pytest.mark.parametrize("programs", MOVING)
@pytest.mark.parametrize("factor", [FINE, LAST_FINE, BROAD, LAST_BROAD, BROADEST], ids=str)
def test_numbers_are_relative_to_the_best_that_moves(factor, programs, before, size):
    """By a little or beyond all that sixteen bits hold; what units before it have made moves along."""
    rng, units = np.random.default_rng(3), len(MOVING[programs][-1].made)
    raws = rng.standard_normal((units, NUMBERS, 12, 32)) * size / factor
    raws = np.clip(raws, -(2**21), 2**21).round().astype(np.int32)
    k = (1 - rng.random((units, 12, 1)) / 2).astype(np.float32)
    q = np.full((2, 12, 32), factor, np.float32)
    scores = raws * (np.float64(factor) * k[:, None])
    tops = np.stack([scores[:, row == ROW_OF].max((0, 1)) for row in (0, 1)])
    tops = tops.reshape(2, 12, 8, 4).max(-1).repeat(4, -1)
    drop = (rng.random((2, 12, 8)) * 3 * size).repeat(4, -1)
    given = {"nothing": np.full(tops.shape, UNSET), "less": tops - drop, "all": tops}[before].astype(np.float32)
    made = step(raws, q, k, given, MOVING[programs])
    rounding = 2 / OCTAVE * (4 if factor in (BROAD, LAST_BROAD) else 1)
    assert (made.best > tops - SLACK - rounding).all()
    assert (made.best <= np.maximum(tops + AHEAD * (before == "nothing"), given) + rounding).all()
    assert np.allclose(made.alpha, np.exp2(given.astype(np.float64) - made.best), rtol=1e-3, atol=1e-30)
    moved = made.best != given
    assert moved.any() == (before != "all")
    assert (np.abs(made.start - start_of(made.best)) <= 1).all()
    want = np.exp2(scores - made.best[ROW_OF] + 8)
    assert (want < 448 * 1.05).all()
    assert (np.abs(made.numbers - want) <= np.maximum(0.09 * want, 2.0**-9)).all()


@pytest.mark.parametrize("programs", MOVING)
def test_warps_of_any_scales_beside_each_other(programs):
    """Units and rows of scales that differ by up to ten octaves, rows of zeros, a best of any size before."""
    rng, units = np.random.default_rng(5), len(MOVING[programs][-1].made)
    for _ in range(20):
        k = (2.0 ** (rng.random((units, 4, 1)) * rng.choice([0, 4, 10]))).astype(np.float32)
        there = (rng.random((2, 4, 8)) > 0.1).repeat(4, -1)
        q = np.where(there, 2.0 ** rng.choice([-16, -12, -10, -6]), 0).astype(np.float32)
        raws = rng.standard_normal((units, NUMBERS, 4, 32)) * 2.0 ** rng.integers(2, 20)
        raws = np.clip(raws, -(2**21), 2**21).round().astype(np.int32)
        scores = raws * (q.astype(np.float64)[ROW_OF][None] * k[:, None])
        tops = np.stack([scores[:, row == ROW_OF].max((0, 1)) for row in (0, 1)]).reshape(2, 4, 8, 4).max(-1)
        best = tops - rng.random((2, 4, 8)) * 2.0 ** rng.integers(0, 12) + rng.choice([0, 5])
        best = np.where(rng.random((2, 4, 8)) < 0.5, UNSET, best).repeat(4, -1)
        made = step(raws, q, k, best, MOVING[programs])
        want = np.exp2(scores - made.best[ROW_OF] + 8)
        bound = np.maximum(0.1 * want, 2.0**-9) + want * np.abs(made.best[ROW_OF]) * 4e-7
        assert (np.abs(made.numbers - want) <= bound).all()
        assert ((made.alpha >= 0) & (made.alpha <= 1)).all()


@pytest.mark.parametrize("factor", [FINE, BROAD, BROADEST], ids=str)
def test_a_row_that_does_not_jump_stays_as_it_is_beside_one_that_does(factor):
    rng = np.random.default_rng(4)
    raws = (rng.standard_normal((4, NUMBERS, 32)) / factor).round().astype(np.int32)
    calm = step(raws, factor, np.ones(4), 6.0)
    raws[2, 1, 9] = round(30 / factor)  # of the third unit, in row 0 of threads 8 to 11
    loud = step(raws, factor, np.ones(4), 6.0)
    there = np.zeros((4, NUMBERS, 32), bool)
    there[:, ROW_OF == 0, 8:12] = True
    assert (loud.numbers[~there] == calm.numbers[~there]).all()
    assert loud.numbers[2, 1, 9] == 256
    there[2, 1, 9] = False
    assert (loud.numbers[there] == 0).all()
    for row in (0, 1):
        jumps = (row == 0) & (np.arange(32) // 4 == 2)
        assert (loud.best[row] == np.where(jumps, 30, 6)).all()
        assert np.allclose(loud.alpha[row], np.where(jumps, 2.0**-24, 1))


def test_the_mixture_adds_little_to_the_error_of_attention():
    """Over random inputs, relative L1 against float64, with int8 scores and e4m3 values."""
    rng, rows, keys, dim = np.random.default_rng(2), 64, 8192, 128
    q, k, v = (rng.standard_normal((n, dim)) for n in (rows, keys, keys))
    weights = np.exp(q @ k.T / dim**0.5)
    want = weights @ v / weights.sum(1, keepdims=True)
    q_scale, k_scale = np.abs(q).max(1) / 127, np.abs(k).reshape(-1, 64 * dim).max(1) / 127
    raw = (np.round(q / q_scale[:, None]) @ np.round(k / k_scale.repeat(64)[:, None]).T).astype(np.int32)
    q_scale = (q_scale * (1.4426950408889634 / dim**0.5)).astype(np.float32)
    scores = raw * (q_scale[:, None].astype(np.float64) * k_scale.repeat(64))
    # Of each warp sixteen rows: a thread has two, and of 64 keys sixteen numbers in words of four.
    steps = keys // 256
    of_threads = np.arange(rows * keys).reshape(
        4, 2, 8, steps, 4, 4, 4, 4
    )  # warp, row, lane, step, unit, word, lane, n
    of_threads = of_threads.transpose(3, 4, 5, 1, 7, 0, 2, 6).reshape(steps, 4, NUMBERS, 4, 32)
    q_of_threads = q_scale.reshape(4, 2, 8).transpose(1, 0, 2).repeat(4, -1)
    made, best, shrunk = np.zeros(rows * keys), np.full((2, 4, 32), UNSET), np.ones((steps, 2, 4, 32))
    for n in range(steps):
        k = k_scale[4 * n : 4 * n + 4, None, None]
        numbers, best, _, alpha = step(raw.reshape(-1)[of_threads[n]], q_of_threads, k, best)
        made[of_threads[n]] = numbers
        shrunk[:n] *= alpha
    made = made.reshape(rows, keys) * shrunk[..., ::4].transpose(2, 1, 3, 0).reshape(rows, -1).repeat(256, 1)
    exact = np.exp2(scores - scores.max(1, keepdims=True) + 8)
    values = torch.from_numpy(v / 0.01).to(torch.float8_e4m3fn).double().numpy() * 0.01

    def error(p: np.ndarray) -> float:
        return np.abs(p @ values / p.sum(1, keepdims=True) - want).sum() / np.abs(want).sum()

    rounded = torch.from_numpy(exact).float().to(torch.float8_e4m3fn).double().numpy()
    assert 0.03 < error(rounded) < 0.041
    assert error(made) < 1.03 * error(rounded)


@pytest.mark.parametrize("best", [300.0, 70000.0, 2.0**20])
@pytest.mark.parametrize("factor", [FINE, LAST_FINE, LAST_BROAD, np.float32(0.3), np.float32(40.0)], ids=str)
def test_only_what_is_near_a_large_score_counts(factor, best):
    """Scores as large as products can make them: in whole steps they go far beyond sixteen bits."""
    raw = np.clip(np.round((best - 4) / np.float64(factor)) - np.array([0, 1, 3]), -(2**21), 2**21)
    exponents = raw * np.float64(factor) + 8 - best
    for way, numbers in by_way(raw.astype(np.int32), factor, np.float32(best)).items():
        want = np.exp2(exponents)
        bound = np.where(want < 2.0**-6, 2.0**-9, 0.09 * want) + want * 2e-7 * abs(best)
        assert (np.abs(numbers - want) <= bound).all(), way
    lowest = by_way(np.full(1, -(2**21), np.int32), factor, np.float32(best))
    assert all((numbers == 0).all() for numbers in lowest.values())


@pytest.mark.parametrize("factor", [FINE, BROAD, BROADEST], ids=str)
def test_nothing_overflows_and_what_is_small_is_zero(factor):
    for numbers in of_exponents(8.74 + np.arange(-64, 1) / (1 << 12), factor).values():
        assert np.isfinite(numbers).all()
        assert (numbers >= 384).all()
    for numbers in of_exponents(np.array([-500.0, -300.0, -30.0, -12.0]), factor).values():
        assert (numbers == 0).all()


@pytest.mark.parametrize(("q", "k"), [(np.nan, 1.0), (0.001, np.nan)])
@pytest.mark.parametrize("best", [UNSET, 3.0])
def test_of_a_scale_that_is_nan_numbers_are(q, k, best):
    """Of its row or its unit, and no others."""
    scales, units = np.full((2, 1), 0.001), np.full((4, 1), 1.0)
    scales[1], units[2] = q, k
    made = step(np.ones((4, NUMBERS, 32), np.int32), scales, units, best)
    broken = np.isnan(scales)[ROW_OF][None] | np.isnan(units)[:, None]
    assert (np.isnan(made.numbers).all(-1) == broken[..., 0]).all()
    assert np.isfinite(made.numbers[~broken[..., 0]]).all()
    assert not np.isnan(made.best).any()


@pytest.mark.parametrize(("large", "alike"), [(BROAD, 0.9), (BROADEST, 0.4)], ids=str)
def test_one_thread_of_many_with_a_large_factor_takes_its_warp_along(large, alike):
    """The others' numbers are made otherwise then, and no worse."""
    exponents = np.broadcast_to(np.linspace(-5, 8, 32), (4, NUMBERS, 32))
    factor = np.where(np.arange(32) == 7, large, FINE)
    fine = np.round(exponents / np.float64(FINE)).astype(np.int32)
    raws = np.where(np.arange(32) == 7, np.round(exponents / np.float64(large)).astype(np.int32), fine)
    with_one, without = step(raws, factor, np.ones(4), 8.0), step(fine, FINE, np.ones(4), 8.0)
    assert np.isclose(with_one.numbers, without.numbers, rtol=0.13).all()
    assert (with_one.numbers == without.numbers)[..., np.arange(32) != 7].mean() > alike


@pytest.mark.parametrize("factor", [FINE, BROAD, BROADEST], ids=str)
def test_of_a_known_best_numbers_are_what_both_halves_make(factor):
    rng = np.random.default_rng(5)
    raws = (rng.standard_normal((4, NUMBERS, 8, 32)) * 3 / factor).round().astype(np.int32)
    best = (raws * np.float64(factor)).max()
    known, made = (step(raws, factor, np.ones(4), best, x) for x in ((OF_KNOWN_BEST,), HALVES))
    # With exponentials those of the first half are rounded to 16 bits on their way.
    assert (known.numbers == made.numbers).mean() > (0.99 if factor == BROADEST else 1 - 1e-9)
    assert np.isclose(known.numbers, made.numbers, rtol=0.13, atol=2.0**-9).all()
    assert (made.alpha == 1).all()


OPERANDS = {
    HALVES[0]: FIRST_OPERANDS, HALVES[1]: SECOND_OPERANDS, OF_KNOWN_BEST: ALL_OPERANDS, ONE_UNIT: ONE_OPERANDS,
    TWO_UNITS: TWO_OPERANDS,
}  # fmt: skip


@pytest.mark.parametrize("program", OPERANDS, ids=lambda program: f"{program.units}")
def test_every_operand_has_its_registers(program):
    """As the compiler counts them: numbers of 8 and 16 bits lie together in one."""
    kinds, (outputs, inputs) = OPERANDS[program].value.split(","), program.places()
    places = [register for registers in (*outputs.values(), *inputs.values()) for register in registers]
    assert places == [f"${n}" for n in range(len(kinds))]
    assert sum(kind.startswith("=&") for kind in kinds) == sum(map(len, outputs.values()))
    for name, registers in (*outputs.items(), *inputs.items()):
        together = {"logs": 2, "made": 4}.get(name[:-1], 1)
        assert len(registers) == NUMBERS // together
    finished = [place for name, own in outputs.items() if name.startswith("made") for place in own]
    for path in PTX[program].split("bra.uni MADE"):
        assert all(path.count(f" {place}, ") == 1 for place in finished)


def test_all_rows_are_made_alike():
    """A thread's words belong to two rows in turns: in two groups each row has as many of each way."""
    words = [word for group in GROUPS for word in group]
    assert sorted(words[::2]) == sorted(words[1::2])
    assert words.count(CHORD) * WORDS == len(words)


def test_all_steps_have_the_same_slack():
    assert launch.SLACK == SLACK
