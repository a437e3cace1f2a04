"""Makes Triton's CPU interpreter round as the hardware does.

As released (3.6 to 3.9) it truncates casts to bfloat16, loses the carry when it rounds to fp8, and multiplies the raw
bits of bfloat16 operands. Casts and products go through torch instead. Reductions by a function of the kernel's own,
and calls of functions, which take it most of the time, are made faster.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
RAW = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}


def _as_torch(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    torch_raw, numpy_raw = RAW[dtype.primitive_bitwidth // 8]
    bits = torch.from_numpy(np.array(data, copy=True).view(numpy_raw))
    return bits.view(torch_raw).view(TORCH_TYPES[dtype.name])


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    values = _as_torch(data, source).float()
    wanted = TORCH_TYPES[target.name]
    if wanted.itemsize == 1:
        limit = torch.finfo(wanted).max
        values = values.clamp(-limit, limit)  # the hardware's casts saturate
    bits = values.to(wanted).view(RAW[wanted.itemsize][0]).numpy()
    return bits.view(getattr(np, f"uint{8 * wanted.itemsize}")).reshape(data.shape)


def _create_dot(self: object, a: object, b: object, d: object, *_: object) -> object:
    """Rounded once, so that no order of adding up shows; whole numbers are exact in float64, and faster."""
    left, right = (
        _as_torch(x.data, x.dtype).double().numpy() if x.dtype.is_floating() else x.data.astype(float) for x in (a, b)
    )
    with np.errstate(all="ignore"):  # hardware does not complain about NaN
        product = left @ right + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def _generic_reduce(self: interpreter.ReduceOps, input: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Halves at once instead of one number after the other: lengths are powers of two, and the order is nobody's."""
    assert not self.keep_dims
    assert self.axis is not None
    formats, parts = [x.dtype for x in input], [x.handle.data for x in input]
    while parts[0].shape[self.axis] > 1:
        halves = [np.split(part, 2, self.axis) for part in parts]
        given = [self.to_tensor(half[n], x) for n in range(2) for half, x in zip(halves, formats, strict=True)]
        found = self.combine_fn.fn(*given)
        parts = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
    rest = [np.squeeze(part, self.axis) for part in parts]
    return [self.to_tensor(x if x.ndim else x[()], dtype) for x, dtype in zip(rest, formats, strict=True)]


def _call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """A function that a kernel calls. As released, each call looks through all of Triton's language anew."""
    module = id(self.fn.__globals__)
    if module not in _prepared:
        interpreter._patch_lang(self.fn)
        _prepared.add(module)
    return self.rewrite()(*args, **kwargs)


def _launch(self: interpreter.GridExecutor, *args: object, **kwargs: object) -> None:
    _prepared.clear()  # a launch takes back what it has replaced
    _released_launch(self, *args, **kwargs)


_prepared: set[int] = set()  # modules whose functions a running kernel may call
_released_launch = interpreter.GridExecutor.__call__


def install() -> None:
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.GridExecutor.__call__ = _launch
    interpreter._convert_float = _convert_float
    interpreter.ReduceOps.generic_reduce = _generic_reduce
    interpreter.InterpreterBuilder.create_dot = _create_dot
