"""Exact rows: those of dense attention, with all keys at once or some after the others."""

from __future__ import annotations

import pytest
import torch
from allocations import LargestTensor
from problems import BY_NAME, each_backend, on_its_device, plain_attention, problem, randn, seen_pairs, tensors

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


CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (300, 20)},
    "causal window": {"is_causal": True, "window": (700, None)},
    "padding": {"padded": True},
    "causal padding": {"is_causal": True, "padded": True},
    "more rows than keys": {"is_causal": True, "q_len": 3000},
    "few keys": {"k_len": 70},
    "wide": {"dim": 160, "v_dim": 192},
    "odd channels": {"dim": 20, "v_dim": 40},
    "float16": {"dtype": torch.float16, "is_causal": True},
    "float32": {"dtype": torch.float32, "is_causal": True},
    "tokens before heads": {"layout": "BSHD", "is_causal": True},
    "negative scale": {"scale": -0.3},
}


@each_backend("dense")
@pytest.mark.parametrize("case", CASES)
def test_every_backend_has_exact_rows(backend, case):
    """So many keys that a GPU's kernel divides them, and so few rows of each head that it must."""
    spec = {"q_len": 1300, "k_len": 2100, "dim": 64, "v_dim": 64, "dtype": torch.bfloat16, **CASES[case]}
    layout, scale, padded = spec.get("layout", "BHSD"), spec.get("scale"), spec.get("padded")
    q_len, k_len = spec["q_len"], spec["k_len"]
    sizes = {name: spec[name] for name in ("q_len", "k_len", "dim", "v_dim", "dtype")}
    q, k, v = tensors(7, batch=2, heads=4, kv_heads=2, **sizes)
    sight = {name: spec[name] for name in ("is_causal", "window") if name in spec}
    valid = None
    if padded:
        valid = torch.arange(k_len) < torch.tensor([[1500], [300]])
        valid[0, 200:230] = False
        k, v = (torch.where(valid[:, None, :, None], x, torch.nan) for x in (k, v))  # what nobody sees may be anything
    ours = [x.transpose(1, 2).contiguous() if layout == "BSHD" else x for x in (q, k, v)]
    inputs = on_its_device(backend, problem(*ours, key_valid=valid, scale=scale, layout=layout, **sight))
    rows = torch.cat((torch.arange(0, q_len, 19), torch.tensor([q_len - 1])))
    got = BY_NAME[backend].exact_rows(inputs, rows.to(inputs.query.device)).cpu()
    seen = positions_seen(rows, q_len, k_len, valid, **sight)
    want, _ = plain_attention(q[:, :, rows], torch.nan_to_num(k), torch.nan_to_num(v), seen, scale)
    assert got.dtype == q.dtype
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[q.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def positions_seen(rows, q_len, k_len, valid, is_causal=False, window=None):
    ahead = torch.arange(k_len) - (rows[:, None] + k_len - q_len)
    left, right = (k_len + q_len if side is None else side for side in window or (None, None))
    seen = ((ahead >= -left) & (ahead <= (min(right, 0) if is_causal else right)))[None]
    return seen if valid is None else seen & valid[:, None]


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
