"""Where the tokens of a sequence stand, and the order in which they attend best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from sparge.ordering import TokenOrder, token_order

Grid = tuple[int, int, int]  # frames, height, width


@dataclass(frozen=True)
class Layout:
    """A sequence of text and pictures. Tokens of each picture (or video) come in raster order, pictures one by one.

    With `shards`, each of several devices held an equal part of the text and of the pictures, and the sequence is
    those parts end to end.
    """

    grids: tuple[Grid, ...]
    text_first: bool
    shards: int = 1

    @property
    def visual(self) -> int:
        """How many tokens are not text."""
        return sum(frames * height * width for frames, height, width in self.grids)

    def text_range(self, length: int) -> tuple[int, int]:
        """Where the text stands in a sequence of this length once it is in order."""
        return (0, length - self.visual) if self.text_first else (self.visual, length)

    def order(self, length: int, device: torch.device) -> TokenOrder:
        """Text in its place, before or after the visual tokens; those along a Hilbert curve through each picture."""
        return _order(self, length, device)

    def apply(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A copy of `x` with the tokens along `dim`, with or without the text, put in order."""
        return self.order(x.shape[dim], x.device).apply(x, dim)

    def restore(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.order(x.shape[dim], x.device).restore(x, dim)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the tensors are kept, and may be used by a call that needs gradients
def _order(layout: Layout, length: int, device: torch.device) -> TokenOrder:
    text = length - layout.visual
    words, parts, start = torch.arange(text), [], 0
    for grid in layout.grids:
        part = token_order(grid, "hilbert").permutation + start
        parts.append(part)
        start += len(part)
    if layout.text_first:
        permutation = torch.cat([words, *(part + text for part in parts)])
    else:
        permutation = torch.cat([*parts, words + layout.visual])
    if layout.shards > 1:
        permutation = _place_in_shards(layout, text)[permutation]
    return TokenOrder(permutation.to(device), permutation.argsort().to(device))


def _place_in_shards(layout: Layout, text: int) -> torch.Tensor:
    """Where each token of the undivided sequence stands in the parts laid end to end."""
    visual, shards = layout.visual, layout.shards
    first, second = (text, visual) if layout.text_first else (visual, text)
    tokens = torch.arange(text + visual)
    heads, tails = tokens[:first].chunk(shards), tokens[first:].chunk(shards)
    there = torch.cat([part for pair in zip(heads, tails, strict=True) for part in pair] if second else [*heads])
    return there.argsort()
