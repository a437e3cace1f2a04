"""Block masks of a stated sparsity: every row alike (uniform), or half the rows with four times the work (skewed)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.bench.cases import Case
from sparge.block_mask import BlockMask
from sparge.visibility import Visibility


def random_mask(
    case: Case, sight: Visibility, heads: int, block: tuple[int, int], generator: torch.Generator
) -> BlockMask:
    """Random blocks, an exact number in each row; under causal order the diagonal is always among them."""
    visible = sight.blocks(*block)[0, 0]
    edge = sight.right_edge(*block) & visible if sight.right_bounded else torch.zeros_like(visible)
    least = edge.sum(-1).clamp(min=1)
    room = visible.sum(-1)
    counts = torch.maximum(((1 - case.sparsity) * room).round().long(), least).expand(heads, -1)
    if case.mask == "skewed":
        counts = _skewed(counts, room, least, generator)
    kept = _choose_blocks(counts, visible, edge, generator)
    return BlockMask.from_dense(kept[None], sight.q_len, sight.k_len, block, sight)


def _skewed(counts: Tensor, room: Tensor, least: Tensor, generator: torch.Generator) -> Tensor:
    """Moves work inside pairs of neighbouring rows, 4 to 1, a coin deciding to which: the total stays what it was."""
    heads, rows = counts.shape
    pairs = rows // 2
    total, room, least = (
        x[..., : 2 * pairs].expand(heads, -1).unflatten(-1, (pairs, 2)) for x in (counts, room, least)
    )
    total = total.sum(-1, keepdim=True)
    heavy_side = torch.randint(2, (heads, pairs, 1), generator=generator, device=counts.device)
    light = torch.maximum((total / 5).round().long(), least.gather(-1, 1 - heavy_side))
    heavy = torch.minimum(total - light, room.gather(-1, heavy_side))
    paired = torch.where(torch.arange(2, device=counts.device) == heavy_side, heavy, total - heavy)
    return torch.cat((paired.flatten(-2), counts[..., 2 * pairs :]), -1)


def _choose_blocks(counts: Tensor, visible: Tensor, edge: Tensor, generator: torch.Generator) -> Tensor:
    """bool [heads, query blocks, key blocks]: the edge first, then visible blocks at random, `counts` per row."""
    rank = torch.rand(len(counts), *visible.shape, generator=generator, device=visible.device)
    rank.masked_fill_(~visible, 2.0).masked_fill_(edge, -1.0)
    listed = torch.arange(visible.shape[-1], device=visible.device) < counts[..., None]
    return torch.zeros_like(listed).scatter_(-1, rank.argsort(-1), listed) & visible
