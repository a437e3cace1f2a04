"""The selection rules: from predicted scores to kept blocks. Ties are kept or left together; NaN is always kept."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.config import SparseConfig


def apply_rules(scores: Tensor, seen: Tensor, countable: Tensor, config: SparseConfig) -> Tensor:
    """Which blocks some sub-row of each query block claims.

    scores     float32 [B, Hq, query blocks, sub-rows, key blocks]
    seen       bool, broadcastable to scores: blocks that take part
    countable  int64 [..., sub-rows, 1], broadcastable: how many blocks the sub-row sees, for top-k
    returns    bool [B, Hq, query blocks, key blocks]
    """
    scores = torch.where(seen, scores, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    total = torch.logsumexp(scores, -1, keepdim=True)
    # Written as "not below": every comparison with NaN is false, so a row that cannot be judged is kept.
    claimed = ~(scores < peak) | ~torch.isfinite(total)
    for name in config.rule:
        dtype = torch.float64 if name == "topk" else torch.float32  # a count must not be off by rounding
        setting = config.per_head(name, scores.shape[1], scores.device, dtype)[:, None, None, None]
        if name == "threshold":
            claimed |= ~(scores <= total + setting.log())
        elif name == "gap":
            claimed |= ~(scores < peak - setting)
        elif name == "cdf":
            claimed |= (_mass_at_least(torch.exp(scores - total)) <= setting) | (setting >= 1)
        elif name == "topk":
            claimed |= ~(scores < _kth_score(scores, countable, setting)) | (setting >= 1)
    return (claimed & seen).any(-2)


def claimed_by_share(scores: Tensor, seen: Tensor, probed: Tensor, asked: Tensor) -> Tensor:
    """Which blocks have a larger share than is asked for, bool [B, Hq, query blocks, key blocks].

    scores, seen  as above
    probed        float32 [B, Hq, query blocks, key blocks]: shares found by sampled rows
    asked         float32 [B or 1, Hq]
    """
    scores = torch.where(seen, scores, -torch.inf)
    total = torch.logsumexp(scores, -1, keepdim=True)
    predicted = torch.exp(scores - total).nan_to_num()  # rows with NaN are kept by the other rules, or see nothing
    judges = total.isfinite().sum(-2)
    share = (predicted.sum(-2) / judges.clamp(min=1) + probed) / 2
    claimed: Tensor = (share > asked[..., None, None]) & seen.any(-2)
    return claimed


def _mass_at_least(probability: Tensor) -> Tensor:
    """For each block, the probability of all blocks that score at least as high."""
    probability = probability.nan_to_num()  # rows with NaN are kept by the caller
    ascending = probability.sort(-1).values
    lower = torch.searchsorted(ascending, probability.contiguous())
    descending_mass = ascending.flip(-1).cumsum(-1)
    return descending_mass.gather(-1, probability.shape[-1] - 1 - lower)


def _kth_score(scores: Tensor, countable: Tensor, ratio: Tensor) -> Tensor:
    """The lowest score that top-k keeps in each sub-row, k = ceil(ratio * visible blocks)."""
    k = torch.ceil(countable * ratio - 1e-6).long().clamp(min=1, max=scores.shape[-1])
    descending = scores.sort(-1, descending=True).values
    return descending.gather(-1, k.expand(*scores.shape[:-1], 1) - 1)
