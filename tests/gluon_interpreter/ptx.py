"""Carries out PTX in numpy, for many threads at once: the last dimension of every operand is the lane, if any ask."""

from __future__ import annotations

import re
import struct
from typing import Any

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
    return np.asarray(x).astype(np.int32)


def _pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    high, low = (np.clip(_signed(x), 0, 0xFFFF).astype(WORD) for x in (high, low))
    return low | (high << WORD(16))


def _float(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


INSTRUCTIONS = {
    "mov.b32": lambda x, high=None: _bits(x) if high is None else x | (high << WORD(16)),
    "mov.f32": lambda x: x,
    "mov.u32": lambda x: x,
    "cvt.rn.f32.s32": _float,
    "cvt.pack.sat.u16.s32": _pair,
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: e4m3(low) | (e4m3(high) << WORD(8)),
    "cvt.rn.satfinite.e4m3x2.f16x2": _of_f16x2,
    "cvt.rn.relu.f16x2.f32": lambda high, low: packed(np.maximum(np.stack((low, high), -1), 0)),
    "fma.rn.f32": lambda x, y, z: _float(np.asarray(x).astype(np.float64) * y + z),
    "fma.rn.f16x2": lambda x, y, z: packed(
        halves(x) * halves(np.broadcast_to(y, x.shape)) + halves(np.broadcast_to(z, x.shape))
    ),
    "mad.hi.s32": _upper_half,
    "mad.lo.u32": lambda x, y, z: x * y + z,
    "add.s32": lambda x, y: (_signed(x).astype(np.int64) + _signed(y)).astype(np.int32),
    "shl.b32": lambda x, y: np.asarray(x).astype(WORD) << y,
    "add.u32": lambda x, y: np.asarray(x).astype(WORD) + y,
    "ex2.approx.ftz.f32": lambda x: _float(np.exp2(np.asarray(x).astype(np.float64))),
    "lg2.approx.ftz.f32": lambda x: _float(np.log2(np.asarray(x).astype(np.float64))),
    "add.f32": lambda x, y: _float(x + y),
    "sub.f32": lambda x, y: _float(x - y),
    "mul.f32": lambda x, y: _float(x * y),
    "max.f32": lambda x, y: _float(np.fmax(x, y)),
    "and.b32": lambda x, y: x & np.asarray(y).astype(x.dtype),
    "or.b32": lambda x, y: x | y,
    "or.pred": lambda x, y: x | y,
    "selp.f32": lambda x, y, p: np.where(p, x, y),
    "setp.gt.f32": lambda x, y: x > y,
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


def carry_out(code: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Registers by name after the code; every branch leads forwards."""
    at: dict[str, Any] = dict(operands)
    shape = np.broadcast_shapes(*(np.shape(x) for x in operands.values()))
    active: Any = True
    ahead: dict[str, Any] = {}  # threads that wait at a label
    body = code.strip()
    body = body[1:-1] if body.startswith("{") else body
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        while label := re.match(r"(\w+):\s*", statement):
            active = active | ahead.pop(label[1], False)
            statement = statement[label.end() :]
        if not statement or not np.any(active):
            continue
        guard = re.match(r"@(!?)(\w+) ", statement)
        follows = active
        if guard:
            follows = active & (~at[guard[2]] if guard[1] else at[guard[2]])
            statement = statement[guard.end() :]
        op, _, rest = statement.partition(" ")
        if op == ".reg" or not np.any(follows):
            continue
        if op == "bra.uni":
            ahead[rest] = ahead.get(rest, False) | follows
            active = active & np.logical_not(follows)
            continue
        target, *sources = re.findall(r"[-\w$%.]+", rest)
        with np.errstate(all="ignore"):
            given = [_constant(x, shape) if x not in at else at[x] for x in sources]
            assert all(x is not None for x in given), statement
            made = np.asarray(INSTRUCTIONS[op](*given))
        made = made if made.shape else np.broadcast_to(made, shape)  # each lane has its own
        if follows is not True:
            before = at.get(target, np.zeros_like(made))
            made = np.where(follows, made, before)
        at[target] = made
    return at
