"""The "probe" rule: a few rows of each query block are scored against the keys they see, and claim blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.visibility import Visibility


def probe_positions(q_len: int, block_rows: int, count: int, device: torch.device) -> Tensor:
    """int64 [query blocks, count]: sampled rows, spread over each block, or its last row where it ends early."""
    first = torch.arange(0, q_len, block_rows, device=device)[:, None]
    inside = (2 * torch.arange(count, device=device) + 1) * block_rows // (2 * count)
    return (first + inside).clamp(max=q_len - 1)


def probe_scores(query: Tensor, key: Tensor, scale: float, sight: Visibility, rows: Tensor, keys: range) -> Tensor:
    """float32 [B, Hq, R, keys]: scores of rows [R] of `sight` for some of its keys; -inf where a row does not see one.

    Query and key hold those rows and keys in float32, rounded to bfloat16.
    """
    (batch, heads, count, dim), kv_heads = query.shape, key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * count, dim)
    scores = (folded @ key.transpose(-1, -2) * scale).view(batch, heads, count, len(keys))
    return torch.where(sight.pairs(rows, keys), scores, -torch.inf)


def probe_claims(scores: Tensor, lse: Tensor, config: SparseConfig) -> Tensor:
    """bool [B, Hq, query blocks, key blocks]: which hold more than "probe" of what one of the block's rows attends to.

    `lse` [B, Hq, R] is over all keys that a row sees; `scores` may be for some of them, from the start of a block on.
    """
    mass = (scores - lse[..., None]).exp()  # NaN where a row sees nothing: claims nothing
    blocks = -(-scores.shape[3] // config.block[1])
    whole = torch.nn.functional.pad(mass, (0, blocks * config.block[1] - scores.shape[3]))
    held = whole.unflatten(-1, (blocks, config.block[1])).sum(-1)
    share = config.per_head("probe", scores.shape[1], scores.device)[:, None, None, None]
    claimed: Tensor = (held.unflatten(2, (-1, config.probe_rows)) > share).any(3)
    return claimed
