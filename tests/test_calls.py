"""A call like an earlier one gives what it would give alone, and is refused where it would be."""

from __future__ import annotations

import pytest
import torch
from problems import randn

import sparge
from sparge import SparseConfig, calls

SPARSE = SparseConfig(rule="topk", topk=0.5, quantization="none")


def three(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [randn(seed + n, *shape, dtype=dtype) for n in range(3)]


def anew(*args, **kwargs):
    calls.forget()
    return sparge.attention(*args, **kwargs)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", [None, SPARSE], ids=["dense", "sparse"])
def test_a_call_like_an_earlier_one_gives_its_own_result(config, is_causal, layout):
    shape = (2, 3, 300, 32) if layout == "BHSD" else (2, 300, 3, 32)
    how = {"config": config, "is_causal": is_causal, "layout": layout}
    first, second = three(0, *shape), three(10, *shape)
    anew(*first, **how)
    got = sparge.attention(*second, **how)
    assert len(calls._known) == 1
    assert torch.equal(got, anew(*second, **how))
    assert torch.equal(sparge.attention(*second, **how, return_stats=True)[0], got)


def test_what_differs_is_another_kind():
    q, k, v = three(0, 1, 2, 200, 32)
    strided = q.transpose(2, 3).contiguous().transpose(2, 3)
    kinds = [
        {"query": q}, {"query": strided}, {"is_causal": True}, {"scale": 0.5}, {"config": SPARSE},
        {"window": (10, 0)}, {"return_lse": True}, {"query": q[:, :, :100], "is_causal": True},
        {"config": SparseConfig(rule="topk", topk=0.25, quantization="none")},
    ]  # fmt: skip
    for kind in kinds:
        arguments = {"query": q, "key": k, "value": v, **kind}
        got, want = sparge.attention(**arguments), anew_beside(arguments)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(calls._known) == len(kinds)


def anew_beside(arguments):
    """Without what is known, and without losing it."""
    known = dict(calls._known)
    calls.forget()
    result = sparge.attention(**arguments)
    calls._known.clear()
    calls._known.update(known)
    return result


def test_what_must_be_refused_is_refused_after_a_good_call_too():
    q, k, v = three(0, 1, 2, 128, 32)
    sparge.attention(q, k, v)
    with pytest.raises(RuntimeError, match="requires grad"):
        sparge.attention(q.clone().requires_grad_(), k, v)
    sparge.attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True, window=(1, 0))
    good = {"is_causal": True, "scale": 1.0, "enable_gqa": True, "window": (1, 0)}
    for name, bad in (("is_causal", 1), ("scale", True), ("enable_gqa", 1), ("window", (True, 0))):
        with pytest.raises((TypeError, ValueError), match=name):
            sparge.attention(q, k, v, **{**good, name: bad})
    for name, bad in (("return_lse", 0), ("return_stats", 0), ("dropout_p", None)):
        with pytest.raises((TypeError, ValueError), match=name):
            sparge.attention(q, k, v, **{name: bad})
    with pytest.raises(TypeError, match="config must be"):
        sparge.attention(q, k, v, config={})
    with pytest.raises(ValueError, match="dropout_p"):
        sparge.attention(q, k, v, dropout_p=0.1)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        sparge.attention(q.tolist(), k, v)
    with pytest.raises(TypeError, match="dense tensor"):
        sparge.attention(q.to_sparse(), k, v)


def test_what_cannot_be_told_apart_is_not_remembered():
    q, k, v = three(0, 1, 2, 128, 32)
    padding = torch.ones(1, 1, 1, 128, dtype=torch.bool)
    for how in ({"attn_mask": padding}, {"window": [5, 5]}):
        sparge.attention(q, k, v, **how)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = sparge.attention(q, k, v)
    assert not calls._known
    assert torch.equal(under_autocast, sparge.attention(q, k, v))


def test_only_so_many_kinds_are_remembered(monkeypatch):
    monkeypatch.setattr(calls, "REMEMBERED", 3)
    for length in range(1, 8):
        sparge.attention(*three(0, 1, 1, length, 32))
        assert 1 <= len(calls._known) <= 3
