"""Where tokens stand in the sequences of image and video models, and their order."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge.integrations.diffusers.order import Layout


@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("words", [0, 5])
def test_one_picture_is_as_token_order_has_it(text_first: bool, words: int) -> None:
    layout = Layout(((2, 4, 6),), text_first)
    x = torch.randn(1, 48 + words, 3)
    where = {"text_before": words} if text_first else {"text_after": words}
    assert torch.equal(layout.apply(x, 1), sparge.token_order((2, 4, 6), "hilbert", **where).apply(x))
    assert torch.equal(layout.restore(layout.apply(x, 1), 1), x)
    assert layout.text_range(48 + words) == ((0, words) if text_first else (48, 48 + words))


def test_pictures_one_by_one() -> None:
    layout = Layout(((1, 4, 4), (1, 2, 6)), True)
    ordered = layout.apply(torch.arange(31), 0)
    assert ordered[:3].tolist() == [0, 1, 2]
    assert sorted(ordered[3:19].tolist()) == list(range(3, 19))
    second = sparge.token_order((1, 2, 6), "hilbert").permutation + 19
    assert ordered[19:].tolist() == second.tolist()


@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("words", [0, 6])
def test_parts_laid_end_to_end_come_together(text_first: bool, words: int) -> None:
    """Two devices, each with a half of the text and of the picture."""
    whole = Layout(((1, 4, 6),), text_first)
    tokens = torch.arange(24 + words)
    first = words if text_first else 24
    halves = zip(tokens[:first].chunk(2), tokens[first:].chunk(2), strict=False) if words else [tokens.chunk(2)]
    gathered = torch.cat([part for pair in halves for part in pair])
    split = Layout(whole.grids, text_first, shards=2)
    assert torch.equal(split.apply(gathered, 0), whole.apply(tokens, 0))
    assert torch.equal(split.restore(whole.apply(tokens, 0), 0), gathered)
