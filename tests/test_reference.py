"""The oracle against definitions written as loops, and against float64 attention."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import EXACT, plain_attention, problem, randn, relative_l1, run, seen_pairs, tensors, token_mask

from sparge import BlockMask, SparseConfig, reference
from sparge import quantization as fmt
from sparge.probing import share_asked, with_blocks_before
from sparge.visibility import Visibility

pytestmark = pytest.mark.usefixtures("one_thread")

# Keeps each row's best block and nothing else, so that what is always kept shows.
ONLY_BEST = SparseConfig(rule="topk", topk=0.0, subblocks=(1, 1), sinks=0, block=(64, 32), quantization="none")


def selected(inputs, config):
    return reference.select(reference.summarize(inputs, config), config)


def some_padding(seed, batch, k_len):
    valid = torch.rand(batch, k_len, generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[:, seed % k_len] = True
    return valid


# ---- exact attention

SHAPES = [
    {"q_len": 1, "k_len": 1},
    {"q_len": 1, "k_len": 257},
    {"q_len": 130, "k_len": 70, "heads": 4, "kv_heads": 2},
    {"q_len": 70, "k_len": 190, "dim": 40, "v_dim": 24},
    {"q_len": 300, "k_len": 300, "heads": 3, "kv_heads": 1, "dim": 64},
]
SIGHTS = [{}, {"is_causal": True}, {"window": (20, 5)}, {"is_causal": True, "window": (33, None)}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_everything_kept_is_dense_attention(shape, sight, padded, scale):
    q, k, v = tensors(1, batch=2, **shape)
    valid = some_padding(3, 2, k.shape[2]) if padded else None
    inputs = problem(q, k, v, key_valid=valid, scale=scale, **sight)
    want, want_lse = plain_attention(q, k, v, seen_pairs(q.shape[2], k.shape[2], key_valid=valid, **sight), scale)

    got = run("reference", inputs, EXACT)
    torch.testing.assert_close(got.values.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.lse.double(), want_lse, atol=1e-5, rtol=1e-6)
    assert got.values.dtype == got.lse.dtype == torch.float32

    dense, dense_lse = reference.dense(inputs)
    torch.testing.assert_close(dense, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(dense_lse, want_lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_a_mask_is_attention_over_its_pairs(sight):
    q, k, v = tensors(2, batch=2, heads=4, kv_heads=2, q_len=200, k_len=170)
    kept = torch.rand(2, 4, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    kept[0, 1, 2] = False
    mask = BlockMask.from_dense(kept, 200, 170, (64, 32))
    want, want_lse = plain_attention(q, k, v, seen_pairs(200, 170, **sight)[:, None] & token_mask(mask))
    got = run("reference", problem(q, k, v, **sight), replace(EXACT, block=(64, 32)), mask)
    torch.testing.assert_close(got.values.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.lse.double(), want_lse, atol=1e-5, rtol=1e-6)


# ---- means and self-similarity


def means_by_hand(x, size, per_block, valid=None):
    """{(b, h, block, segment): float64 mean of its valid tokens}; segments without one are left out."""
    found = {}
    batch, heads, length, _ = x.shape
    step = size // per_block
    for b in range(batch):
        for h in range(heads):
            for segment, start in enumerate(range(0, length, step)):
                tokens = [
                    x[b, h, n].double() for n in range(start, min(start + step, length)) if valid is None or valid[b, n]
                ]
                if tokens:
                    found[b, h, segment // per_block, segment % per_block] = sum(tokens) / len(tokens)
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (63, 130), (200, 97)])
@pytest.mark.parametrize("subblocks", [(1, 1), (4, 4), (2, 8)], ids=str)
def test_means_average_real_tokens_only(padded, q_len, k_len, subblocks):
    q, k, v = tensors(4, batch=2, heads=2, kv_heads=1, q_len=q_len, k_len=k_len)
    valid = some_padding(1, 2, k_len) if padded else None
    k = k if valid is None else torch.where(valid[:, None, :, None], k, math.nan)  # hidden keys may hold anything
    config = replace(ONLY_BEST, subblocks=subblocks)
    blocks = reference.summarize(problem(q, k, v, key_valid=valid), config)
    (rows, keys), (a, b) = config.block, subblocks
    assert blocks.q_means.shape == (2, 2, -(-q_len // rows), a, 16)
    assert blocks.k_means.shape == (2, 1, b, -(-k_len // keys), 16)

    for (n, h, i, s), mean in means_by_hand(q, rows, a).items():
        torch.testing.assert_close(blocks.q_means[n, h, i, s].double(), mean, rtol=2**-8, atol=1e-6)
    by_hand = means_by_hand(k, keys, b, valid)
    everything = means_by_hand(k, k_len, 1, valid)
    for (n, h, j, s), mean in by_hand.items():
        smoothed = mean - everything[n, h, 0, 0]
        torch.testing.assert_close(blocks.k_means[n, h, s, j].double(), smoothed, rtol=2**-8, atol=1e-6)
        assert blocks.k_filled.expand(2, -1, -1)[n, s, j]
    assert blocks.k_filled.expand(2, -1, -1).sum() == len(by_hand)
    assert not blocks.k_means.isnan().any()


def similarity_by_hand(rows):
    """Mean cosine over all pairs, a row with itself included; a zero row is similar to nothing."""
    total = 0.0
    for x in rows.double():
        for y in rows.double():
            lengths = float(x.norm() * y.norm())
            total += float(x @ y) / lengths if lengths > 0 else 0.0
    return total / len(rows) ** 2


@pytest.mark.parametrize("length", [1, 31, 32, 33, 80])
def test_self_similarity_is_the_mean_of_the_gram_matrix(length):
    x = randn(5, 2, 2, length, 16) + randn(6, 2, 2, 1, 16)
    x[0, 0, length // 2] = 0.0
    got = reference.self_similarity(x, 32)
    assert got.shape == (2, 2, -(-length // 32))
    for b in range(2):
        for h in range(2):
            for i in range(got.shape[2]):
                want = similarity_by_hand(x[b, h, 32 * i : 32 * i + 32])
                assert got[b, h, i].item() == pytest.approx(want, abs=1e-6)


def test_self_similarity_of_keys_is_of_smoothed_valid_keys():
    q, k, v = tensors(7, q_len=70, k_len=90)
    valid = some_padding(2, 1, 90)
    inputs = problem(q, k + 3.0, v, key_valid=valid)
    got = reference.summarize(inputs, replace(ONLY_BEST, similarity=0.5)).k_similarity
    smoothed = (k + 3.0) - (k + 3.0)[:, :, valid[0]].mean(2, keepdim=True)
    for h in range(2):
        for j in range(3):
            real = valid[0, 32 * j : 32 * j + 32]
            want = similarity_by_hand(smoothed[0, h, 32 * j : 32 * j + 32][real])
            assert got[0, h, j].item() == pytest.approx(want, abs=1e-5)


def test_zero_rows_give_no_nan():
    q, k, v = (torch.zeros(1, 1, 100, 16) for _ in range(3))
    blocks = reference.summarize(problem(q, k, v), replace(ONLY_BEST, similarity=0.5))
    assert blocks.q_similarity.tolist() == [[[0.0] * 2]]
    assert blocks.k_similarity.tolist() == [[[0.0] * 4]]
    assert not reference.block_scores(blocks, 0, 2).isnan().any()


# ---- scores


@pytest.mark.parametrize("subblocks", [(1, 1), (4, 4), (2, 8)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.9])
def test_scores_are_log_mean_exponentials_of_sub_block_products(subblocks, scale):
    q, k, v = tensors(8, heads=4, kv_heads=2, q_len=150, k_len=100)
    blocks = reference.summarize(problem(q, k, v, scale=scale), replace(ONLY_BEST, subblocks=subblocks))
    got = reference.block_scores(blocks, 0, 3)
    a, b = subblocks
    assert got.shape == (1, 4, 3, a, 4)
    for h in range(4):
        for i in range(3):
            for s in range(a):
                for j in range(4):
                    terms = [
                        float(blocks.q_means[0, h, i, s].double() @ blocks.k_means[0, h // 2, t, j].double())
                        for t in range(b)
                        if 32 * j + t * (32 // b) < 100
                    ]
                    terms = [term * (0.25 if scale is None else scale) for term in terms]
                    want = math.log(math.fsum(map(math.exp, terms)) / len(terms))
                    assert got[0, h, i, s, j].item() == pytest.approx(want, abs=1e-4)


def test_a_shifted_sequence_of_keys_predicts_the_same_mask():
    q, k, v = tensors(9, heads=4, q_len=512, dim=32, contrast=1.0)
    config = SparseConfig(rule=("threshold", "topk"), threshold=0.1, topk=0.2, block=(64, 32), quantization="none")
    shift = randn(1, 1, 4, 1, 32)
    mask, moved = (selected(problem(q, key, v), config).to_dense() for key in (k, k + shift))
    assert 0.1 < mask.float().mean() < 0.9
    assert (mask != moved).float().mean() < 0.01  # bfloat16 means round differently: ties


def test_the_mask_does_not_depend_on_how_many_rows_are_scored_at_once(monkeypatch):
    inputs = problem(*tensors(10, batch=2, heads=4, kv_heads=2, q_len=500, k_len=430), is_causal=True)
    config = SparseConfig(rule=("threshold", "gap"), block=(64, 32), threshold=0.05, gap=1.0, quantization="none")
    whole = selected(inputs, config)
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", 1)
    assert selected(inputs, config).equals(whole)


# ---- what is always kept


def always(inputs, **changed):
    """Booleans [B, H, query blocks, key blocks], and which visible blocks the rule alone would leave out."""
    return selected(inputs, replace(ONLY_BEST, **changed)).to_dense()


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_the_probe_keeps_blocks_by_what_rows_and_means_give_them(sight):
    inputs = problem(*tensors(4, batch=2, heads=4, kv_heads=2, q_len=150, k_len=230, dim=16, contrast=4.0), **sight)
    config = replace(ONLY_BEST, rule=("topk", "probe"), probe=(0.05, 0.1, 0.2, 0.4), probe_rows=2)
    query, key = (x.to(torch.bfloat16).double() for x in (inputs.query, inputs.key.repeat_interleave(2, 1)))
    seen = seen_pairs(150, 230, **sight)[:, None]
    share = torch.where(seen, query @ key.mT * inputs.scale, -torch.inf).softmax(-1).nan_to_num()
    share = torch.nn.functional.pad(share, (0, 26)).unflatten(-1, (8, 32)).sum(-1)
    rows = torch.stack([share[:, :, rows].mean(2) for rows in ([31, 63], [95, 127], [149, 149])], 2)
    rows = (rows + 0.5 * rows[:, :, [0, 0, 1]]) / 1.5
    blocks = reference.summarize(inputs, config)
    scores, visible = reference.block_scores(blocks, 0, 3), inputs.visibility.blocks(64, 32)
    assert scores.shape[3] == 1  # the paper's means
    means = torch.where(visible, scores[:, :, :, 0], -torch.inf).softmax(-1).nan_to_num()
    claimed = ((rows + means) / 2 > torch.tensor(config.probe)[:, None, None]) & visible
    kept, best = selected(inputs, config).to_dense(), selected(inputs, ONLY_BEST).to_dense()
    assert (claimed & ~best).any()
    assert torch.equal(kept, best | claimed)


def test_the_probe_finds_a_key_that_means_hide():
    q, k, v = (0.1 * randn(seed, 1, 1, 256, 16) for seed in range(3))
    q[0, 0, 64 + 31], k[0, 0, 7], k[0, 0, 8] = 6.0, 6.0, -6.0  # a row of the second block looks for one key
    k[0, 0, 40] += 1.0  # what means take for the best is elsewhere
    inputs = problem(q, k, v)
    means = SparseConfig(rule="gap", gap=0.001, subblocks=(1, 1), sinks=0, block=(64, 32), quantization="none")
    probed = replace(means, rule=("gap", "probe"), probe=0.2, probe_rows=2)
    variants = (means, probed, replace(probed, probe_rows=1))
    kept = [selected(inputs, config).to_dense()[0, 0] for config in variants]
    assert not kept[0][1, 0]
    assert kept[1][1, 0]
    assert kept[1][:, 0].sum() == 1 + kept[0][:, 0].sum()  # of the next block it is half of the evidence: too little
    assert torch.equal(kept[2], kept[0])  # samples a row that looks for nothing


def test_rows_of_the_block_before_count_half():
    probed = torch.tensor([0.4, 0.4, 0.1, 0.0]).half()[None, None, :, None]
    want = torch.tensor([0.4, 0.2, 0.1 / 3])[None, None, :, None]
    torch.testing.assert_close(with_blocks_before(probed), want, atol=1e-3, rtol=0)


def test_the_share_asked_for_falls_with_the_length():
    config, full = SparseConfig(probe=(0.004, 0.01)), torch.tensor([[0.004, 0.01]])
    for keys, factor in ((1, 1.0), (8192, 1.0), (16384, 2**-0.5), (131072, 0.25)):
        sight = Visibility(1, keys, torch.device("cpu"))
        torch.testing.assert_close(share_asked(config, 2, sight), full * factor)
    valid = torch.arange(32768) < torch.tensor([[16384], [32768], [100]])  # padding does not count
    asked = share_asked(config, 2, replace(sight, k_len=32768, key_valid=valid))
    torch.testing.assert_close(asked, full * torch.tensor([[2**-0.5], [0.5], [1.0]]))


def test_the_probe_of_rows_that_see_nothing_claims_nothing(monkeypatch):
    inputs = problem(*tensors(4, q_len=300, k_len=40, contrast=4.0), is_causal=True)
    config = replace(ONLY_BEST, rule=("topk", "probe"), probe=0.0)
    whole = selected(inputs, config)
    monkeypatch.setattr(reference, "PROBED_AT_ONCE", 1)  # a block of them by itself
    assert selected(inputs, config).equals(whole)
    assert whole.to_dense().any(-1)[0, 0].tolist() == [False] * 4 + [True]


@pytest.mark.parametrize(("q_len", "k_len"), [(300, 300), (100, 300), (300, 100), (1, 65)])
def test_diagonal_blocks_are_kept_under_causal(q_len, k_len):
    inputs = problem(*tensors(11, q_len=q_len, k_len=k_len), is_causal=True)
    diagonal = torch.zeros(-(-q_len // 64), -(-k_len // 32), dtype=torch.bool)
    for row in range(q_len):
        if row + k_len - q_len >= 0:
            diagonal[row // 64, (row + k_len - q_len) // 32] = True
    assert (always(inputs) | ~diagonal).all()


def test_diagonal_blocks_are_judged_like_others_without_causal():
    kept = always(problem(*tensors(11, q_len=320)))
    assert kept.sum(-1).unique().tolist() == [1]


@pytest.mark.parametrize("sinks", [0, 1, 3, 99])
def test_sinks_are_kept(sinks):
    inputs = problem(*tensors(12, q_len=320))
    kept, without = always(inputs, sinks=sinks), always(inputs)
    want = without.clone()
    want[..., :sinks] = True
    assert torch.equal(kept, want)


def test_only_visible_sinks_are_kept():
    inputs = problem(*tensors(12, q_len=320), is_causal=True, window=(10, None))
    kept = always(inputs, sinks=3)
    assert not (kept & ~inputs.visibility.blocks(64, 32)).any()
    assert kept[0, 0, 0, :2].all()
    assert not kept[0, 0, 2:, :3].any()


@pytest.mark.parametrize(
    ("protected", "rows", "columns"),
    [
        (((0, 1),), {0}, {0}),
        (((-1, None),), {4}, {9}),
        (((63, 65),), {0, 1}, {1, 2}),
        (((128, 192),), {2}, {4, 5}),
        (((0, 10), (300, None)), {0, 4}, {0, 9}),
        (((1000, None),), set(), set()),
    ],
)
def test_protected_tokens_are_kept_as_rows_and_as_columns(protected, rows, columns):
    inputs = problem(*tensors(13, q_len=320))
    want = always(inputs).clone()
    want[:, :, sorted(rows)] = True
    want[..., sorted(columns)] = True
    assert torch.equal(always(inputs, protected=protected), want)


def test_protected_rows_stand_where_their_keys_stand():
    """With fewer queries than keys, row r is token r + k_len - q_len."""
    inputs = problem(*tensors(13, q_len=128, k_len=320))
    kept = always(inputs, protected=((192, 200), (319, None)))
    assert kept[:, :, :].all(-1).tolist() == [[[True, True]] * 2]
    kept = always(inputs, protected=((0, 10),))
    assert not kept.all(-1).any()
    assert kept[..., 0].all()


def test_dissimilar_blocks_are_kept_on_both_sides():
    """Every block of a query block that is no likeness of its mean; every such key block, for all rows."""
    q, k, v = tensors(14, q_len=320)
    q, k = q * 0.1 + randn(1, 1, 2, 1, 16), k * 0.1 + randn(2, 1, 2, 10, 1, 16).repeat_interleave(32, 3).flatten(2, 3)
    q[:, 0, 128:192] = randn(3, 1, 64, 16)  # query block 2 of head 0
    k[:, 1, 96:128] = randn(4, 1, 32, 16) * 3  # key block 3 of head 1
    inputs = problem(q, k, v)
    kept = always(inputs, similarity=0.4)
    want = always(inputs)
    assert want.sum(-1).max() == 1
    assert kept[0, 0, 2].all()
    assert kept[0, 1, :, 3].all()
    others = kept.clone()
    others[0, 0, 2], others[0, 1, :, 3] = False, False
    assert others.sum(-1).max() == 1
    nobody = always(inputs, similarity=-1.0)
    assert torch.equal(nobody, want)
    everybody = always(inputs, similarity=1.0)
    assert everybody.all()
    one_head = always(inputs, similarity=(1.0, -1.0))
    assert one_head[:, 0].all()
    assert torch.equal(one_head[:, 1], want[:, 1])


def test_dissimilar_key_blocks_leave_the_softmax():
    """A dissimilar block takes no probability from the others: the rule judges them as if it were not there."""
    q, k, v = tensors(15, q_len=64, k_len=128, heads=1)
    q = q * 0.01 + torch.ones(16)
    k = k * 0.01 + torch.tensor([0.0, 0.3, 0.6, 0.0]).repeat_interleave(32)[:, None]
    k[0, 0, :32] = randn(9, 32, 16) * 4 + 3  # the best block by far, and a mixed one
    config = replace(ONLY_BEST, rule="threshold", threshold=0.3, topk=0.5)
    assert always(problem(q, k, v), rule="threshold", threshold=0.3, topk=0.5)[0, 0, 0].tolist() == [True] + [False] * 3
    judged = selected(problem(q, k, v), replace(config, similarity=0.9)).to_dense()[0, 0, 0]
    assert judged[:3].tolist() == [True, False, True]


# ---- second stage


def second_stage_by_hand(q, k, v, seen, scale, limits):
    """float64, one 64-row group and one key block of 32 at a time, from the last block to the first."""
    batch, heads, q_len, _ = q.shape
    group_size = heads // k.shape[1]
    values = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), -torch.inf, dtype=torch.float64)
    skipped = torch.zeros(batch, heads, dtype=torch.int64)
    for b in range(batch):
        for h in range(heads):
            scores = q[b, h].double() @ k[b, h // group_size].double().T * scale
            scores = scores.masked_fill(~seen[b, h], -torch.inf)
            for first in range(0, q_len, 64):
                group = range(first, min(first + 64, q_len))
                running = dict.fromkeys(group, -math.inf)
                for start in reversed(range(0, scores.shape[1], 32)):
                    local = {row: float(scores[row, start : start + 32].max()) for row in group}
                    looking = [row for row in group if local[row] > -math.inf]
                    running = {row: max(running[row], local[row]) for row in group}
                    if looking and max(local[row] - running[row] for row in looking) < limits[h]:
                        skipped[b, h] += 1
                        scores[first : first + 64, start : start + 32] = -torch.inf
            lse[b, h] = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse[b, h, :, None]).nan_to_num()
            values[b, h] = weights @ v[b, h // group_size].double()
    return values, lse, skipped


@pytest.mark.parametrize(
    "sight", [{}, {"is_causal": True}, {"window": (140, 40)}, {"is_causal": True, "window": (99, 9)}]
)
@pytest.mark.parametrize("limits", [(-1.0,) * 4, (-0.3, -2.0, -math.inf, -5.0)], ids=["one", "per head"])
def test_second_stage_skips_groups_that_add_little(sight, limits):
    q, k, v = tensors(16, batch=2, heads=4, kv_heads=2, q_len=200, k_len=230, contrast=4.0)
    kept = torch.rand(2, 4, 2, 8, generator=torch.Generator().manual_seed(0)) < 0.8
    mask = BlockMask.from_dense(kept, 200, 230, (128, 32))
    seen = seen_pairs(200, 230, **sight)[:, None] & token_mask(mask)
    want, want_lse, want_skipped = second_stage_by_hand(q, k, v, seen, 0.5, limits)
    config = replace(EXACT, block=(128, 32), pv_threshold=limits if limits[0] != limits[1] else limits[0])
    got = run("reference", problem(q, k, v, scale=0.5, **sight), config, mask)
    assert torch.equal(got.skipped_pv, want_skipped)
    assert want_skipped[:, 0].min() > 0
    assert limits[2] != -math.inf or want_skipped[:, 2].max() == 0
    torch.testing.assert_close(got.values.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.lse.double(), want_lse, atol=1e-5, rtol=1e-6)


# ---- quantised modes


@pytest.mark.parametrize(("mode", "limit"), [("int8", 0.03), ("int8-fp8", 0.05)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sight", [{}, {"is_causal": True}], ids=str)
def test_quantised_attention_is_near_dense(mode, limit, dtype, sight):
    q, k, v = tensors(17, heads=4, kv_heads=2, q_len=300, k_len=330, dim=64, dtype=dtype)
    inputs = problem(q, k, v, **sight)
    got = run("reference", inputs, replace(EXACT, quantization=mode))
    want, want_lse = reference.dense(inputs)
    assert got.values.dtype == dtype
    assert 1e-3 < relative_l1(got.values, want) < limit  # it is quantised, and not badly
    assert (got.lse - want_lse).abs().max() < 0.05


def walsh_hadamard(size):
    """Entry (i, j) is the parity of i & j."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / size**0.5


def int8_scores_by_hand(q, k, scale):
    """One head: rotate, one scale per query row and per 64 smoothed keys, integer products in float64."""
    size = 1 << (q.shape[-1] - 1).bit_length()
    rotation = walsh_hadamard(size)[: q.shape[-1]].double()
    mean = k.double().mean(0)
    q_turned, k_turned = q.double() @ rotation, (k.double() - mean) @ rotation
    scores = torch.zeros(len(q), len(k), dtype=torch.float64)
    for row, x in enumerate(q_turned):
        q_scale = x.abs().max() / 127
        for start in range(0, len(k), 64):
            group = k_turned[start : start + 64]
            k_scale = group.abs().max() / 127
            products = (group / k_scale).round() @ (x / q_scale).round()
            scores[row, start : start + 64] = products * q_scale * k_scale * scale
    return scores, scale * q.double() @ mean


@pytest.mark.parametrize("dim", [16, 40])
@pytest.mark.parametrize("block", [(64, 32), (128, 64), (128, 128)], ids=str)
def test_int8_attention_by_hand(dim, block):
    q, k, v = tensors(22, q_len=70, k_len=150, dim=dim)
    scale = 1.3 / dim**0.5
    got = run("reference", problem(q, k + 1.0, v, scale=scale), replace(EXACT, block=block, quantization="int8"))
    for h in range(2):
        scores, shift = int8_scores_by_hand(q[0, h], k[0, h] + 1.0, scale)
        want_lse = torch.logsumexp(scores, -1) + shift
        assert ((got.lse[0, h] - want_lse).abs() < 1e-3).float().mean() > 0.9  # half-way cases may round either way
        torch.testing.assert_close(got.lse[0, h].double(), want_lse, atol=5e-3, rtol=0)
        want = scores.softmax(-1) @ v[0, h].bfloat16().double()
        torch.testing.assert_close(got.values[0, h].double(), want, atol=2**-7, rtol=0)


@pytest.mark.parametrize("mode", ["int8", "int8-fp8"])
@pytest.mark.parametrize("dim", [16, 20, 100, 256])
def test_quantised_attention_takes_any_head_dim(mode, dim):
    inputs = problem(*tensors(18, q_len=90, dim=dim, v_dim=40), is_causal=True)
    got = run("reference", inputs, replace(EXACT, quantization=mode))
    assert relative_l1(got.values, reference.dense(inputs)[0]) < 0.06


@pytest.mark.parametrize("mode", ["int8", "int8-fp8"])
def test_quantised_keys_are_smoothed(mode):
    """A constant added to every key leaves the output; the LSE moves by scale * q . constant."""
    q, k, v = tensors(19, q_len=256, dim=64)
    shift = randn(1, 1, 2, 1, 64) * 20
    config = replace(EXACT, quantization=mode)
    still, moved = (run("reference", problem(q, key, v, scale=0.1), config) for key in (k, k + shift))
    assert relative_l1(moved.values, still.values) < 2e-3
    want = still.lse + 0.1 * (q * shift).sum(-1)
    torch.testing.assert_close(moved.lse, want, atol=5e-3, rtol=0)
    unsmoothed, _ = reference.dense(problem(q, k + shift, v, scale=0.1))
    assert relative_l1(moved.values, unsmoothed) < 0.05


def test_a_constant_value_comes_out_exact():
    """Nothing is left to round once it has lost its mean. Rows that see no key stay 0."""
    q, k, v = tensors(23, batch=2, heads=4, kv_heads=2, q_len=150, k_len=100, dim=64)
    v = (v[:, :, :1] + 5.0).expand_as(v)
    got = run("reference", problem(q, k, v, is_causal=True), replace(EXACT, quantization="int8-fp8"))
    assert torch.equal(got.values[:, :, 50:], v.repeat_interleave(2, 1))
    assert not got.values[:, :, :50].any()
    assert (got.lse[:, :, :50] == -math.inf).all()


def test_the_first_token_comes_out_exact_where_it_has_all_the_weight():
    q, k, v = tensors(24, q_len=100, dim=64)
    q, k[:, :, 0], v[:, :, 0] = q.abs() + 0.1, 50.0, v[:, :, 0] / 100
    got = run("reference", problem(q, k, v, scale=1.0), replace(EXACT, quantization="int8-fp8"))
    torch.testing.assert_close(got.values, v[:, :, :1].expand_as(v), atol=1e-5, rtol=0)


def test_smoothing_saves_what_rounding_would_take_from_values_far_from_zero(monkeypatch):
    q, k, v = tensors(25, q_len=300, dim=64)
    inputs, config = problem(q, k, v + 6.0, is_causal=True), replace(EXACT, quantization="int8-fp8")
    want, smoothed = reference.dense(inputs)[0], run("reference", inputs, config)
    take = fmt.value_scale_and_mean
    monkeypatch.setattr(fmt, "value_scale_and_mean", lambda *x: (take(*x)[0], torch.zeros_like(take(*x)[1])))
    plain = run("reference", inputs, config)
    assert relative_l1(smoothed.values, want) < 0.4 * relative_l1(plain.values, want)


@pytest.mark.parametrize("mode", ["int8", "int8-fp8"])
def test_outlier_channels_are_rotated_away(mode):
    """One channel 30 times the others would eat int8's range without the rotation."""
    q, k, v = tensors(20, q_len=256, dim=64)
    loud = torch.ones(64)
    loud[7] = 30.0
    inputs = problem(q / loud, k * loud, v)
    got = run("reference", inputs, replace(EXACT, quantization=mode))
    assert relative_l1(got.values, reference.dense(inputs)[0]) < 0.09


@pytest.mark.parametrize("mode", ["int8", "int8-fp8"])
def test_hidden_keys_do_not_touch_quantised_results(mode):
    q, k, v = tensors(21, batch=2, q_len=100, k_len=150)
    valid = some_padding(5, 2, 150)
    hidden = ~valid[:, None, :, None]
    config = replace(EXACT, quantization=mode)
    results = [
        run("reference", problem(q, k.masked_fill(hidden, x), v.masked_fill(hidden, x), key_valid=valid), config)
        for x in (0.0, 1e4, math.nan, math.inf)
    ]
    for other in results[1:]:
        assert torch.equal(other.values, results[0].values)
        assert torch.equal(other.lse, results[0].lse)


# ---- properties of the whole


@settings(max_examples=30)
@given(st.integers(0, 999), st.sampled_from(("threshold", "gap", "cdf", "topk")), st.booleans())
def test_stricter_settings_keep_fewer_blocks(seed, rule, is_causal):
    q, k, v = tensors(seed, q_len=300, k_len=320)
    inputs = problem(q, k, v, is_causal=is_causal, scale=1.0)
    loose, strict = {"threshold": (0.01, 0.2), "gap": (4.0, 0.5), "cdf": (0.95, 0.4), "topk": (0.8, 0.3)}[rule]
    masks = [
        selected(inputs, SparseConfig(rule=rule, **{rule: value}, block=(64, 32), quantization="none"))
        for value in (loose, strict)
    ]
    assert (masks[0] & masks[1]).equals(masks[1])
    assert (masks[0].visible_bits == masks[1].visible_bits).all()


BY_MEANS = SparseConfig(rule=("threshold", "gap"), block=(64, 32), gap=1.0, threshold=0.05, quantization="none")
BY_ROWS = SparseConfig(rule=("gap", "probe"), block=(64, 32), gap=0.3, probe=0.15, quantization="none")


@pytest.mark.parametrize("config", [BY_MEANS, BY_ROWS], ids=["means", "rows"])
@settings(max_examples=30)
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_grouped_heads_are_repeated_heads(config, seed, group, q_len, k_len, is_causal):
    q, k, v = tensors(seed, heads=2 * group, kv_heads=2, q_len=q_len, k_len=k_len)
    config = replace(config, pv_threshold=-2.0)
    grouped = problem(q, k, v, is_causal=is_causal)
    repeated = problem(q, *(x.repeat_interleave(group, 1) for x in (k, v)), is_causal=is_causal)
    assert selected(grouped, config).equals(selected(repeated, config))
    torch.testing.assert_close(
        run("reference", grouped, config).values, run("reference", repeated, config).values, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("config", [BY_MEANS, BY_ROWS], ids=["means", "rows"])
@settings(max_examples=30)
@given(st.integers(0, 999), st.integers(1, 200), st.integers(1, 200), st.integers(1, 100))
def test_padding_at_the_end_is_a_shorter_sequence(config, seed, q_len, k_len, extra):
    q, k, v = tensors(seed, q_len=q_len, k_len=k_len)
    longer = [torch.cat((x, torch.full((1, 2, extra, 16), math.nan)), 2) for x in (k, v)]
    valid = (torch.arange(k_len + extra) < k_len)[None]
    short, padded = problem(q, k, v), problem(q, *longer, key_valid=valid)
    kept = selected(padded, config).to_dense()[..., : -(-k_len // 32)]
    assert torch.equal(kept, selected(short, config).to_dense())
    torch.testing.assert_close(
        run("reference", padded, config).values, run("reference", short, config).values, atol=1e-6, rtol=0
    )
