"""Plain torch on any device: gather the kept keys of a query block, then ordinary attention over them.

The fallback where no compiled engine can run. It skips for real, but small matrix products and an unfused softmax leave
it several times slower than the compiled CPU engine, and at moderate sparsity no faster than dense attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge import reference
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.redoing import BudgetInTorch
from sparge.reference import GROUP, multiply_visible
from sparge.stages import Blocks, Output


class GatherBackend(BudgetInTorch):
    """Plain torch on any device: skips blocks, but is several times slower than a compiled engine."""

    name = "torch"
    takes_masks = True
    merit = "first choice"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, inputs: Inputs, config: SparseConfig) -> str | None:
        if inputs.packing is not None:
            return "takes packed sequences one at a time"
        if config.quantization not in ("auto", "none"):
            return f"computes in floating point only, not {config.quantization}"
        return None

    def default_quantization(self, device: torch.device) -> str:
        return "none"

    summarize = staticmethod(reference.summarize)
    select = staticmethod(reference.select)

    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
        inputs = blocks.inputs
        batch, heads, q_len, _ = inputs.query.shape
        kept = mask.to_dense().expand(batch, heads, -1, -1)
        output = inputs.empty_output()
        lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=output.device)
        skipped = torch.zeros(batch, heads, dtype=torch.int64, device=output.device)
        limits = None
        if config.pv_threshold is not None:
            limits = config.per_head("pv_threshold", heads, output.device)
        for b in range(batch):
            for h in range(heads):
                for i in range(mask.q_blocks):
                    rows = slice(i * mask.block[0], min((i + 1) * mask.block[0], q_len))
                    tile = GatheredTile(blocks, mask.block[1], b, h, rows, kept[b, h, i].nonzero()[:, 0])
                    if limits is not None:
                        skipped[b, h] += tile.second_stage(limits[h])
                    output[b, h, rows], lse[b, h, rows] = tile.finish()
        return Output(output, lse, skipped)


class GatheredTile:
    """The scores of one query block over the keys it keeps."""

    def __init__(self, blocks: Blocks, block_k: int, b: int, h: int, rows: slice, kept: Tensor) -> None:
        inputs, sight = blocks.inputs, blocks.inputs.visibility
        keys = (kept[:, None] * block_k + torch.arange(block_k, device=kept.device)).flatten()
        inside = keys < sight.k_len
        keys = keys.clamp(max=sight.k_len - 1)
        position = torch.arange(rows.start, rows.stop, device=keys.device)[:, None] + sight.offset
        self.seen = inside & (keys >= position - sight.left) & (keys <= position + sight.right)
        if sight.key_valid is not None:
            self.seen &= sight.key_valid[b, keys]
        self.block_k = block_k
        kv_head = h // inputs.group_size
        self.v_finite = blocks.v_finite[b, kv_head, kept]
        self.value = inputs.value[b, kv_head].index_select(0, keys).float()
        key = inputs.key[b, kv_head].index_select(0, keys).float()
        scores = inputs.query[b, h, rows].float() @ key.T * inputs.scale
        self.scores = scores.masked_fill_(~self.seen, -torch.inf)

    def second_stage(self, limit: Tensor) -> Tensor:
        """Hide what 64-row groups do not want; returns how many (group, block) pairs that is."""
        count = torch.zeros((), dtype=torch.int64, device=limit.device)
        for scores, seen in zip(self.scores.split(GROUP), self.seen.split(GROUP), strict=True):
            local = scores.unflatten(1, (-1, self.block_k)).amax(-1)
            sees = seen.unflatten(1, (-1, self.block_k)).any(-1)
            running = local.flip(-1).cummax(-1).values.flip(-1)  # blocks are visited in descending order
            below = (torch.where(sees, local - running, -torch.inf) < limit) | ~sees
            skip = below.all(0) & self.v_finite
            count += (skip & sees.any(0)).sum()
            hide = skip.repeat_interleave(self.block_k)
            seen &= ~hide
            scores.masked_fill_(hide, -torch.inf)
        return count

    def finish(self) -> tuple[Tensor, Tensor]:
        lse = torch.logsumexp(self.scores, -1)
        sees = self.seen.any(-1)
        weights = torch.where(self.seen, torch.exp(self.scores - lse[:, None]), 0.0)
        values = multiply_visible(weights, self.seen, self.value)
        return torch.where(sees[:, None], values, 0.0), torch.where(sees, lse, -torch.inf)
