import math

import numpy as np
import pytest
import torch
from problems import EXACT, randn, refused, tensors

import sparge
from sparge import BlockMask, SparseConfig
from sparge.inputs import prepare_inputs

META = torch.device("meta")
B, H, N, D = 2, 4, 8, 16


def good(**changed):
    """A call that would succeed, with some arguments changed."""
    q, k, v = tensors(batch=B, heads=H, q_len=N, dim=D)
    return {"query": q, "key": k, "value": v} | changed


def test_the_unchanged_call_succeeds():
    assert sparge.attention(**good()).shape == (B, H, N, D)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("shape", [(N, D), (H, N, D), (1, B, H, N, D), ()])
def test_wrong_rank(name, shape):
    with refused(ValueError, name, "4 dimensions", "[B, H, S, D]", str(shape)):
        sparge.attention(**good(**{name: torch.zeros(shape)}))
    with refused(ValueError, name, "[B, S, H, D]", str(shape)):
        sparge.attention(**good(**{name: torch.zeros(shape)}), layout="BSHD")


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize(
    "value", [np.zeros((B, H, N, D), np.float32), None, [[[[0.0]]]]], ids=["numpy", "None", "list"]
)
def test_not_a_tensor(name, value):
    with refused(TypeError, name, "torch.Tensor", type(value).__name__):
        sparge.attention(**good(**{name: value}))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn],
    ids=str,
)
def test_unsupported_dtype(name, dtype):
    with refused(TypeError, name, str(dtype), "float16, bfloat16 or float32"):
        sparge.attention(**good(**{name: torch.zeros(B, H, N, D).to(dtype)}))


@pytest.mark.parametrize("name", ["key", "value"])
def test_mixed_dtypes(name):
    with refused(TypeError, name, "torch.bfloat16", "torch.float32"):
        sparge.attention(**good(**{name: torch.zeros(B, H, N, D, dtype=torch.bfloat16)}))


@pytest.mark.parametrize("name", ["key", "value"])
def test_mixed_devices(name):
    with refused(ValueError, name, "meta", "cpu"):
        sparge.attention(**good(**{name: torch.zeros(B, H, N, D, device=META)}))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": (3, H, N, D)}, ("batch", "3, 2 and 2")),
        ({"value": (1, H, N, D)}, ("batch", "2, 2 and 1")),
        ({"value": (B, H, 9, D)}, ("4 heads of 8 tokens", "4 heads of 9")),
        ({"value": (B, 2, N, D)}, ("4 heads of 8 tokens", "2 heads of 8")),
        ({"key": (B, H, N, 32)}, ("head_dim 16", "32")),
        ({"query": (B, H, 0, D)}, ("(2, 4, 0, 16)", "at least one")),
        ({"key": (B, H, 0, D), "value": (B, H, 0, D)}, ("(2, 4, 0, 16)", "at least one")),
        ({"query": (B, 0, N, D)}, ("(2, 0, 8, 16)", "at least one")),
        ({"key": (B, 0, N, D), "value": (B, 0, N, D)}, ("(2, 0, 8, 16)", "at least one")),
        ({"query": (0, H, N, D), "key": (0, H, N, D), "value": (0, H, N, D)}, ("(0, 4, 8, 16)", "at least one")),
        ({"query": (B, H, N, 8), "key": (B, H, N, 8)}, ("query", "head_dim 8", "16 to 256")),
        ({"query": (B, H, N, 257), "key": (B, H, N, 257)}, ("query", "head_dim 257", "16 to 256")),
        ({"value": (B, H, N, 15)}, ("value", "head_dim 15", "16 to 256")),
        ({"value": (B, H, N, 512)}, ("value", "head_dim 512", "16 to 256")),
    ],
)
def test_shapes_that_do_not_fit(changed, words):
    with refused(ValueError, *words):
        sparge.attention(**good(**{name: torch.zeros(shape) for name, shape in changed.items()}))


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_heads_not_divisible(enable_gqa):
    k = v = torch.zeros(B, 3, N, D)
    with refused(ValueError, "4 heads", "multiple", "3"):
        sparge.attention(**good(key=k, value=v), enable_gqa=enable_gqa)


def test_fewer_query_heads_than_key_heads():
    with refused(ValueError, "2 heads", "multiple", "4"):
        sparge.attention(**good(query=torch.zeros(B, 2, N, D)), enable_gqa=True)


def test_gqa_needs_to_be_asked_for():
    k = v = torch.zeros(B, 2, N, D)
    with refused(ValueError, "4 heads", "2", "enable_gqa=True"):
        sparge.attention(**good(key=k, value=v))


@pytest.mark.parametrize("layout", ["BSDH", "bhsd", "", None, 4, "SBHD"])
def test_unknown_layout(layout):
    with refused(ValueError, "layout", repr(layout), "'BHSD'", "'BSHD'"):
        sparge.attention(**good(), layout=layout)


def test_shapes_are_read_in_the_layout_given():
    q, k, v = (x.transpose(1, 2) for x in tensors(heads=4, kv_heads=2, q_len=6))
    with refused(ValueError, "4 heads", "2", "enable_gqa"):
        sparge.attention(q, k, v, layout="BSHD")


@pytest.mark.parametrize("dropout_p", [0.1, 1.0, -0.5, math.nan])
def test_dropout(dropout_p):
    with refused(ValueError, f"dropout_p={dropout_p!r}", "dropout_p=0.0"):
        sparge.attention(**good(), dropout_p=dropout_p)


@pytest.mark.parametrize("is_causal", [1, None, "True", torch.tensor(True)], ids=repr)
def test_is_causal_must_be_a_bool(is_causal):
    with refused(TypeError, "is_causal", repr(is_causal)):
        sparge.attention(**good(), is_causal=is_causal)


@pytest.mark.parametrize("enable_gqa", ["no", 1, None], ids=repr)
def test_enable_gqa_must_be_a_bool(enable_gqa):
    with refused(TypeError, "enable_gqa", repr(enable_gqa)):
        sparge.attention(**good(), enable_gqa=enable_gqa)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, "0.1", True, 1j, torch.tensor(0.5)], ids=repr)
def test_bad_scale(scale):
    with refused(ValueError, "scale", repr(scale), "finite"):
        sparge.attention(**good(), scale=scale)


@pytest.mark.parametrize(
    "window", [5, "5", (1,), (1, 2, 3), (-2, 0), (0, -3), (1.0, 0), (True, 0), ("a", 1), ()], ids=repr
)
def test_bad_window(window):
    with refused(ValueError, "window", repr(window), "(left, right)"):
        sparge.attention(**good(), window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_attn_mask_that_is_not_boolean(dtype):
    with refused(TypeError, "attn_mask", str(dtype), "boolean"):
        sparge.attention(**good(), attn_mask=torch.zeros(B, 1, 1, N, dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [
        (N, N),
        (B, 1, N, N),
        (B, H, 1, N),
        (1, H, 1, N),
        (B, N),
        (B, 1, N),
        (3, 1, 1, N),
        (B, 1, 1, N + 1),
        (1, B, 1, 1, N),
    ],
    ids=str,
)
def test_attn_mask_of_another_shape_than_key_padding(shape):
    with refused(ValueError, "attn_mask", str(shape), f"[B, 1, 1, {N}]"):
        sparge.attention(**good(), attn_mask=torch.ones(shape, dtype=torch.bool))


def test_attn_mask_elsewhere_or_not_a_tensor():
    with refused(ValueError, "attn_mask", "meta", "cpu"):
        sparge.attention(**good(), attn_mask=torch.ones(B, 1, 1, N, dtype=torch.bool, device=META))
    with refused(TypeError, "attn_mask", "torch.Tensor", "list"):
        sparge.attention(**good(), attn_mask=[[[[True] * N]]])


@pytest.mark.parametrize("shape", [(B, 1, 1, N), (1, 1, 1, N), (1, 1, N), (1, N), (N,)], ids=str)
def test_key_padding_in_every_form_that_broadcasts(shape):
    hidden = torch.arange(N).expand(shape) < 3
    inputs = prepare_inputs(**good(), attn_mask=~hidden)
    assert inputs.visibility.key_valid.tolist() == [[False] * 3 + [True] * (N - 3)] * B


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_requires_grad(name):
    changed = good(**{name: torch.zeros(B, H, N, D, requires_grad=True)})
    with refused(RuntimeError, name, "requires grad", "no_grad"):
        sparge.attention(**changed)
    with torch.no_grad():
        assert not sparge.attention(**changed).requires_grad
    with torch.inference_mode():
        assert sparge.attention(**changed).shape == (B, H, N, D)


@pytest.mark.parametrize("config", ["topk", {"rule": "topk"}, 0.5, SparseConfig], ids=repr)
def test_unknown_config_type(config):
    q, k, v = good().values()
    ends = torch.tensor([0, N])
    for call in (
        lambda: sparge.attention(q, k, v, config=config),
        lambda: sparge.predict_mask(q, k, config=config),
        lambda: sparge.varlen_attention(q[0].mT, k[0].mT, v[0].mT, ends, ends, N, N, config=config),
    ):
        with refused(TypeError, "config", "SparseConfig", type(config).__name__):
            call()


@pytest.mark.parametrize("name", ["gap", "similarity", "pv_threshold"])
def test_per_head_settings_for_another_number_of_heads(name):
    values = (-1.0, -2.0, -3.0) if name == "pv_threshold" else (0.1, 0.2, 0.3)
    with refused(ValueError, name, "3 values", "4 heads"):
        sparge.attention(**good(), config=SparseConfig(**{name: values}))


def test_unknown_arguments_are_not_swallowed():
    for name in ("output_dtype", "smooth_k", "tensor_layout", "simthreshd1"):
        with pytest.raises(TypeError, match=name):
            sparge.attention(**good(), **{name: 1})


# ---- the other functions


def test_predict_mask_checks_its_inputs_too():
    q, k, _ = good().values()
    with refused(ValueError, "query", "4 dimensions", "(8, 16)"):
        sparge.predict_mask(q[0, 0], k)
    with refused(ValueError, "key", "meta"):
        sparge.predict_mask(q, k.to(META))
    with refused(ValueError, "enable_gqa"):
        sparge.predict_mask(q, k[:, :2])
    with refused(TypeError, "attn_mask", "torch.float32"):
        sparge.predict_mask(q, k, attn_mask=torch.zeros(B, 1, 1, N))
    with refused(ValueError, "window", "(-5, 0)"):
        sparge.predict_mask(q, k, window=(-5, 0))


def block_mask(q_len=N, k_len=N, batch=1, heads=1):
    return BlockMask.from_dense(torch.ones(batch, heads, 1, 1, dtype=torch.bool), q_len, k_len)


@pytest.mark.parametrize("mask", [torch.ones(1, 1).bool(), None, block_mask().to_flex()], ids=["dense", "None", "flex"])
def test_block_sparse_needs_a_block_mask(mask):
    with refused(TypeError, "mask", "BlockMask", type(mask).__name__):
        sparge.block_sparse_attention(**good(), mask=mask)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (block_mask(q_len=9), ("9 x 8 tokens", "8 x 8 tokens")),
        (block_mask(k_len=7), ("8 x 7 tokens", "8 x 8 tokens")),
        (block_mask(batch=3), ("3 x 1 heads", "2 x 4 heads")),
        (block_mask(heads=2), ("1 x 2 heads", "2 x 4 heads")),
    ],
)
def test_block_sparse_mask_for_other_inputs(mask, words):
    with refused(ValueError, "mask", *words):
        sparge.block_sparse_attention(**good(), mask=mask)


def test_block_sparse_mask_elsewhere():
    mask = BlockMask(torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=META), N, N, (128, 64))
    with refused(ValueError, "mask", "meta", "cpu"):
        sparge.block_sparse_attention(**good(), mask=mask)


def test_block_sparse_checks_the_rest_too():
    with refused(ValueError, "quantization", "'fp4'"):
        sparge.block_sparse_attention(**good(), mask=block_mask(), quantization="fp4")
    with refused(ValueError, "pv_threshold", "1.0"):
        sparge.block_sparse_attention(**good(), mask=block_mask(), pv_threshold=1.0)
    with refused(ValueError, "pv_threshold", "2 values", "4 heads"):
        sparge.block_sparse_attention(**good(), mask=block_mask(), pv_threshold=(-1.0, -2.0))
    with refused(ValueError, "layout", "'HBSD'"):
        sparge.block_sparse_attention(**good(), mask=block_mask(), layout="HBSD")


def packed(**changed):
    ends = torch.tensor([0, 3, N])
    call = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5, "config": EXACT}
    return {"query": randn(0, N, H, D), "key": randn(1, N, H, D), "value": randn(2, N, H, D)} | call | changed


def test_the_unchanged_packed_call_succeeds():
    assert sparge.varlen_attention(**packed()).shape == (N, H, D)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    "ends",
    [[0, 3, 8], torch.tensor([0.0, 8.0]), torch.tensor([[0, 8]]), torch.tensor([0]), torch.tensor(8)],
    ids=["list", "float", "2-D", "one end", "0-D"],
)
def test_packed_ends_of_the_wrong_kind(name, ends):
    with refused(TypeError, name, "1-D int32 or int64"):
        sparge.varlen_attention(**packed(**{name: ends}))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("ends", [[1, 8], [0, 7], [0, 9], [0, 5, 3, 8], [0, -1, 8]], ids=str)
def test_packed_ends_that_do_not_rise_over_all_tokens(name, ends):
    good = torch.tensor([0] * (len(ends) - 1) + [N])
    both = {"cu_seqlens_q": good, "cu_seqlens_k": good, "max_seqlen_q": N, "max_seqlen_k": N}
    with refused(ValueError, name, "from 0", "8", str(ends)):
        sparge.varlen_attention(**packed(**both | {name: torch.tensor(ends)}))


def test_packed_batches_that_do_not_fit():
    with refused(ValueError, "cu_seqlens_q", "2 sequences", "cu_seqlens_k", "1"):
        sparge.varlen_attention(**packed(cu_seqlens_k=torch.tensor([0, N]), max_seqlen_k=N))
    with refused(ValueError, "max_seqlen_q=4", "5"):
        sparge.varlen_attention(**packed(max_seqlen_q=4))
    with refused(ValueError, "max_seqlen_k=2", "5"):
        sparge.varlen_attention(**packed(max_seqlen_k=2))
    with refused(ValueError, "query", "3 dimensions", "[tokens, H, D]"):
        sparge.varlen_attention(**packed(query=randn(0, 1, N, H, D)))
    with refused(ValueError, "4 heads", "multiple", "3"):
        sparge.varlen_attention(**packed(key=randn(0, N, 3, D), value=randn(0, N, 3, D)))
    with refused(TypeError, "value", "torch.int32"):
        sparge.varlen_attention(**packed(value=torch.zeros(N, H, D, dtype=torch.int32)))
    with refused(RuntimeError, "key", "requires grad"):
        sparge.varlen_attention(**packed(key=randn(1, N, H, D).requires_grad_()))


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("longest", [None, "5"], ids=repr)
def test_packed_lengths_must_be_integers(name, longest):
    with refused(TypeError, name, repr(longest)):
        sparge.varlen_attention(**packed(**{name: longest}))
