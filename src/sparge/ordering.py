"""Reordering of visual tokens so that neighbours in sequence are neighbours in the picture.

The tokens of an image or a video arrive in raster order: time, then height, then width. Sparse attention
works on blocks of consecutive tokens and predicts best when a block is compact, so the tokens are first
permuted, most usefully along a Hilbert curve, and the attention output is permuted back afterwards. Text
tokens before or after the visual ones keep their places.

>>> order = token_order((1, 2, 2), "hilbert", text_before=1)
>>> order.permutation.tolist()
[0, 1, 2, 4, 3]
>>> tokens = torch.randn(5, 8)
>>> torch.equal(order.restore(order.apply(tokens)), tokens)
True
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

AXES_FROM_SLOW_TO_FAST = {"row": (0, 1, 2), "column": (0, 2, 1), "time": (1, 2, 0)}
ORDER_NAMES = ("hilbert", *AXES_FROM_SLOW_TO_FAST, "random")
RANDOM_ORDER_SEED = 20_240_229

# The length of one side of a box, and the signed change of the raster index for one step along it.
Axis = tuple[int, int]


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """A permutation of a token sequence together with its inverse, both int64 vectors.

    Position `i` of the reordered sequence holds token `permutation[i]` of the original one. Both methods
    always return a new tensor, also for the identity, so writing to a result never changes the input.
    """

    permutation: torch.Tensor
    inverse: torch.Tensor

    def apply(self, x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """Return a copy of `x` with the tokens along `dim` put into this order."""
        return _select_tokens(x, dim, self.permutation)

    def restore(self, x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """Return a copy of `x` with the tokens along `dim` put back: `restore(apply(x))` equals `x`."""
        return _select_tokens(x, dim, self.inverse)


def token_order(
    grid: tuple[int, int, int],
    name: str = "hilbert",
    *,
    text_before: int = 0,
    text_after: int = 0,
    device: torch.device | str | None = None,
) -> TokenOrder:
    """Build the order of a sequence of text, a (time, height, width) grid of visual tokens, and text.

    `name` says how the visual tokens are visited:

    - "hilbert": along a generalised Hilbert curve, for any extents. The curve starts at the first token,
      and each step goes to a cell that shares a face with the last one. No diagonal step is ever taken,
      as measured on all grids up to 16 x 16 x 16, all pictures up to 80 x 80, and many larger ones.
    - "row": time, height, width, the last varying fastest. This is the order in which tokens arrive.
    - "column": time, width, height.
    - "time": height, width, time.
    - "random": shuffled, the same way on every call and on every machine.

    The visual part is cached for recently used grids; the returned tensors are not shared between calls.
    """
    extents = _checked_grid(grid)
    if name not in ORDER_NAMES:
        raise ValueError(f"Order name {name!r} is unknown; it must be one of {', '.join(ORDER_NAMES)}.")
    before = _checked_integer("text_before", text_before, minimum=0)
    after = _checked_integer("text_after", text_after, minimum=0)

    visual = before + _visual_order(extents, name)
    visual_end = before + visual.size
    permutation = np.concatenate([np.arange(before), visual, np.arange(visual_end, visual_end + after)])
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(permutation.size)
    return TokenOrder(torch.tensor(permutation, device=device), torch.tensor(inverse, device=device))


def _select_tokens(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if x.size(dim) != index.numel():
        raise ValueError(
            f"The tensor has {x.size(dim)} tokens along dimension {dim} of its shape {tuple(x.shape)}, "
            f"but this order is for {index.numel()} tokens."
        )
    return x.index_select(dim, index.to(x.device))


def _checked_integer(what: str, value: object, minimum: int) -> int:
    accepted = f"{what} must be an integer of at least {minimum}"
    # Python counts True as an integer, but as an extent or a count it is a mistake.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{accepted}, but {value!r} was given.")
    integer = operator.index(value)
    if integer < minimum:
        raise ValueError(f"{accepted}, but {integer} was given.")
    return integer


def _checked_grid(grid: object) -> tuple[int, int, int]:
    accepted = "The grid must hold three positive integers (time, height, width)"
    if not isinstance(grid, Sequence) or isinstance(grid, str | bytes):
        raise TypeError(f"{accepted}, but {grid!r} was given.")
    if len(grid) != 3:
        raise ValueError(f"{accepted}, but {grid!r} with {len(grid)} extents was given.")
    time, height, width = (
        _checked_integer(f"The {side} of grid {grid!r}", extent, minimum=1)
        for side, extent in zip(("time", "height", "width"), grid, strict=True)
    )
    return time, height, width


@lru_cache(maxsize=16)
def _visual_order(grid: tuple[int, int, int], name: str) -> npt.NDArray[np.int64]:
    time, height, width = grid
    count = time * height * width
    if name == "hilbert":
        cells: list[int] = []
        _walk_grid(0, [(time, height * width), (height, width), (width, 1)], cells)
        order = np.array(cells, dtype=np.int64)
    elif name == "random":
        # Sorting raw bits, because NumPy promises a fixed stream for the bit generator but not for shuffles.
        bits = np.random.PCG64(RANDOM_ORDER_SEED).random_raw(count)
        order = np.argsort(bits, kind="stable").astype(np.int64)
    else:
        raster = np.arange(count, dtype=np.int64).reshape(grid)
        order = raster.transpose(AXES_FROM_SLOW_TO_FAST[name]).flatten()
    order.flags.writeable = False  # Every caller gets this same cached array.
    return order


def _walk_grid(start: int, axes: list[Axis], cells: list[int]) -> None:
    """Append the cells of a whole grid, starting at one corner and ending wherever suits."""
    axes = sorted(axes, key=lambda axis: axis[0], reverse=True)
    length, step = axes[0]
    main = next((axis for axis in axes if axis[0] % 2 == 0), axes[0])
    if 2 * length <= 3 * main[0]:
        axes.remove(main)
        _walk_box(start, main, axes[0], axes[1], cells)
        return
    # An odd side much longer than every even one cannot be the main axis, and a short main axis would send
    # the curve up and down the long side. So an even part is walked lengthwise, and the end is left over.
    tail = (min(main[0], length // 2) - 1) | 1
    _walk_box(start, (length - tail, step), axes[1], axes[2], cells)
    _walk_grid(start + (length - tail) * step, [(tail, step), *axes[1:]], cells)


def _walk_box(start: int, a: Axis, b: Axis, c: Axis, cells: list[int]) -> None:
    """Append the cells of a box from the corner `start` to the corner at the other end of its axis `a`.

    Colouring the cells like a chessboard shows that unit steps can do this only if `a` is even or all sides
    are odd. Every cut below hands on boxes for which that holds again, which is why cuts are even.
    """
    if b[0] < c[0]:
        b, c = c, b
    (len_a, step_a), (len_b, step_b), (len_c, step_c) = a, b, c
    if len_b == 1:
        cells.extend(range(start, start + len_a * step_a, step_a))
        return
    cut_a, far_a = _even_half(len_a), (len_a - 1) * step_a
    a_near, a_far = (cut_a, step_a), (len_a - cut_a, -step_a)
    if 2 * len_a > 3 * len_b:  # Long: two boxes in a row.
        _walk_box(start, a_near, b, c, cells)
        _walk_box(start + cut_a * step_a, (len_a - cut_a, step_a), b, c, cells)
        return
    if 3 * len_b > 4 * len_c or (len_b % 2 and len_c % 2):  # Flat, or too odd to fold twice: out, over, back.
        cut_b = _even_half(len_b)
        turn = start + (cut_b - 1) * step_b
        _walk_box(start, (cut_b, step_b), c, a_near, cells)
        _walk_box(turn + step_b, a, (len_b - cut_b, step_b), c, cells)
        _walk_box(turn + far_a, (cut_b, -step_b), c, a_far, cells)
        return
    if len_c % 2:
        (len_b, step_b), (len_c, step_c) = c, b
    cut_b, cut_c, far_c = _even_half(len_b), _even_half(len_c), (len_c - 1) * step_c
    turn, b_rest = start + (cut_b - 1) * step_b, (len_b - cut_b, step_b)
    _walk_box(start, (cut_b, step_b), (cut_c, step_c), a_near, cells)
    _walk_box(turn + step_b, (len_c, step_c), a_near, b_rest, cells)
    _walk_box(turn + far_c, a, (cut_b, -step_b), (len_c - cut_c, -step_c), cells)
    _walk_box(turn + step_b + far_a + far_c, (len_c, -step_c), a_far, b_rest, cells)
    _walk_box(turn + far_a, (cut_b, -step_b), (cut_c, step_c), a_far, cells)


def _even_half(length: int) -> int:
    half = length // 2
    return half + 1 if half % 2 and length > 2 else half
