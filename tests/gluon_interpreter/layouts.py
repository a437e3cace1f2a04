"""Which thread's which register holds which number of a block, as Triton says."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from triton._C.libtriton import gluon_ir, ir

Bases = list[list[int]]


def places(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """[warps, 32, registers]: flat indices. A thread has each number of a row once."""
    return _places(layout, shape)


@functools.cache
def _places(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))
    assert not linear.block_bases
    registers = [basis for basis in linear.reg_bases if any(basis)] if len(shape) == 1 else linear.reg_bases
    strides = np.cumprod([1, *shape[:0:-1]])[::-1]
    warps, lanes, own = (
        _spanned(bases, len(shape)) @ strides for bases in (linear.warp_bases, linear.lane_bases, registers)
    )
    return warps[:, None, None] + lanes[None, :, None] + own[None, None, :]


def _spanned(bases: Bases, rank: int) -> np.ndarray:
    found = np.zeros((1, rank), dtype=np.int64)
    for basis in bases:
        found = np.concatenate((found, found + np.array(basis)))
    return found
