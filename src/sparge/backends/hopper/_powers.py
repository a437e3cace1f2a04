"""Powers of two as e4m3 numbers, relative to a best that may move while they are made, without the exponential unit.

Scores stay whole numbers until the end. A score times its factor, in whole 1,024ths of an octave, is a 16-bit float in
which 2^f is 1 + f inside an octave. That is a CHORD, 4 % too low to 2 % too high about its mean, 1.8 % by root mean
square, where rounding to e4m3 has 2.6 %. An ARC is the sum of two chords whose octaves begin half an octave apart: 1 %
too low to .5 % too high, .4 % by root mean square. Instructions a number: 2 and 3, where an exponential takes 3.5.

Numbers are made as if no score exceeded the row's best by more than e4m3 has room for, which is looked at afterwards,
two numbers in a word at once: that takes half as many instructions as looking for the largest score beforehand, and
nothing waits for it. In 16 bits there is room for 41 octaves above the best, so where it has to move after all, what
was made before is lowered. The first half of a step is made while the scores of the other are still under way.

The mixture adds 1 to 3 % to the error of attention over random inputs (.039 or .040 with exponentials alone); two
chords in eight would add 3, three 4. A thread's words of four numbers belong to two rows in turns: two groups, one
after the other, make all rows alike.
"""

import itertools
import struct
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHORD, ARC = "chord", "arc"
GROUPS = ((CHORD,) + (ARC,) * 7, (ARC, CHORD) + (ARC,) * 6)
WORDS = len(GROUPS[0])
NUMBERS = 4 * WORDS  # of a thread and a unit of 64 keys
ROWS = (0, 1)  # of a thread
OCTAVE = 1024  # steps of 16-bit floats from one power of two to the next
P_SHIFT, SLACK = 8, 0.75  # what is as large as the best becomes 2^8, which may be exceeded by so much: e4m3 ends at 448

# A factor becomes a share of 2^32: the upper half of its product with a score counts steps, rounded down. Shares are
# read off the 23 lower bits of a float, so factors end at a 2,048th of an octave. Broader ones, up to a 512th, count
# four steps at once; with more, a chord of the row's best could fall below a power of two. Beyond, and where a factor
# is NaN, exponentials make all numbers.
COARSE = 4
FINEST, COARSEST = 2.0**-11 * 0.9995, 2.0**-9 * 0.9995
ABOVE_SHARES = 2.0**23

# 1 is 15 octaves above the smallest number. A chord is 58.9 steps too high on average, the sum of two an octave more.
ONE = 15 * OCTAVE - 59
APART = OCTAVE // 2
LOWER = OCTAVE + APART  # where an arc's lower chord begins, below a chord; words hold lower chords
AT_BEST = ONE + P_SHIFT * OCTAVE - LOWER
HALF_FULL = 0xFFFF

UNSET = -1.0e29  # a best below is that of a row that has seen nothing
BROAD = 2.0**26  # scores whose last bit is worth four octaves: beyond, roundings hide all that e4m3 tells
ROUNDINGS = 1.5 * 2.0**-23  # of a large score, added up
# Of factors that fit no score exceeds 4,096 octaves: what is relative to a best beyond FAR is 0.
FAR = float(1 << 19)

STATE = {"best": "f", "start": "b", "alpha": "f"}  # of a row: where steps count from, and what sums shrink by


class Program(NamedTuple):
    """PTX of a step or a part of it. Operands by name: the kind of their registers, and how many numbers lie in one."""

    units: tuple[int, ...]
    before: tuple[int, ...]  # units that others have made words of
    finishes: bool  # makes numbers of all these words, else leaves words
    moves: bool  # the rows' best where scores exceed it; else they are known not to
    apart: bool = False  # looks at one unit after the other, where registers have no room for the words of all

    @property
    def outputs(self) -> dict[str, tuple[str, int]]:
        made = {f"{'made' if self.finishes else 'logs'}{n}": ("r", 4 if self.finishes else 2) for n in self.made}
        made |= {} if self.finishes else {"peak": ("r", 1)}
        return made | {name: (_kind(name), 1) for name in STATE if self.moves}

    @property
    def inputs(self) -> dict[str, tuple[str, int]]:
        scores = {f"raw{n}": ("r", 1) for n in self.units} | {f"logs{n}": ("r", 2) for n in self.before}
        scores |= {"peak": ("r", 1)} if self.before else {}
        scales = dict.fromkeys(("q", *(f"k{n}" for n in self.units), "most"), ("f", 1))
        scales |= {"ahead": ("r", 1)} if self.moves else {}
        return scores | scales | {name: (_kind(name), 1) for name in STATE if self.moves or name != "alpha"}

    @property
    def made(self) -> tuple[int, ...]:
        return self.before + self.units

    @property
    def constraints(self) -> str:
        """Some words are written before all numbers are read: they may not take a number's register."""
        kinds = [(f"=&{kind}", together) for kind, together in self.outputs.values()] + list(self.inputs.values())
        return ",".join(kind for kind, together in kinds for _ in range(NUMBERS // together))

    def places(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """The registers of each output and input."""
        count, found = itertools.count(), []
        for operands in (self.outputs, self.inputs):
            found.append({name: [f"${next(count)}" for _ in range(NUMBERS // n)] for name, (_, n) in operands.items()})
        return found[0], found[1]


def _kind(name: str) -> str:
    return STATE[name].replace("b", "r")


HALVES = (Program((0, 1), (), False, True, True), Program((2, 3), (0, 1), True, True))
OF_KNOWN_BEST = Program((0, 1, 2, 3), (), True, False)
ONE_UNIT, TWO_UNITS = Program((0,), (), True, True), Program((0, 1), (), True, True, True)


def _twice(bits: int) -> str:
    """In both halves of a register."""
    return f"0x{bits:04X}{bits:04X}"


def _half(x: float) -> int:
    """Bits of a 16-bit float."""
    return int(struct.unpack("<H", struct.pack("<e", x))[0])


def _bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def _single(x: float) -> str:
    return f"0f{_bits(x):08X}"


def _row(number: int) -> int:
    return number // 4 % 2


def _largest(op: str, target: str, numbers: list[str]) -> str:
    """Three compare at once."""
    code = f"{op} {target}, {numbers[0]}, {numbers[1]}; "
    return code + "".join(f"{op} {target}, {target}, {x}; " for x in numbers[2:])


def _of_row(row: int, unit: int, name: str) -> list[str]:
    return [f"{name}{unit}_{n}" for n in range(NUMBERS) if _row(n) == row]


def _of_four_threads(op: str, number: str) -> str:
    """Who hold a row."""
    return "".join(
        f"shfl.sync.bfly.b32 other, {number}, {lane}, 31, -1; {op} {number}, {number}, other; " for lane in (1, 2)
    )


def _moved(row: int) -> str:
    """Where the row's score in `top` exceeds its best, by {row}: it is the best."""
    code = f"sub.f32 lower{row}, best{row}, top; ex2.approx.ftz.f32 lower{row}, lower{row}; "
    return code + f"@jumps{row} mul.f32 alpha{row}, alpha{row}, lower{row}; @jumps{row} mov.f32 best{row}, top; "


# ---- steps


def _coarser(steps: str, coarse: int) -> str:
    """So many steps as one."""
    return f"add.s32 {steps}, {steps}, {coarse // 2}; shr.s32 {steps}, {steps}, 2; " if coarse > 1 else ""


def _shares(units: tuple[int, ...], inputs: dict[str, list[str]], coarse: int) -> str:
    code, scale = "", OCTAVE / coarse * 2.0**24
    for row in ROWS:
        code += f"mul.f32 wide{row}, {inputs['q'][4 * row]}, {_single(scale)}; "
        for unit in units:
            code += f"fma.rn.f32 wide, wide{row}, {inputs[f'k{unit}'][0]}, {_single(ABOVE_SHARES)}; "
            code += f"mov.b32 share{unit}_{row}, wide; shl.b32 share{unit}_{row}, share{unit}_{row}, 8; "
        code += f"mov.b32 begin{row}, start{row}; " + _coarser(f"begin{row}", coarse)
    return code


def _words(unit: int) -> str:
    return "".join(
        f"cvt.pack.sat.u16.s32 w{unit}_{pair}, n{unit}_{2 * pair + 1}, n{unit}_{2 * pair}; "
        for pair in range(NUMBERS // 2)
    )


def _counted(units: tuple[int, ...], inputs: dict[str, list[str]]) -> str:
    """Words of some units."""
    code = ""
    for unit in units:
        for n in range(NUMBERS):
            code += f"mad.hi.s32 n{unit}_{n}, {inputs[f'raw{unit}'][n]}, share{unit}_{_row(n)}, begin{_row(n)}; "
        code += _words(unit)
    return code


def _peaks(units: tuple[int, ...], before: bool) -> str:
    """The largest numbers of each row's words, of which a register holds two; with those before."""
    code = ""
    for row in ROWS:
        words = [f"w{unit}_{pair}" for unit in units for pair in range(NUMBERS // 2) if _row(2 * pair) == row]
        code += _largest("max.u16x2", f"peak{row}", [f"peak{row}"] * before + words)
    return code


def _jumped(row: int, coarse: int, maybe_first: bool) -> str:
    """Of the most steps in a row: its best, if they exceed what there is room for, where it counts from then, and how
    far that is below."""
    code = f"setp.gt.s32 jumps{row}, steps, {_most(coarse)}; sub.s32 steps, steps, begin{row}; "
    if maybe_first:
        code += f"setp.leu.f32 unset{row}, best{row}, {_single(UNSET)}; "
        code += f"mul.lo.s32 other, ahead, {OCTAVE // coarse}; selp.b32 other, other, 0, unset{row}; "
        code += "add.s32 steps, steps, other; "
    code += f"cvt.rn.f32.s32 top, steps; mul.f32 top, top, {_single(coarse / OCTAVE)}; " + _moved(row)
    code += f"mul.lo.s32 steps, steps, {coarse}; sub.s32 steps, {AT_BEST}, steps; "
    code += f"@jumps{row} mov.b32 start{row}, steps; " + _coarser("steps", coarse)
    code += f"sub.s32 steps, begin{row}, steps; selp.b32 down{row}, steps, 0, jumps{row}; "
    return code + f"sub.s32 begin{row}, begin{row}, down{row}; "


def _larger_half(row: int) -> str:
    """The most steps of a row's words, as far as those tell."""
    return f"shr.u32 steps, peak{row}, 16; and.b32 other, peak{row}, {HALF_FULL}; max.s32 steps, steps, other; "


def _most(coarse: int) -> int:
    return AT_BEST // coarse + int(SLACK * OCTAVE) // coarse


def _far_up(peaks: str, done: str) -> str:
    """Goes on unless some thread of the warp has a word beyond signed numbers."""
    code = f"and.b32 other, {peaks}, 0x80008000; setp.ne.s32 some, other, 0; vote.sync.any.pred some, some, -1; "
    return code + f"@!some bra.uni {done}; "


def _moved_far(units: tuple[int, ...], earlier: tuple[int, ...], coarse: int) -> str:
    """The rows' best moves, by more than words can tell, and all words with it."""
    code = ""
    for row in ROWS:
        code += _larger_half(row) + _largest(
            "max.s32", "steps", ["steps", *(x for unit in units for x in _of_row(row, unit, "n"))]
        )
        code += _of_four_threads("max.s32", "steps") + _jumped(row, coarse, True)
        code += f"min.s32 steps, down{row}, {HALF_FULL}; mul.lo.s32 both{row}, steps, 0x10001; "
    for unit in units:
        code += "".join(f"sub.s32 n{unit}_{n}, n{unit}_{n}, down{_row(n)}; " for n in range(NUMBERS)) + _words(unit)
    for unit in earlier:
        for pair in range(NUMBERS // 2):
            word, both = f"w{unit}_{pair}", f"both{_row(2 * pair)}"
            code += f"max.u16x2 {word}, {word}, {both}; sub.s32 {word}, {word}, {both}; "
    return code + _peaks(earlier + units, False)


def _moved_near(units: tuple[int, ...], coarse: int) -> str:
    """The rows' best moves, and all words with it."""
    code = ""
    for row in ROWS:
        code += _larger_half(row) + _of_four_threads("max.s32", "steps") + _jumped(row, coarse, False)
        code += f"sub.s32 steps, 0, down{row}; and.b32 steps, steps, {HALF_FULL}; "
        code += f"mul.lo.s32 both{row}, steps, 0x10001; "
    for unit in units:
        for pair in range(NUMBERS // 2):
            word = f"w{unit}_{pair}"
            code += f"add.s16x2 {word}, {word}, both{_row(2 * pair)}; max.s16x2 {word}, {word}, zero; "
    return code


def _settled(units: tuple[int, ...], earlier: tuple[int, ...], coarse: int) -> str:
    """Where some row exceeds what there is room for, its best moves."""
    done, near, above = f"SETTLED_{coarse}", f"NEAR_{coarse}", f"0x{_most(coarse) << 16 | HALF_FULL:08X}"
    code = f"max.u16x2 largest, peak0, peak1; setp.gt.u32 some, largest, {above}; shl.b32 other, largest, 16; "
    code += f"setp.gt.or.u32 some, other, {above}, some; vote.sync.any.pred some, some, -1; @!some bra.uni {done}; "
    code += _far_up("largest", near) + _moved_far(units, earlier, coarse) + f"bra.uni {done}; "
    return code + f"{near}: " + _moved_near(earlier + units, coarse) + f"{done}: "


def _joined(unit: int, pair: int, made: list[str]) -> str:
    """Of a word's second pair: the word, in one with the conversion before it."""
    return f"mov.b32 {made[pair // 2]}, {{e{unit}_{pair - 1}, e{unit}_{pair}}}; " if pair % 2 else ""


def _from_steps(unit: int, made: list[str], coarse: int) -> str:
    """A unit's e4m3 numbers."""
    code = ""
    for pair in range(NUMBERS // 2):
        w, x = f"w{unit}_{pair}", f"x{unit}_{pair}"
        if coarse > 1:  # products are rounded down: half a step more
            code += f"mad.lo.u32 {w}, {w}, {coarse}, {_twice(coarse // 2)}; "
        if GROUPS[unit % 2][pair // 2] == ARC:
            code += f"add.u32 {x}, {w}, {_twice(APART)}; fma.rn.f16x2 {x}, {w}, root, {x}; "
        else:
            code += f"add.u32 {x}, {w}, {_twice(LOWER)}; "
        code += f"cvt.rn.satfinite.e4m3x2.f16x2 e{unit}_{pair}, {x}; " + _joined(unit, pair, made)
    return code


# ---- exponentials


def _offset(row: int) -> str:
    """What is added to a row's scores; roundings may not lift the largest."""
    code = f"setp.leu.f32 unset{row}, best{row}, {_single(UNSET)}; selp.f32 wide, 0f00000000, best{row}, unset{row}; "
    code += f"abs.f32 size, wide; sub.f32 wide, {_single(P_SHIFT)}, wide; "
    code += f"fma.rn.f32 wide, size, {_single(-ROUNDINGS)}, wide; setp.lt.f32 some, size, {_single(BROAD)}; "
    return code + f"selp.f32 offset{row}, wide, 0f7FC00000, some; "


def _start(row: int) -> str:
    """Where steps count from, of a row's best."""
    code = f"max.f32 wide, best{row}, {_single(-FAR)}; min.f32 wide, wide, {_single(FAR)}; "
    code += f"mul.f32 wide, wide, {_single(OCTAVE)}; cvt.rni.s32.f32 steps, wide; sub.s32 steps, {AT_BEST}, steps; "
    return code + f"@jumps{row} mov.b32 start{row}, steps; "


def _exponents(units: tuple[int, ...], inputs: dict[str, list[str]]) -> str:
    """Of some units, relative to the rows' best."""
    code = ""
    for unit in units:
        for row in ROWS:
            code += f"mul.f32 factor{row}, {inputs['q'][4 * row]}, {inputs[f'k{unit}'][0]}; "
        for n in range(NUMBERS):
            y, row = f"y{unit}_{n}", _row(n)
            code += f"cvt.rn.f32.s32 {y}, {inputs[f'raw{unit}'][n]}; fma.rn.f32 {y}, {y}, factor{row}, offset{row}; "
    return code


def _settled_exponents(units: tuple[int, ...], earlier: tuple[int, ...]) -> str:
    """As _settled; the words of earlier units are 16-bit floats."""
    done, most = f"SETTLED{units[0]}", P_SHIFT + SLACK
    # Bits of floats above 0 are in their order, and a NaN only asks for more.
    code = _largest("max.s32", "largest", [f"y{unit}_{n}" for unit in units for n in range(NUMBERS)])
    code += f"setp.gt.or.s32 some, largest, {_bits(most)}, unset0; or.pred some, some, unset1; "
    code += f"vote.sync.any.pred some, some, -1; @!some bra.uni {done}; "
    for row in ROWS:
        code += _largest("max.f32", f"wide{row}", [x for unit in units for x in _of_row(row, unit, "y")])
        code += _of_four_threads("max.f32", f"wide{row}")
        code += f"selp.f32 top, 0fFF800000, {_single(most)}, unset{row}; "
        code += f"setp.gt.f32 jumps{row}, wide{row}, top; sub.f32 top, wide{row}, offset{row}; "
        code += f"cvt.rn.f32.s32 wide, ahead; selp.f32 wide, wide, 0f00000000, unset{row}; add.f32 top, top, wide; "
        code += _moved(row) + f"mov.f32 wide{row}, offset{row}; "
        code += _start(row) + _offset(row) + f"sub.f32 wide{row}, offset{row}, wide{row}; "
        code += f"selp.f32 wide{row}, wide{row}, 0f00000000, jumps{row}; "
        code += f"selp.f32 lower{row}, lower{row}, 0f3F800000, jumps{row}; "
        code += f"cvt.rn.f16x2.f32 both{row}, lower{row}, lower{row}; "
    for unit in units:
        code += "".join(f"add.f32 y{unit}_{n}, y{unit}_{n}, wide{_row(n)}; " for n in range(NUMBERS))
    for other in earlier:
        for pair in range(NUMBERS // 2):
            code += f"mul.rn.f16x2 w{other}_{pair}, w{other}_{pair}, both{_row(2 * pair)}; "
    return code + f"{done}: "


def _powers(unit: int) -> str:
    return "".join(f"ex2.approx.ftz.f32 y{unit}_{n}, y{unit}_{n}; " for n in range(NUMBERS))


def _to_halves(unit: int) -> str:
    return "".join(
        f"cvt.rn.f16x2.f32 w{unit}_{pair}, y{unit}_{2 * pair + 1}, y{unit}_{2 * pair}; " for pair in range(NUMBERS // 2)
    )


def _from_floats(unit: int, made: list[str], halves: bool) -> str:
    """A unit's e4m3 numbers."""
    code = ""
    for pair in range(NUMBERS // 2):
        kind, given = "f32", f"y{unit}_{2 * pair + 1}, y{unit}_{2 * pair}"
        if halves:
            kind, given = "f16x2", f"w{unit}_{pair}"
        code += f"cvt.rn.satfinite.e4m3x2.{kind} e{unit}_{pair}, {given}; " + _joined(unit, pair, made)
    return code


# ---- both


def _registers(program: Program) -> str:
    """Of every number, pair, unit and row."""
    numbers = [f"{u}_{n}" for u in program.units for n in range(NUMBERS)]
    pairs = [f"{u}_{n}" for u in program.made for n in range(NUMBERS // 2)]
    each = [("b32 n", numbers), ("b32 y", numbers), ("b32 w", pairs), ("b32 x", pairs), ("b16 e", pairs)]
    each += [("b32 share", [f"{u}_{row}" for u in program.units for row in ROWS])]
    kinds = {
        "b32": ("start", "begin", "down", "both", "peak"), "pred": ("jumps", "unset"),
        "f32": ("best", "alpha", "lower", "wide", "factor", "offset"),
    }  # fmt: skip
    each += [(f"{kind} {name}", ROWS) for kind, names in kinds.items() for name in names]
    single = {"b32": "steps, other, largest, root, zero, ahead", "f32": "most, wide, top, size", "pred": "broad, some"}
    code = "".join(f".reg .{kind} {names}; " for kind, names in single.items())
    for named, places in each:
        kind, name = named.split()
        code += f".reg .{kind} {', '.join(f'{name}{place}' for place in places)}; "
    return code


def _parts(program: Program) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Units that are looked at together, and those before them."""
    if program.apart:
        return [((unit,), program.made[: program.made.index(unit)]) for unit in program.units]
    return [(program.units, program.before)]


def _by_steps(program: Program, inputs: dict[str, list[str]], outputs: dict[str, list[str]], coarse: int) -> str:
    code, parts = _shares(program.units, inputs, coarse), _parts(program)
    for n, (units, earlier) in enumerate(parts):
        code += _counted(units, inputs)
        if not program.moves:
            continue
        code += _peaks(units, bool(earlier))
        if program.finishes and n == len(parts) - 1:
            code += _settled(units, earlier, coarse)
        else:  # sixteen bits hold what exceeds by less
            done = f"HELD{units[0]}_{coarse}"
            code += "max.u16x2 largest, peak0, peak1; " + _far_up("largest", done)
            code += _moved_far(units, earlier, coarse) + f"{done}: "
    finished = program.made if program.finishes else ()
    return code + "".join(_from_steps(unit, outputs[f"made{unit}"], coarse) for unit in finished)


def _by_exponentials(program: Program, inputs: dict[str, list[str]], outputs: dict[str, list[str]]) -> str:
    """What later units may lower waits in 16 bits."""
    code, parts = "".join(_offset(row) for row in ROWS), _parts(program)
    last = parts[-1][0] if program.finishes else ()
    for units, earlier in parts:
        code += _exponents(units, inputs) + (_settled_exponents(units, earlier) if program.moves else "")
        code += "".join(_powers(unit) + ("" if unit in last else _to_halves(unit)) for unit in units)
    finished = program.made if program.finishes else ()
    return code + "".join(_from_floats(unit, outputs[f"made{unit}"], unit not in last) for unit in finished)


def _ptx(program: Program) -> str:
    outputs, inputs = program.places()
    code = _registers(program) + f"mov.b32 root, {_twice(_half(2**0.5))}; mov.b32 zero, 0; "
    code += f"mov.b32 ahead, {inputs['ahead'][0]}; " if program.moves else ""
    for name, kind in STATE.items():
        if name in inputs:
            code += "".join(f"mov.{kind}32 {name}{row}, {inputs[name][4 * row]}; " for row in ROWS)
    for unit in program.before:
        code += "".join(f"mov.b32 w{unit}_{pair}, {inputs[f'logs{unit}'][pair]}; " for pair in range(NUMBERS // 2))
    code += "".join(f"mov.b32 peak{row}, {inputs['peak'][4 * row] if program.before else 0}; " for row in ROWS)
    code += f"max.NaN.f32 most, {inputs['most'][0]}, {inputs['most'][4]}; "
    for coarse, most, other in ((1, FINEST, "BROADER"), (COARSE, COARSEST, "BROADEST")):
        code += f"setp.gtu.f32 broad, most, {_single(most)}; vote.sync.any.pred broad, broad, -1; "
        code += f"@broad bra.uni {other}; " + _by_steps(program, inputs, outputs, coarse) + f"bra.uni MADE; {other}: "
    code += _by_exponentials(program, inputs, outputs) + "MADE: "
    for unit in () if program.finishes else program.units:
        code += "".join(f"mov.b32 {outputs[f'logs{unit}'][n]}, w{unit}_{n}; " for n in range(NUMBERS // 2))
    for name, kind in (STATE | {"peak": "b"}).items():
        if name in outputs:
            code += "".join(f"mov.{kind}32 {place}, {name}{_row(n)}; " for n, place in enumerate(outputs[name]))
    return "{ " + code + "}"


FIRST_CODE, SECOND_CODE, ALL_CODE, ONE_CODE, TWO_CODE = (
    gl.constexpr(_ptx(program)) for program in (*HALVES, OF_KNOWN_BEST, ONE_UNIT, TWO_UNITS)
)
FIRST_OPERANDS, SECOND_OPERANDS, ALL_OPERANDS, ONE_OPERANDS, TWO_OPERANDS = (
    gl.constexpr(program.constraints) for program in (*HALVES, OF_KNOWN_BEST, ONE_UNIT, TWO_UNITS)
)
TOGETHER = gl.constexpr(NUMBERS)
START_AT_BEST, FAREST = gl.constexpr(AT_BEST), gl.constexpr(FAR)
UNSEEN = gl.constexpr(UNSET)


@gluon.jit
def start_of(best):
    """Where steps count from, of rows' best."""
    steps = gl.minimum(gl.maximum(best, -FAREST), FAREST) * 1024.0
    steps = gl.inline_asm_elementwise(
        "cvt.rni.s32.f32 $0, $1;", "=r,f", [steps], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip
    return START_AT_BEST - steps


@gluon.jit
def first_powers(a, b, q, ka, kb, most, ahead, best, start, alpha):
    """What the second half needs of two units of a step: words of both, their peak, the rows' best, `start_of` it, and
    alpha, which shrinks with every jump. A first best lies so many octaves ahead of what the row has seen."""
    return gl.inline_asm_elementwise(
        FIRST_CODE, FIRST_OPERANDS, [a, b, q, ka, kb, most, ahead, best, start, alpha],
        dtype=(gl.int16, gl.int16, gl.int32, gl.float32, gl.int32, gl.float32), is_pure=True, pack=TOGETHER,
    )  # fmt: skip


@gluon.jit
def second_powers(c, d, a_logs, b_logs, peak, q, kc, kd, most, ahead, best, start, alpha):
    """e4m3, of four units: 2^(raw * q * k - best + 8). Of a factor that is NaN they are NaN; what is too small is 0."""
    return gl.inline_asm_elementwise(
        SECOND_CODE, SECOND_OPERANDS, [c, d, a_logs, b_logs, peak, q, kc, kd, most, ahead, best, start, alpha],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float32, gl.int32, gl.float32),
        is_pure=True, pack=TOGETHER,
    )  # fmt: skip


@gluon.jit
def all_powers(a, b, c, d, q, ka, kb, kc, kd, most, best, start):
    """As both halves, where no score exceeds the rows' best."""
    return gl.inline_asm_elementwise(
        ALL_CODE, ALL_OPERANDS, [a, b, c, d, q, ka, kb, kc, kd, most, best, start],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=TOGETHER,
    )  # fmt: skip


@gluon.jit
def one_power(a, q, ka, most, ahead, best, start, alpha):
    """As both halves, of a single unit."""
    return gl.inline_asm_elementwise(
        ONE_CODE, ONE_OPERANDS, [a, q, ka, most, ahead, best, start, alpha],
        dtype=(gl.float8e4nv, gl.float32, gl.int32, gl.float32), is_pure=True, pack=TOGETHER,
    )  # fmt: skip


@gluon.jit
def two_powers(a, b, q, ka, kb, most, ahead, best, start, alpha):
    """As both halves, of two units."""
    return gl.inline_asm_elementwise(
        TWO_CODE, TWO_OPERANDS, [a, b, q, ka, kb, most, ahead, best, start, alpha],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float32, gl.int32, gl.float32), is_pure=True, pack=TOGETHER,
    )  # fmt: skip
