"""Masks that last for several denoising steps: what a layer looks at changes slowly from one to the next."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparge.api import attention_and_mask
from sparge.block_mask import BlockMask


class Masks:
    """The masks of one patched model, by layer and call of a step. Copies of the model begin without any."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], BlockMask] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": {}}

    def attention(
        self, place: tuple[Any, ...], anew: bool, query: Tensor, key: Tensor, *rest: Any, **arguments: Any
    ) -> Tensor:
        """sparge.attention with the mask of an earlier step, if there is one of this place and size."""
        where = (*place, query.shape, key.shape, arguments["config"])
        output, chosen = attention_and_mask(None if anew else self.kept.get(where), query, key, *rest, **arguments)
        if chosen is not None:
            self.kept[where] = chosen
        return output
