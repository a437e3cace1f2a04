import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import seen_pairs

from sparge.inputs import visibility

CPU = torch.device("cpu")
sides = st.one_of(st.none(), st.just(-1), st.integers(0, 60))
windows = st.one_of(st.none(), st.tuples(sides, sides))


@st.composite
def sights(draw):
    """A Visibility and, pair by pair, what it must mean."""
    q_len, k_len = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    is_causal, window = draw(st.booleans()), draw(windows)
    valid = None
    if draw(st.booleans()):
        rows = st.lists(st.booleans(), min_size=k_len, max_size=k_len)
        valid = torch.tensor(draw(st.lists(rows, min_size=2, max_size=2)))
    return visibility(q_len, k_len, is_causal, window, CPU, valid), seen_pairs(q_len, k_len, is_causal, window, valid)


@given(sights(), st.data())
def test_pairs_of_any_range(sight_and_seen, data):
    sight, seen = sight_and_seen
    r0, k0 = data.draw(st.integers(0, sight.q_len - 1)), data.draw(st.integers(0, sight.k_len - 1))
    r1, k1 = data.draw(st.integers(r0 + 1, sight.q_len)), data.draw(st.integers(k0 + 1, sight.k_len))
    assert torch.equal(sight.pairs(range(r0, r1), range(k0, k1)), seen[:, None, r0:r1, k0:k1])


@given(sights(), st.data())
def test_a_part_sees_what_the_whole_sees_there(sight_and_seen, data):
    sight, seen = sight_and_seen
    r0, k0 = data.draw(st.integers(0, sight.q_len - 1)), data.draw(st.integers(0, sight.k_len - 1))
    r1, k1 = data.draw(st.integers(r0 + 1, sight.q_len)), data.draw(st.integers(k0 + 1, sight.k_len))
    part, want = sight.part(range(r0, r1), range(k0, k1)), seen[:, r0:r1, k0:k1]
    assert torch.equal(part.pairs(range(r1 - r0), range(k1 - k0)), want[:, None])
    assert torch.equal(part.blocks(8, 4), blocks_by_hand(want, 8, 4))
    assert part.right_bounded == sight.right_bounded


def blocks_by_hand(seen, rows, keys):
    q_blocks, k_blocks = -(-seen.shape[1] // rows), -(-seen.shape[2] // keys)
    found = torch.zeros(len(seen), 1, q_blocks, k_blocks, dtype=torch.bool)
    for i in range(q_blocks):
        for j in range(k_blocks):
            found[:, 0, i, j] = seen[:, i * rows : (i + 1) * rows, j * keys : (j + 1) * keys].flatten(1).any(1)
    return found


@given(sights(), st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_block_is_visible_where_a_pair_is(sight_and_seen, rows, keys, data):
    sight, seen = sight_and_seen
    want = blocks_by_hand(seen, rows, keys)
    assert torch.equal(sight.blocks(rows, keys), want)
    assert torch.equal(sight.visible_per_row(rows, keys), want[:, 0].sum(-1))
    first = data.draw(st.integers(0, want.shape[2] - 1))
    last = data.draw(st.integers(first + 1, want.shape[2] + 3))
    assert torch.equal(sight.blocks(rows, keys, first, last), want[:, :, first:last])


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(1, 40))
def test_the_causal_right_edge_holds_each_rows_own_position(q_len, k_len, rows, keys):
    own = seen_pairs(q_len, k_len, window=(0, 0))
    found = visibility(q_len, k_len, True, None, CPU).right_edge(rows, keys)
    assert torch.equal(found, blocks_by_hand(own, rows, keys)[0, 0])


def test_causal_is_aligned_bottom_right():
    sight = visibility(2, 5, True, None, CPU)
    assert sight.pairs(range(2), range(5))[0, 0].tolist() == [[True] * 4 + [False], [True] * 5]
    above = visibility(5, 2, True, None, CPU).pairs(range(5), range(2))[0, 0]
    assert above.tolist() == [[False] * 2] * 3 + [[True, False], [True, True]]


@pytest.mark.parametrize("far", [10**6, 10**15])
def test_windows_wider_than_any_sequence(far):
    sight = visibility(7, 9, False, (far, far), CPU)
    assert sight.pairs(range(7), range(9)).all()
    assert sight.blocks(4, 4).all()


def test_causal_and_window_both_apply():
    sight = visibility(6, 6, True, (2, 3), CPU)
    assert torch.equal(sight.pairs(range(6), range(6)), seen_pairs(6, 6, window=(2, 0))[:, None])


def test_two_sights_are_the_same_if_every_row_sees_the_same_keys():
    valid = torch.ones(1, 60, dtype=torch.bool)
    sight = visibility(50, 60, True, None, CPU, valid)
    assert sight.same_as(visibility(50, 60, True, None, CPU, valid))
    for other in (
        visibility(50, 60, False, None, CPU, valid),
        visibility(50, 60, True, (3, None), CPU, valid),
        visibility(50, 61, True, None, CPU, valid),
        visibility(50, 60, True, None, CPU, valid.clone()),
        visibility(50, 60, True, None, CPU, None),
        valid,
        None,
    ):
        assert not sight.same_as(other)


def test_valid_keys_are_counted():
    valid = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    sight = visibility(4, 4, False, None, CPU, valid)
    assert sight.valid_before.tolist() == [[0, 1, 2, 2, 3], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert sight.unbroken.tolist() == [2, 0, 4]
    assert visibility(4, 4, False, None, CPU).unbroken is None


@pytest.mark.parametrize("sight", [{}, {"is_causal": True}, {"window": (20, 5)}, {"window": (60, 0)}], ids=str)
def test_keys_that_all_rows_see(sight):
    see = visibility(40, 70, sight.get("is_causal", False), sight.get("window"), CPU)
    for top, bottom in ((0, 7), (8, 8), (20, 39)):
        seen = see.pairs(range(top, bottom + 1), range(70))[0, 0].all(0)
        leading = int(seen.long().cumprod(0).sum())
        assert see.keys_seen_from(top, bottom) == leading
    assert visibility(40, 70, False, None, CPU, torch.ones(1, 70, dtype=torch.bool)).keys_seen_from(0, 7) == 0
