"""How far a result is off, judged by a few of its rows that are also computed exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_ROWS, MOST_ROWS = 64, 1024  # sampled
ROWS_PER_SAMPLE = 512  # one row of so many: a fifth of a percent of dense attention
GOLDEN = 0.6180339887498949  # its multiples fill an interval evenly, and follow no block's rhythm
DEVIATIONS = 3.0  # of the estimate, that a head's true error may lie above it


@dataclass(frozen=True)
class Verdict:
    """What the check found, per batch entry and query head."""

    error: Tensor  # float32 [B, Hq]: the estimated relative L1 of the result
    over: Tensor  # bool [B, Hq]: heads whose error may exceed the budget


def sampled_rows(length: int, device: torch.device) -> Tensor:
    """int64 [R]: one row of each of R equal parts, or all rows of few; the same ones for every call of this length."""
    count = max(FEWEST_ROWS, min(MOST_ROWS, length // ROWS_PER_SAMPLE))
    if length <= 2 * count:
        return torch.arange(length, device=device)
    part = torch.arange(count, device=device, dtype=torch.float32)
    return ((part + (part * GOLDEN) % 1) * (length / count)).long().clamp(max=length - 1)


def judge(values: Tensor, exact: Tensor, rows: Tensor, max_error: float) -> Verdict:
    """Of values [B, Hq, Nq, Dv], by their rows [R] as they should be, [B, Hq, R, Dv]."""
    error, bound = estimated_error(values[:, :, rows], exact, values.shape[2])
    return Verdict(error, ~(bound <= max_error))  # NaN is over


def estimated_error(values: Tensor, exact: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """float32 [B, Hq], twice: the relative L1 of the rows at hand, and what that of all rows hardly exceeds."""
    return error_of_rows(*row_errors(values, exact), length)


def row_errors(values: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [B, Hq, R], twice: the L1 of each row as it should be, and of what it is off."""
    size = torch.linalg.vector_norm(exact, 1, -1, dtype=torch.float32)
    return size, torch.linalg.vector_norm(values.float() - exact, 1, -1)


def error_of_rows(size: Tensor, off: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A ratio of sums over a sample; its deviation is that of the rows' remainders."""
    total, count = size.sum(-1).clamp(min=torch.finfo(torch.float32).tiny), size.shape[-1]
    error = off.sum(-1) / total
    remainder = torch.addcmul(off, error[..., None], size, value=-1)
    return error, error + deviations_of(count, length) * torch.linalg.vector_norm(remainder, 2, -1) / total


def deviations_of(count: int, length: int) -> float:
    """What the length of the remainders is multiplied with; nothing is uncertain if all rows are known."""
    return DEVIATIONS * math.sqrt(count / max(count - 1, 1) * (1 - count / length))
