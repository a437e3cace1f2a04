"""Paired statistics: intervals that hold what they promise, and exact small numbers."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.evaluate.statistics import mean_interval, share_interval, sign_test


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    chance = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        low, high = mean_interval(chance.normal(0.3, 1.0, 40).tolist(), seed=trial)
        inside += low <= 0.3 <= high
    assert 180 <= inside <= 198  # 190 expected, a little less from the bootstrap


def test_the_interval_of_a_mean_needs_two_different_values_and_is_repeatable() -> None:
    assert mean_interval([1.0]) is None
    assert mean_interval([0.0, 0.0, 0.0]) is None
    assert mean_interval([0.0, 1.0, 5.0]) == mean_interval([0.0, 1.0, 5.0])
    low, high = mean_interval([0.0, 1.0, 5.0])
    assert 0 <= low < 2 < high <= 5


def test_the_interval_of_a_share_covers_it_as_often_as_it_says() -> None:
    chance = np.random.default_rng(1)
    inside = 0
    for _ in range(500):
        lost, gained = (int((chance.random(30) < rate).sum()) for rate in (0.2, 0.05))
        low, high = share_interval(lost, gained, 30)
        inside += low <= -0.15 <= high
    assert inside >= 470


def test_the_interval_of_a_share_is_symmetric_and_never_empty() -> None:
    assert share_interval(0, 0, 1) is None
    low, high = share_interval(3, 1, 20)
    assert share_interval(1, 3, 20) == (pytest.approx(-high), pytest.approx(-low))
    assert low < -0.1 < high
    low, high = share_interval(2, 0, 2)
    assert -1 <= low < high


@pytest.mark.parametrize(("lost", "gained", "chance"), [(0, 0, 1.0), (1, 1, 1.0), (6, 0, 1 / 32), (0, 6, 1 / 32)])
def test_sign_test(lost: int, gained: int, chance: float) -> None:
    assert sign_test(lost, gained) == pytest.approx(chance)
