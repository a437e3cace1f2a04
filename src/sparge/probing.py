"""The "probe" rule: a few rows of each query block are scored against every key they see.

Means of rows and keys show what all of them like, and hide what single rows look for; single rows say little about the
others. The mean of both predicts best which blocks matter.

Of each group of keys only the one that scores best counts. A group is what one thread of a tensor core holds of a row
and 64 keys, sixteen of them, so that kernels take one exponential instead of sixteen; shares lose nothing by it.

Scores are those that attention itself will have: of int8 copies where there are such, else of bfloat16 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.quantization import KEYS_PER_SCALE
from sparge.stages import Blocks
from sparge.visibility import Visibility

SHARE_DTYPE = torch.float16  # of shares that are kept or sent
NEIGHBOUR = 0.5  # what rows of the query block before count, which look for much the same
FULL_LENGTH = 8192  # keys from which on the share asked for falls
GROUPED_KEYS = 64  # that are divided into four groups; fewer where blocks are smaller
EVERY = slice(None)

Scaled = tuple[Tensor, Tensor | None]  # numbers of tokens, and what to multiply each token's by: None for 1


def probe_positions(q_len: int, block_rows: int, count: int, device: torch.device) -> Tensor:
    """int64 [query blocks, count]: sampled rows, spread over each block up to its last row.

    So the last row of a prompt, which says what comes next, is always among them.
    """
    first = torch.arange(0, q_len, block_rows, device=device)[:, None]
    inside = (torch.arange(count, device=device) + 1) * block_rows // count - 1
    return (first + inside).clamp(max=q_len - 1)


def rows_to_probe(blocks: Blocks, rows: Tensor, heads: slice = EVERY) -> Scaled:
    """Of some heads [B, H, R, D] in bfloat16, or int8 with scales [B, H, R]."""
    copies = blocks.quantized
    if copies is None:
        return blocks.inputs.query[:, heads][:, :, rows].to(torch.bfloat16), None
    return copies.query[:, heads][:, :, rows], copies.query_scale[:, heads][:, :, rows]


def keys_to_probe(blocks: Blocks, keys: slice, heads: slice = EVERY) -> Scaled:
    """As rows_to_probe, of the keys that `blocks` holds in these places."""
    copies = blocks.quantized
    if copies is None:
        return blocks.inputs.key[:, heads, keys].to(torch.bfloat16), None
    unit = torch.arange(keys.start, keys.stop, device=copies.key.device) // KEYS_PER_SCALE
    return copies.key[:, heads, keys], copies.key_scale[:, heads][:, :, unit]


def probe_scores(
    query: Scaled, key: Scaled, scale: float, sight: Visibility, rows: Tensor, keys: range, free: int = 0
) -> Tensor:
    """float32 [B, Hq, R, keys]: scores of rows [R] of `sight` for some of its keys; -inf where a row does not see one.

    All rows see the first `free` keys.
    """
    (numbers, q_scale), (columns, k_scale) = query, key
    (batch, heads, count, dim), kv_heads = numbers.shape, columns.shape[1]
    folded = numbers.float().reshape(batch, kv_heads, heads // kv_heads * count, dim)
    # Scaled afterwards: products of bfloat16 numbers are exact in TF32 too.
    scores = (folded @ columns.float().transpose(-1, -2)).mul_(scale)
    if k_scale is not None:
        scores *= k_scale[:, :, None]
    scores = scores.view(batch, heads, count, len(keys))
    if q_scale is not None:
        scores *= q_scale[..., None]
    scores[..., free:].masked_fill_(~sight.pairs(rows, keys[free:]), -torch.inf)
    return scores


def best_of_groups(scores: Tensor, block_keys: int) -> Tensor:
    """float32 [..., key blocks, groups]: the best score of each group of keys. Scores begin where a block does.

    Keys 0, 1, 8, 9, 16, 17 ... of 64 are a group, 2, 3, 10, 11 ... the next. NaN is passed over, and overwritten.
    """
    scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    missing = -scores.shape[-1] % block_keys
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    together = min(block_keys, GROUPED_KEYS)
    best = scores.unflatten(-1, (-1, block_keys // together, together // 8, 8))
    while best.shape[-2] > 1:  # by halves: on a CPU ten times as fast as a reduction over two dimensions
        best = torch.maximum(*best.chunk(2, -2))
    return torch.maximum(best[..., 0, 0::2], best[..., 0, 1::2]).flatten(-2)


def probe_shares(probability: Tensor, config: SparseConfig) -> Tensor:
    """float16 [B, Hq, query blocks, key blocks]: the mean share of each key block in what the block's rows attend to.

    Probabilities are those of groups, [B, Hq, R, key blocks, groups]; NaN are those of rows that see nothing.
    """
    mean: Tensor = probability.sum(-1).nan_to_num().unflatten(2, (-1, config.probe_rows)).mean(3)
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
