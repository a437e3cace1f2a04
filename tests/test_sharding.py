"""Who holds which tokens: cutting, aligning to blocks, joining, and moving parts between ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import refused
from threads import run_threads

from sparge.distributed.sharding import (
    Holding,
    Move,
    aligned,
    coalesced,
    joined,
    length_of,
    overlaps,
    redistribute,
    shares_of,
    split_evenly,
    union,
    units_of,
    within,
)

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any)


def tokens_of(share):
    return [token for interval in share for token in range(*interval)]


@given(st.integers(1, 500), st.integers(1, 6), st.sampled_from(["contiguous", "zigzag"]))
def test_an_even_split_holds_every_token_once_and_is_recognised_by_its_lengths(total, ranks, sharding):
    shares = split_evenly(total, ranks, sharding)
    assert sorted(token for share in shares for token in tokens_of(share)) == list(range(total))
    again = shares_of(tuple((length_of(share),) for share in shares), sharding)
    assert list(map(tokens_of, again)) == list(map(tokens_of, shares))
    assert max(map(length_of, shares)) - min(map(length_of, shares)) <= 2


def test_segments_are_cut_one_by_one():
    shares = shares_of(((2, 10), (3, 8)), "contiguous")
    assert shares == (((0, 2), (5, 15)), ((2, 5), (15, 23)))
    assert shares_of(((4, 8), (4, 8)), "zigzag") == (((0, 2), (6, 12), (20, 24)), ((2, 6), (12, 20)))


def test_zigzag_shards_of_other_lengths_are_refused():
    with refused(ValueError, "[6, 6]", "[5, 7]"):
        shares_of(((5,), (7,)), "zigzag")


@given(LENGTHS, st.sampled_from([64, 128, 192]))
def test_aligned_shares_hold_whole_units_by_majority(lengths, unit):
    shares = shares_of(tuple((n,) for n in lengths), "contiguous")
    whole = aligned(shares, unit)
    total = sum(lengths)
    assert sorted(token for share in whole for token in tokens_of(share)) == list(range(total))
    owner = {token: rank for rank, share in enumerate(shares) for token in tokens_of(share)}
    for rank, share in enumerate(whole):
        assert all(start % unit == 0 and (stop % unit == 0 or stop == total) for start, stop in share)
        for n in units_of(share, unit):
            held = [owner[token] for token in range(n * unit, min((n + 1) * unit, total))]
            assert held.count(rank) == max(map(held.count, held))


def test_what_is_aligned_stays():
    for sharding in ("contiguous", "zigzag"):
        shares = tuple(map(coalesced, split_evenly(1024, 4, sharding)))
        assert aligned(shares, 128) == shares


def test_parts_of_shares():
    assert within(((0, 5), (8, 20)), 3, 10) == ((0, 2), (5, 7))
    assert union([((0, 2), (6, 8)), ((2, 6),)]) == ((0, 8),)
    assert overlaps(((0, 4), (10, 14)), ((2, 12),)) == [(2, 0, 2), (4, 8, 2)]


@given(LENGTHS, st.integers(0, 5))
def test_joined_parts_are_the_sequence(lengths, seed):
    total = sum(lengths)
    cut = sorted(torch.randperm(total + 1, generator=torch.Generator().manual_seed(seed))[:4].tolist())
    pieces = list(zip([0, *cut], [*cut, total], strict=True))
    shares = (coalesced(pieces[::2]), coalesced(pieces[1::2]))
    x = torch.arange(total)[None]
    assert torch.equal(joined([x[:, tokens_of(share)] for share in shares], shares, 1), x)


@pytest.mark.parametrize("back", [False, True])
def test_tokens_and_heads_go_where_they_are_wanted(back):
    """Three ranks hold all six heads of some tokens; then each has two heads, the last key head twice, of all."""
    x = torch.arange(6 * 20).view(1, 6, 20, 1)
    shares = (((0, 3), (12, 20)), ((3, 4),), ((4, 12),))
    by_token = tuple(Holding(tuple(range(6)), share) for share in shares)
    by_head = tuple(Holding(heads, ((0, 20),)) for heads in ((0, 1), (2, 3), (4, 5)))
    have, want = (by_head, by_token) if back else (by_token, by_head)

    def part(holding):
        return x[:, list(holding.heads)][:, :, tokens_of(holding.tokens)]

    moved = run_threads(lambda team: redistribute([Move(part(have[team.rank]), have, want)], team, "test")[0], 3)
    for got, holding in zip(moved, want, strict=True):
        assert torch.equal(got, part(holding))


def test_a_head_may_be_wanted_twice_and_nothing_moves_that_is_in_place():
    x = torch.arange(2 * 8).view(1, 2, 8, 1)
    have = (Holding((0, 1), ((0, 8),)), Holding((0, 1), ()))
    want = (Holding((0,), ((0, 8),)), Holding((0, 1, 1), ((2, 8),)))
    sources = (x, x[:, :, :0])
    moved = run_threads(lambda team: redistribute([Move(sources[team.rank], have, want)], team, "test")[0], 2)
    assert torch.equal(moved[0], x[:, :1])
    assert torch.equal(moved[1], x[:, [0, 1, 1], 2:])
    assert redistribute([Move(x, have, have)], None, "test")[0] is x
