"""The error budget: a few rows per head are also computed exactly; heads whose error may exceed the budget are redone.

Only the device knows which heads those are, and nothing here waits for it: on a GPU the second attention is always
launched, and for a head within the budget it has no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparge.backends import Backend, choose
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.stages import Blocks, Output

FEWEST_ROWS, MOST_ROWS = 64, 1024  # sampled
ROWS_PER_SAMPLE = 192  # one row of so many: half a percent of dense attention
GOLDEN = 0.6180339887498949  # its multiples fill an interval evenly, and follow no block's rhythm
SLOW = ("torch", "reference")  # these would make a GPU wait for the host
DEVIATIONS = 3.0  # of the estimate, that a head's true error may lie above it


@dataclass(frozen=True)
class Verdict:
    """What the check found, per batch entry and query head."""

    error: Tensor  # float32 [B, Hq]: the estimated relative L1 of what is returned
    redone: Tensor  # bool [B, Hq]


def enforce(output: Output, blocks: Blocks, backend: Backend, config: SparseConfig) -> tuple[Output, Verdict]:
    """The output with every head over the budget computed anew, all of it; and what is estimated of the result."""
    inputs = blocks.inputs
    assert config.max_error is not None
    kept = config.keeps_everything and config.pv_threshold is None and config.quantization == "none"
    if kept or not backend.takes_masks:
        nothing = torch.zeros(inputs.query.shape[:2], device=inputs.query.device)
        return output, Verdict(nothing, nothing.bool())
    rows = sampled_rows(inputs.query.shape[2], inputs.query.device)
    exact = exact_rows(inputs, rows)
    error, bound = estimated_error(output.values[:, :, rows], exact, inputs.query.shape[2])
    over = ~(bound <= config.max_error)  # NaN is over
    if inputs.query.device.type == "cpu" and not over.any():
        return output, Verdict(error, over)
    again = _everything(over, blocks, backend, config)
    values = torch.where(over[..., None, None], again.values, output.values)
    lse = None if output.lse is None or again.lse is None else torch.where(over[..., None], again.lse, output.lse)
    after, _ = estimated_error(values[:, :, rows], exact, inputs.query.shape[2])
    skipped = torch.where(over, 0, output.skipped_pv)
    return Output(values, lse, skipped), Verdict(after, over)


def sampled_rows(length: int, device: torch.device) -> Tensor:
    """int64 [R]: one row of each of R equal parts, or all rows of few; the same ones for every call of this length."""
    count = max(FEWEST_ROWS, min(MOST_ROWS, length // ROWS_PER_SAMPLE))
    if length <= 2 * count:
        return torch.arange(length, device=device)
    part = torch.arange(count, device=device, dtype=torch.float32)
    return ((part + (part * GOLDEN) % 1) * (length / count)).long().clamp(max=length - 1)


def exact_rows(inputs: Inputs, rows: Tensor) -> Tensor:
    """[B, Hq, R, Dv]: dense attention of some rows, in the inputs' dtype."""
    batch, heads, _, dim = inputs.query.shape
    kv_heads, group, sight = inputs.key.shape[1], inputs.group_size, inputs.visibility
    # Heads of a group share their keys: as more rows of one head they need no copies.
    query = inputs.query[:, :, rows].reshape(batch, kv_heads, group * len(rows), dim)
    seen = None
    if sight.key_valid is not None or sight.left < sight.k_len or sight.right < sight.k_len:
        key, position = torch.arange(sight.k_len, device=rows.device), (rows + sight.offset)[:, None]
        seen = ((key >= position - sight.left) & (key <= position + sight.right))[None, None]
        if sight.key_valid is not None:
            seen = seen & sight.key_valid[:, None, None]
        seen = seen.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(query, inputs.key, inputs.value, seen, scale=inputs.scale)
    if seen is not None:
        out = torch.where(seen.any(-1, keepdim=True), out, 0.0)
    return out.reshape(batch, heads, len(rows), -1)


def estimated_error(values: Tensor, exact: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """float32 [B, Hq], twice: the relative L1 of the rows at hand, and what that of all rows hardly exceeds.

    A ratio of sums over a sample; its deviation is that of the rows' remainders.
    """
    size = exact.float().abs().sum(-1)
    off = (values.float() - exact.float()).abs().sum(-1)
    total, count = size.sum(-1).clamp(min=torch.finfo(torch.float32).tiny), size.shape[-1]
    error = off.sum(-1) / total
    remainder = off - error[..., None] * size
    variance = remainder.square().sum(-1) * count / max(count - 1, 1) * (1 - count / length)
    return error, error + DEVIATIONS * variance.sqrt() / total


def _everything(over: Tensor, blocks: Blocks, backend: Backend, config: SparseConfig) -> Output:
    """Attention over all visible blocks of the heads that are over, unquantised where the backend can."""
    inputs, sight = blocks.inputs, blocks.inputs.visibility
    visible = BlockMask.all_visible(sight, config.block, inputs.query.shape[0], 1)
    bits = torch.where(over[..., None, None], visible.bits, 0)
    mask = BlockMask(bits, sight.q_len, sight.k_len, config.block, sight)
    config = replace(config, pv_threshold=None)
    exact = replace(config, quantization="none")
    able = choose(inputs, exact, own_mask=True).backend
    if able is not backend and able.name in SLOW:
        return backend.attend(blocks, mask, config)
    return able.attend(replace(blocks, quantized=None), mask, exact)
