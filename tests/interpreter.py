"""Makes Triton's CPU interpreter round as the hardware does.

As released (3.6 to 3.9) it truncates casts to bfloat16, loses the carry when it rounds to fp8, and multiplies the raw
bits of bfloat16 operands. Casts and products go through torch instead.
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
    left, right = a.data, b.data
    if a.dtype.is_floating():
        left, right = (_as_torch(x.data, x.dtype).float().numpy() for x in (a, b))
    with np.errstate(all="ignore"):  # hardware does not complain about NaN
        return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def install() -> None:
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
