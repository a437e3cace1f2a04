"""Masks of transformers by what they mean: the same as its own, wherever they are read, cut or moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
from transformers import masking_utils as theirs  # noqa: E402

from sparge.integrations.transformers.mask import Pattern, PatternMask, sight_of, sparge_mask  # noqa: E402
from sparge.visibility import UNBOUNDED, Visibility  # noqa: E402

CAUSAL, BOTH = theirs.causal_mask_function, theirs.bidirectional_mask_function
SLIDING = theirs.sliding_window_causal_mask_function(20)
AROUND = theirs.sliding_window_bidirectional_mask_function(20)
BATCH = 2


def padding(length: int, left: bool = True) -> Tensor:
    valid = torch.ones(BATCH, length, dtype=torch.bool)
    valid[0, : length // 2] = not left
    valid[1, length // 2 + 3 :] = left
    return valid


def sizes(q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0) -> dict[str, Any]:
    return {
        "batch_size": BATCH, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "allow_is_causal_skip": True, "allow_is_bidirectional_skip": True,
    }  # fmt: skip


def whole(mask: Tensor | None) -> Tensor:
    assert isinstance(mask, PatternMask)
    return mask.whole()


@pytest.mark.parametrize(
    ("function", "left", "right"),
    [(CAUSAL, UNBOUNDED, 0), (BOTH, UNBOUNDED, UNBOUNDED), (SLIDING, 19, 0), (AROUND, 20, 20)],
)
def test_known_mask_functions_are_read(function: Any, left: int, right: int) -> None:
    assert sight_of(function) == (left, right)


@pytest.mark.parametrize(
    "function",
    [
        theirs.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
        theirs.and_masks(CAUSAL, theirs.packed_sequence_mask_function(torch.zeros(1, 64))),
        theirs.or_masks(CAUSAL, theirs.blockwise_overlay(torch.zeros(1, 64))),
        theirs.and_masks(),
        lambda b, h, q, kv: kv <= q,
    ],
)
def test_other_mask_functions_are_not(function: Any) -> None:
    assert sight_of(function) is None


@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize(
    ("function", "where"),
    [
        (CAUSAL, sizes(50, 50)),
        (CAUSAL, sizes(50, 80, 30)),  # a prefix in a dynamic cache
        (CAUSAL, sizes(50, 128, 30)),  # in a static one
        (CAUSAL, sizes(50, 128, torch.tensor(30))),
        (SLIDING, sizes(50, 50)),
        (SLIDING, sizes(50, 69, 100, 81)),  # a sliding cache that is full
        (SLIDING, sizes(50, 128, 30)),
        (BOTH, sizes(50, 50)),
        (BOTH, sizes(50, 90)),  # to another sequence
        (AROUND, sizes(50, 50)),
    ],
)
def test_masks_are_those_of_sdpa(function: Any, where: dict[str, Any], padded: str | None) -> None:
    seen = int(where["q_offset"]) + where["q_length"] if function is not BOTH else where["kv_length"]
    valid = None if padded is None else padding(seen, padded == "left")
    mask = sparge_mask(**where, mask_function=function, attention_mask=valid)
    always = where | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    want = theirs.sdpa_mask(**always, mask_function=function, attention_mask=valid)
    if mask is None:
        assert theirs.sdpa_mask(**where, mask_function=function, attention_mask=valid) is None
    else:
        assert torch.equal(whole(mask), want)
        assert mask.shape == want.shape
    again = sparge_mask(**always, mask_function=function, attention_mask=valid)
    assert torch.equal(whole(again), want)  # where a model must have a mask it gets one


@pytest.mark.parametrize(
    "where",
    [
        {"mask_function": theirs.chunked_causal_mask_function(8, torch.zeros(BATCH, dtype=torch.long))},
        {"mask_function": CAUSAL, "q_offset": 1, "kv_length": 50},  # rows past the last key
        {"mask_function": AROUND, "kv_length": 90},  # a window that does not end with the keys
        {"mask_function": CAUSAL, "q_length": 3, "q_offset": 47},  # decoding: dense anyway
    ],
)
def test_what_is_not_understood_is_left_to_transformers(where: dict[str, Any]) -> None:
    arguments = sizes(50, 50) | {"allow_is_causal_skip": False, "attention_mask": padding(50)} | where
    mask, want = sparge_mask(**arguments), theirs.sdpa_mask(**arguments)
    assert type(mask) is Tensor
    assert torch.equal(mask, want)


def test_arguments_of_other_versions() -> None:
    arguments = sizes(50, 80, 30) | {"mask_function": CAUSAL}
    want = whole(sparge_mask(**arguments))
    older = {name: arguments[name] for name in ("batch_size", "kv_length", "mask_function")}
    assert torch.equal(whole(sparge_mask(**older, cache_position=torch.arange(30, 80))), want)
    del arguments["mask_function"], arguments["allow_is_bidirectional_skip"]
    assert type(sparge_mask(**arguments)) is Tensor  # transformers' own, by its own default


# ---- as a tensor


def example() -> PatternMask:
    return PatternMask(Pattern(Visibility(30, 40, torch.device("cpu"), 12, 0, padding(40)), BATCH, 50))


def test_any_operation_reads_the_whole_mask() -> None:
    mask, want = example(), example().whole()
    assert (mask.shape, mask.dtype, mask.ndim, mask.device) == (want.shape, torch.bool, 4, want.device)
    assert want.any()
    for operate in (
        lambda x: x[:, :, 3:, :44],
        lambda x: ~x,
        lambda x: x & torch.ones_like(x),
        lambda x: torch.where(x, 0.0, -1.0),
        lambda x: x.to(torch.float32),
        lambda x: x.expand(2, 3, 30, 50),
        lambda x: x.sum(),
    ):
        got = operate(mask)
        assert type(got) is Tensor
        assert torch.equal(got, operate(want))
    q, k = torch.randn(2, 2, 30, 16), torch.randn(2, 2, 50, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q, k, k, attn_mask=mask), attend(q, k, k, attn_mask=want))


def test_moves_keep_the_pattern() -> None:
    mask = example()
    assert mask.contiguous() is mask
    assert mask.to("cpu") is mask
    moved = mask.to(device="meta")
    assert isinstance(moved, PatternMask)
    assert moved.device.type == "meta"
    assert moved.shape == mask.shape


def test_a_mask_that_was_written_to_is_no_longer_its_pattern() -> None:
    mask = example()
    mask[:, :, :, 2] = True
    assert mask.pattern is None
    assert bool(mask.whole()[..., 2].all())
    other = example()
    other &= False
    assert not bool(other.any())
    assert torch.equal(example().masked_fill_(torch.tensor(True), False), torch.zeros(2, 1, 30, 50, dtype=torch.bool))
