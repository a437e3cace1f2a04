"""Error budgets without kernels of their own: heads computed anew are copied out of whole results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.exact import exact_rows
from sparge.judging import judge
from sparge.stages import Blocks, Output, Redo

REDONE_AT_ONCE = 1 << 27  # bytes of the result: all heads are computed, though those within the budget have no blocks


class Attends(Protocol):
    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output: ...


class BudgetInTorch:
    """What an error budget asks of a backend, for those without kernels for it."""

    exact_rows = staticmethod(exact_rows)
    judge = staticmethod(judge)

    def attend_again(self: Attends, blocks: Blocks, config: SparseConfig, redo: Redo) -> None:
        heads, output = redo.heads, redo.output
        # Copies for a number format belong to all rows: they cannot be divided with them.
        parts = [(slice(None), blocks)] if blocks.quantized is not None else some_rows(blocks)
        for rows, part in parts:
            sight = part.inputs.visibility
            visible = BlockMask.all_visible(sight, config.block, heads.shape[0], 1)
            bits = torch.where(heads[..., None, None], visible.bits, 0)
            again = self.attend(part, BlockMask(bits, sight.q_len, sight.k_len, config.block, sight), config)
            output.values[:, :, rows] = torch.where(heads[..., None, None], again.values, output.values[:, :, rows])
            if output.lse is not None and again.lse is not None:
                output.lse[:, :, rows] = torch.where(heads[..., None], again.lse, output.lse[:, :, rows])


def some_rows(blocks: Blocks) -> Iterator[tuple[slice, Blocks]]:
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
