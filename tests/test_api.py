import inspect
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import EXACT, each_backend, plain_attention, problem, randn, refused, run, seen_pairs, tensors, token_mask

import sparge
from sparge import BlockMask, SparseConfig, Stats, calls

pytestmark = pytest.mark.usefixtures("one_thread")

SPARSE = SparseConfig(rule=("threshold", "gap"), threshold=0.05, gap=0.5, quantization="none")


def packed(seed, tokens, heads, dim=16):
    return randn(seed, tokens, heads, dim)


# ---- a superset of torch's function


def test_the_arguments_are_those_of_torch_in_the_same_order():
    parameters = list(inspect.signature(sparge.attention).parameters.values())
    assert [(p.name, p.default) for p in parameters[:8]] == [
        ("query", inspect.Parameter.empty),
        ("key", inspect.Parameter.empty),
        ("value", inspect.Parameter.empty),
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[:8])
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[8:])
    q, k, v = tensors(q_len=40)
    want = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3, enable_gqa=True)
    got = sparge.attention(q, k, v, None, 0.0, True, 0.3, True, config=EXACT)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    q_len=st.integers(1, 150),
    k_len=st.integers(1, 150),
    group=st.integers(1, 3),
    v_dim=st.sampled_from((16, 40)),
    padded=st.booleans(),
    scale=st.sampled_from((None, 0.2)),
)
def test_exact_attention_is_torchs(seed, q_len, k_len, group, v_dim, padded, scale):
    q, k, v = tensors(seed, batch=2, heads=2 * group, kv_heads=2, q_len=q_len, k_len=k_len, v_dim=v_dim)
    valid = torch.rand(2, 1, 1, k_len, generator=torch.Generator().manual_seed(seed)) < 0.8
    valid[..., 0] = True
    arguments = {"attn_mask": valid if padded else None, "scale": scale, "enable_gqa": group > 1}
    want = F.scaled_dot_product_attention(q, k, v, **arguments)
    torch.testing.assert_close(sparge.attention(q, k, v, **arguments, config=EXACT), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_causal_attention_is_torchs(dtype):
    q, k, v = tensors(batch=2, heads=4, q_len=200, dtype=dtype)
    want = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    got = sparge.attention(q, k, v, is_causal=True, config=EXACT)
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.float(), want, atol=max(eps, 1e-5), rtol=eps)


@pytest.mark.parametrize(("q_len", "k_len"), [(50, 120), (120, 50), (1, 90)])
def test_causal_with_unequal_lengths_aligns_bottom_right(q_len, k_len):
    q, k, v = tensors(q_len=q_len, k_len=k_len)
    want, want_lse = plain_attention(q, k, v, seen_pairs(q_len, k_len, is_causal=True))
    out, lse = sparge.attention(q, k, v, is_causal=True, config=EXACT, return_lse=True)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [(10, 0), (0, 0), (None, 5), (-1, -1), (40, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sliding_windows(window, is_causal):
    q, k, v = tensors(q_len=100, k_len=130)
    want, _ = plain_attention(q, k, v, seen_pairs(100, 130, is_causal, window))
    got = sparge.attention(q, k, v, is_causal=is_causal, window=window, config=EXACT)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


def test_the_default_is_near_dense_attention_and_really_sparse():
    q, k, v = tensors(heads=4, q_len=4096, dim=32, contrast=8.0)
    out, stats = sparge.attention(q, k, v, is_causal=True, return_stats=True)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert stats.sparsity > 0.3
    assert (out - want).abs().sum() / want.abs().sum() < 0.05


def test_a_mask_may_be_shared_by_a_padded_batch():
    q, k, v = tensors(batch=2, heads=2, q_len=200)
    valid = torch.arange(200) < torch.tensor([[200], [70]])
    mask = BlockMask.from_dense(torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool(), 200, 200)
    padding = valid[:, None, None]
    out, stats = sparge.block_sparse_attention(q, k, v, mask, padding, quantization="none", return_stats=True)
    seen = seen_pairs(200, 200, key_valid=valid)[:, None] & token_mask(mask)
    want, _ = plain_attention(q, k, v, seen)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    assert stats.executed[:, 0].tolist() == [5, 3]  # blocks of padding alone are not computed


# ---- what comes back


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("return_stats", [False, True])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_returns_the_output_then_what_was_asked_for(return_lse, return_stats, layout):
    q, k, v = tensors(batch=2, heads=4, q_len=70, k_len=90, v_dim=24)
    mask = BlockMask.from_dense(torch.ones(1, 2).bool(), 70, 90)
    if layout == "BSHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    extras = {"return_lse": return_lse, "return_stats": return_stats, "layout": layout}
    for result in (sparge.attention(q, k, v, **extras), sparge.block_sparse_attention(q, k, v, mask, **extras)):
        if not (return_lse or return_stats):
            assert isinstance(result, torch.Tensor)
            continue
        assert isinstance(result, tuple)
        assert len(result) == 1 + return_lse + return_stats
        assert result[0].shape == ((2, 4, 70, 24) if layout == "BHSD" else (2, 70, 4, 24))
        if return_lse:
            assert result[1].shape == (2, 4, 70)
            assert result[1].dtype == torch.float32
        if return_stats:
            assert isinstance(result[-1], Stats)


def test_what_is_asked_for_does_not_change_the_output():
    q, k, v = tensors(q_len=200, contrast=2.0)
    for config in (SPARSE, replace(SPARSE, pv_threshold=-1.0), replace(SPARSE, quantization="int8")):
        alone = sparge.attention(q, k, v, is_causal=True, config=config)
        out, _, _ = sparge.attention(q, k, v, is_causal=True, config=config, return_lse=True, return_stats=True)
        assert torch.equal(alone, out)


@each_backend()
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_the_output_is_contiguous_in_the_callers_layout(backend, layout):
    q, k, v = tensors(batch=2, q_len=70)
    if layout == "BSHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    values = run(backend, problem(q, k, v, layout=layout), EXACT).values
    out = sparge.attention(q, k, v, layout=layout, config=EXACT)
    assert out.is_contiguous()
    assert (values if layout == "BHSD" else values.transpose(1, 2)).is_contiguous()
    assert out.shape == q.shape


def test_layouts_agree():
    q, k, v = tensors(batch=2, heads=4, kv_heads=2, q_len=150)
    arguments = {"is_causal": True, "enable_gqa": True, "config": SPARSE, "return_lse": True}
    out, lse = sparge.attention(q, k, v, **arguments)
    turned, same_lse = sparge.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="BSHD", **arguments)
    assert torch.equal(turned.transpose(1, 2), out)
    assert torch.equal(lse, same_lse)


def test_inputs_are_left_alone():
    q, k, v = tensors(q_len=200)
    copies = [x.clone() for x in (q, k, v)]
    for quantization in ("none", "int8", "int8-fp8"):
        config = replace(SPARSE, pv_threshold=-1.0, similarity=0.1, quantization=quantization)
        sparge.attention(q, k, v, is_causal=True, config=config)
    assert all(torch.equal(x, copy) for x, copy in zip((q, k, v), copies, strict=True))


def test_results_do_not_depend_on_the_number_of_threads():
    q, k, v = tensors(heads=4, q_len=500, contrast=2.0)
    config = replace(SPARSE, pv_threshold=-1.0)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(sparge.attention(q, k, v, is_causal=True, config=config, return_lse=True))
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], atol=1e-6, rtol=0)
        torch.testing.assert_close(lse, results[0][1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_decoding_one_query(q_len, is_causal):
    q, k, v = tensors(batch=2, heads=4, kv_heads=1, q_len=q_len, k_len=333)
    want, _ = plain_attention(q, k, v, seen_pairs(q_len, 333, is_causal=is_causal))
    got = sparge.attention(q, k, v, is_causal=is_causal, enable_gqa=True, config=EXACT)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dim", "v_dim"), [(16, 256), (256, 16), (24, 40), (17, 31)])
def test_values_may_have_another_head_dim(dim, v_dim):
    q, k, v = tensors(q_len=80, dim=dim, v_dim=v_dim)
    out = sparge.attention(q, k, v, config=EXACT)
    assert out.shape == (1, 2, 80, v_dim)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=0)
    assert sparge.attention(q, k, v, config=replace(EXACT, quantization="int8-fp8")).shape == (1, 2, 80, v_dim)


# ---- stats


@pytest.mark.parametrize("is_causal", [False, True])
def test_stats_count_blocks(is_causal):
    q, k, v = tensors(batch=2, heads=4, kv_heads=2, q_len=500, k_len=600, contrast=2.0)
    arguments = {"is_causal": is_causal, "enable_gqa": True}
    config = replace(SPARSE, pv_threshold=-1.0)
    _, stats = sparge.attention(q, k, v, **arguments, config=config, return_stats=True)
    mask = sparge.predict_mask(q, k, **arguments, config=config)
    visible = 4 * 10 if not is_causal else sum(min(10, (min(128 * i + 127, 499) + 100) // 64 + 1) for i in range(4))
    assert stats.visible.tolist() == [[visible] * 4] * 2
    assert torch.equal(stats.executed, mask.kept_per_head)
    assert stats.executed.dtype == stats.visible.dtype == stats.skipped_pv.dtype == torch.int64
    assert stats.executed.shape == stats.visible.shape == stats.skipped_pv.shape == (2, 4)
    assert stats.skipped_pv.sum() > 0
    assert (stats.skipped_pv <= 2 * stats.executed).all()
    assert stats.sparsity.item() == pytest.approx(1 - stats.executed.sum().item() / (8 * visible))
    assert 0 < stats.sparsity < 1
    torch.testing.assert_close(stats.sparsity_per_head, 1 - stats.executed / visible)
    assert isinstance(stats.sparsity, torch.Tensor)


def test_stats_say_which_backend_ran_and_why():
    q, k, v = tensors(q_len=70)
    _, stats = sparge.attention(q, k, v, return_stats=True)
    assert stats.quantization == "none"  # what auto means on a CPU
    assert stats.backend == "dense"
    assert "too short to gain" in stats.reason
    _, stats = sparge.attention(q, k, v, config=SparseConfig(quantization="none"), return_stats=True)
    assert stats.backend in ("cpu", "torch")
    assert stats.reason
    for mode in ("int8", "int8-fp8"):
        _, stats = sparge.attention(q, k, v, config=SparseConfig(quantization=mode), return_stats=True)
        assert (stats.backend, stats.quantization) == ("reference", mode)
        assert "cpu" in stats.reason
        assert "torch" in stats.reason
        assert mode in stats.reason


@pytest.mark.parametrize(("tokens", "dim", "is_dense"), [(5119, 72, True), (5120, 72, False), (4096, 64, False)])
def test_wide_heads_in_causal_order_pay_later_on_a_cpu(tokens, dim, is_dense):
    q, k, v = tensors(q_len=tokens, heads=1, dim=dim)
    _, causal = sparge.attention(q, k, v, is_causal=True, return_stats=True)
    _, full = sparge.attention(q, k, v, return_stats=True)
    assert (causal.backend == "dense", full.backend == "dense") == (is_dense, False)


@pytest.mark.parametrize(
    ("q_len", "k_len", "is_dense"), [(2047, 2047, True), (2048, 2048, False), (16, 9000, True), (1500, 3300, False)]
)
@pytest.mark.parametrize("rule", ["gap", ("gap", "probe")])
def test_calls_too_short_to_gain_are_dense_on_a_cpu(rule, q_len, k_len, is_dense):
    if "probe" in rule:  # computes rows, and pays from twice the length on
        q_len, k_len = 2 * q_len, 2 * k_len
    q, k, v = tensors(q_len=q_len, k_len=k_len, heads=1)
    out, stats = sparge.attention(q, k, v, is_causal=True, config=SparseConfig(rule=rule), return_stats=True)
    assert (stats.backend == "dense") is is_dense
    if is_dense:
        want, _ = plain_attention(q, k, v, seen_pairs(q_len, k_len, True))
        torch.testing.assert_close(out, want.to(out.dtype), atol=1e-4, rtol=1e-4)
    for more in ({"config": SparseConfig(quantization="none")}, {"return_lse": True}, {"window": (64, 0)}):
        *_, stats = sparge.attention(q, k, v, is_causal=True, return_stats=True, **more)
        assert stats.backend != "dense"


def test_few_rows_before_many_keys_make_no_mask_of_every_pair():
    q, k, v = tensors(q_len=300, k_len=60_000, heads=1)
    _, stats = sparge.attention(q, k, v, is_causal=True, return_stats=True)
    assert stats.backend != "dense"
    assert "mask of every pair" in stats.reason
    _, stats = sparge.attention(q, k, v, return_stats=True)
    assert stats.backend == "dense"


def test_an_engine_that_is_missing_is_passed_over(monkeypatch):
    q, k, v = tensors(q_len=70)
    want = sparge.attention(q, k, v, config=SPARSE)
    monkeypatch.setattr(sparge.backends.CpuBackend, "unavailable", lambda self: "needs something")
    calls.forget()
    out, stats = sparge.attention(q, k, v, config=SPARSE, return_stats=True)
    assert stats.backend == "torch"
    assert "cpu: needs something" in stats.reason
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


# ---- predict_mask


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    q_len=st.integers(1, 400),
    k_len=st.integers(1, 400),
    is_causal=st.booleans(),
    window=st.sampled_from((None, (100, 20))),
    mode=st.sampled_from(("none", "int8", "int8-fp8")),
)
def test_predict_mask_is_the_mask_attention_uses(seed, q_len, k_len, is_causal, window, mode):
    q, k, v = tensors(seed, heads=4, kv_heads=2, q_len=q_len, k_len=k_len, contrast=2.0)
    config = replace(SPARSE, block=(64, 32), quantization=mode)
    arguments = {"is_causal": is_causal, "enable_gqa": True, "window": window, "scale": 0.4}
    mask = sparge.predict_mask(q, k, config=config, **arguments)
    out, stats = sparge.attention(q, k, v, config=config, return_stats=True, **arguments)
    assert torch.equal(stats.executed, mask.kept_per_head)
    assert torch.equal(stats.visible, mask.visible_per_head.expand(1, 4))
    assert torch.equal(stats.sparsity, mask.sparsity)
    assert torch.equal(sparge.block_sparse_attention(q, k, v, mask, quantization=mode, **arguments), out)


def test_predict_mask_reads_layout_and_padding():
    q, k, _ = tensors(batch=2, heads=4, q_len=300, contrast=2.0)
    padding = torch.arange(300).expand(2, 1, 1, 300) < torch.tensor([300, 130]).view(2, 1, 1, 1)
    mask = sparge.predict_mask(q, k, padding, config=SPARSE)
    turned = sparge.predict_mask(q.transpose(1, 2), k.transpose(1, 2), padding, config=SPARSE, layout="BSHD")
    assert mask.equals(turned)
    assert not mask.to_dense()[1, :, :, 3:].any()
    assert mask.to_dense()[0, :, :, 3:].any()


# ---- block_sparse_attention


@settings(max_examples=25)
@given(st.integers(0, 999), st.booleans(), st.sampled_from((None, (70, 10))), st.sampled_from(((1, 1), (2, 4), (1, 4))))
def test_block_sparse_attention_adds_nothing_to_the_mask(seed, is_causal, window, shape):
    q, k, v = tensors(seed, batch=2, heads=4, kv_heads=2, q_len=200, k_len=170)
    kept = torch.rand(*shape, 4, 6, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask = BlockMask.from_dense(kept, 200, 170, (64, 32))
    seen = seen_pairs(200, 170, is_causal, window)[:, None] & token_mask(mask)
    want, want_lse = plain_attention(q, k, v, seen)
    arguments = {"is_causal": is_causal, "window": window, "enable_gqa": True}
    out, lse, stats = sparge.block_sparse_attention(q, k, v, mask, **arguments, return_lse=True, return_stats=True)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-6)
    blocks = torch.nn.functional.pad(seen, (0, 22, 0, 56)).unflatten(-1, (6, 32)).unflatten(2, (4, 64)).any(-1).any(3)
    assert torch.equal(stats.executed, blocks.sum((-2, -1)).expand(2, 4))


def test_block_sparse_attention_filters_and_quantises_when_told():
    q, k, v = tensors(heads=4, q_len=256, contrast=4.0)
    mask = BlockMask.from_dense(torch.ones(2, 4).bool(), 256, 256)
    exact = sparge.block_sparse_attention(q, k, v, mask)
    limits = (-1.0, -1.0, -1.0, -math.inf)
    out, stats = sparge.block_sparse_attention(q, k, v, mask, pv_threshold=limits, return_stats=True)
    assert stats.skipped_pv[0, :3].min() > 0
    assert stats.skipped_pv[0, 3] == 0
    torch.testing.assert_close(out[:, 3], exact[:, 3], atol=1e-6, rtol=0)
    assert not torch.allclose(out[:, 0], exact[:, 0], atol=1e-6)
    out, stats = sparge.block_sparse_attention(q, k, v, mask, quantization="int8", return_stats=True)
    assert stats.quantization == "int8"
    assert 1e-5 < (out - exact).abs().mean() < 0.05


# ---- varlen_attention

LENGTHS = [([70, 1, 200], [70, 50, 130]), ([0, 40, 0, 3], [10, 40, 0, 90]), ([40, 5], [0, 5]), ([5], [7])]


def ends(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize(("q_lengths", "k_lengths"), LENGTHS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mode", ["none", "int8"])
def test_packed_sequences_equal_separate_calls(q_lengths, k_lengths, is_causal, mode):
    q, k, v = packed(0, sum(q_lengths), 4), packed(1, sum(k_lengths), 2), packed(2, sum(k_lengths), 2, 24)
    config = replace(SPARSE, quantization=mode, pv_threshold=-2.0)
    shared = {"is_causal": is_causal, "scale": 0.3, "window": (60, None), "config": config}
    q_ends, k_ends = ends(q_lengths), ends(k_lengths, torch.int64)
    out, lse, stats = sparge.varlen_attention(
        q, k, v, q_ends, k_ends, max(q_lengths), max(k_lengths), **shared, return_lse=True, return_stats=True
    )
    assert out.shape == (sum(q_lengths), 4, 24)
    assert lse.shape == (4, sum(q_lengths))
    assert stats.executed.shape == stats.visible.shape == stats.skipped_pv.shape == (len(q_lengths), 4)
    for n, (q_len, k_len) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        rows = slice(int(q_ends[n]), int(q_ends[n + 1]))
        keys = slice(int(k_ends[n]), int(k_ends[n + 1]))
        if 0 in (q_len, k_len):
            assert not out[rows].any()
            assert (lse[:, rows] == -math.inf).all()
            assert stats.visible[n].sum() == stats.executed[n].sum() == 0
            continue
        one, one_lse, one_stats = sparge.attention(
            q[None, rows], k[None, keys], v[None, keys], **shared,
            enable_gqa=True, layout="BSHD", return_lse=True, return_stats=True,
        )  # fmt: skip
        assert torch.equal(out[rows], one[0])
        assert torch.equal(lse[:, rows], one_lse[0])
        for name in ("executed", "visible", "skipped_pv"):
            assert torch.equal(getattr(stats, name)[n], getattr(one_stats, name)[0])


def test_packed_sequences_do_not_see_each_other():
    q, k, v = (packed(n, 100, 2) for n in range(3))
    two = ends([60, 40])
    before = sparge.varlen_attention(q, k, v, two, two, 60, 60, config=EXACT)
    k[60:], v[60:] = math.nan, math.nan
    after = sparge.varlen_attention(q, k, v, two, two, 60, 60, config=EXACT)
    assert torch.equal(before[:60], after[:60])
    assert after[60:].isnan().all()


def test_packed_results_come_alone_unless_asked():
    q, k, v = (packed(n, 10, 2) for n in range(3))
    assert isinstance(sparge.varlen_attention(q, k, v, ends([10]), ends([10]), 10, 10), torch.Tensor)


def test_packed_dtype_is_kept():
    q, k, v = (packed(n, 10, 2).half() for n in range(3))
    assert sparge.varlen_attention(q, k, v, ends([10]), ends([10]), 10, 10).dtype == torch.float16


def test_packed_settings_are_checked_even_if_every_sequence_is_empty():
    q, k, v = packed(0, 5, 2), packed(1, 6, 2), packed(2, 6, 2)
    arguments = (ends([5, 0]), ends([0, 6]), 5, 6)
    assert not sparge.varlen_attention(q, k, v, *arguments).any()
    with refused(ValueError, "scale", "nan"):
        sparge.varlen_attention(q, k, v, *arguments, scale=math.nan)
    with refused(ValueError, "gap", "3 values", "2 heads"):
        sparge.varlen_attention(q, k, v, *arguments, config=SparseConfig(gap=(1.0, 2.0, 3.0)))


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys", "settings"),
    [(1, 3000, {}), (1, 3000, {"is_causal": True, "window": (500, 0)}), (1, 700, {"window": (3, 5)}),
     (64, 64, {"is_causal": True}), (300, 700, {"is_causal": True, "enable_gqa": True}), (500, 400, {})],
    ids=str,
)  # fmt: skip
def test_short_calls_with_padding_are_torchs_own(rows, keys, settings, broken):
    query = randn(0, 2, 4, rows, 32)
    key, value = randn(1, 2, 2, 2 if settings.get("enable_gqa") else 4, keys, 32)
    padding = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    padding[0, ..., : keys // 3] = False
    padding[1, ..., -5:] = False  # and with it all that a row of a short window sees
    if broken:
        key[0, :, : keys // 3] = value[0, :, : keys // 3] = float("nan")
    got, stats = sparge.attention(query, key, value, padding, **settings, return_stats=True)
    want = sparge.attention(query, key, value, padding, **settings, config=EXACT)
    assert stats.backend == "dense"
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
