"""Carries out PTX in numpy, for many threads at once: the last dimension of every operand is the lane, if any ask."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

HALVES = np.dtype("<f2")
WORD = np.uint32


def halves(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(HALVES).reshape(*x.shape, 2).astype(np.float64)


def packed(low_high: np.ndarray) -> np.ndarray:
    numbers = low_high.astype(HALVES)
    numbers[np.isnan(numbers)] = np.uint16(0x7FFF).view(HALVES)  # the chip's only NaN
    return np.ascontiguousarray(numbers).view("<u4")[..., 0]


def e4m3(x: np.ndarray) -> np.ndarray:
    numbers = torch.from_numpy(np.clip(x, -448, 448))  # rounded once, as the chip does
    return numbers.float().to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(WORD)


def _of_f16x2(a: np.ndarray) -> np.ndarray:
    low, high = np.moveaxis(halves(a), -1, 0)
    return e4m3(low) | (e4m3(high) << WORD(8))


def _bfly(x: np.ndarray, lanes: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return x[..., np.arange(32) ^ int(np.max(lanes))]


def _to_all(reduced: np.ndarray, like: np.ndarray) -> np.ndarray:
    return np.broadcast_to(reduced[..., None], like.shape)


def _upper_half(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    product = _signed(x).astype(np.int64) * _signed(y).astype(np.int64) >> 32
    return (product + _signed(z)).astype(np.int32)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).view(WORD) if np.asarray(x).dtype == np.float32 else x


def _signed(x: Any) -> np.ndarray:
    return np.asarray(_bits(x)).astype(np.int32)


def _product(x: Any, y: Any) -> np.ndarray:
    """Its lower half."""
    return (_signed(x).astype(np.int64) * _signed(y)).astype(np.int32)


def _larger_halves(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = (np.asarray(_bits(x)).astype(WORD) for x in (x, y))
    low, high = WORD(0xFFFF), WORD(16)
    return np.maximum(x & low, y & low) | (np.maximum(x >> high, y >> high) << high)


def _pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    high, low = (np.clip(_signed(x), 0, 0xFFFF).astype(WORD) for x in (high, low))
    return low | (high << WORD(16))


def _float(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def _as_float(x: Any) -> Any:
    """A register's bits, whatever it was written as."""
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(np.float32) if x.dtype.kind in "iu" else x


def _signed_halves(op: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = (np.ascontiguousarray(np.broadcast_to(_bits(z), np.shape(x)), WORD).view("<i2") for z in (x, y))
        return np.ascontiguousarray(op(x, y)).view(WORD)

    return of


INSTRUCTIONS = {
    "mov.b32": lambda x, high=None: _bits(x) if high is None else x | (high << WORD(16)),
    "mov.f32": lambda x: x,
    "mov.u32": lambda x: x,
    "cvt.rn.f32.s32": lambda x: _float(_signed(x)),
    "cvt.rni.s32.f32": lambda x: np.rint(x).astype(np.int32),
    "cvt.pack.sat.u16.s32": _pair,
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: e4m3(low) | (e4m3(high) << WORD(8)),
    "cvt.rn.satfinite.e4m3x2.f16x2": _of_f16x2,
    "cvt.rn.relu.f16x2.f32": lambda high, low: packed(np.maximum(np.stack((low, high), -1), 0)),
    "cvt.rn.f16x2.f32": lambda high, low: packed(np.stack((low, high), -1)),
    "mul.rn.f16x2": lambda x, y: packed(halves(x) * halves(np.broadcast_to(y, x.shape))),
    "max.u16x2": _larger_halves,
    "add.s16x2": _signed_halves(np.add),
    "max.s16x2": _signed_halves(np.maximum),
    "shr.u32": lambda x, y: np.asarray(x).astype(WORD) >> WORD(int(np.max(y))),
    "fma.rn.f32": lambda x, y, z: _float(np.asarray(x).astype(np.float64) * y + z),
    "fma.rn.f16x2": lambda x, y, z: packed(
        halves(x) * halves(np.broadcast_to(y, x.shape)) + halves(np.broadcast_to(z, x.shape))
    ),
    "mad.hi.s32": _upper_half,
    "mul.lo.s32": _product,
    "max.s32": lambda x, y: np.maximum(_signed(x), _signed(y)),
    "min.s32": lambda x, y: np.minimum(_signed(x), _signed(y)),
    "sub.s32": lambda x, y: (_signed(x).astype(np.int64) - _signed(y)).astype(np.int32),
    "shr.s32": lambda x, y: _signed(x) >> _signed(y),
    "mad.lo.u32": lambda x, y, z: np.asarray(x).astype(WORD) * y + z,
    "add.s32": lambda x, y: (_signed(x).astype(np.int64) + _signed(y)).astype(np.int32),
    "shl.b32": lambda x, y: np.asarray(x).astype(WORD) << y,
    "add.u32": lambda x, y: np.asarray(x).astype(WORD) + y,
    "ex2.approx.ftz.f32": lambda x: _float(np.exp2(np.asarray(x).astype(np.float64))),
    "lg2.approx.ftz.f32": lambda x: _float(np.log2(np.asarray(x).astype(np.float64))),
    "add.f32": lambda x, y: _float(x + y),
    "sub.f32": lambda x, y: _float(x - y),
    "mul.f32": lambda x, y: _float(x * y),
    "max.f32": lambda x, y: _float(np.fmax(x, y)),
    "min.f32": lambda x, y: _float(np.fmin(x, y)),
    "max.NaN.f32": lambda x, y: _float(np.maximum(x, y)),
    "abs.f32": lambda x: _float(np.abs(x)),
    "and.b32": lambda x, y: x & np.asarray(y).astype(x.dtype),
    "or.b32": lambda x, y: x | y,
    "or.pred": lambda x, y: x | y,
    "selp.f32": lambda x, y, p: np.where(p, x, y),
    "selp.b32": lambda x, y, p: np.where(p, _signed(x), _signed(y)),
    "setp.gt.f32": lambda x, y: x > y,
    "setp.lt.f32": lambda x, y: x < y,
    "setp.leu.f32": lambda x, y: ~(x > y),
    "setp.gtu.f32": lambda x, y: ~(x <= y),
    "setp.gt.s32": lambda x, y: _signed(x) > _signed(y),
    "setp.gt.or.s32": lambda x, y, or_: (_signed(x) > _signed(y)) | or_,
    "setp.gt.u32": lambda x, y: np.asarray(x).astype(WORD) > y,
    "setp.gt.or.u32": lambda x, y, or_: (np.asarray(x).astype(WORD) > y) | or_,
    "setp.neu.f32": lambda x, y: ~(x == y),
    "setp.geu.f32": lambda x, y: ~(x < y),
    "setp.geu.or.f32": lambda x, y, or_: ~(x < y) | or_,
    "setp.ne.s32": lambda x, y: x != y,
    "shfl.sync.bfly.b32": _bfly,
    "vote.sync.any.pred": lambda x, _: _to_all(x.any(-1), x),
    "redux.sync.or.b32": lambda x, _: _to_all(np.bitwise_or.reduce(x, -1), x),
}


def _constant(text: str, shape: tuple[int, ...]) -> np.ndarray | np.generic | None:
    if text == "%laneid":
        return np.broadcast_to(np.arange(32, dtype=WORD), shape)
    if text.startswith("0f"):
        return np.float32(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
    if re.fullmatch(r"-?\d+\.\d+", text):
        return np.float32(text)
    if re.fullmatch(r"-?(0x[\da-fA-F]+|\d+)", text):
        return WORD(int(text, 0) & 0xFFFFFFFF)
    return None


class Statement(NamedTuple):
    labels: tuple[str, ...]  # in front of it
    guard: str  # a predicate, or nothing
    inverted: bool
    op: str
    operands: tuple[str, ...]


@functools.lru_cache(maxsize=64)
def _statements(code: str) -> tuple[Statement, ...]:
    body, found = code.strip(), []
    body = body[1:-1] if body.startswith("{") else body
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        labels = []
        while label := re.match(r"(\w+):\s*", statement):
            labels.append(label[1])
            statement = statement[label.end() :]
        guard = re.match(r"@(!?)(\w+) ", statement)
        op, _, rest = (statement[guard.end() :] if guard else statement).partition(" ")
        operands = tuple(re.findall(r"[-\w$%.]+", rest))
        found.append(Statement(tuple(labels), guard[2] if guard else "", bool(guard and guard[1]), op, operands))
    return tuple(statement for statement in found if statement.op != ".reg")


def carry_out(code: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Registers by name after the code; every branch leads forwards."""
    at: dict[str, Any] = dict(operands)
    shape = np.broadcast_shapes(*(np.shape(x) for x in operands.values()))
    active: Any = True
    ahead: dict[str, Any] = {}  # threads that wait at a label
    for labels, guard, inverted, op, names in _statements(code):
        for label in labels:
            active = active | ahead.pop(label, False)
        if not op or not np.any(active):
            continue
        follows = active
        if guard:
            follows = active & (~at[guard] if inverted else at[guard])
        if not np.any(follows):
            continue
        if op == "bra.uni":
            (label,) = names
            ahead[label] = ahead.get(label, False) | follows
            active = active & np.logical_not(follows)
            continue
        target, *sources = names
        with np.errstate(all="ignore"):
            given = [_constant(x, shape) if x not in at else at[x] for x in sources]
            assert all(x is not None for x in given), (op, names)
            if op.endswith(".f32"):
                given = [_as_float(x) for x in given]
            made = np.asarray(INSTRUCTIONS[op](*given))
        made = made if made.shape else np.broadcast_to(made, shape)  # each lane has its own
        if follows is not True:
            before = np.ascontiguousarray(at.get(target, np.zeros_like(made)))
            made = np.where(follows, made, before.view(made.dtype) if made.dtype.itemsize == 4 else before)
        at[target] = made
    return at
