"""The "probe" rule: a few rows of each query block are scored against every key they see.

Means of rows and keys show what all of them like, and hide what single rows look for; single rows say little about the
others. The mean of both predicts best which blocks matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.visibility import Visibility

SHARE_DTYPE = torch.float16  # of shares that are kept or sent
NEIGHBOUR = 0.5  # what rows of the query block before count, which look for much the same
FULL_LENGTH = 8192  # keys from which on the share asked for falls


def probe_positions(q_len: int, block_rows: int, count: int, device: torch.device) -> Tensor:
    """int64 [query blocks, count]: sampled rows, spread over each block up to its last row.

    So the last row of a prompt, which says what comes next, is always among them.
    """
    first = torch.arange(0, q_len, block_rows, device=device)[:, None]
    inside = (torch.arange(count, device=device) + 1) * block_rows // count - 1
    return (first + inside).clamp(max=q_len - 1)


def probe_scores(
    query: Tensor, key: Tensor, scale: float, sight: Visibility, rows: Tensor, keys: range, free: int = 0
) -> Tensor:
    """float32 [B, Hq, R, keys]: scores of rows [R] of `sight` for some of its keys; -inf where a row does not see one.

    Query and key hold those rows and keys in float32, rounded to bfloat16. All rows see the first `free` keys.
    """
    (batch, heads, count, dim), kv_heads = query.shape, key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * count, dim)
    # Scaled afterwards: products of bfloat16 numbers are exact in TF32 too.
    scores = (folded @ key.transpose(-1, -2)).mul_(scale).view(batch, heads, count, len(keys))
    scores[..., free:].masked_fill_(~sight.pairs(rows, keys[free:]), -torch.inf)
    return scores


def probe_shares(probability: Tensor, config: SparseConfig) -> Tensor:
    """float16 [B, Hq, query blocks, key blocks]: the mean share of each key block in what the block's rows attend to.

    Probabilities [B, Hq, R, keys] begin where a block does; NaN are those of rows that see nothing.
    """
    missing = -probability.shape[3] % config.block[1]
    if missing:
        probability = torch.nn.functional.pad(probability, (0, missing))
    held = probability.unflatten(-1, (-1, config.block[1])).sum(-1)
    mean: Tensor = held.nan_to_num().unflatten(2, (-1, config.probe_rows)).mean(3)
    return mean.to(SHARE_DTYPE)


def with_blocks_before(probed: Tensor) -> Tensor:
    """float32 [B, Hq, query blocks, key blocks] from one row more: what stands before the first block comes first."""
    before, own = probed[:, :, :-1].float(), probed[:, :, 1:].float()
    return (own + NEIGHBOUR * before) / (1 + NEIGHBOUR)


def share_asked(config: SparseConfig, heads: int, sight: Visibility) -> Tensor:
    """float32 [B or 1, heads]: a longer text spreads over more blocks what it attends to. Padding does not count."""
    keys = torch.full((1,), sight.k_len, device=sight.device) if sight.key_valid is None else sight.key_valid.sum(-1)
    falling = (FULL_LENGTH / keys.clamp(min=FULL_LENGTH).float()).sqrt()
    return config.per_head("probe", heads, sight.device) * falling[:, None]
