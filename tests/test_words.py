"""Bits in words: packed, counted and spanned as bit by bit, and some rows at a time."""

from __future__ import annotations

import pytest
import torch
from allocations import LargestTensor
from hypothesis import given
from hypothesis import strategies as st

from sparge import words


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "WORDS_AT_ONCE", 40)
    monkeypatch.setattr(words, "BITS_AT_ONCE", 300)


def random_bits(*shape: int, density: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < density


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8))
def test_bits_of_any_words_are_counted(numbers):
    counts = words.count_per_row(torch.tensor(numbers, dtype=torch.int32)[None, None, :, None])
    assert counts.dtype == torch.int64
    assert counts[0, 0].tolist() == [(n & 0xFFFFFFFF).bit_count() for n in numbers]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("at_once", ["all", "few"])
def test_packing_and_counting(length, at_once, request):
    if at_once == "few":
        request.getfixturevalue("few_at_once")
    dense, among = random_bits(2, 3, 11, length), random_bits(2, 1, 11, length, density=0.7)
    bits = words.pack(dense)
    assert bits.shape == (2, 3, 11, -(-length // 32))
    assert torch.equal(words.unpack(bits, length), dense)
    assert torch.equal(words.count_per_row(bits), dense.sum(-1))
    assert torch.equal(words.count_per_row(bits, words.pack(among)), (dense & among).sum(-1))
    assert torch.equal(words.count_per_row(words.pack(among), bits), (dense & among).sum(-1))
    assert torch.equal(words.unpack(bits, length), dense)  # counting leaves them as they were


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("at_once", ["all", "few"])
def test_spans_are_set_bit_by_bit(length, at_once, request):
    if at_once == "few":
        request.getfixturevalue("few_at_once")
    edges = torch.randint(0, length + 1, (2, 3, 17), generator=torch.Generator().manual_seed(length))
    begin, end = edges.amin(0), edges.amax(0)
    place = torch.arange(length)
    want = (place >= begin[..., None]) & (place < end[..., None])
    assert torch.equal(words.packed_spans(begin, end, length), words.pack(want[:, None]))


def test_counting_many_words_needs_few_at_a_time():
    bits = torch.full((1, 1, 4096, 512), 0x0F00000F, dtype=torch.int32).expand(1, 8, -1, -1)
    with LargestTensor() as seen:
        counts = words.count_per_row(bits)
    assert (counts == 8 * 512).all()
    assert 4 * words.WORDS_AT_ONCE <= seen.bytes <= 8 * words.WORDS_AT_ONCE < 4 * bits.numel()


def test_packing_many_bits_needs_few_at_a_time():
    dense = torch.ones(1, 4, 512, 8192, dtype=torch.bool)
    with LargestTensor() as seen:
        bits = words.pack(dense)
    assert (bits == -1).all()
    assert seen.bytes <= 8 * words.BITS_AT_ONCE < 8 * dense.numel()
