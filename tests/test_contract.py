"""One test for each defect of the public implementation that concerns this layer, and for broken numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problems import (
    BY_NAME,
    EXACT,
    each_backend,
    on_its_device,
    plain_attention,
    problem,
    randn,
    refused,
    run,
    seen_pairs,
    tensors,
)

import sparge
from sparge import BlockMask, SparseConfig, reference

pytestmark = pytest.mark.usefixtures("one_thread")

NAN, INF = math.nan, math.inf
SPARSE = SparseConfig(rule=("threshold", "gap"), threshold=0.05, gap=0.7, quantization="none")
CONFIGS = {
    "default": SparseConfig(quantization="none"),
    "sparse": SPARSE,
    "filtered": replace(SPARSE, pv_threshold=-1.0),
    "small blocks": replace(SPARSE, block=(64, 32), subblocks=(2, 8)),
    "paper": SparseConfig(rule="cdf", cdf=0.5, subblocks=(1, 1), similarity=0.2, quantization="none"),
    "topk": SparseConfig(rule="topk", topk=0.2, sinks=0, quantization="none"),
    "wide keys": SparseConfig(rule="topk", topk=0.1, sinks=0, block=(64, 128), quantization="none"),
}
FUTURES = {"other numbers": None, "zero": 0.0, "huge": 3e38, "NaN": NAN, "inf": INF, "-inf": -INF}
LENGTHS = [(300, 300), (150, 300), (300, 170)]


def change_after(x, time, future):
    """x with every token from `time` on replaced."""
    changed = x.clone()
    changed[:, :, time:] = randn(99, *x[:, :, time:].shape) if future is None else future
    return changed


def assert_past_is_equal(before, after, rows):
    assert rows > 0
    assert torch.equal(before.values[:, :, :rows], after.values[:, :, :rows])
    assert torch.equal(before.lse[:, :, :rows], after.lse[:, :, :rows])
    assert before.values[:, :, :rows].isfinite().all()


# ---- 1. causal attention sees the future


@each_backend()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("future", FUTURES.values(), ids=FUTURES)
def test_1_future_values_leave_the_past_bit_equal(backend, config, future):
    for q_len, k_len in LENGTHS:
        q, k, v = tensors(1, heads=4, kv_heads=2, q_len=q_len, k_len=k_len, contrast=2.0)
        before = run(backend, problem(q, k, v, is_causal=True), config)
        for time in (k_len - 37, k_len - 128):
            after = run(backend, problem(q, k, change_after(v, time, future), is_causal=True), config)
            assert_past_is_equal(before, after, rows=time - (k_len - q_len))


@each_backend()
@pytest.mark.parametrize("future", FUTURES.values(), ids=FUTURES)
@pytest.mark.parametrize("what", ["key", "value", "both"])
def test_1_future_keys_and_values_leave_the_past_bit_equal_under_a_given_mask(backend, future, what):
    for q_len, k_len in LENGTHS:
        q, k, v = tensors(2, heads=4, kv_heads=2, q_len=q_len, k_len=k_len)
        dense = torch.rand(1, 4, -(-q_len // 128), -(-k_len // 64), generator=torch.Generator().manual_seed(0)) < 0.7
        mask = BlockMask.from_dense(dense, q_len, k_len)
        time = k_len - 70
        other_k = change_after(k, time, future) if what != "value" else k
        other_v = change_after(v, time, future) if what != "key" else v
        results = [
            run(backend, problem(q, *kv, is_causal=True), replace(EXACT, block=(128, 64)), mask)
            for kv in ((k, v), (other_k, other_v))
        ]
        assert_past_is_equal(*results, rows=time - (k_len - q_len))


@each_backend()
@pytest.mark.parametrize("future", FUTURES.values(), ids=FUTURES)
def test_1_future_values_leave_the_past_bit_equal_in_a_window_without_right_side(backend, future):
    """window=(n, 0) is causal too, though its diagonal blocks are not forced."""
    q, k, v = tensors(3, heads=4, q_len=300, contrast=2.0)
    config = replace(CONFIGS["topk"], topk=0.0, block=(64, 128), subblocks=(1, 1))
    for time in (170, 230):
        results = [run(backend, problem(q, k, x, window=(None, 0)), config) for x in (v, change_after(v, time, future))]
        assert_past_is_equal(*results, rows=time)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("future", FUTURES.values(), ids=FUTURES)
def test_1_future_values_leave_the_past_bit_equal_in_int8(config, future):
    q, k, v = tensors(4, heads=4, kv_heads=2, q_len=300, contrast=2.0)
    config = replace(config, quantization="int8")
    results = [run("reference", problem(q, k, x, is_causal=True), config) for x in (v, change_after(v, 200, future))]
    assert_past_is_equal(*results, rows=200)


def test_1_future_values_move_the_past_within_one_rounding_step_in_fp8():
    q, k, v = tensors(5, heads=2, q_len=300)
    config = replace(EXACT, quantization="int8-fp8")
    louder = change_after(v, 200, None) * torch.where(torch.arange(300) < 200, 1.0, 1.7)[:, None]
    before, after = (run("reference", problem(q, k, x, is_causal=True), config) for x in (v, louder))
    step = v[:, :, :200].abs().amax(2, keepdim=True) * 2**-3  # two roundings of at most 1/16 each
    assert ((before.values - after.values)[:, :, :200].abs() <= step).all()
    assert torch.equal(before.lse[:, :, :200], after.lse[:, :, :200])


@each_backend()
def test_1_causal_is_exact_inside_diagonal_blocks(backend):
    q, k, v = tensors(6, q_len=300)
    want, _ = plain_attention(q, k, v, seen_pairs(300, 300, is_causal=True))
    got = run(backend, problem(q, k, v, is_causal=True), EXACT)
    torch.testing.assert_close(got.values.double(), want, atol=1e-5, rtol=0)


# ---- 2 to 12


def test_2_diagonal_blocks_are_forced_under_causal():
    """Keys that repel their own queries: no rule would keep the diagonal."""
    q = randn(0, 1, 1, 1024, 32)
    q = q.unflatten(2, (16, 64)).mean(3, keepdim=True).expand(1, 1, 16, 64, 32).flatten(2, 3) * 20
    mask = sparge.predict_mask(q, -q, is_causal=True, config=replace(CONFIGS["topk"], topk=0.0, subblocks=(1, 1)))
    assert mask.sparsity > 0.3
    kept = mask.to_dense()[0, 0]
    for row in range(1024):
        assert kept[row // 128, row // 64]


def test_3_causal_topk_counts_visible_blocks_only():
    q, k, _ = tensors(7, q_len=2048)
    config = replace(CONFIGS["topk"], topk=0.5, subblocks=(1, 1), block=(64, 64))
    kept = sparge.predict_mask(q, k, is_causal=True, config=config).to_dense()[0, 0].sum(-1)
    for row, count in enumerate(kept.tolist()):
        half = math.ceil((row + 1) / 2)
        assert half <= count <= half + 1  # the diagonal may come on top


@each_backend()
def test_4_rows_without_a_key_are_zero_and_minus_infinity(backend, poisoned):
    q, k, v = tensors(8, batch=2, q_len=300, k_len=100)
    got = run(backend, problem(q, k, v, is_causal=True), SPARSE)
    assert not got.values[:, :, :200].any()
    assert (got.lse[:, :, :200] == -INF).all()
    assert got.values[:, :, 200:].any(-1).all()

    nothing = torch.zeros(2, 100, dtype=torch.bool)
    nothing[1] = True
    got = run(backend, problem(q, k, v, key_valid=nothing), SPARSE)
    assert not got.values[0].any()
    assert (got.lse[0] == -INF).all()
    assert got.lse[1].isfinite().all()


@each_backend()
@pytest.mark.parametrize("config", [EXACT, replace(EXACT, pv_threshold=-1.0)], ids=["plain", "filtered"])
def test_4_rows_without_a_block_are_zero_and_minus_infinity(backend, config, poisoned):
    q, k, v = tensors(9, q_len=300)
    kept = torch.ones(1, 2, 3, 5, dtype=torch.bool)
    kept[0, 0, 1] = False
    got = run(backend, problem(q, k, v), config, BlockMask.from_dense(kept, 300, 300))
    assert not got.values[0, 0, 128:256].any()
    assert (got.lse[0, 0, 128:256] == -INF).all()
    assert got.lse.isfinite().sum() == 2 * 300 - 128


@pytest.mark.parametrize("mode", ["int8", "int8-fp8"])
def test_4_quantised_rows_without_a_key_are_zero_and_minus_infinity(mode, poisoned):
    q, k, v = tensors(8, q_len=300, k_len=100)
    got = run("reference", problem(q, k, v, is_causal=True), replace(EXACT, quantization=mode))
    assert not got.values[:, :, :200].any()
    assert (got.lse[:, :, :200] == -INF).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_5_sparsity_of_a_custom_mask_is_the_share_of_visible_blocks_skipped(is_causal):
    q, k, v = tensors(10, q_len=512)
    full = BlockMask.from_dense(torch.ones(4, 8).bool(), 512, 512)
    _, stats = sparge.block_sparse_attention(q, k, v, full, is_causal=is_causal, return_stats=True)
    assert stats.sparsity == 0.0
    assert full.sparsity == 0.0
    half = BlockMask.from_dense(torch.tensor([1, 0] * 4).bool().expand(4, 8), 512, 512)
    _, stats = sparge.block_sparse_attention(q, k, v, half, is_causal=is_causal, return_stats=True)
    assert stats.sparsity == 0.5
    assert stats.visible.tolist() == [[20 if is_causal else 32] * 2]


@each_backend()
@pytest.mark.parametrize("block", [(128, 64), (64, 128), (256, 32), (192, 64)])
def test_6_mask_tiles_are_the_configs_on_every_backend(backend, block):
    inputs = problem(*tensors(11, q_len=500, k_len=450), is_causal=True)
    config = replace(SPARSE, block=block)
    stages = BY_NAME[backend]
    mask = stages.select(stages.summarize(on_its_device(backend, inputs), config), config)
    assert mask.block == block
    assert mask.to_dense().shape[2:] == (-(-500 // block[0]), -(-450 // block[1]))
    want = reference.select(reference.summarize(inputs, config), config)
    assert torch.equal(mask.to_dense().cpu(), want.to_dense())


@each_backend("dense")
def test_6_a_window_that_ends_past_the_last_key_keeps_no_edge(backend):
    inputs = problem(*tensors(13, q_len=1, k_len=1395, contrast=2.0), window=(None, 2))
    stages = BY_NAME[backend]
    got = stages.select(stages.summarize(on_its_device(backend, inputs), SPARSE), SPARSE)
    want = reference.select(reference.summarize(inputs, SPARSE), SPARSE)
    assert not want.to_dense()[..., -1].all()
    assert torch.equal(got.to_dense().cpu(), want.to_dense())


def test_7_nothing_is_accepted_and_ignored():
    q, k, v = tensors(12, batch=2, q_len=64)
    with refused(TypeError, "attn_mask"):
        sparge.attention(q, k, v, torch.zeros(64, 64))
    with refused(ValueError, "attn_mask"):
        sparge.attention(q, k, v, torch.ones(64, 64, dtype=torch.bool))
    with refused(ValueError, "dropout_p=0.1"):
        sparge.attention(q, k, v, None, 0.1)
    with pytest.raises(TypeError, match="output_dtype"):
        sparge.attention(q, k, v, output_dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int8-fp8"])
def test_7_the_output_has_the_inputs_dtype(dtype, quantization):
    q, k, v = tensors(12, q_len=64, dtype=dtype)
    out, lse = sparge.attention(q, k, v, config=SparseConfig(quantization=quantization), return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32


def test_8_the_predictor_uses_the_callers_scale():
    q, k, _ = tensors(13, heads=4, q_len=1024, contrast=1.0)
    config = SparseConfig(rule="threshold", threshold=0.08, subblocks=(1, 1), sinks=0, quantization="none")
    kept = [sparge.predict_mask(q, k, scale=scale, config=config).kept_per_head.sum() for scale in (0.0, 0.25, 2.0)]
    assert kept[0] > kept[1] > kept[2]  # flat scores reach no threshold alone: all are tied with the maximum
    scaled = sparge.predict_mask(q * 2.0, k, scale=0.25, config=config)
    assert scaled.equals(sparge.predict_mask(q, k, scale=0.5, config=config))
    assert sparge.predict_mask(q, k, config=config).equals(sparge.predict_mask(q, k, scale=16**-0.5, config=config))


@pytest.mark.parametrize("length", [1, 65, 100, 127, 129, 300])
@pytest.mark.parametrize("zeros", ["no", "some", "all"])
def test_9_ragged_and_zero_rows_give_no_nan(length, zeros):
    q, k, v = tensors(14, q_len=length)
    if zeros != "no":
        rows = slice(None) if zeros == "all" else slice(0, None, 3)
        q[:, :, rows], k[:, :, rows] = 0.0, 0.0
    config = replace(CONFIGS["paper"], quantization="none")
    blocks = reference.summarize(problem(q, k, v), config)
    for x in (blocks.q_similarity, blocks.k_similarity, blocks.q_means, blocks.k_means):
        assert x.isfinite().all()
    assert (blocks.q_similarity <= 1.0001).all()
    if zeros == "no":
        tail = q[:, :, length - (length % 128 or 128) :]
        unit = tail / tail.norm(dim=-1, keepdim=True)
        want = (unit @ unit.mT).mean((-2, -1))
        torch.testing.assert_close(blocks.q_similarity[..., -1], want, atol=1e-5, rtol=0)
    assert sparge.attention(q, k, v, config=config).isfinite().all()


def test_10_cdf_is_accumulated_in_float32():
    """2048 blocks of almost equal probability: a bfloat16 sum stands still at .125 and would keep nearly all."""
    k_means = torch.linspace(-1, 1, 2048)[torch.randperm(2048, generator=torch.Generator().manual_seed(0))]
    scores = (k_means * 0.01).view(1, 1, 1, 1, 2048)
    seen = torch.ones_like(scores, dtype=torch.bool)
    for tau in (0.25, 0.5, 0.9):
        kept = sparge.selection.apply_rules(scores, seen, seen.sum(-1, keepdim=True), SparseConfig(rule="cdf", cdf=tau))
        mass = scores.double().softmax(-1).flatten().sort(descending=True).values.cumsum(0)
        assert abs(int(kept.sum()) - int((mass <= tau).sum())) <= 1


@each_backend()
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (8, 2), (6, 3)])
@pytest.mark.parametrize(
    "config", [SPARSE, SparseConfig(rule=("gap", "probe"), gap=0.3, probe=0.15, quantization="none")]
)
def test_11_grouped_queries(backend, heads, kv_heads, config):
    q, k, v = tensors(15, batch=2, heads=heads, kv_heads=kv_heads, q_len=200, k_len=260)
    repeated = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    config = replace(config, pv_threshold=-1.0)
    got = run(backend, problem(q, k, v, is_causal=True), config)
    want = run(backend, problem(q, *repeated, is_causal=True), config)
    torch.testing.assert_close(got.values, want.values, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=0)
    assert torch.equal(got.skipped_pv, want.skipped_pv)


@each_backend()
@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 127])
def test_12_short_sequences(backend, length):
    q, k, v = tensors(16, q_len=length)
    for is_causal in (False, True):
        want, _ = plain_attention(q, k, v, seen_pairs(length, length, is_causal=is_causal))
        got = run(backend, problem(q, k, v, is_causal=is_causal), EXACT)
        torch.testing.assert_close(got.values.double(), want, atol=1e-5, rtol=0)


# ---- NaN and infinity in the inputs

BROKEN = {"NaN": NAN, "inf": INF, "-inf": -INF}
WHERE = (1, 1, 150, 3)  # batch, key head, token, channel
OURS = (1, slice(2, 4))  # the batch entry and query heads that read it


def broken_inputs(name, number, **sight):
    """Two versions of a problem of 2 batch entries, 6 heads on 3 key heads: whole, and with one number broken."""
    q, k, v = tensors(17, batch=2, heads=6, kv_heads=3, q_len=300, contrast=2.0)
    whole = {"query": q, "key": k, "value": v}
    batch, head, token, channel = WHERE
    changed = whole[name].clone()
    changed[batch, head * 2 if name == "query" else head, token, channel] = number
    return problem(q, k, v, **sight), problem(*(whole | {name: changed}).values(), **sight)


def elsewhere(x):
    """Everything but the heads that read the broken number."""
    x = x.clone()
    x[OURS] = 0.0
    return x


def broken_case(test):
    for mark in (
        pytest.mark.parametrize("name", ["query", "key", "value"]),
        pytest.mark.parametrize("number", BROKEN.values(), ids=BROKEN),
        pytest.mark.parametrize("sight", [{}, {"is_causal": True}], ids=["all", "causal"]),
    ):
        test = mark(test)
    return test


@each_backend()
@broken_case
@pytest.mark.parametrize("config", ["sparse", "filtered", "paper"])
def test_broken_numbers_do_what_they_do_in_dense_attention_and_only_in_their_head(backend, name, number, sight, config):
    whole, broken = broken_inputs(name, number, **sight)
    before, after = (run(backend, inputs, CONFIGS[config]) for inputs in (whole, broken))
    assert torch.equal(elsewhere(before.values), elsewhere(after.values))
    assert torch.equal(elsewhere(before.lse), elsewhere(after.lse))

    want, want_lse = reference.dense(broken)
    bad = ~want.isfinite()
    assert bad.any()
    torch.testing.assert_close(after.values[bad].double(), want[bad], equal_nan=True, atol=0, rtol=0)
    assert torch.equal(after.values.isfinite(), ~bad)
    assert torch.equal(after.lse.isfinite(), want_lse.isfinite())


@each_backend()
@broken_case
def test_broken_rows_equal_dense_attention_when_everything_is_kept(backend, name, number, sight):
    _, broken = broken_inputs(name, number, **sight)
    want, want_lse = reference.dense(broken)
    got = run(backend, broken, EXACT)
    torch.testing.assert_close(got.values.double(), want, equal_nan=True, atol=1e-5, rtol=0)
    whole = want_lse.isfinite()
    assert torch.equal(got.lse.isfinite(), whole)
    torch.testing.assert_close(got.lse[whole].double(), want_lse[whole], atol=1e-4, rtol=0)


@each_backend()
@pytest.mark.parametrize("number", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("config", ["sparse", "filtered", "paper", "wide keys"])
def test_rows_that_see_a_broken_key_equal_dense_attention(backend, number, config):
    """An infinite key may only take its own weight away: such rows are finite, and those of dense attention."""
    config = CONFIGS[config]
    if config.pv_threshold is not None:
        config = replace(config, pv_threshold=-30.0)
    _, broken = broken_inputs("key", number)
    want, _ = reference.dense(broken)
    got = run(backend, broken, config)
    torch.testing.assert_close(got.values[OURS].double(), want[OURS], equal_nan=True, atol=1e-5, rtol=0)


@each_backend()
@pytest.mark.parametrize("number", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("pv_threshold", [None, -1.0])
@pytest.mark.parametrize("keys", [[70], range(64, 128), range(200)], ids=["one key", "one block", "every key"])
def test_a_score_that_is_infinite_for_every_row(backend, number, pv_threshold, keys):
    """+inf makes a row NaN, -inf takes the key out, and nothing but -inf is NaN again: as in dense attention."""
    q, k, v = tensors(18, q_len=200)
    k[:, :, list(keys)] = number
    inputs = problem(q.abs() + 0.1, k, v)
    got = run(backend, inputs, replace(EXACT, pv_threshold=pv_threshold))
    assert torch.equal(got.values.isfinite(), reference.dense(inputs)[0].isfinite())


@each_backend()
@pytest.mark.parametrize("number", BROKEN.values(), ids=BROKEN)
def test_the_second_stage_does_not_hide_broken_values(backend, number):
    """The filter may drop weights too small to matter; times NaN or infinity they do matter."""
    q, k, v = tensors(19, q_len=256)
    q, k = q * 0.1 + 1.0, k * 0.1 + torch.tensor([0.0, 0.0, 0.0, 2.0]).repeat_interleave(64)[:, None]
    v[:, :, 5, 2] = number  # in block 0, which every row finds far below block 3
    config = replace(EXACT, pv_threshold=-3.0)
    assert run(backend, problem(q, k, v.nan_to_num(0, 0, 0)), config).skipped_pv.min() > 0
    inputs = problem(q, k, v)
    want, got = reference.dense(inputs)[0], run(backend, inputs, config).values
    assert not want[..., 2].isfinite().any()
    torch.testing.assert_close(got[..., 2].double(), want[..., 2], equal_nan=True)


@each_backend()
@pytest.mark.parametrize("number", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("pv_threshold", [None, -1.0])
def test_broken_numbers_in_hidden_keys_or_unkept_blocks_do_nothing(backend, number, pv_threshold):
    q, k, v = tensors(20, q_len=300)
    config = replace(EXACT, pv_threshold=pv_threshold)
    valid = torch.rand(1, 300, generator=torch.Generator().manual_seed(0)) < 0.6
    hidden = ~valid[:, None, :, None]
    before = run(backend, problem(q, k, v, key_valid=valid), config)
    after = run(backend, problem(q, *(x.masked_fill(hidden, number) for x in (k, v)), key_valid=valid), config)
    assert torch.equal(before.values, after.values)

    mask = BlockMask.from_dense(torch.tensor([1, 0, 1, 0, 1]).bool().expand(3, 5), 300, 300)
    hidden = (torch.arange(300) // 64 % 2 == 1)[:, None]
    before = run(backend, problem(q, k, v), config, mask)
    after = run(backend, problem(q, *(x.masked_fill(hidden, number) for x in (k, v))), config, mask)
    assert torch.equal(before.values, after.values)
    assert after.values.isfinite().all()


@broken_case
@pytest.mark.parametrize("mode", ["int8", "int8-fp8"])
@pytest.mark.parametrize("config", [EXACT, CONFIGS["filtered"]], ids=["exact", "filtered"])
def test_quantised_broken_numbers_are_never_finite_and_wrong(name, number, sight, mode, config):
    config = replace(config, quantization=mode)
    whole, broken = broken_inputs(name, number, **sight)
    want, _ = reference.dense(broken)
    before, after = (run("reference", inputs, config) for inputs in (whole, broken))
    assert torch.equal(elsewhere(before.values), elsewhere(after.values))
    assert not after.values[~want.isfinite()].isfinite().any()
    if config.keeps_everything:
        good = after.values.isfinite()
        assert (after.values[good] - want[good]).abs().max() < 0.3  # what is finite is right


@pytest.mark.parametrize("mode", ["int8", "int8-fp8"])
@pytest.mark.parametrize("number", BROKEN.values(), ids=BROKEN)
def test_quantised_rows_of_a_broken_query_or_key_are_nan(mode, number):
    config = replace(EXACT, quantization=mode)
    _, broken = broken_inputs("query", number)
    got = run("reference", broken, config).values
    assert got[1, 2, 150].isnan().all()
    assert got.isnan().sum() == 16
    _, broken = broken_inputs("key", number)
    got = run("reference", broken, config).values
    assert got[OURS].isnan().all()
    assert got.isnan().sum() == 2 * 300 * 16
