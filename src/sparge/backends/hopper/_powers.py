"""Powers of two as e4m3 numbers, made in three ways that keep different units of a multiprocessor busy.

A word is four numbers of one row. EXACT words take the exponential unit: eight cycles for a warp's instruction, and
what needs the result waits for long. CHORD words take none. Sixty-four times the exponent, as a whole number, is a
16-bit float in which 2^f is 1 + f inside an octave, but for a shift of its bits: 4 % too low to 2 % too high about its
mean, 1.8 % by root mean square, where rounding to e4m3 has 2.6 %. ARC words bend that line by a parabola: .6 %, and up
to 2.5 just above powers of two, to which e4m3 rounds them anyway.

Half of the words are exact and three in eight chords: as many as keep attention over random inputs within .040 of
float64 (with exact words alone it is .039). A thread's words belong to two rows in turns; the arc's place differs from
one 64 keys to the next, so that all rows are made alike.
"""

import math
import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EXACT, CHORD, ARC = "exact", "chord", "arc"
GROUPS = (
    (EXACT, EXACT, EXACT, EXACT, CHORD, CHORD, CHORD, ARC), (EXACT, EXACT, EXACT, EXACT, CHORD, CHORD, ARC, CHORD),
)  # fmt: skip
WORDS = len(GROUPS[0])
NUMBERS = gl.constexpr(4 * WORDS)  # that a thread makes at once
OCTAVE = 64
CHORD_MEAN = 3.68  # 64ths of an octave that a chord is too high by, on average

# A whole number below 2,048, times 2^-24, is a 16-bit float whose bits are that number: conversion rounds, and clamps
# at 0 from below. Four bits further left they are exponent and upper bits of a 16-bit float again, 1 being 15 * 64.
# Half a 64th is added there, so that e4m3 finds no ties to round to even.
WHOLE = gl.constexpr(OCTAVE * 2.0**-24)
FIRST = gl.constexpr((15 * OCTAVE - CHORD_MEAN - 0.5) * 2.0**-24)


def _bits(x: float) -> int:
    """Of a 16-bit float."""
    return int(struct.unpack("<H", struct.pack("<e", x))[0])


def _rounded(x: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", x))[0])


# An arc is above its chord, so lowered, by (BEND x)^2 - CROSS^2, x being how far it is from the middle of its octave;
# numbers inside an octave are 1 + n / 1,024. All three are fitted; the chord was lowered, so the middle is not 32.
BEND = _rounded(1024 * 2.0**-12 * math.sqrt(5.49) / (OCTAVE // 2))
CROSS = 2.0**-12 * math.sqrt(1.75)
MIDDLE = 1 + 29 / 1024
CONSTANTS = {  # in both halves of a register
    name: f"0x{bits:04X}{bits:04X}"
    for name, bits in {
        "inside": OCTAVE - 1, "one": _bits(1), "bend": _bits(BEND),
        "left": _bits(-BEND * MIDDLE - CROSS), "right": _bits(-BEND * MIDDLE + CROSS),
    }.items()
}  # fmt: skip


def _exponent(number: int, way: str) -> str:
    """y: a number's exponent, as it is or whole."""
    tensors = (0, 1, 2) if way == EXACT else (0, 3, 4)
    raw, factor, offset = (f"${WORDS + 4 * WORDS * tensor + number}" for tensor in tensors)
    return f"cvt.rn.f32.s32 y{number}, {raw}; fma.rn.f32 y{number}, y{number}, {factor}, {offset}; "


def _sixteen_bits(pair: int, way: str) -> str:
    """a: two powers."""
    a, x, z = f"a{pair}", f"x{pair}", f"z{pair}"
    lines = [f"cvt.rn.relu.f16x2.f32 {a}, y{2 * pair + 1}, y{2 * pair}"]
    if way == ARC:
        lines += [f"lop3.b32 {x}, {a}, inside, one, 0xEA"]  # (a & inside) | one
        lines += [f"fma.rn.f16x2 {z}, {x}, bend, left", f"fma.rn.f16x2 {x}, {x}, bend, right"]
        lines += [f"fma.rn.f16x2 {a}, {x}, {z}, {a}"]
    return "; ".join([*lines, f"mad.lo.u32 {a}, {a}, 16, 0x00080008"]) + "; "


def _ptx(group: tuple[str, ...]) -> str:
    """For a thread's numbers: first exponentials, then what needs none and hides them, then what waits for them."""
    exponentials, arithmetic, conversions = "", "", ""
    for word, way in enumerate(group):
        low, high = 2 * word, 2 * word + 1
        for number in range(4 * word, 4 * word + 4):
            if way == EXACT:
                exponentials += _exponent(number, way) + f"ex2.approx.ftz.f32 y{number}, y{number}; "
            else:
                arithmetic += _exponent(number, way)
        packed = ""
        for pair in (low, high):
            if way == EXACT:
                packed += f"cvt.rn.satfinite.e4m3x2.f32 e{pair}, y{2 * pair + 1}, y{2 * pair}; "
            else:
                arithmetic += _sixteen_bits(pair, way)
                packed += f"cvt.rn.satfinite.e4m3x2.f16x2 e{pair}, a{pair}; "
        packed += f"mov.b32 ${word}, {{e{low}, e{high}}}; "
        if way == EXACT:
            conversions += packed
        else:
            arithmetic += packed
    pairs = 2 * WORDS
    registers = f".reg .f32 y<{2 * pairs}>; .reg .b16 e<{pairs}>; .reg .b32 a<{pairs}>, x<{pairs}>, z<{pairs}>; "
    registers += f".reg .b32 {', '.join(CONSTANTS)}; "
    constants = "".join(f"mov.b32 {name}, {bits}; " for name, bits in CONSTANTS.items())
    return "{ " + registers + constants + exponentials + arithmetic + conversions + "}"


PTX, PTX_NEXT = (gl.constexpr(_ptx(group)) for group in GROUPS)
# Some words are written before all numbers are read: they may not take a number's register.
OPERANDS = gl.constexpr(",".join(["=&r"] * WORDS + ["r"] * (4 * WORDS) + ["f"] * (16 * WORDS)))


@gluon.jit
def powers(raw, factor, offset, NEXT: gl.constexpr):
    """e4m3: 2^(raw * factor + offset), of int32, a factor per row, and an offset; no exponent may exceed 9.

    NaN stays NaN; what is too small for e4m3 is 0. Every other 64 keys are NEXT.
    """
    CODE: gl.constexpr = PTX_NEXT if NEXT else PTX
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, raw.type.layout)
    factor = gl.expand_dims(gl.convert_layout(factor, OF_ROWS, assert_trivial=True), 1)
    whole_factor, raw = gl.broadcast(factor * WHOLE, raw)
    factor, raw = gl.broadcast(factor, raw)
    numbers = [raw, factor, offset, whole_factor, offset * WHOLE + FIRST]
    return gl.inline_asm_elementwise(CODE, OPERANDS, numbers, dtype=gl.float8e4nv, is_pure=True, pack=NUMBERS)
