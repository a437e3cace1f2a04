"""The error budget: what is sampled, what is estimated, which heads are computed anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import (
    BY_NAME,
    INTERPRETED,
    each_backend,
    on_its_device,
    plain_attention,
    problem,
    randn,
    refused,
    relative_l1,
    seen_pairs,
    tensors,
)
from torch.fx.experimental.proxy_tensor import make_fx

import sparge
from sparge import BlockMask, SparseConfig, budget, judging, redoing
from sparge.backends import BACKENDS
from sparge.stages import Blocks, Output

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 600
ROUGH = SparseConfig(rule="topk", topk=0.12, quantization="none", sinks=0)


def one_bad_head(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Head 0 looks at one block of keys, which is predicted well; head 1 everywhere alike, so skipping ruins it."""
    q, k, v = (randn(3 * seed + n, 1, 2, LENGTH, 32) for n in range(3))
    where = torch.zeros(32)
    where[0] = 12.0
    q[:, 0] = where + 0.1 * q[:, 0]
    k[:, 0, 64:128] += where
    q[:, 1] *= 0.1
    return q, k, v


def per_head_error(got: torch.Tensor, q, k, v, is_causal: bool = False) -> list[float]:
    want, _ = plain_attention(q, k, v, seen_pairs(q.shape[2], k.shape[2], is_causal))
    return [relative_l1(got[:, head], want[:, head]) for head in range(q.shape[1])]


def skip_refused(stages, inputs, config) -> None:
    if refusal := stages.unsupported(inputs, config):
        pytest.skip(f"{stages.name}: {refusal}")


# ---- the sample


@pytest.mark.parametrize(("length", "count"), [(129, 64), (1000, 64), (33_280, 65), (80_000, 156), (1_000_000, 1024)])
def test_one_row_of_each_part_is_sampled(length, count):
    rows = judging.sampled_rows(length, torch.device("cpu"))
    assert len(rows) == count
    parts = rows.double() // (length / count)
    assert (parts - torch.arange(count)).abs().max() <= 1  # a row on the edge of two parts may be counted to either
    assert len(rows.unique()) > 0.9 * count
    assert rows[0] >= 0
    assert rows[-1] < length
    assert torch.equal(rows, judging.sampled_rows(length, torch.device("cpu")))


@pytest.mark.parametrize("length", [1, 5, 128])
def test_every_row_of_few_is_sampled(length):
    assert torch.equal(judging.sampled_rows(length, torch.device("cpu")), torch.arange(length))


def test_the_sample_follows_no_block():
    inside = judging.sampled_rows(80_000, torch.device("cpu")) % 128
    assert torch.histc(inside.float(), 8, 0, 128).min() > 156 / 8 / 2


# ---- the estimate


def test_the_error_of_all_rows_is_no_estimate():
    exact, off = randn(0, 1, 3, 50, 8), 0.1 * randn(1, 1, 3, 50, 8)
    error, bound = judging.estimated_error(exact + off, exact, 50)
    want = off.abs().sum((-1, -2)) / exact.abs().sum((-1, -2))
    torch.testing.assert_close(error, want)
    torch.testing.assert_close(bound, want)


def test_the_bound_covers_what_the_sample_missed():
    """Errors in a few rows only, different ones each time: the hardest to sample."""
    length, rows = 6400, judging.sampled_rows(6400, torch.device("cpu"))
    exact = randn(0, 1, 1, length, 8)
    missed, plain = 0, 0
    for seed in range(300):
        rare = torch.rand(1, 1, length, 1, generator=torch.Generator().manual_seed(seed)) < 0.1
        got = exact + rare * randn(seed + 1, 1, 1, length, 8)
        error, bound = judging.estimated_error(got[:, :, rows], exact[:, :, rows], length)
        true = float((got - exact).abs().sum() / exact.abs().sum())
        missed, plain = missed + int(bound < true), plain + int(error < true)
    assert missed <= 9
    assert plain > 75  # an estimate without its deviation would be wrong half of the time


@each_backend("dense")
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_judges_alike(backend, layout, dtype):
    """Three heads with more error each, one that is not finite, one that is exact, one of zeros."""
    values = randn(0, 2, 3, 900, 40).to(dtype)
    if layout == "BSHD":
        values = values.transpose(1, 2).contiguous().transpose(1, 2)
    rows = judging.sampled_rows(900, torch.device("cpu"))
    off = torch.tensor([[0.01, 0.1, 0.3], [0.0, 0.0, 0.0]])[..., None, None]
    exact = (values[:, :, rows] + off * randn(1, 2, 3, len(rows), 40) * randn(2, 1, 1, len(rows), 1)).to(dtype)
    exact[1, 0, 5, 7] = torch.nan
    values[1, 2], exact[1, 2] = 0.0, 0.0
    want = judging.judge(values, exact, rows, 0.085)
    assert want.over.tolist() == [[False, True, True], [True, False, False]]
    device = "cuda" if backend in ("triton", "hopper") and not INTERPRETED else "cpu"
    there = [x.to(device) for x in (values, exact, rows)]
    got = BY_NAME[backend].judge(*there, 0.085)
    assert torch.equal(got.over.cpu(), want.over)
    torch.testing.assert_close(got.error.cpu(), want.error, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert BY_NAME[backend].judge(*there, 1).over.tolist() == [[False] * 3, [True, False, False]]


# ---- enforcement


@each_backend("dense")  # which has no choice of blocks
def test_only_heads_over_the_budget_are_redone(backend):
    q, k, v = one_bad_head()
    inputs, stages = on_its_device(backend, problem(q, k, v)), BY_NAME[backend]
    config = replace(ROUGH, max_error=0.05)
    skip_refused(stages, inputs, config)
    blocks = stages.summarize(inputs, config)
    before = stages.attend(blocks, stages.select(blocks, config), config)
    first, second = per_head_error(before.values.cpu(), q, k, v)
    assert first < 0.02
    assert second > 0.2
    kept = Output(before.values.cpu().clone(), before.lse.cpu().clone(), before.skipped_pv.cpu())
    after, verdict = budget.enforce(before, blocks, stages, config)
    before, after = kept, Output(after.values.cpu(), after.lse.cpu(), after.skipped_pv.cpu())
    assert verdict.over.tolist() == [[False, True]]
    assert torch.equal(after.values[:, 0], before.values[:, 0])
    assert torch.equal(after.lse[:, 0], before.lse[:, 0])
    _, lse = plain_attention(q, k, v, seen_pairs(LENGTH, LENGTH))
    assert per_head_error(after.values, q, k, v)[1] < 1e-4
    torch.testing.assert_close(after.lse[:, 1].double(), lse[:, 1], atol=1e-4, rtol=1e-4)
    assert (verdict.error < 0.02).all()


@each_backend("dense")
@pytest.mark.parametrize(
    ("q_len", "k_len", "sight"),
    [
        (600, 600, {}),
        (600, 600, {"is_causal": True}),
        (500, 900, {"window": (200, 30)}),
        (700, 300, {"is_causal": True}),
        (600, 900, {"key_valid": (torch.arange(900) % 300 < 150)[None]}),
        (600, 600, {"key_valid": (torch.arange(600) >= 200)[None], "is_causal": True}),
    ],
    ids=["full", "causal", "window", "rows without keys", "padding", "causal padding"],
)
def test_heads_are_redone_some_rows_at_a_time(backend, q_len, k_len, sight, monkeypatch):
    q, k, v = tensors(heads=4, kv_heads=2, q_len=q_len, k_len=k_len, dim=32)
    inputs, stages = on_its_device(backend, problem(q, k, v, **sight)), BY_NAME[backend]
    config, over = replace(ROUGH, max_error=0.05), torch.tensor([[True, False, False, True]])
    skip_refused(stages, inputs, config)
    blocks = stages.summarize(inputs, config)
    empty = BlockMask.from_dense(torch.zeros(-(-q_len // 128), -(-k_len // 64)).bool(), q_len, k_len)
    empty = replace(empty, bits=empty.bits.to(inputs.query.device))
    results = []
    for at_once in (redoing.REDONE_AT_ONCE, 1 << 17):  # all rows, and 256 of them
        monkeypatch.setattr(redoing, "REDONE_AT_ONCE", at_once)
        output = stages.attend(blocks, empty, config)
        budget.redo(over.to(inputs.query.device), output, blocks, stages, config)
        results.append(output)
    assert torch.equal(results[0].values, results[1].values)
    assert torch.equal(results[0].lse, results[1].lse)
    want, _ = plain_attention(q, k, v, seen_pairs(q_len, k_len, **sight))
    for head in range(4):
        error = relative_l1(results[1].values[:, head].cpu(), want[:, head])
        assert error < 1e-4 if over[0, head] else error == 1


def test_redoing_needs_no_second_result():
    """64 heads of 128K tokens: each part is bounded, and together they are all rows, with the keys that those see."""
    tokens, dim = 1 << 17, 16
    key = randn(0, 1, 1, tokens, dim)
    inputs = problem(key.expand(1, 64, -1, -1), key, key, is_causal=True)
    finite = torch.ones(1, 1, tokens // 64, dtype=torch.bool)
    blocks = Blocks(inputs, key, key, finite, None, None, None, (128, 64))
    parts = list(redoing.some_rows(blocks))
    assert [rows.start for rows, _ in parts] == [0, *(rows.stop for rows, _ in parts[:-1])]
    assert parts[-1][0].stop == tokens
    for rows, part in parts:
        assert part.inputs.query.numel() * 4 <= redoing.REDONE_AT_ONCE < inputs.query.numel() * 4
        assert part.inputs.key.shape[2] == rows.stop
        assert part.v_finite.shape[2] == rows.stop // 64


def test_the_stats_tell():
    q, k, v = one_bad_head()
    out, stats = sparge.attention(q, k, v, config=replace(ROUGH, max_error=0.05), return_stats=True)
    assert max(per_head_error(out, q, k, v)) < 0.05
    assert stats.redone.tolist() == [[False, True]]
    assert stats.error.shape == (1, 2)
    assert stats.executed[0, 1] == stats.visible[0, 1]
    assert stats.executed[0, 0] < stats.visible[0, 0] / 2
    without = sparge.attention(q, k, v, config=ROUGH, return_stats=True)[1]
    assert without.error is None
    assert without.redone is None


def test_a_budget_that_is_kept_changes_nothing():
    q, k, v = one_bad_head()
    config = SparseConfig(quantization="none")
    want = sparge.attention(q, k, v, is_causal=True, config=config)
    got, stats = sparge.attention(q, k, v, is_causal=True, config=replace(config, max_error=0.5), return_stats=True)
    assert torch.equal(got, want)
    assert not stats.redone.any()
    true = torch.tensor([per_head_error(got, q, k, v, is_causal=True)])
    assert ((stats.error - true).abs() < 0.02).all()


@pytest.mark.parametrize("quantization", ["int8", "int8-fp8"])
def test_number_formats_count_too(quantization):
    """Nothing is skipped: what is left is the format's own error, which a redone head does not have."""
    q, k, v = one_bad_head()
    strict = SparseConfig(rule="topk", topk=1.0, quantization=quantization, max_error=1e-5)
    out, stats = sparge.attention(q, k, v, config=strict, return_stats=True)
    assert stats.redone.all()
    assert max(per_head_error(out, q, k, v)) < 1e-5


def test_nothing_to_check_costs_nothing(monkeypatch):
    for backend in BACKENDS:
        monkeypatch.setattr(type(backend), "exact_rows", None)
    config = SparseConfig(rule="topk", topk=1.0, quantization="none", max_error=0.01)
    _, stats = sparge.attention(*one_bad_head(), config=config, return_stats=True)
    assert stats.error.tolist() == [[0.0, 0.0]]
    assert not stats.redone.any()


def test_the_second_stage_is_checked_where_the_first_keeps_everything():
    _, k, v = one_bad_head()
    q = randn(9, 1, 2, 1, 32).expand(1, 2, LENGTH, 32) / 4  # all rows look everywhere alike, and have the same maxima
    second = SparseConfig(rule="topk", topk=1.0, quantization="none", pv_threshold=-0.01)
    out = sparge.attention(q, k, v, config=second)
    worst = max(per_head_error(out, q, k, v))
    assert worst > 0.1
    out, stats = sparge.attention(q, k, v, config=replace(second, max_error=worst / 3), return_stats=True)
    assert stats.redone.any()
    assert max(per_head_error(out, q, k, v)) < worst / 3


def test_a_head_that_is_not_finite_is_over():
    q, k, v = one_bad_head()
    v[0, 0, 70, 3] = torch.nan
    _, stats = sparge.attention(q, k, v, config=replace(ROUGH, max_error=5.0), return_stats=True)
    assert stats.redone.tolist() == [[True, False]]
    assert stats.error[0, 0].isnan()


def test_packed_sequences_are_checked_one_by_one():
    (q, k, v), ends = one_bad_head(), torch.tensor([0, 100, 100, LENGTH])
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    config = replace(ROUGH, max_error=0.05)
    out, stats = sparge.varlen_attention(*packed, ends, ends, LENGTH, LENGTH, config=config, return_stats=True)
    assert stats.error.shape == (3, 2)
    assert stats.redone.shape == (3, 2)
    assert not stats.redone[1].any()
    for start, stop in ((0, 100), (100, LENGTH)):
        part = [x[:, :, start:stop] for x in (q, k, v)]
        assert max(per_head_error(out[None, start:stop].transpose(1, 2), *part)) < 0.05


def test_tracers_see_error_and_redone():
    q, k, v = one_bad_head()
    config = replace(ROUGH, max_error=0.05)

    def function(q, k, v):
        out, stats = sparge.attention(q, k, v, config=config, return_stats=True)
        return out, stats.error, stats.redone

    out, error, redone = make_fx(function, tracing_mode="fake")(q, k, v)(q, k, v)
    assert torch.equal(out, sparge.attention(q, k, v, config=config))
    assert redone.tolist() == [[False, True]]
    assert (error < 0.05).all()


@pytest.mark.parametrize("bad", [0, -0.1, float("nan"), float("inf")])
def test_a_budget_lies_above_zero(bad):
    with refused(ValueError, "max_error", "above 0"):
        SparseConfig(max_error=bad)


@pytest.mark.parametrize("bad", ["0.1", True, (0.1, 0.2)])
def test_a_budget_is_a_number(bad):
    with refused(TypeError, "max_error", "number above 0"):
        SparseConfig(max_error=bad)
