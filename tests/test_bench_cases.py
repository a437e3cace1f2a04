"""The table of cases, and the masks made from them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from sparge.bench import contenders
from sparge.bench.cases import BARS, CPU, FULL, GRIDS, MASKS, SPARSITIES, Case, cases_of
from sparge.bench.masks import random_mask
from sparge.block_mask import BlockMask
from sparge.config import QUANTIZATIONS
from sparge.inputs import visibility

BLOCKS = [(128, 64), (64, 64), (128, 128)]


def mask_of(case: Case, heads: int = 3, block: tuple[int, int] = (128, 64), seed: int = 0) -> BlockMask:
    sight = visibility(case.tokens, case.tokens, case.causal, None, torch.device("cpu"))
    return random_mask(case, sight, heads, block, torch.Generator().manual_seed(seed))


# ---- the table


@pytest.mark.parametrize("name", GRIDS)
def test_grids_hold_distinct_sensible_cases(name: str) -> None:
    cases = GRIDS[name]
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert case.sparsity in SPARSITIES
        assert case.mask in MASKS
        assert case.quantization in QUANTIZATIONS
        assert case.head_dim in (64, 128, 256)
        assert case.group in (1, 4, 8)
        assert 1024 <= case.tokens <= 131072
        assert case.tokens & (case.tokens - 1) == 0


def test_full_covers_every_axis_and_the_bars() -> None:
    assert set(BARS) <= set(FULL)
    assert {case.sparsity for case in FULL} == set(SPARSITIES)
    assert {case.tokens // 1024 for case in FULL} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert {case.head_dim for case in FULL} == {64, 128, 256}
    assert {case.group for case in FULL} == {1, 4, 8}
    assert {case.mask for case in FULL} == set(MASKS)
    assert {case.quantization for case in FULL} == {"int8-fp8", "int8", "none"}
    assert {case.causal for case in FULL} == {False, True}
    assert len(FULL) < 90  # pruned, not the cross product


def test_the_cpu_grid_keeps_its_bars() -> None:
    assert len(CPU) == 24
    assert {(case.causal, case.sparsity): case.bar for case in CPU} == {
        (False, 0.0): 0.0, (True, 0.0): 0.0, (False, 0.6): 2.0, (True, 0.6): 1.7, (False, 0.8): 3.5, (True, 0.8): 3.5,
    }  # fmt: skip


def test_a_captured_file_adds_a_real_case_once() -> None:
    assert all(case.mask != "real" for case in cases_of("bars", captured=False))
    assert [case.mask for case in cases_of("bars", captured=True)].count("real") == 1
    assert cases_of("full", captured=True) == FULL


@pytest.mark.parametrize("wrong", [{"mask": "diagonal"}, {"mask": "skewed", "sparsity": 0.2}])
def test_impossible_cases_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="mask"):
        Case(1024, **wrong)  # type: ignore[arg-type]


# ---- masks


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_uniform_masks_have_the_stated_sparsity_in_every_row(sparsity: float, block: tuple[int, int]) -> None:
    mask = mask_of(Case(8192, sparsity=sparsity), block=block)
    counts = mask.kept_per_row
    assert (counts == max(1, round((1 - sparsity) * mask.k_blocks))).all()
    assert mask.sparsity.item() == pytest.approx(sparsity, abs=0.01)


def test_uniform_masks_differ_between_rows_heads_and_seeds() -> None:
    dense = mask_of(Case(4096)).to_dense()[0]
    assert not torch.equal(dense[0], dense[1])
    assert not torch.equal(dense[0, 0], dense[0, 1])
    assert not torch.equal(dense, mask_of(Case(4096), seed=1).to_dense()[0])
    assert torch.equal(dense, mask_of(Case(4096)).to_dense()[0])


@pytest.mark.parametrize("sparsity", [0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("tokens", [4096, 8192, 8064])
def test_skewed_masks_do_the_work_of_uniform_ones_four_to_one(sparsity: float, tokens: int) -> None:
    skewed, uniform = (mask_of(Case(tokens, sparsity=sparsity, mask=name)) for name in ("skewed", "uniform"))
    assert torch.equal(skewed.kept_per_head, uniform.kept_per_head)
    rows = skewed.kept_per_row[0]
    even = rows[:, : skewed.q_blocks // 2 * 2].unflatten(-1, (-1, 2)).sort(-1).values
    light, heavy = even[..., 0], even[..., 1]
    assert ((heavy - 4 * light).abs() <= 3).all()  # 4 to 1 but for rounding
    assert (heavy > 2 * light).all()
    heavy_is_first = rows[:, 0 : 2 * light.shape[1] : 2] == heavy
    assert 0.2 < heavy_is_first.float().mean() < 0.8  # not always the same rows


@pytest.mark.parametrize("mask", ["uniform", "skewed"])
@pytest.mark.parametrize("sparsity", [0.4, 0.6, 0.95])
@pytest.mark.parametrize("block", BLOCKS)
def test_causal_masks_keep_the_diagonal_and_nothing_unseen(mask: str, sparsity: float, block: tuple[int, int]) -> None:
    case = Case(4096, causal=True, sparsity=sparsity, mask=mask)
    made = mask_of(case, block=block)
    sight = visibility(4096, 4096, True, None, torch.device("cpu"))
    dense, visible, edge = made.to_dense()[0], sight.blocks(*block)[0, 0], sight.right_edge(*block)
    assert dense[:, edge].all()
    assert not dense[:, ~visible].any()
    uniform = mask_of(Case(4096, causal=True, sparsity=sparsity), block=block)
    assert torch.equal(made.kept_per_head, uniform.kept_per_head)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_flex_attention_gets_the_same_blocks(causal: bool, block: tuple[int, int]) -> None:
    mask = mask_of(Case(1024, causal=causal), block=block)
    flex = contenders.flex_mask(mask, causal)
    assert torch.equal(flex.to_dense().bool(), mask.to_dense())
    assert flex.seq_lengths == (1024, 1024)
    assert tuple(flex.BLOCK_SIZE) == block
    if causal:  # what torch itself finds crossed by the diagonal is masked inside, and nothing else
        every = create_block_mask(lambda b, h, q, k: q >= k, 1, 3, 1024, 1024, device="cpu", BLOCK_SIZE=block)
        everything = contenders.flex_mask(mask_of(Case(1024, causal=True, sparsity=0.0), block=block), True)
        assert torch.equal(everything.kv_num_blocks, every.kv_num_blocks.expand(1, 3, -1))
        assert torch.equal(everything.full_kv_num_blocks, every.full_kv_num_blocks.expand(1, 3, -1))
    else:
        assert not flex.kv_num_blocks.any()
