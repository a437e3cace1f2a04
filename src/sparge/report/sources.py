"""What a report looks at: a language model that reads a text, or captured Q, K and V of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sparge.api import Run, attention
from sparge.bench.captured import Captured
from sparge.config import SparseConfig
from sparge.evaluate.language import Variant
from sparge.integrations.layers import Layer
from sparge.integrations.patch import patch
from sparge.observe import observed
from sparge.ordering import token_order
from sparge.report.findings import LayerFindings, look_at
from sparge.report.mass import picture_side

Grid = tuple[int, int, int]
OnLayer = Callable[[str], None]
DRAWN_CELLS = 20_000  # a curve through more could not be told from a filled box


@dataclass
class Look:
    """The layers that were looked at, in the order of their calls, and what was planned for each."""

    layers: list[LayerFindings] = field(default_factory=list)
    planned: tuple[Layer, ...] = ()
    interrupted: bool = False


@torch.no_grad()
def look_at_model(model: Any, ids: Sequence[int], variant: Variant, on_layer: OnLayer) -> Look:
    """One sparse prefill. Ctrl-C keeps the layers that are done."""
    plan = patch(model, variant.config, variant.profile, dry_run=True)
    look = Look(planned=plan.layers)
    side = picture_side(sum(layer.heads or 1 for layer in plan.layers))
    entered = [""]

    def enter(name: str, *_: Any) -> None:
        entered[0] = name

    def keep(run: Run) -> None:
        look.layers.append(look_at(run, entered[0], side))
        on_layer(entered[0])

    hooks = [
        model.get_submodule(layer.name).register_forward_pre_hook(partial(enter, layer.name)) for layer in plan.layers
    ]
    tokens = torch.tensor([list(ids)], device=model.device)
    try:
        with patch(model, variant.config, variant.profile), observed(keep):
            model.base_model(tokens, use_cache=False)
    except KeyboardInterrupt:
        look.interrupted = True
    finally:
        for hook in hooks:
            hook.remove()
    return look


@torch.no_grad()
def look_at_captured(
    captured: Captured, config: SparseConfig, device: torch.device, grid: Grid | None, on_layer: OnLayer
) -> tuple[Look, dict[str, Any] | None]:
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
            ways[name] = {"sparsity": _mean(found[-1].sparsity), "error": _mean(found[-1].error)}
    except KeyboardInterrupt:
        look.interrupted = True
    look.layers = found[:1]  # those in the best order
    return look, None if grid is None else {**drawn_order(grid), "ways": ways}


def drawn_order(grid: Grid) -> dict[str, Any]:
    """The Hilbert curve through a grid, or through a coarser one of the same shape where it is too fine to see."""
    drawn = grid
    while drawn[0] * drawn[1] * drawn[2] > DRAWN_CELLS:
        drawn = (-(-drawn[0] // 2), -(-drawn[1] // 2), -(-drawn[2] // 2))
    return {"grid": grid, "drawn": drawn, "path": token_order(drawn).permutation.tolist()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
