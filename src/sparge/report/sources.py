"""What a report looks at: a language model that reads a text, or captured Q, K and V of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sparge.api import Run, attention
from sparge.bench.captured import Captured
from sparge.config import SparseConfig
from sparge.evaluate.language import Variant
from sparge.integrations.diffusers.order import Grid
from sparge.integrations.patch import patch
from sparge.observe import observed
from sparge.ordering import token_order
from sparge.report.findings import LayerFindings, look_at
from sparge.report.inside import Look, OnLayer, look_inside
from sparge.report.mass import picture_side
from sparge.report.orders import drawn_order, mean


def look_at_model(model: Any, ids: Sequence[int], variant: Variant, on_layer: OnLayer) -> Look:
    """One sparse prefill."""
    plan = patch(model, variant.config, variant.profile, dry_run=True)
    sparse = partial(patch, model, variant.config, variant.profile)
    tokens = torch.tensor([list(ids)], device=model.device)
    prefill = partial(model.base_model, tokens, use_cache=False)
    side = picture_side(sum(layer.heads or 1 for layer in plan.layers))
    return look_inside({"": model}, plan.layers, sparse, prefill, side, on_layer)


@torch.no_grad()
def look_at_captured(
    captured: Captured, config: SparseConfig, device: torch.device, grid: Grid | None, on_layer: OnLayer
) -> Look:
    """One call. Tokens of a grid are put in Hilbert order; how they fare in the order they came in is told too."""
    dtype = torch.float32 if device.type == "cpu" else captured.query.dtype
    query, key, value = (x[None].to(device, dtype) for x in (captured.query, captured.key, captured.value))
    look, ways = Look(), {}
    orders = {"row": None} if grid is None else {"hilbert": token_order(grid, device=device), "row": None}
    found: list[LayerFindings] = []

    def keep(run: Run) -> None:
        found.append(look_at(run, captured.source, picture_side(1)))
        on_layer(captured.source)

    try:
        for name, order in orders.items():
            q, k, v = (x if order is None else order.apply(x) for x in (query, key, value))
            with observed(keep):
                attention(q, k, v, is_causal=captured.causal, enable_gqa=True, config=config)
            ways[name] = {"sparsity": mean(found[-1].sparsity), "error": mean(found[-1].error)}
    except KeyboardInterrupt:
        look.interrupted = True
    look.layers = found[:1]  # those in the best order
    look.order = None if grid is None else {**drawn_order(grid), "ways": ways}
    return look
