"""The error budget: a few rows per head are also computed exactly; heads whose error may exceed the budget are redone.

Only the device knows which heads those are, and nothing here waits for it: on a GPU the second attention is always
launched, and for a head within the budget it has no blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.backends import Backend, choose
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.exact import exact_rows
from sparge.stages import Blocks, Output

FEWEST_ROWS, MOST_ROWS = 64, 1024  # sampled
ROWS_PER_SAMPLE = 192  # one row of so many: half a percent of dense attention
GOLDEN = 0.6180339887498949  # its multiples fill an interval evenly, and follow no block's rhythm
SLOW = ("torch", "reference")  # these would make a GPU wait for the host
DEVIATIONS = 3.0  # of the estimate, that a head's true error may lie above it
REDONE_AT_ONCE = 1 << 27  # bytes of the result: all heads are launched, whichever are over


@dataclass(frozen=True)
class Verdict:
    """What the check found, per batch entry and query head."""

    error: Tensor  # float32 [B, Hq]: the estimated relative L1 of what is returned
    redone: Tensor  # bool [B, Hq]


def enforce(output: Output, blocks: Blocks, backend: Backend, config: SparseConfig) -> tuple[Output, Verdict]:
    """The output with every head over the budget computed anew, in its place; and what is estimated of the result."""
    inputs = blocks.inputs
    assert config.max_error is not None
    if loses_nothing(config) or not backend.takes_masks:
        nothing = torch.zeros(inputs.query.shape[:2], device=inputs.query.device)
        return output, Verdict(nothing, nothing.bool())
    rows = sampled_rows(inputs.query.shape[2], inputs.query.device)
    exact = exact_rows(inputs, rows)
    error, bound = estimated_error(output.values[:, :, rows], exact, inputs.query.shape[2])
    over = ~(bound <= config.max_error)  # NaN is over
    if inputs.query.device.type == "cpu" and not over.any():
        return output, Verdict(error, over)
    redo(over, output, blocks, backend, config)
    after, _ = estimated_error(output.values[:, :, rows], exact, inputs.query.shape[2])
    return replace(output, skipped_pv=torch.where(over, 0, output.skipped_pv)), Verdict(after, over)


def loses_nothing(config: SparseConfig) -> bool:
    return config.keeps_everything and config.pv_threshold is None and config.quantization == "none"


def sampled_rows(length: int, device: torch.device) -> Tensor:
    """int64 [R]: one row of each of R equal parts, or all rows of few; the same ones for every call of this length."""
    count = max(FEWEST_ROWS, min(MOST_ROWS, length // ROWS_PER_SAMPLE))
    if length <= 2 * count:
        return torch.arange(length, device=device)
    part = torch.arange(count, device=device, dtype=torch.float32)
    return ((part + (part * GOLDEN) % 1) * (length / count)).long().clamp(max=length - 1)


def estimated_error(values: Tensor, exact: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """float32 [B, Hq], twice: the relative L1 of the rows at hand, and what that of all rows hardly exceeds."""
    return error_of_rows(*row_errors(values, exact), length)


def row_errors(values: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [B, Hq, R], twice: the L1 of each row as it should be, and of what it is off."""
    return exact.float().abs().sum(-1), (values.float() - exact.float()).abs().sum(-1)


def error_of_rows(size: Tensor, off: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A ratio of sums over a sample; its deviation is that of the rows' remainders."""
    total, count = size.sum(-1).clamp(min=torch.finfo(torch.float32).tiny), size.shape[-1]
    error = off.sum(-1) / total
    remainder = off - error[..., None] * size
    variance = remainder.square().sum(-1) * count / max(count - 1, 1) * (1 - count / length)
    return error, error + DEVIATIONS * variance.sqrt() / total


def redo(over: Tensor, output: Output, blocks: Blocks, backend: Backend, config: SparseConfig) -> None:
    """Overwrites the heads that are over with attention over all visible blocks, unquantised where a backend can."""
    inputs, config = blocks.inputs, replace(config, pv_threshold=None)
    exact = replace(config, quantization="none")
    able = choose(inputs, exact, own_mask=True).backend
    parts: Iterable[tuple[slice, Blocks]] = _some_rows(replace(blocks, quantized=None))
    if able is not backend and able.name in SLOW:
        able, exact, parts = backend, config, [(slice(None), blocks)]
    for rows, part in parts:
        sight = part.inputs.visibility
        visible = BlockMask.all_visible(sight, config.block, inputs.query.shape[0], 1)
        bits = torch.where(over[..., None, None], visible.bits, 0)
        again = able.attend(part, BlockMask(bits, sight.q_len, sight.k_len, config.block, sight), exact)
        output.values[:, :, rows] = torch.where(over[..., None, None], again.values, output.values[:, :, rows])
        if output.lse is not None and again.lse is not None:
            output.lse[:, :, rows] = torch.where(over[..., None], again.lse, output.lse[:, :, rows])


def _some_rows(blocks: Blocks) -> Iterator[tuple[slice, Blocks]]:
    """Whole query blocks at a time, with the keys up to the last that one of the rows sees."""
    inputs, sight, (height, width) = blocks.inputs, blocks.inputs.visibility, blocks.block
    bytes_per_row = inputs.query.shape[:2].numel() * inputs.value.shape[3] * inputs.query.element_size()
    step = max(1, REDONE_AT_ONCE // (bytes_per_row * height)) * height
    if step >= sight.q_len:
        yield slice(None), blocks
        return
    for first in range(0, sight.q_len, step):
        rows = range(first, min(first + step, sight.q_len))
        keys = range(max(1, min(rows.stop + sight.offset + sight.right, sight.k_len)))
        some = replace(
            inputs,
            query=inputs.query[:, :, rows.start : rows.stop],
            key=inputs.key[:, :, : keys.stop],
            value=inputs.value[:, :, : keys.stop],
            visibility=sight.part(rows, keys),
        )
        finite = blocks.v_finite[:, :, : -(-keys.stop // width)].contiguous()
        yield slice(rows.start, rows.stop), replace(blocks, inputs=some, v_finite=finite)
