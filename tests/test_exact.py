"""Exact rows: those of dense attention, with all keys at once or some after the others."""

from __future__ import annotations

import pytest
import torch
from allocations import LargestTensor
from problems import plain_attention, problem, randn, seen_pairs, tensors

from sparge import exact

ROWS = torch.tensor([0, 7, 50, 89])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (40, None), (3, 5)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("keys_at_once", [None, 16, 48])
def test_exact_rows_are_those_of_dense_attention(is_causal, window, padded, keys_at_once, monkeypatch):
    if keys_at_once is not None:
        monkeypatch.setattr(exact, "PAIRS_AT_ONCE", 1)
        monkeypatch.setattr(exact, "SCORES_AT_ONCE", keys_at_once * 2 * 4 * len(ROWS))
    q, k, v = tensors(4, batch=2, heads=4, kv_heads=2, q_len=90, k_len=130, dim=16, v_dim=24)
    valid = torch.rand(2, 130, generator=torch.Generator().manual_seed(0)) < 0.3 if padded else None
    inputs = problem(q, k, v, is_causal=is_causal, window=window, key_valid=valid, scale=0.4)
    want, _ = plain_attention(q, k, v, seen_pairs(90, 130, is_causal, window, valid), 0.4)
    torch.testing.assert_close(exact.exact_rows(inputs, ROWS).double(), want[:, :, ROWS], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_no_mask_of_all_pairs_is_made(padded, monkeypatch):
    """A kilobyte of pairs at once: the mask of 100 rows and 20,000 keys would have 2 million."""
    monkeypatch.setattr(exact, "PAIRS_AT_ONCE", 1000)
    monkeypatch.setattr(exact, "SCORES_AT_ONCE", 1 << 15)
    q, k, v = (randn(n, 1, 2, 20_000, 16) for n in range(3))
    valid = torch.arange(20_000)[None] < 19_000 if padded else None
    inputs = problem(q, k, v, is_causal=True, key_valid=valid)
    rows = torch.arange(0, 20_000, 200)
    with LargestTensor() as seen:
        exact.exact_rows(inputs, rows)
    assert seen.bytes <= 4 << 15


def test_the_fused_kernel_is_called_as_torch_declares_it():
    """Shapes only: the kernel needs a GPU, where tests/test_gpu.py runs it."""
    query, key, value = (torch.empty(2, 3, n, 64, dtype=torch.bfloat16, device="meta") for n in (50, 33, 33))
    seen = torch.empty(2, 1, 50, 33, dtype=torch.bool, device="meta")
    values, lse = exact._attend_fused(query, key, value, seen, 0.1)
    assert (values.shape, values.dtype) == ((2, 3, 50, 64), torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 3, 50), torch.float32)
