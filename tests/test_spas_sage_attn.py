"""The public SpargeAttn's names: the same arguments, what they mean in sparge, and what is refused."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from problems import refused
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as dense

import sparge
from sparge import spas_sage_attn as names

BY_TOPK = [names.spas_sage2_attn_meansim_topk_cuda, names.spas_sage_attn_meansim_topk_cuda]
BY_CDF = [names.spas_sage2_attn_meansim_cuda, names.spas_sage_attn_meansim_cuda]
EVERY = [*BY_TOPK, *BY_CDF, names.block_sparse_sage2_attn_cuda]
KEEPS_ALL: dict[Any, dict[str, Any]] = {
    **{function: {"topk": 1.0} for function in BY_TOPK},
    **{function: {"cdfthreshd": 1.0} for function in BY_CDF},
    names.block_sparse_sage2_attn_cuda: {"mask_id": torch.ones(1, 4, 3, 5, dtype=torch.int8)},
}
every = pytest.mark.parametrize("function", EVERY, ids=lambda function: function.__name__)


def qkv(heads: int = 4, kv_heads: int = 4, length: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, n, length, 64).cumsum(-2) / 8 for n in (heads, kv_heads, kv_heads))


@every
def test_exact_when_every_block_is_kept(function: Any) -> None:
    q, k, v = qkv()
    torch.testing.assert_close(function(q, k, v, **KEEPS_ALL[function]), dense(q, k, v), atol=1e-5, rtol=1e-4)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    out = function(*swapped, **KEEPS_ALL[function], tensor_layout="NHD", scale=0.2)
    torch.testing.assert_close(out.transpose(1, 2), dense(q, k, v, scale=0.2), atol=1e-5, rtol=1e-4)


@every
def test_names_are_their_own(function: Any) -> None:
    assert getattr(names, function.__name__) is function
    assert function.__doc__


@pytest.mark.parametrize("function", [*BY_TOPK, *BY_CDF], ids=lambda function: function.__name__)
def test_causal_order_is_exact(function: Any) -> None:
    q, k, v = qkv()
    out = function(q, k, v, is_causal=True, **KEEPS_ALL[function])
    torch.testing.assert_close(out, dense(q, k, v, is_causal=True), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "given", "config"),
    [
        (BY_TOPK[0], {}, {"rule": "topk", "topk": 0.5, "similarity": -0.1, "pv_threshold": -50 * math.log(2)}),
        (
            BY_CDF[0],
            {"attention_sink": True, "pvthreshd": torch.tensor([8.0, 9.0, 10.0, 11.0])},
            {
                "rule": "cdf", "cdf": 0.98, "similarity": 0.6, "sinks": 1,
                "pv_threshold": tuple(-math.log(2) * n for n in (8, 9, 10, 11)),
            },
        ),
        (
            BY_CDF[1],
            {"cdfthreshd": torch.tensor([0.9, 0.8, 0.7, 0.6]), "simthreshd1": 0.3},
            {
                "rule": "cdf", "cdf": (0.9, 0.8, 0.7, 0.6), "similarity": 0.3, "pv_threshold": -50 * math.log(2),
            },
        ),
    ],
)  # fmt: skip
def test_settings_in_the_words_of_sparge(function: Any, given: Any, config: Any) -> None:
    q, k, v = qkv()
    per_head = {name: torch.tensor(value) if isinstance(value, tuple) else value for name, value in config.items()}
    same = sparge.SparseConfig(**{"sinks": 0, "subblocks": (1, 1), "quantization": "none", **per_head})
    want, stats = sparge.attention(q, k, v, config=same, return_stats=True)
    out, sparsity = function(q, k, v, **given, return_sparsity=True)
    assert torch.equal(out, want)
    assert sparsity == float(stats.sparsity)
    assert isinstance(sparsity, float)


def test_a_mask_of_blocks() -> None:
    q, k, v = qkv()
    marked = torch.rand(1, 4, 3, 5) < 0.5
    marked[..., 2] = True
    want = sparge.block_sparse_attention(
        q, k, v, sparge.BlockMask.from_dense(marked, 300, 300), quantization="none", pv_threshold=-50 * math.log(2)
    )
    assert torch.equal(names.block_sparse_sage2_attn_cuda(q, k, v, mask_id=marked.int()), want)
    marked[..., 0] = False
    sunk = names.block_sparse_sage2_attn_cuda(q, k, v, mask_id=marked, attention_sink=True)
    marked[..., 0] = True
    assert torch.equal(sunk, names.block_sparse_sage2_attn_cuda(q, k, v, mask_id=marked))


def test_results() -> None:
    q, k, v = qkv(4, 2)
    plain = names.spas_sage2_attn_meansim_topk_cuda(q, k, v)
    out, lse = names.spas_sage2_attn_meansim_topk_cuda(q, k, v, return_lse=True)
    assert torch.equal(out, plain)
    assert lse.shape == (1, 4, 300)
    half = names.spas_sage2_attn_meansim_topk_cuda(q, k, v, output_dtype=torch.float16)
    assert torch.equal(half, plain.half())


def test_positions_of_arguments_are_those_of_the_package() -> None:
    first = ["q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "smooth_k", "simthreshd1", "cdfthreshd"]
    last = ["pvthreshd", "attention_sink", "tensor_layout", "output_dtype", "return_sparsity", "return_lse"]
    assert [*inspect.signature(BY_CDF[0]).parameters] == [*first, *last]
    assert [*inspect.signature(BY_TOPK[0]).parameters] == [*first, "topk", *last]
    own = ["q", "k", "v", "mask_id", "dropout_p", "scale", "smooth_k"]
    assert [*inspect.signature(names.block_sparse_sage2_attn_cuda).parameters] == [*own, *last]


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"smooth_k": False}, ValueError, ("smooth_k", "True")),
        ({"tensor_layout": "BHSD"}, ValueError, ("tensor_layout", "'BHSD'")),
        ({"dropout_p": 0.1}, ValueError, ("dropout_p",)),
        ({"return_sparsity": True, "return_lse": True}, ValueError, ("return_sparsity", "return_lse")),
        ({"pvthreshd": -5}, ValueError, ("pvthreshd", "above 0")),
        ({"pvthreshd": "x"}, ValueError, ("pvthreshd", "above 0")),
        ({"attention_sink": 2}, TypeError, ("attention_sink", "2")),
    ],
)
@every
def test_what_cannot_be_honoured_is_refused(function: Any, given: Any, kind: Any, words: Any) -> None:
    with refused(kind, *words):
        function(*qkv(), **{**KEEPS_ALL[function], **given})


def test_more_that_is_refused() -> None:
    with refused(ValueError, "cdfthreshd and topk"):
        BY_TOPK[0](*qkv(), cdfthreshd=0.9)
    with refused(TypeError, "attn_mask", "float32"):
        BY_TOPK[0](*qkv(), attn_mask=torch.zeros(1, 1, 300, 300))
    with refused(TypeError, "mask_id", "None"):
        names.block_sparse_sage2_attn_cuda(*qkv())
    with refused(ValueError, "3, 5", "blocks"):
        names.block_sparse_sage2_attn_cuda(*qkv(), mask_id=torch.ones(1, 4, 5, 3))
    with refused(ImportError, "SparseAttentionMeansim", "sparge.tune"):
        from sparge.spas_sage_attn import SparseAttentionMeansim  # noqa: F401
