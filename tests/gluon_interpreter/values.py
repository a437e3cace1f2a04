"""Numbers of a kernel: a block of them, its number format, and the layout it was given."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl

TORCH_FORMATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
INTEGERS = {tl.int1: np.bool_, tl.int8: np.int8, tl.int16: np.int16, tl.int32: np.int32, tl.int64: np.int64}
FORMATS = {
    torch.int8: tl.int8, torch.bool: tl.int8, torch.int32: tl.int32, torch.int64: tl.int64,
    **{torch_format: own for own, torch_format in TORCH_FORMATS.items()},
}  # fmt: skip
RAW = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}


def numpy_type(dtype: tl.dtype) -> Any:
    """What the numbers are kept in: floats of every width are kept as float32."""
    return INTEGERS.get(dtype, np.float32)


def size_of(dtype: tl.dtype) -> int:
    return max(dtype.primitive_bitwidth // 8, 1)


def encoded(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The bits of numbers in a format, rounded as the chip rounds."""
    raw, torch_raw = RAW[size_of(dtype)]
    if dtype in INTEGERS:
        return np.ascontiguousarray(data.astype(INTEGERS[dtype])).view(raw)
    numbers = torch.from_numpy(np.array(data, dtype=np.float32))
    if dtype == tl.float8e4nv:
        numbers = numbers.clamp(-448, 448)  # casts saturate
    return numbers.to(TORCH_FORMATS[dtype]).view(torch_raw).numpy().view(raw).reshape(data.shape)


def decoded(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype in INTEGERS:
        return np.ascontiguousarray(bits).view(INTEGERS[dtype])
    _, torch_raw = RAW[size_of(dtype)]
    same = torch.from_numpy(np.array(bits)).view(torch_raw)
    return same.view(TORCH_FORMATS[dtype]).float().numpy().reshape(bits.shape)


def _common(a: tl.dtype, b: tl.dtype) -> tl.dtype:
    if a == b:
        return a
    floats = [x for x in (a, b) if x.is_floating()]
    if len(floats) == 1:
        return floats[0]
    if floats:
        return tl.float32  # of two formats
    return max(a, b, key=lambda x: x.primitive_bitwidth)


class Value:
    """A number where the shape is ()."""

    __slots__ = ("data", "dtype", "layout")
    __array_priority__ = 1000

    def __init__(self, data: Any, dtype: tl.dtype, layout: Any = None) -> None:
        self.data = np.asarray(data, dtype=numpy_type(dtype))
        self.dtype, self.layout = dtype, layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def type(self) -> Value:
        return self

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> Value:
        if bitcast:
            return Value(decoded(encoded(self.data, self.dtype), dtype), dtype, self.layout)
        if dtype in INTEGERS or dtype == tl.float32:
            return Value(self.data.astype(numpy_type(dtype)), dtype, self.layout)
        return Value(decoded(encoded(self.data.astype(np.float32), dtype), dtype), dtype, self.layout)

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(shape), self.dtype)

    def permute(self, order: list[int]) -> Value:
        return Value(self.data.transpose(order), self.dtype)

    def split(self) -> tuple[Value, Value]:
        return Value(self.data[..., 0], self.dtype), Value(self.data[..., 1], self.dtype)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return operator.index(self.data[()])

    def __neg__(self) -> Value:
        return Value(-self.data, self.dtype, self.layout)

    def __invert__(self) -> Value:
        return Value(~self.data, self.dtype, self.layout)


def value(x: Any, like: tl.dtype | None = None) -> Value:
    """A Python number takes the format of what it is combined with."""
    if isinstance(x, Value):
        return x
    if isinstance(x, float):
        return Value(x, like if like is not None and like.is_floating() else tl.float32)
    own = tl.int1 if isinstance(x, bool) else tl.int32 if -(2**31) <= x < 2**31 else tl.int64
    return Value(x, own if like is None or like == tl.int1 else like)


def paired(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray, tl.dtype, Any]:
    """Both numbers in the format they have in common, that, and their layout."""
    a, b = value(a, getattr(b, "dtype", None)), value(b, getattr(a, "dtype", None))
    if not (isinstance(a, Value) and isinstance(b, Value)):
        raise TypeError(f"{a!r} and {b!r} cannot be combined")
    assert a.layout is None or b.layout is None or a.shape != b.shape or a.layout == b.layout, "layouts differ"
    dtype = _common(a.dtype, b.dtype)
    kind = numpy_type(dtype)
    return a.data.astype(kind), b.data.astype(kind), dtype, _layout_of(a, b)


def _layout_of(*values: Value) -> Any:
    largest = max(x.data.ndim for x in values)
    return next((x.layout for x in values if x.layout is not None and x.data.ndim == largest), None)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """As in C, towards zero."""
    whole = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return (np.sign(a) * np.sign(b) * whole).astype(a.dtype)


OPERATORS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "floordiv": _quotient,
    "mod": lambda a, b: (a - b * _quotient(a, b)).astype(a.dtype), "lshift": np.left_shift, "rshift": np.right_shift,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal
}  # fmt: skip


def _install(name: str, compute: Callable[..., np.ndarray], compares: bool) -> None:
    def combined(a: Any, b: Any) -> Value:
        x, y, dtype, layout = paired(a, b)
        if dtype == tl.int1 and not compares and name not in ("and", "or", "xor"):
            dtype = tl.int32
            x, y = x.astype(np.int32), y.astype(np.int32)
        if name == "truediv" and dtype in INTEGERS:
            dtype = tl.float32
        with np.errstate(all="ignore"):
            result = compute(x, y)
        made = Value(result, tl.int1 if compares else dtype, layout)
        return made if compares or dtype in INTEGERS or dtype == tl.float32 else made.to(dtype)

    def forwards(self: Value, other: Any) -> Any:
        if not isinstance(other, (Value, int, float, np.generic)):
            return NotImplemented
        return combined(self, other)

    setattr(Value, f"__{name}__", forwards)
    if not compares:
        setattr(Value, f"__r{name}__", lambda self, other: combined(other, self))


for _name, _compute in OPERATORS.items():
    _install(_name, _compute, False)
for _name, _compute in COMPARISONS.items():
    _install(_name, _compute, True)
