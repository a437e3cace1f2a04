"""One number per head, its strictness, moves every setting of the rules in use: 0 is the config as given."""

from __future__ import annotations

import itertools
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
# Of two kinds of settings that move on their own: each pair of steps.
SHARE_STEPS = (-0.7, -0.35, 0.0, 0.35, 0.7, 1.4)
GAP_STEPS = (-2.0, -1.0, -0.5, 0.0, 1.0, 2.0)
PV_OFF = -1e4  # further below the running maximum than scores go
PV_THRESHOLDS = (-12.0, -10.0, -8.0, -7.0, -6.0, -5.0, -4.0)


Settings = dict[str, Any]  # by name, a vector per head


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


def grid(base: SparseConfig, heads: int) -> list[Settings]:
    """Settings to try: the config as given first, then everything kept, then all others."""

    def at(step: float) -> Settings:
        return settings_at(base, torch.full((heads,), step, dtype=torch.float64))

    steps = [(step, step) for step in sorted({*SHARE_STEPS, *GAP_STEPS})]
    if "gap" in base.rule and len(base.rule) > 1:  # a gap moves on its own
        steps = list(itertools.product(SHARE_STEPS, GAP_STEPS))
    moved = [at(share) | ({"gap": at(gap)["gap"]} if share != gap else {}) for share, gap in steps if share or gap]
    return [at(0.0), at(EVERYTHING), *moved]


def with_settings(base: SparseConfig, settings: Settings) -> SparseConfig:
    return replace(base, **settings)
