"""TMA descriptors of tensors: what the copy engine fetches boxes from.

Triton checks a descriptor whenever one is made, which takes the host longer than a launch. The first of a kind is
checked, and others are made like it; whoever asks for one of a caller's tensor has looked at its address.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from sparge.backends.triton.plans import REMEMBERED

_checked: dict[Hashable, tuple[type, dict[str, Any]]] = {}  # by kind: the class, and all that is set but the base


def descriptor(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """Of x as a tensor of this shape, in boxes of `block`."""
    kind = (shape, strides, block, x.dtype)
    known = _checked.get(kind)
    if known is None:
        return _check(kind, x, shape, strides, block)
    made: Any = object.__new__(known[0])
    made.__dict__.update(known[1], base=x)
    return made


def _check(kind: Hashable, x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """The first of a kind."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    number = {
        torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16
    }[x.dtype]  # fmt: skip
    layout = gl.NVMMASharedLayout.get_default_for(list(block), number)  # of a box in shared memory
    made = TensorDescriptor(x, list(shape), list(strides), list(block), layout)
    if len(_checked) >= REMEMBERED:
        _checked.clear()
    _checked[kind] = (type(made), {name: value for name, value in vars(made).items() if name != "base"})
    return made
