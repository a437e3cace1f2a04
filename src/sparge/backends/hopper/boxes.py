"""TMA descriptors of tensors: what the copy engine fetches boxes from.

Triton checks a descriptor whenever one is made, which takes the host longer than a launch. The first of a kind is
checked, and others are made like it; whoever asks for one of a caller's tensor has looked at its address.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from sparge.backends.triton.plans import REMEMBERED

_checked: dict[Hashable, dict[str, Any]] = {}


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a box lies in shared memory."""
    from triton.experimental.gluon import language as gl

    kinds = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds.get(dtype, gl.bfloat16))


def descriptor(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """Of x as a tensor of this shape, in boxes of `block`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    kind = (shape, strides, block, x.dtype)
    settings = _checked.get(kind)
    if settings is not None:
        made = object.__new__(TensorDescriptor)
        made.__dict__.update(settings, base=x)
        return made
    made = TensorDescriptor(x, list(shape), list(strides), list(block), _layout(block, x.dtype))
    if len(_checked) >= REMEMBERED:
        _checked.clear()
    _checked[kind] = {name: value for name, value in vars(made).items() if name != "base"}
    return made
