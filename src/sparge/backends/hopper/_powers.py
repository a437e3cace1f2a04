"""Powers of two as e4m3 numbers, made in three ways that keep different units of a multiprocessor busy.

A word is four numbers of one row. EXACT words take the exponential unit, which needs eight cycles for a warp's
instruction. The others take no floats until the end: a score times its factor, in whole 1,024ths of an octave, is a
16-bit float in which 2^f is 1 + f inside an octave. That is a CHORD, 4 % too low to 2 % too high about its mean, 1.8 %
by root mean square, where rounding to e4m3 has 2.6 %. An ARC is the sum of two chords whose octaves begin half an
octave apart: 1 % too low to .5 % too high, .4 % by root mean square. Instructions a number: 3.5, 2 and 3.

The mixture adds 1 to 3 % to the error of attention over random inputs (.039 or .040 with exact words alone); two chords
in eight would add 3, three 4. A thread's words belong to two rows in turns: two groups, one after the other, make all
rows alike.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EXACT, CHORD, ARC = "exact", "chord", "arc"
GROUPS = (
    (EXACT, EXACT, CHORD, ARC, ARC, ARC, ARC, ARC), (EXACT, EXACT, ARC, CHORD, ARC, ARC, ARC, ARC),
)  # fmt: skip
WORDS = len(GROUPS[0])
NUMBERS = gl.constexpr(4 * WORDS)  # of a thread and 64 keys
UNITS = 4  # of 64 keys in a step
RAWS, FACTORS, OFFSET = range(4), range(4, 8), 8  # tensors that are given
KINDS = ("r",) * 4 + ("f",) * 5
OCTAVE = 1024  # steps of 16-bit floats from one power of two to the next

# A factor becomes a share of 2^32: the upper half of its product with a score counts steps, rounded down. Shares are
# read off the 23 lower bits of a float, so factors end at a 2,048th of an octave. Broader ones, up to a 512th, count
# four steps at once; with more, a chord of the row's best could fall below a power of two. Beyond, all are exact.
COARSE = 4
FINEST, COARSEST = 2.0**-11 * 0.9995, 2.0**-9 * 0.9995
ABOVE_SHARES = 2.0**23
# Where counting begins is read off the lower bits beside 1.5 * 2^23. Of factors that fit no score exceeds half of
# FAR octaves, or of four FAR: what is relative to a best beyond is 0.
ABOVE_STEPS, ABOVE_STEPS_BITS = 1.5 * 2.0**23, 0x4B400000
FAR = 4096 - 64

# 1 is 15 octaves above the smallest number. A chord is 58.9 steps too high on average, the sum of two an octave more.
ONE = 15 * OCTAVE - 59
APART = OCTAVE // 2
LOWER = OCTAVE + APART  # where an arc's lower chord begins, below a chord


def _twice(bits: int) -> str:
    """In both halves of a register."""
    return f"0x{bits:04X}{bits:04X}"


def _half(x: float) -> int:
    """Bits of a 16-bit float."""
    return int(struct.unpack("<H", struct.pack("<e", x))[0])


def _single(x: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _operand(tensor: int, number: int) -> str:
    return f"${UNITS * WORDS + 4 * WORDS * tensor + number}"


def _words(way: str, row: int | None = None) -> list[tuple[int, int]]:
    """The units and words of those made in a way, of one of a thread's rows or of both."""
    every = [(unit, word) for unit in range(UNITS) for word in range(WORDS)]
    return [(unit, word) for unit, word in every if GROUPS[unit % 2][word] == way and row in (None, word % 2)]


def _joined(unit: int, word: int) -> str:
    """A word of its two pairs."""
    return f"mov.b32 ${WORDS * unit + word}, {{e{unit}_{2 * word}, e{unit}_{2 * word + 1}}}; "


def _powers(unit: int, word: int) -> str:
    """By the exponential unit."""
    code = ""
    for n in range(4 * word, 4 * word + 4):
        raw, factor, offset = (_operand(tensor, n) for tensor in (RAWS[unit], FACTORS[unit], OFFSET))
        y = f"y{unit}_{n}"
        code += f"cvt.rn.f32.s32 {y}, {raw}; fma.rn.f32 {y}, {y}, {factor}, {offset}; ex2.approx.ftz.f32 {y}, {y}; "
    return code


def _packed(unit: int, word: int) -> str:
    """The word of these."""
    code = ""
    for pair in (2 * word, 2 * word + 1):
        high, low = f"y{unit}_{2 * pair + 1}", f"y{unit}_{2 * pair}"
        code += f"cvt.rn.satfinite.e4m3x2.f32 e{unit}_{pair}, {high}, {low}; "
    return code + _joined(unit, word)


def _line(unit: int, word: int, way: str, coarse: int) -> str:
    """A word of chords or arcs."""
    code, row = "", word % 2
    for pair in (2 * word, 2 * word + 1):
        a, x, pairs = f"a{unit}_{pair}", f"x{unit}_{pair}", (2 * pair, 2 * pair + 1)
        for n in pairs:
            code += f"mad.hi.s32 n{unit}_{n}, {_operand(RAWS[unit], n)}, share{unit}_{row}, {way}{row}; "
        code += f"cvt.pack.sat.u16.s32 {a}, n{unit}_{pairs[1]}, n{unit}_{pairs[0]}; "
        if coarse > 1:  # products are rounded down: half a step more
            code += f"mad.lo.u32 {a}, {a}, {coarse}, {_twice(coarse // 2)}; "
        if way == ARC:
            code += f"add.u32 {x}, {a}, {_twice(APART)}; fma.rn.f16x2 {a}, {a}, root, {x}; "
        code += f"cvt.rn.satfinite.e4m3x2.f16x2 e{unit}_{pair}, {a}; "
    return code + _joined(unit, word)


def _scales(coarse: int) -> str:
    """What factors and offsets come to in steps, for each unit and row."""
    code, steps = "", OCTAVE / coarse
    for unit in range(UNITS):
        for row in range(2):
            factor, share = _operand(FACTORS[unit], 4 * row), f"share{unit}_{row}"
            code += f"fma.rn.f32 wide, {factor}, {_single(steps * 2.0**24)}, {_single(ABOVE_SHARES)}; "
            code += f"mov.b32 {share}, wide; shl.b32 {share}, {share}, 8; "
    one, rest = divmod(ONE, coarse)
    for row in range(2):
        offset = _operand(OFFSET, 4 * row)
        if rest:
            code += f"add.f32 wide, {offset}, {_single(rest / OCTAVE)}; "
            offset = "wide"
        code += f"max.f32 wide, {offset}, {_single(-FAR * coarse)}; "
        code += f"fma.rn.f32 wide, wide, {_single(steps)}, {_single(ABOVE_STEPS + one)}; mov.b32 {CHORD}{row}, wide; "
        code += f"add.s32 {ARC}{row}, {CHORD}{row}, {-ABOVE_STEPS_BITS - LOWER // coarse}; "
        code += f"add.s32 {CHORD}{row}, {CHORD}{row}, {-ABOVE_STEPS_BITS}; "
    return code


def _all_words(coarse: int) -> str:
    """Each word of exponentials, a part of the others, which hide them, then what waits for them.

    What a row and way count from takes two registers: they come one after the other.
    """
    ways = ((0, CHORD), (0, ARC), (1, ARC), (1, CHORD))
    lines = [_line(*place, way, coarse) for row, way in ways for place in _words(way, row)]
    code, exact = _scales(coarse), _words(EXACT)
    part = len(lines) // len(exact)
    for i, place in enumerate(exact):
        code += _powers(*place) + "".join(lines[part * i : part * (i + 1)]) + _packed(*place)
    return code


def _registers() -> str:
    """Of every number, pair, unit and row."""
    numbers, pairs, rows = (
        [f"{u}_{n}" for u in range(UNITS) for n in range(many)] for many in (4 * WORDS, 2 * WORDS, 2)
    )
    each = {"f32 y": numbers, "b32 n": numbers, "b32 a": pairs, "b32 x": pairs, "b16 e": pairs, "b32 share": rows}
    each |= {f"b32 {way}": ["0", "1"] for way in (CHORD, ARC)}
    each |= {"f32 most": [""], "f32 wide": [""], "b32 root": [""], "pred broad": [""]}
    return "".join(f".reg .{kind}{f', {kind[4:]}'.join(names)}; " for kind, names in each.items())


def _ptx() -> str:
    factors = [_operand(tensor, 4 * row) for tensor in FACTORS for row in range(2)]
    code = _registers() + f"mov.b32 root, {_twice(_half(2**0.5))}; max.f32 most, {factors[0]}, {factors[1]}; "
    code += "".join(f"max.f32 most, most, {x}; " for x in factors[2:])
    for coarse, most, other in ((1, FINEST, "BROADER"), (COARSE, COARSEST, "BROADEST")):
        code += f"setp.gt.f32 broad, most, {_single(most)}; vote.sync.any.pred broad, broad, -1; "
        code += f"@broad bra.uni {other}; {_all_words(coarse)} bra.uni MADE; {other}: "
    every = [(unit, word) for unit in range(UNITS) for word in range(WORDS)]
    return "{ " + code + "".join(_powers(*place) + _packed(*place) for place in every) + "MADE: }"


PTX = gl.constexpr(_ptx())
# Some words are written before all numbers are read: they may not take a number's register.
OPERANDS = gl.constexpr(",".join(["=&r"] * (UNITS * WORDS) + [kind for kind in KINDS for _ in range(NUMBERS.value)]))


@gluon.jit
def of_numbers(x, like):
    """A number per row, for all that a thread holds of an operand's rows."""
    x = gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)
    x, _ = gl.broadcast(gl.expand_dims(x, 1), like)
    return x


@gluon.jit
def powers(a, b, c, d, a_factor, b_factor, c_factor, d_factor, offset):
    """e4m3, of four units: 2^(raw * factor + offset), of int32, a factor per row, and an offset; no exponent may
    exceed 9.

    Of a factor or an offset that is NaN exact words are NaN; what is too small for e4m3 is 0.
    """
    numbers = [
        a, b, c, d, of_numbers(a_factor, a), of_numbers(b_factor, a), of_numbers(c_factor, a), of_numbers(d_factor, a),
        offset,
    ]  # fmt: skip
    return gl.inline_asm_elementwise(
        PTX, OPERANDS, numbers, dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv), is_pure=True,
        pack=NUMBERS,
    )  # fmt: skip
