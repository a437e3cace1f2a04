from __future__ import annotations

import doctest
import itertools
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparge import ordering
from sparge.ordering import ORDER_NAMES, TokenOrder, token_order

Grid = tuple[int, int, int]

names = st.sampled_from(ORDER_NAMES)
grids = st.tuples(st.integers(1, 13), st.integers(1, 13), st.integers(1, 13))
text_counts = st.integers(0, 5)
RANDOM_ORDER_OF_EIGHT = [3, 0, 6, 1, 2, 4, 7, 5]

quick = settings(max_examples=60, deadline=None)


def coordinates(grid: Grid, name: str) -> npt.NDArray[np.int64]:
    """The (time, height, width) position of each token, in the order of the sequence."""
    return np.stack(np.unravel_index(token_order(grid, name).permutation.numpy(), grid), axis=1)


def longest_step(grid: Grid) -> int:
    steps = np.abs(np.diff(coordinates(grid, "hilbert"), axis=0)).sum(axis=1)
    return int(steps.max(initial=0))


def mean_distance_in_blocks(grid: Grid, name: str, block: int = 64) -> float:
    cells = coordinates(grid, name)
    whole_blocks = cells[: len(cells) // block * block].reshape(-1, block, 3)
    differences = whole_blocks[:, :, None, :] - whole_blocks[:, None, :, :]
    return float(np.abs(differences).sum(axis=-1).mean())


@quick
@given(grid=grids, name=names, before=text_counts, after=text_counts)
def test_every_token_appears_once_and_text_stays(grid: Grid, name: str, before: int, after: int) -> None:
    order = token_order(grid, name, text_before=before, text_after=after)
    count = before + int(np.prod(grid)) + after
    identity = torch.arange(count)

    assert order.permutation.dtype == order.inverse.dtype == torch.int64
    assert torch.equal(order.permutation.sort().values, identity)
    assert torch.equal(order.permutation[order.inverse], identity)
    assert torch.equal(order.inverse[order.permutation], identity)
    assert torch.equal(order.permutation[:before], identity[:before])
    assert torch.equal(order.permutation[count - after :], identity[count - after :])


@quick
@given(grid=grids, name=names, before=text_counts)
def test_text_only_shifts_the_visual_order(grid: Grid, name: str, before: int) -> None:
    with_text = token_order(grid, name, text_before=before, text_after=2).permutation
    assert torch.equal(with_text[before:-2] - before, token_order(grid, name).permutation)


def test_orders_of_a_small_grid() -> None:
    expected = {
        "row": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
        "column": [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11],
        "time": [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11],
    }
    for name, permutation in expected.items():
        assert token_order((2, 2, 3), name).permutation.tolist() == permutation


def test_hilbert_steps_are_unit_steps_for_all_small_grids() -> None:
    sides = range(1, 10)
    for grid in itertools.product(sides, sides, sides):
        assert longest_step(grid) <= 1, grid
        assert token_order(grid).permutation[0] == 0, grid


def test_hilbert_steps_are_unit_steps_for_all_small_pictures() -> None:
    for height, width in itertools.product(range(1, 33), repeat=2):
        assert longest_step((1, height, width)) <= 1, (height, width)


@pytest.mark.parametrize(
    "grid",
    [(21, 30, 45), (13, 45, 80), (33, 45, 79), (1, 64, 1001), (1001, 1, 2), (2, 101, 3), (5, 1, 999)],
)
def test_hilbert_steps_are_unit_steps_for_large_and_lopsided_grids(grid: Grid) -> None:
    assert longest_step(grid) == 1


@quick
@given(grid=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)))
def test_hilbert_steps_are_unit_steps_for_random_grids(grid: Grid) -> None:
    assert longest_step(grid) <= 1


@pytest.mark.parametrize("grid", [(8, 32, 32), (21, 30, 45), (1, 64, 64), (5, 47, 33), (3, 2, 301)])
def test_hilbert_blocks_are_more_compact_than_raster_blocks(grid: Grid) -> None:
    hilbert = mean_distance_in_blocks(grid, "hilbert")
    for other in ("row", "column", "time", "random"):
        assert hilbert < mean_distance_in_blocks(grid, other), other


def test_hilbert_blocks_are_close_to_cubes() -> None:
    cube = mean_distance_in_blocks((4, 4, 4), "row")
    assert mean_distance_in_blocks((8, 32, 32), "hilbert") < 1.2 * cube


def test_hilbert_is_fast_enough_for_video() -> None:
    ordering._visual_order.cache_clear()
    began = time.perf_counter()
    token_order((33, 60, 104))
    assert time.perf_counter() - began < 2.0


def test_curves_are_cached_within_a_bound() -> None:
    ordering._visual_order.cache_clear()
    for _ in range(3):
        token_order((3, 4, 5), text_before=1)
    assert ordering._visual_order.cache_info().misses == 1
    assert ordering._visual_order.cache_info().maxsize is not None


@pytest.mark.parametrize("name", ORDER_NAMES)
def test_changing_a_returned_order_leaves_later_ones_alone(name: str) -> None:
    first = token_order((2, 3, 4), name)
    expected = first.permutation.clone()
    first.permutation.zero_()
    assert torch.equal(token_order((2, 3, 4), name).permutation, expected)


def test_random_order_is_fixed() -> None:
    first = token_order((1, 2, 4), "random").permutation
    ordering._visual_order.cache_clear()
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(token_order((1, 2, 4), "random").permutation, first)
    assert first.tolist() == RANDOM_ORDER_OF_EIGHT


@quick
@given(grid=grids, name=names, before=text_counts, after=text_counts, dim=st.integers(-4, 3))
def test_restore_undoes_apply_along_any_dimension(grid: Grid, name: str, before: int, after: int, dim: int) -> None:
    order = token_order(grid, name, text_before=before, text_after=after)
    count = len(order.permutation)
    shape = [2, 1, 3, 2]
    shape[dim] = count
    x = torch.arange(float(np.prod(shape))).reshape(shape)
    reordered = order.apply(x, dim)

    assert torch.equal(order.restore(reordered, dim), x)
    for position in (0, count // 2, count - 1):
        original = int(order.permutation[position])
        assert torch.equal(reordered.select(dim, position), x.select(dim, original))


@pytest.mark.parametrize("shape", [(24, 5), (2, 24, 5), (2, 3, 24, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_the_default_dimension_is_the_last_but_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    order = token_order((2, 3, 4))
    x = torch.randint(0, 2, shape).to(dtype)
    assert torch.equal(order.apply(x), x[..., order.permutation, :])
    assert torch.equal(order.restore(order.apply(x)), x)


def test_apply_accepts_a_non_contiguous_tensor_and_passes_gradients() -> None:
    order = token_order((2, 3, 4))
    x = torch.randn(5, 24, requires_grad=True)
    weight = torch.randn(24, 5)
    total = (order.apply(x.transpose(0, 1)) * weight).sum()
    (gradient,) = torch.autograd.grad(total, x)
    assert torch.equal(gradient.transpose(0, 1), order.restore(weight))


@pytest.mark.parametrize("name", ORDER_NAMES)
def test_results_never_share_memory_with_the_input(name: str) -> None:
    order = token_order((2, 3, 4), name)
    x = torch.zeros(24, 5)
    order.apply(x).fill_(1.0)
    order.restore(x).fill_(1.0)
    assert torch.equal(x, torch.zeros(24, 5))


def test_the_index_follows_the_device_of_the_tensor() -> None:
    order = token_order((2, 3, 4), device="cpu")
    assert order.permutation.device.type == order.inverse.device.type == "cpu"
    on_meta = torch.empty(2, 24, 5, device="meta")
    assert order.apply(on_meta).shape == on_meta.shape
    assert order.apply(on_meta).device.type == "meta"


def test_an_order_cannot_be_reassigned() -> None:
    order = token_order((1, 1, 1))
    with pytest.raises(AttributeError):
        order.permutation = torch.zeros(1)  # type: ignore[misc]


@pytest.mark.parametrize("method", [TokenOrder.apply, TokenOrder.restore])
def test_a_wrong_number_of_tokens_is_refused(method: Any) -> None:
    order = token_order((2, 3, 4), text_after=1)
    with pytest.raises(ValueError, match=r"24 tokens along dimension -2 .*\(1, 24, 5\).* for 25 tokens"):
        method(order, torch.zeros(1, 24, 5))
    with pytest.raises(ValueError, match="5 tokens along dimension 2"):
        method(order, torch.zeros(1, 25, 5), 2)


@pytest.mark.parametrize(
    ("grid", "error", "message"),
    [
        (
            (0, 2, 2),
            ValueError,
            r"time of grid \(0, 2, 2\) must be an integer of at least 1, but 0 was given",
        ),
        ((2, -3, 2), ValueError, "height of grid .* at least 1, but -3 was given"),
        ((2, 2), ValueError, "three positive integers .* with 2 extents was given"),
        ((2, 2, 2, 2), ValueError, "three positive integers .* with 4 extents was given"),
        ((2, 2, 2.0), TypeError, "width of grid .* must be an integer .* but 2.0 was given"),
        ((2, True, 2), TypeError, "height of grid .* must be an integer .* but True was given"),
        ((2, "2", 2), TypeError, "must be an integer .* but '2' was given"),
        (8, TypeError, "three positive integers .* but 8 was given"),
        ("234", TypeError, "three positive integers .* but '234' was given"),
    ],
)
def test_bad_grids_are_refused(grid: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        token_order(grid)


@pytest.mark.parametrize("name", ["zigzag", "Hilbert", "", None])
def test_unknown_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is unknown; it must be one of hilbert, row, column"):
        token_order((2, 2, 2), name)


@pytest.mark.parametrize("which", ["text_before", "text_after"])
def test_bad_text_counts_are_refused(which: str) -> None:
    bad_counts: list[tuple[Any, type[Exception]]] = [(-1, ValueError), (1.5, TypeError), (None, TypeError)]
    for count, error in bad_counts:
        with pytest.raises(error, match=f"{which} must be an integer of at least 0, but {count} was given"):
            token_order((2, 2, 2), **{which: count})


def test_integers_of_other_libraries_are_accepted() -> None:
    grid: Any = [np.int64(2), torch.tensor(3), 4]
    assert torch.equal(token_order(grid).permutation, token_order((2, 3, 4)).permutation)


def test_the_example_in_the_documentation_holds() -> None:
    results = doctest.testmod(ordering)
    assert results.attempted > 0
    assert results.failed == 0
