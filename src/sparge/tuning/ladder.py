"""One number per head, its strictness, moves every setting of the rules in use: 0 is the config as given."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparge.config import SparseConfig

EVERYTHING = -math.inf  # the strictness that keeps every block
WIDEST_GAP = 1e4  # further than scores differ, and finite, as a profile's numbers must be
# Steps of e: a block must be e times as likely, or 1 nearer to the best in natural log.
COARSE = (EVERYTHING, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
FINE = (-0.5, -0.25, 0.25, 0.5, 0.75)  # around what the coarse pass chose
PV_OFF = -1e4  # further below the running maximum than scores go
PV_THRESHOLDS = (-12.0, -10.0, -8.0, -7.0, -6.0, -5.0, -4.0)


def settings_at(base: SparseConfig, strictness: Tensor) -> dict[str, tuple[float, ...]]:
    """Per-head vectors of the rules' settings, for a strictness per head (float64 [heads])."""
    heads, factor = len(strictness), strictness.exp()
    settings = {}
    for name in base.rule:
        start = base.per_head(name, heads, strictness.device, torch.float64)
        if name in ("threshold", "probe"):
            moved = start * factor
        elif name == "gap":
            moved = (start - strictness).clamp(max=WIDEST_GAP)
        elif name == "cdf":
            moved = 1 - (1 - start) * factor
        else:  # topk: half as fast, since shares of blocks and of probability differ
            moved = start / factor.sqrt()
        settings[name] = tuple(moved.clamp(0, WIDEST_GAP if name == "gap" else 1).tolist())
    return settings


def with_settings(base: SparseConfig, settings: dict[str, Any]) -> SparseConfig:
    return replace(base, **settings)
