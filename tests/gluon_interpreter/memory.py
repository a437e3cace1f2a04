"""Memory: pointers into tensors, shared memory, barriers, and boxes that the copy engine fetches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from gluon_interpreter.values import FORMATS, INTEGERS, RAW, Value, decoded, encoded, numpy_type, size_of, value

GARBAGE = 77  # what stands in shared memory until someone writes there; floats are NaN


class OutsideError(Exception):
    """A kernel reads or writes where nothing is."""


def _bits_of(x: Tensor) -> np.ndarray:
    """All bits of the memory that a tensor is part of, one number per element of its size."""
    raw, _ = RAW[x.element_size()]
    storage = x.untyped_storage()
    everything = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return everything[: len(everything) // x.element_size() * x.element_size()].view(raw)


@dataclass(frozen=True)
class PointerType:
    element_ty: tl.dtype


class Pointer:
    """A tensor's address, or many, each so many elements from its first."""

    __array_priority__ = 1000

    def __init__(self, bits: np.ndarray, element: tl.dtype, at: Value) -> None:
        self.bits, self.element, self.at = bits, element, at

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        return cls(_bits_of(x), FORMATS[x.dtype], Value(x.storage_offset(), tl.int64))

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.element)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.bits, self.element, self.at + value(other).to(tl.int64))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Where it points, and which of it counts; the rest points to the first element."""
        counts = np.broadcast_to(True if mask is None else value(mask).data, self._shape(mask))
        at = np.broadcast_to(self.at.data, counts.shape)
        beyond = counts & ((at < 0) | (at >= len(self.bits)))
        if beyond.any():
            raise OutsideError(f"element {at[beyond][0]} of {len(self.bits)}")
        return np.where(counts, at, 0), counts

    def _shape(self, mask: Any) -> tuple[int, ...]:
        return np.broadcast_shapes(self.at.shape, () if mask is None else value(mask).shape)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    at, counts = pointer.places(mask)
    found = decoded(pointer.bits[at], pointer.element).reshape(at.shape)
    rest = value(other, pointer.element).data.astype(found.dtype)
    return Value(np.where(counts, found, rest), pointer.element, pointer.at.layout)


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    numbers = value(x, pointer.element)
    shape = np.broadcast_shapes(pointer._shape(mask), numbers.shape)
    assert shape == pointer._shape(mask), "more numbers than addresses"
    at, counts = pointer.places(mask)
    bits = encoded(np.broadcast_to(numbers.to(pointer.element).data, at.shape), pointer.element).reshape(at.shape)
    pointer.bits[at[counts]] = bits[counts]


def atomic_add(pointer: Pointer, x: Any) -> Value:
    before = load(pointer)
    store(pointer, before + x)
    return before


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        assert self.count == 0, "initialised twice"
        self.count = self.left = count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        assert self.count > 0, "not initialised"
        self.left -= count
        self.bytes += expected
        assert self.left >= 0, "more arrivals than a phase has"
        self._end()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._end()

    def _end(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity % 2


class Barriers:
    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.each[int(value(i))]


class SharedMemory:
    """A view of a program's shared memory; floats are kept as float32."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype, layout: Any) -> None:
        self.data, self.dtype, self.layout = data, dtype, layout

    @classmethod
    def allocated(cls, dtype: tl.dtype, shape: list[int], layout: Any) -> SharedMemory:
        return cls(np.full(shape, _garbage(dtype), dtype=numpy_type(dtype)), dtype, layout)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def _view(self, data: np.ndarray) -> SharedMemory:
        assert np.shares_memory(data, self.data)
        return SharedMemory(data, self.dtype, self.layout)

    def index(self, i: Any) -> SharedMemory:
        i = int(value(i))
        assert 0 <= i < len(self.data), f"{i} of {len(self.data)}"
        return self._view(self.data[i])

    def slice(self, start: Any, length: int, dim: int = 0) -> SharedMemory:
        start = int(value(start))
        assert 0 <= start <= start + length <= self.shape[dim]
        return self._view(self.data[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: tuple[int, ...]) -> SharedMemory:
        return self._view(self.data.transpose(order))

    def reshape(self, shape: list[int]) -> SharedMemory:
        return self._view(self.data.reshape(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.data.copy(), self.dtype, layout)

    def store(self, x: Value) -> None:
        assert x.shape == self.shape
        assert x.dtype == self.dtype
        self.data[...] = x.data

    def spoil(self) -> None:
        self.data[...] = _garbage(self.dtype)


def _garbage(dtype: tl.dtype) -> float:
    return GARBAGE if dtype in INTEGERS else np.nan


class Boxes:
    """A tensor as the copy engine sees it."""

    def __init__(self, given: Any) -> None:
        base, self.block, self.layout = given.base, list(given.block_shape), given.layout
        self.dtype = FORMATS[base.dtype]
        bits = _bits_of(base)[base.storage_offset() :]
        strides = [stride * bits.itemsize for stride in given.strides]
        last = sum((n - 1) * stride for n, stride in zip(given.shape, given.strides, strict=True))
        assert last < len(bits), "a descriptor reaches beyond its tensor"
        self.bits = np.lib.stride_tricks.as_strided(bits, tuple(given.shape), tuple(strides))

    def bytes(self) -> int:
        return int(np.prod(self.block)) * size_of(self.dtype)

    def fetch(self, corner: list[int], target: SharedMemory) -> None:
        """What lies outside is 0."""
        assert list(target.shape) == self.block, f"a box of {self.block} into {target.shape}"
        assert target.dtype == self.dtype
        box = np.zeros(self.block, dtype=self.bits.dtype)
        inside, outside = [], []
        for start, length, extent in zip(corner, self.block, self.bits.shape, strict=True):
            low, high = min(max(start, 0), extent), min(max(start + length, 0), extent)
            inside.append(slice(low - start, max(high, low) - start))
            outside.append(slice(low, max(high, low)))
        box[tuple(inside)] = self.bits[tuple(outside)]
        target.data[...] = decoded(box, self.dtype).reshape(self.block)


def corners(coordinates: list[Any]) -> list[int]:
    return list(itertools.starmap(int, ((value(x),) for x in coordinates)))
