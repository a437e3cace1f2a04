"""Attention over some of the keys, then over others: merged into attention over all of them by their LSE."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(values: Tensor, lse: Tensor, more_values: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the union of keys. Values are float32 [..., rows, channels], and overwritten."""
    total = torch.logaddexp(lse, more_lse)
    _weigh(values, lse, total)
    _weigh(more_values, more_lse, total)
    values += more_values
    return values, total


def _weigh(values: Tensor, lse: Tensor, total: Tensor) -> None:
    """In place. A part that saw nothing, or only scores of -inf, counts where no part saw more."""
    nothing = lse == -torch.inf
    values.masked_fill_((nothing & (total != -torch.inf))[..., None], 0.0)
    values *= torch.where(nothing, 1.0, torch.exp(lse - total))[..., None]
