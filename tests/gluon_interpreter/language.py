"""What kernels know as `gl`, `gluon`, `mbarrier` and `tma`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as real

from gluon_interpreter import machine, memory
from gluon_interpreter.layouts import places
from gluon_interpreter.memory import Barrier, Barriers, Boxes, Pointer, SharedMemory
from gluon_interpreter.ptx import carry_out
from gluon_interpreter.values import INTEGERS, Value, _layout_of, decoded, numpy_type, paired, size_of, value

TO_THE_COMPILER = ("num_warps", "maxnreg")


class _Whole(int):
    value = property(int)


class _Float(float):
    value = property(float)


class _Text(str):
    __slots__ = ()
    value = property(str)


class constexpr:  # noqa: N801 (its name in kernels)
    def __new__(cls, x: Any) -> Any:
        for plain, kept in ((bool, bool), (int, _Whole), (float, _Float), (str, _Text)):
            if isinstance(x, plain):
                return kept(x)
        return x


class Kernel:
    """A function of a kernel; launched, as many programs of it run beside each other."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.arg_names = fn, list(inspect.signature(fn).parameters)
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        (programs,) = grid

        def launch(*args: Any, **constants: Any) -> None:
            given = [_seen_by_the_kernel(x) for x in args]
            kept = {name: x for name, x in constants.items() if name not in TO_THE_COMPILER}
            machine.Machine().run(lambda: self.fn(*given, **kept), programs)

        return launch


def _seen_by_the_kernel(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.to(x)
    return Boxes(x) if hasattr(x, "block_shape") else value(x)


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    return Kernel if fn is None else Kernel(fn)


# ---- blocks of numbers


def full(shape: Sequence[int], x: Any, dtype: tl.dtype, layout: Any) -> Value:
    return Value(np.full(shape, value(x).data, dtype=numpy_type(dtype)), dtype, layout)


def zeros(shape: Sequence[int], dtype: tl.dtype, layout: Any) -> Value:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Value) -> Value:
    return Value(np.zeros_like(x.data), x.dtype, x.layout)


def arange(start: int, end: int, layout: Any) -> Value:
    return Value(np.arange(start, end), tl.int32, layout)


def expand_dims(x: Any, axis: int) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.bits, x.element, expand_dims(x.at, axis))
    sliced = type(x.layout).__name__ == "SliceLayout"
    assert not sliced or x.layout.dim == axis
    return Value(np.expand_dims(x.data, axis), x.dtype, x.layout.parent if sliced else None)


def broadcast(a: Value, b: Value) -> tuple[Value, Value]:
    layout, (x, y) = _layout_of(a, b), np.broadcast_arrays(a.data, b.data)
    return Value(x, a.dtype, layout), Value(y, b.dtype, layout)


def join(a: Value, b: Value) -> Value:
    return Value(np.stack((a.data, b.data), -1), a.dtype)


def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(x.data, x.dtype, layout)


def where(condition: Any, a: Any, b: Any) -> Value:
    x, y, dtype, layout = paired(a, b)
    return Value(np.where(value(condition).data, x, y), dtype, layout or getattr(condition, "layout", None))


def _larger(a: Any, b: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Value:
    x, y, dtype, layout = paired(a, b)
    return Value((np.maximum if propagate_nan == tl.PropagateNan.ALL else np.fmax)(x, y), dtype, layout)


def _smaller(a: Any, b: Any) -> Value:
    x, y, dtype, layout = paired(a, b)
    return Value(np.fmin(x, y), dtype, layout)


def _of_one(compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[Value], Value]:
    def of(x: Value) -> Value:
        with np.errstate(all="ignore"):
            return Value(compute(x.data), x.dtype, x.layout)

    return of


def fma(a: Value, b: Value, c: Value) -> Value:
    with np.errstate(all="ignore"):
        return Value(a.data.astype(np.float64) * b.data + c.data, a.dtype, a.layout)


def _reduced(x: Value, axis: int, compute: Callable[..., np.ndarray]) -> Value:
    layout = None if x.layout is None or x.data.ndim == 1 else real.SliceLayout(axis, x.layout)
    dtype = tl.int32 if x.dtype in INTEGERS and x.dtype != tl.int64 else x.dtype
    with np.errstate(all="ignore"):
        return Value(compute(x.data.astype(numpy_type(dtype)), axis=axis), dtype, layout)


def largest(x: Value, axis: int) -> Value:
    return _reduced(x, axis, np.fmax.reduce)


def added(x: Value, axis: int) -> Value:
    return _reduced(x, axis, lambda data, axis: np.add.reduce(data, axis=axis, dtype=data.dtype))


def reduce(x: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    def all_of(data: np.ndarray, axis: int) -> np.ndarray:
        slices = (Value(part, x.dtype) for part in np.moveaxis(data, axis, 0))
        return functools.reduce(combine, slices).data

    return _reduced(x, axis, all_of)


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Value], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Each thread's numbers, `pack` of each argument at a time, as the instructions see them."""
    formats = dtype if isinstance(dtype, tuple) else (dtype,)
    shape, layout = np.broadcast_shapes(*(x.shape for x in args)), _layout_of(*args)
    if pack == 1 and layout is None:
        where_ = np.arange(int(np.prod(shape))).reshape(-1, 1, 1)
    else:
        where_ = places(layout, shape) if pack > 1 else np.arange(int(np.prod(shape))).reshape(-1, 1, 1)
    where_ = np.moveaxis(where_.reshape(*where_.shape[:2], -1, pack), (2, 3), (0, 1))  # [times, pack, warps, lanes]
    names = constraints.split(",")
    per_register = [4 // size_of(x) for x in formats]
    outputs = [n for n, name in enumerate(names) if name.startswith("=")]
    assert len(outputs) == sum(pack // n for n in per_register)
    registers: dict[str, np.ndarray] = {}
    given = [register for x in args for register in _registers_of(x, shape, where_, pack)]
    assert len(given) == len(names) - len(outputs)
    for n, (name, register) in enumerate(zip(names[len(outputs) :], given, strict=True), len(outputs)):
        registers[f"${name}" if name.isdigit() else f"${n}"] = register
    after = carry_out(asm, registers)
    made, first = [], 0
    for own_format, packed in zip(formats, per_register, strict=True):
        flat = np.zeros(int(np.prod(shape)), dtype=numpy_type(own_format))
        for n in range(pack):
            register = np.broadcast_to(after[f"${first + n // packed}"], where_[:, n].shape)
            if packed > 1:
                wide = 32 // packed
                bits = (register.astype(np.uint32) >> np.uint32(wide * (n % packed))).astype(f"uint{wide}")
                register = decoded(bits, own_format).reshape(register.shape)
            flat[where_[:, n]] = register
        first += pack // packed
        made.append(Value(flat.reshape(shape), own_format, layout))
    return tuple(made) if isinstance(dtype, tuple) else made[0]


def _registers_of(x: Value, shape: tuple[int, ...], where_: np.ndarray, pack: int) -> list[np.ndarray]:
    """What a thread's numbers fill: those of 16 bits lie two in each."""
    numbers = [np.broadcast_to(x.data, shape).reshape(-1)[where_[:, n]] for n in range(pack)]
    if x.dtype != tl.int16:
        return numbers
    bits = [number.view(np.uint16).astype(np.uint32) for number in numbers]
    return [low | (high << np.uint32(16)) for low, high in zip(bits[::2], bits[1::2], strict=True)]


# ---- memory, and who else runs


def allocate_shared_memory(dtype: tl.dtype, shape: Sequence[int], layout: Any) -> Any:
    if isinstance(layout, _BarrierLayout):
        return Barriers(shape[0])
    return SharedMemory.allocated(dtype, list(shape), layout)


class _BarrierLayout:
    pass


def atomic_add(pointer: Pointer, x: Any) -> Value:
    machine.let_others_run()
    return memory.atomic_add(pointer, x)


def _wait(barrier: Barrier, parity: Any) -> None:
    wanted = int(value(parity))
    if not barrier.passed(wanted) or machine.chance.random() < 0.3:
        machine.wait_until(lambda: barrier.passed(wanted), f"a barrier in phase {barrier.phase}, for parity {wanted}")


def _async_load(boxes: Boxes, corner: Sequence[Any], barrier: Barrier, target: SharedMemory) -> None:
    machine.fetch(boxes, memory.corners(list(corner)), barrier, target)


def _nothing() -> None:
    """What keeps warps in step has nothing to do where they are."""


def _same(x: Any) -> Any:
    return x


LAYOUTS = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
           "DotOperandLayout", "DistributedLinearLayout")  # fmt: skip
FORMATS = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float8e4nv")
ANNOTATIONS = ("tensor", "shared_memory_descriptor")

gl = SimpleNamespace(
    **{name: getattr(real, name) for name in LAYOUTS}, **{name: getattr(tl, name) for name in FORMATS},
    **dict.fromkeys(ANNOTATIONS, object), constexpr=constexpr, static_range=range,
    full=full, zeros=zeros, zeros_like=zeros_like, arange=arange, expand_dims=expand_dims, broadcast=broadcast,
    join=join, convert_layout=convert_layout, where=where, maximum=_larger, minimum=_smaller, abs=_of_one(np.abs),
    exp2=_of_one(np.exp2), log2=_of_one(np.log2), sqrt=_of_one(np.sqrt), fma=fma, max=largest, sum=added, reduce=reduce,
    inline_asm_elementwise=inline_asm_elementwise, load=memory.load, store=memory.store, atomic_add=atomic_add,
    allocate_shared_memory=allocate_shared_memory, warp_specialize=machine.specialize, barrier=_nothing,
    program_id=lambda axis: Value(machine.own().program, tl.int32),
    num_programs=lambda axis: Value(machine.own().machine.programs, tl.int32),
)  # fmt: skip
mbarrier = SimpleNamespace(
    MBarrierLayout=_BarrierLayout, init=lambda barrier, count: barrier.init(count), wait=_wait,
    arrive=lambda barrier, count=1: barrier.arrive(count),
    expect=lambda barrier, count: barrier.arrive(1, int(value(count))),
)  # fmt: skip
tma = SimpleNamespace(async_load=_async_load)
hopper = SimpleNamespace(
    mbarrier=mbarrier, tma=tma, fence_async_shared=_nothing, warpgroup_mma=machine.multiply,
    warpgroup_mma_wait=machine.wait_for_products,
)  # fmt: skip
gluon = SimpleNamespace(jit=jit, constexpr_function=_same, language=gl)
