"""Attention under many masks at once: exponentials and products are computed once, and each mask adds up its blocks.

A block's part of the numerator and the denominator does not depend on which others are kept. So dozens of masks cost
little more than dense attention; only number formats and a second stage, which see a mask's other blocks, cannot be had
this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparge.block_mask import BlockMask
from sparge.inputs import Inputs

NUMBERS_AT_ONCE = 1 << 26  # in float32: the parts of all blocks of one query block, of as many heads as that allows


def outputs_under(
    inputs: Inputs, masks: Sequence[BlockMask], query_blocks: Sequence[int]
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """For some heads and the rows of one query block: dense attention [B, H, R, Dv], and attention under each mask
    [masks, B, H, R, Dv], float32. Before them, which heads and which rows: of all those of the query blocks, in a row.

    Rows that see no key that is kept give 0.
    """
    rows_per_block, keys_per_block = masks[0].block
    batch, _, q_len, _ = inputs.query.shape
    k_len, group, width = inputs.key.shape[2], inputs.group_size, inputs.value.shape[3] + 1
    k_blocks = -(-k_len // keys_per_block)
    missing = k_blocks * keys_per_block - k_len
    per_group = batch * group * rows_per_block * max(k_blocks * width, k_len)
    step = max(1, NUMBERS_AT_ONCE // per_group)
    for first in range(0, inputs.key.shape[1], step):
        shared, heads = slice(first, first + step), slice(first * group, (first + step) * group)
        key = _float_and_padded(inputs.key[:, shared], missing)
        value = _float_and_padded(inputs.value[:, shared], missing)
        value = torch.nn.functional.pad(value, (0, 1), value=1.0)  # the last channel adds up the denominator
        value = value.unflatten(2, (k_blocks, keys_per_block))
        kept = _kept(masks, heads, inputs.query[:, heads].shape[:2], query_blocks)
        for n, block in enumerate(query_blocks):
            rows = slice(block * rows_per_block, min((block + 1) * rows_per_block, q_len))
            parts = _parts(inputs.query[:, heads, rows].float(), key, value, inputs, rows)
            places = slice(n * rows_per_block, n * rows_per_block + rows.stop - rows.start)
            yield heads, places, *_added_up(parts, kept[:, :, :, n, : parts.shape[2]])


def _float_and_padded(x: Tensor, missing: int) -> Tensor:
    """What is not finite counts as nothing: padding may hold anything, and inputs of searches are finite."""
    return torch.nn.functional.pad(x.float().nan_to_num(0.0, 0.0, 0.0), (0, 0, 0, missing))


def _kept(masks: Sequence[BlockMask], heads: slice, shape: Sequence[int], query_blocks: Sequence[int]) -> Tensor:
    """float32 [B, H, masks, query blocks, key blocks]."""
    dense = [mask.to_dense()[:, :, list(query_blocks)] for mask in masks]
    chosen = [(x if x.shape[1] == 1 else x[:, heads]).expand(*shape, -1, -1) for x in dense]
    return torch.stack(chosen, 2).float()


def _parts(query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, rows: slice) -> Tensor:
    """[B, H, key blocks, R, Dv + 1]: what each key block that some row sees adds to numerator and denominator."""
    (batch, heads, count, dim), kv_heads, sight = query.shape, key.shape[1], inputs.visibility
    size = value.shape[3]
    last = min(sight.k_len, max(0, rows.stop - 1 + sight.offset + sight.right + 1))
    blocks = max(1, -(-last // size))
    stop = min(blocks * size, sight.k_len)
    folded = query.reshape(batch, kv_heads, -1, dim)
    scores = (folded @ key[:, :, : blocks * size].mT).mul_(inputs.scale).view(batch, heads, count, -1)
    scores[..., stop:] = -torch.inf
    scores[..., :stop].masked_fill_(~sight.pairs(range(rows.start, rows.stop), range(stop)), -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # finite where nothing is seen
    weights = scores.sub_(largest).exp_()
    weights = weights.view(batch, kv_heads, -1, blocks, size).transpose(2, 3)  # [B, Hkv, blocks, rows of the group, bk]
    parts = (weights @ value[:, :, :blocks]).unflatten(3, (-1, count))
    by_head: Tensor = parts.transpose(2, 3).reshape(batch, heads, blocks, count, -1)
    return by_head


def _added_up(parts: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Dense attention, and attention under each mask. kept [B, H, masks, key blocks]."""
    count = parts.shape[3]
    every = torch.nn.functional.pad(kept, (0, 0, 1, 0), value=1.0)
    sums = (every @ parts.flatten(3)).unflatten(3, (count, -1)).movedim(2, 0)
    outputs = sums[..., :-1] / sums[..., -1:].clamp(min=torch.finfo(torch.float32).tiny)
    return outputs[0], outputs[1:]
