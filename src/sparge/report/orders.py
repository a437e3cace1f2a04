"""Tokens of images and video in Hilbert order: the curve to look at, and what the order they came in would skip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparge.api import Run, attention
from sparge.integrations.diffusers.order import Grid, Layout
from sparge.observe import observed
from sparge.ordering import token_order
from sparge.report.findings import LayerFindings, relative_error

DRAWN_CELLS = 20_000  # a curve through more could not be told from a filled box


class Orders:
    """Runs whose tokens are in Hilbert order, each computed once more in the order that the tokens came in."""

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._ways: dict[str, list[tuple[float, float]]] = {"hilbert": [], "row": []}  # sparsity, error

    def add(self, run: Run, layout: Layout, found: LayerFindings, exact: Tensor) -> None:
        """exact: the attention of the run without approximation, in its order."""
        if found.tokens[0] != found.tokens[1] or found.tokens[1] < layout.visual:  # not all tokens of the grid
            return
        self._grid = self._grid or layout.grids[0]
        if found.backend == "dense":  # which knows no order
            return
        self._ways["hilbert"].append((mean(found.sparsity), mean(found.error)))
        self._ways["row"].append(_in_row_order(run, layout, exact))

    def drawn(self) -> dict[str, Any] | None:
        """For the page; None where no run had a grid."""
        if self._grid is None:
            return None
        ways = {
            name: {"sparsity": mean([one[0] for one in found]), "error": mean([one[1] for one in found])}
            for name, found in self._ways.items()
            if found
        }
        return {**drawn_order(self._grid), "ways": ways}


def _in_row_order(run: Run, layout: Layout, exact: Tensor) -> tuple[float, float]:
    inputs, valid, again = run.inputs, run.inputs.visibility.key_valid, list[Run]()
    query, key, value = (layout.restore(x, 2) for x in (inputs.query, inputs.key, inputs.value))
    mask = None if valid is None else layout.restore(valid, 1)[:, None, None]
    with observed(again.append) as seen:
        attention(query, key, value, mask, scale=inputs.scale, enable_gqa=True, config=run.choice.config)
    error = relative_error(again[0], layout.restore(exact, 2))
    return (seen.visible - seen.executed) / max(1, seen.visible), mean(error)


def drawn_order(grid: Grid) -> dict[str, Any]:
    """The Hilbert curve through a grid, or through a coarser one of the same shape where it is too fine to see."""
    drawn = grid
    while drawn[0] * drawn[1] * drawn[2] > DRAWN_CELLS:
        drawn = (-(-drawn[0] // 2), -(-drawn[1] // 2), -(-drawn[2] // 2))
    return {"grid": grid, "drawn": drawn, "path": token_order(drawn).permutation.tolist()}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
