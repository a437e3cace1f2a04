"""Each rule against its definition, written as loops over one sub-row of scores."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import randn

from sparge import SparseConfig
from sparge.selection import apply_rules

NAN, INF = math.nan, math.inf


# ---- the definitions, in float64, on the visible scores of one sub-row


def probabilities(scores):
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def keep_threshold(scores, t):
    return [p > t for p in probabilities(scores)]


def keep_gap(scores, g):
    return [score >= max(scores) - g for score in scores]


def keep_cdf(scores, tau):
    """Best first; equal scores stand or fall together; the score that crosses tau is left out."""
    chances, kept, mass = probabilities(scores), set(), 0.0
    for level in sorted(set(scores), reverse=True):
        mass += math.fsum(p for p, score in zip(chances, scores, strict=True) if score == level)
        if tau < 1 and mass > tau:
            break
        kept.add(level)
    return [score in kept for score in scores]


def keep_topk(scores, ratio):
    k = max(1, math.ceil(Fraction(str(ratio)) * len(scores)))
    return [score >= sorted(scores, reverse=True)[k - 1] for score in scores]


RULES = {"threshold": keep_threshold, "gap": keep_gap, "cdf": keep_cdf, "topk": keep_topk}


def keep_row(scores, seen, settings):
    """What one sub-row claims: the union of its rules, and its maximum; everything it sees if a score is NaN."""
    visible = [score for score, ok in zip(scores, seen, strict=True) if ok]
    if not visible:
        return [False] * len(scores)
    if any(math.isnan(score) or score == INF for score in visible):
        return list(seen)
    claims = [RULES[name](visible, setting) for name, setting in settings.items()]
    claims.append([score == max(visible) for score in visible])
    union = iter([any(row) for row in zip(*claims, strict=True)])
    return [ok and next(union) for ok in seen]


def keep_by_hand(scores, seen, settings):
    """[B, H, blocks, sub-rows, keys] by the definitions; settings have one value per head."""
    batch, heads, blocks, subrows, keys = scores.shape
    seen = seen.expand(scores.shape)
    kept = torch.zeros(batch, heads, blocks, keys, dtype=torch.bool)
    for b, h, i, a in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, blocks, subrows))).tolist():
        one = {name: values[h] for name, values in settings.items()}
        kept[b, h, i] |= torch.tensor(keep_row(scores[b, h, i, a].tolist(), seen[b, h, i, a].tolist(), one))
    return kept


def select(scores, seen, settings):
    config = SparseConfig(rule=tuple(settings), **{name: tuple(values) for name, values in settings.items()})
    return apply_rules(scores, seen, seen.sum(-1, keepdim=True), config)


# ---- the rules on random and on tied scores

NUMBERS = {
    "threshold": (0.0013, 0.031, 0.117, 0.31, 1.0),
    "gap": (0.0, 0.77, 2.3, 9.1),
    "cdf": (0.0, 0.1713, 0.5119, 0.8713, 0.97131),
    "topk": (0.0, 0.1, 0.25, 0.5, 0.77),
}


@st.composite
def rows_and_settings(draw):
    names = draw(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=4, unique=True))
    batch, heads, blocks, subrows = (draw(st.integers(1, 2)) for _ in range(4))
    keys = draw(st.integers(1, 40))
    settings = {name: [draw(st.sampled_from(NUMBERS[name])) for _ in range(heads)] for name in names}
    seed, spread = draw(st.integers(0, 9999)), draw(st.sampled_from((0.01, 1.0, 4.0)))
    scores = randn(seed, batch, heads, blocks, subrows, keys) * spread
    if draw(st.booleans()):
        scores = (scores * 2).round() / 2  # many ties
    seen = torch.rand(batch, 1, blocks, subrows, keys, generator=torch.Generator().manual_seed(seed)) < 0.8
    return scores, seen, settings


@given(rows_and_settings())
def test_rules_and_unions_by_definition(case):
    assert torch.equal(select(*case), keep_by_hand(*case))


@pytest.mark.parametrize("name", sorted(RULES))
def test_each_rule_alone_by_definition(name):
    for seed, number in enumerate(NUMBERS[name] * 4):
        scores = randn(seed, 2, 1, 3, 4, 37) * 3
        if seed % 2:
            scores = scores.round()
        seen = torch.ones(1, 1, 3, 1, 37, dtype=torch.bool).tril(20)
        case = scores, seen.expand(1, 1, 3, 4, 37), {name: [number]}
        assert torch.equal(select(*case), keep_by_hand(*case))


ONE_ROW = torch.tensor([3.0, 1.0, 3.0, 2.0, -1.0, 2.0]).view(1, 1, 1, 1, 6)
ALL = torch.ones(1, 1, 1, 1, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"topk": [0.1]}, [0, 2]),  # one of six, but the best two are tied
        ({"topk": [0.5]}, [0, 2, 3, 5]),  # the third is tied with the fourth
        ({"gap": [1.0]}, [0, 2, 3, 5]),  # exactly within the gap
        ({"gap": [0.99]}, [0, 2]),
        ({"cdf": [0.5]}, [0, 2]),  # the pair crosses .5 together; at least the best is kept
        ({"cdf": [0.75]}, [0, 2]),
        ({"cdf": [0.98]}, [0, 2, 3, 5]),
        ({"threshold": [0.13]}, [0, 2]),
        ({"threshold": [0.12]}, [0, 2, 3, 5]),
        ({"threshold": [0.04]}, [0, 1, 2, 3, 5]),
        ({"topk": [0.1], "threshold": [0.04]}, [0, 1, 2, 3, 5]),
    ],
)
def test_a_row_small_enough_to_check_by_eye(settings, kept):
    assert select(ONE_ROW, ALL, settings)[0, 0, 0].nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2, 0.3, 0.6, 0.7, 0.9, 0.95])
def test_topk_counts_exactly(ratio):
    """ceil(ratio * n), the decimal number the caller wrote: .3 of 100 blocks is 30."""
    for n in range(1, 520):
        scores = torch.arange(n, dtype=torch.float32).view(1, 1, 1, 1, n)
        kept = select(scores, torch.ones_like(scores, dtype=torch.bool), {"topk": [ratio]})
        assert kept.sum() == math.ceil(Fraction(str(ratio)) * n), f"{ratio} of {n}"


# ---- certainties


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("per_head", [False, True])
def test_the_loosest_setting_keeps_everything(name, per_head):
    loosest = {"threshold": 0.0, "gap": INF, "cdf": 1.0, "topk": 1.0}[name]
    scores = randn(0, 1, 2, 3, 2, 50) * 40  # most probabilities underflow
    seen = torch.rand(1, 1, 3, 2, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    config = SparseConfig(rule=name, **{name: (loosest, loosest) if per_head else loosest})
    kept = apply_rules(scores, seen, seen.sum(-1, keepdim=True), config)
    assert torch.equal(kept, seen.any(-2).expand(1, 2, 3, 50))


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_strictest_setting_keeps_the_maximum_and_its_ties(name):
    strictest = {"threshold": 1.0, "gap": 0.0, "cdf": 0.0, "topk": 0.0}[name]
    scores = (randn(0, 2, 1, 3, 1, 50) * 3).round()
    kept = select(scores, torch.ones_like(scores, dtype=torch.bool), {name: [strictest]})
    assert torch.equal(kept, (scores == scores.amax(-1, keepdim=True))[..., 0, :])
    assert kept.sum() > 6  # there were ties


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_row_that_cannot_be_judged_is_kept_whole(name, broken):
    strictest = {"threshold": 1.0, "gap": 0.0, "cdf": 0.0, "topk": 0.0}[name]
    scores = randn(0, 1, 2, 2, 1, 8)
    scores[0, 1, 0, 0, 3] = broken
    seen = torch.ones(1, 1, 2, 1, 8, dtype=torch.bool)
    seen[..., 7] = False
    kept = select(scores, seen, {name: [strictest] * 2})
    assert kept[0, 1, 0].tolist() == [True] * 7 + [False]
    assert kept.sum(-1).tolist() == [[[1, 1], [7, 1]]]


def test_a_hidden_nan_disturbs_nothing():
    scores = randn(0, 1, 1, 1, 1, 8)
    hidden = scores.clone()
    hidden[..., 5] = NAN
    seen = torch.arange(8).view(1, 1, 1, 1, 8) != 5
    for name in RULES:
        settings = {name: [NUMBERS[name][2]]}
        assert torch.equal(select(hidden, seen, settings), select(scores, seen, settings))


def test_a_row_that_sees_nothing_claims_nothing():
    seen = torch.zeros(1, 1, 2, 2, 8, dtype=torch.bool)
    for name in RULES:
        assert not select(randn(0, 1, 1, 2, 2, 8), seen, {name: [NUMBERS[name][1]]}).any()


def test_any_sub_row_may_claim_a_block():
    scores = torch.full((1, 1, 1, 3, 5), -9.0)
    for sub_row, best in enumerate((4, 0, 4)):
        scores[0, 0, 0, sub_row, best] = 9.0
    kept = select(scores, torch.ones_like(scores, dtype=torch.bool), {"topk": [0.2]})
    assert kept[0, 0, 0].tolist() == [True, False, False, False, True]


def test_settings_are_per_head():
    scores = randn(3, 1, 1, 4, 1, 30).expand(1, 3, 4, 1, 30)
    kept = select(scores, torch.ones(1, 1, 4, 1, 30, dtype=torch.bool), {"topk": [0.1, 0.5, 1.0]})
    assert kept.sum(-1)[0].tolist() == [[3] * 4, [15] * 4, [30] * 4]
