"""Starts kernels with little work on the host.

Triton binds and hashes every argument on every launch, some 70 microseconds for a kernel with dozens of them: more than
short attention takes. What it compiles depends on few facts about the arguments, none of them a length; a dictionary
keyed by those facts holds the compiled kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Facts = tuple[Any, ...]
_compiled: dict[Facts, tuple[Any, tuple[Any, ...]]] = {}


def facts(*tensors: Tensor) -> Facts:
    """All that a compiler may learn from tensors and their strides: types, divisibility by 16, and what is 1."""
    known: list[Any] = []
    for x in tensors:
        known += (x.dtype, x.data_ptr() & 15)
        known += [(n & 15 == 0) + 2 * (n == 1) + 4 * (n >= 1 << 31) for n in x.stride()]
    return tuple(known)


def addresses_of(pointers: tuple[Tensor, ...]) -> list[int]:
    return [x.data_ptr() for x in pointers]


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    known: Facts = (),
    addresses: list[int] | None = None,
) -> None:
    """kernel[(programs,)](*pointers, *numbers, **constants) on the current device and stream.

    `known` holds the facts of all tensors that were not just allocated; numbers that are not strides of those tensors
    must be parameters on which the kernel does not specialise. `addresses` are those of the pointers, to look them up
    once for several launches.
    """
    device = torch.cuda.current_device() if pointers[0].is_cuda else -1
    key = (id(kernel), device, known, *constants.values())  # kernels live as long as their module
    found = _compiled.get(key)
    if found is not None:
        compiled, tail = found
        compiled[programs, 1, 1](*(addresses or addresses_of(pointers)), *numbers, *tail)
        return
    compiled = kernel[(programs,)](*pointers, *numbers, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        names = kernel.arg_names[len(pointers) + len(numbers) :]
        _compiled[key] = (compiled, tuple(constants[name] for name in names))
