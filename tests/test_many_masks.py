"""Attention under many masks at once is what each mask gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import tensors
from torch import Tensor

from sparge import BlockMask, block_sparse_attention
from sparge.inputs import prepare_inputs
from sparge.tuning import many_masks
from sparge.tuning.many_masks import outputs_under

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (150, 40)},
    "padding": {"attn_mask": (torch.arange(330) % 7 != 3).expand(2, 1, 1, 330)},
}


def random_masks(count: int, heads: int, q_len: int, k_len: int, block: tuple[int, int]) -> list[BlockMask]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, heads, -(-q_len // block[0]), -(-k_len // block[1]))
    kept = torch.rand(count, *shape, generator=generator) < 0.4
    kept[1] = False
    kept[2] = True
    return [BlockMask.from_dense(one, q_len, k_len, block) for one in kept]


@pytest.mark.parametrize("numbers_at_once", [1, 1 << 26])
@pytest.mark.parametrize("kind", KINDS)
def test_each_mask_gives_what_it_gives_alone(kind: str, numbers_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_masks, "NUMBERS_AT_ONCE", numbers_at_once)
    more = KINDS[kind]
    q, k, v = tensors(1, batch=2, heads=6, kv_heads=2, q_len=300, k_len=330, dim=24, v_dim=20)
    masks = random_masks(4, 6, 300, 330, (128, 64))
    inputs = prepare_inputs(q, k, v, enable_gqa=True, **more)
    got: list[tuple[slice, slice, Tensor, Tensor]] = list(outputs_under(inputs, masks, [0, 2]))
    assert len(got) == 2 * (2 if numbers_at_once == 1 else 1)
    rows = torch.cat((torch.arange(128), torch.arange(256, 300)))
    alone = [block_sparse_attention(q, k, v, mask, enable_gqa=True, quantization="none", **more) for mask in masks]
    covered = torch.zeros(6, len(rows), dtype=torch.int64)
    for heads, places, dense, outputs in got:
        covered[heads, places] += 1
        for output, want in zip((dense, *outputs), (alone[2], *alone), strict=True):
            torch.testing.assert_close(output, want[:, heads][:, :, rows[places]], atol=1e-5, rtol=1e-5)
    assert bool((covered == 1).all())
