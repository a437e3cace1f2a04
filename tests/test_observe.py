"""observed(): every sparge call inside a block is counted, whoever made it, and none outside."""

from __future__ import annotations

import pytest
import torch
from problems import randn

import sparge
from sparge.observe import observed

FEW = sparge.SparseConfig(rule="topk", topk=0.25, quantization="none", block=(64, 32), subblocks=(1, 1), sinks=0)


def test_counts_are_those_of_the_stats() -> None:
    q = randn(0, 1, 2, 256, 32)
    sparge.attention(q, q, q, config=FEW)  # before the block
    with observed() as seen:
        _, stats = sparge.attention(q, q, q, config=FEW, return_stats=True)
        with sparge.patched(FEW):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    sparge.attention(q, q, q, config=FEW)  # after it
    assert len(seen.calls) == 2
    assert seen.executed == 2 * int(stats.executed.sum())
    assert seen.visible == 2 * int(stats.visible.sum())
    assert 0 < seen.executed < seen.visible
    assert seen.backends == {stats.backend: 2}


def test_the_innermost_block_counts_and_errors_leave_nothing_behind() -> None:
    q = randn(0, 1, 2, 256, 32)
    with observed() as outer:
        with pytest.raises(ValueError, match="head"), observed() as inner:
            sparge.attention(q, q, torch.cat([sparge.attention(q, q, q)] * 2, 1))
        sparge.attention(q, q, q)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)
    assert outer.visible > 0


def test_heads_that_are_redone_count_in_full() -> None:
    q, k, v = (randn(seed, 1, 2, 512, 32) for seed in range(3))
    careful = sparge.SparseConfig(rule="topk", topk=0.05, quantization="none", max_error=1e-6)
    with observed() as seen:
        sparge.attention(q, k, v, config=careful)
    assert seen.executed == seen.visible


def test_calls_that_stay_dense_are_counted_by_reason() -> None:
    q, few = randn(0, 1, 2, 256, 32), randn(1, 1, 2, 8, 32)
    said: list[str] = []
    with observed(on_dense=said.append) as seen, sparge.patched(FEW):
        for x in (q, few, few):
            torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert len(seen.calls) == 1
    assert list(seen.dense.values()) == [2]
    assert said == 2 * ["at most 16 query rows gain nothing."]
