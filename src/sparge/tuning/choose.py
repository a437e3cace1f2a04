"""From measured curves to one candidate per head: the same error for every head, or one budget for the whole model."""

from __future__ import annotations

import torch
from torch import Tensor


def within_bound(work: Tensor, error: Tensor, bound: float) -> Tensor:
    """The paper's way: for each head the least work among candidates within the bound, int64 [heads].

    work, error: [candidates, heads]. Where no candidate is within the bound, the one with the least error.
    """
    allowed = torch.where(error <= bound, work, torch.inf)
    least = allowed.argmin(0)
    return torch.where(torch.isfinite(allowed.amin(0)), least, error.argmin(0))


def within_budget(work: Tensor, damage: Tensor, budget: float, aside: Tensor | float = 0.0) -> Tensor:
    """The least total work whose total damage stays within one budget, int64 [heads].

    Each head takes the candidate with the least work + price * (damage + aside). One price for all heads means that the
    last block saved costs the same everywhere; it is bisected until the budget is spent. What is then left of it,
    because candidates are few, goes to the single exchanges that save most work for it.

    aside  what a candidate does besides, in the same measure; it may be negative, and no budget limits it
    """
    if budget <= 0:
        return damage.argmin(0)
    damage, aside, budget = damage / budget, aside / budget, 1.0
    harm = damage + aside
    low, high = 0.0, 1.0
    while _total(damage, _at_price(work, harm, high)) > budget:
        high *= 4
        if high > 1e30:  # no price brings the damage within the budget
            return damage.argmin(0)
    for _ in range(100):
        price = (low + high) / 2
        over = _total(damage, _at_price(work, harm, price)) > budget
        low, high = (price, high) if over else (low, price)
    return _spend_rest(work, damage, _at_price(work, harm, high), budget)


def _at_price(work: Tensor, harm: Tensor, price: float) -> Tensor:
    return (work + price * harm).argmin(0)


def _total(values: Tensor, chosen: Tensor) -> float:
    return float(values.gather(0, chosen[None]).sum())


def _spend_rest(work: Tensor, damage: Tensor, chosen: Tensor, budget: float) -> Tensor:
    chosen = chosen.clone()
    heads = torch.arange(len(chosen))
    for _ in range(len(chosen)):
        rest = budget - _total(damage, chosen)
        saved = work[chosen, heads] - work
        fits = (damage - damage[chosen, heads] <= rest) & (saved > 0)
        best = int(torch.where(fits, saved, 0.0).argmax())
        candidate, head = divmod(best, len(chosen))
        if not fits[candidate, head]:
            break
        chosen[head] = candidate
    return chosen
