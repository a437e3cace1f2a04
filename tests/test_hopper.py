"""Hopper's kernels against the portable ones: thousands of launches over every kind of block list, with a watchdog.

Interpreted, on a CPU, the problems are few and small.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import INTERPRETED, problem
from torch import Tensor

from sparge import BlockMask, SparseConfig, reference
from sparge.backends.hopper import launch, launch_prepare, launch_probe, launch_select
from sparge.backends.hopper.launch import CHIP, HopperBackend
from sparge.backends.triton.launch import TritonBackend
from sparge.backends.triton.launch_select import select_by_parts, shares_of
from sparge.backends.triton.plans import select_plan
from sparge.inputs import Inputs, pack_inputs
from sparge.packing import Packing
from sparge.stages import Blocks, Output

HOPPER, PORTABLE = HopperBackend(), TritonBackend()
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (CHIP // 10, CHIP % 10)
DEVICE = "cuda" if HERE else "cpu"
pytestmark = pytest.mark.skipif(not HERE and not INTERPRETED, reason="needs an H100 or H200")


def fewer(count: Any, interpreted: Any) -> Any:
    """Of launches, tokens or cases: what the interpreter has time for."""
    return interpreted if INTERPRETED else count


LAUNCHES = fewer(10_000, 3 * 32)
HANGS_AFTER = 240  # seconds
KERNELS = tuple(itertools.product(((128, 64), (192, 64), (256, 64), (128, 128)), (64, 96, 128), ("int8-fp8",)))
WIDE_KERNELS = (((128, 64), 256, "int8-fp8"), ((256, 128), 160, "int8-fp8"))
KERNELS_16_BIT = tuple(itertools.product(((128, 64), (256, 64), (128, 128)), (64, 96, 128), ("int8", "none")))


@pytest.fixture
def watchdog():
    """A kernel that waits for a barrier nobody arrives at would wait for ever: end the process, and say where."""
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def any_step(monkeypatch):
    """Makes whole steps wide, and divides the last tiles, where lists are too short for that to pay, or does not."""
    short, costs = launch.WIDE_FROM, (launch.PIECE_KEYS, launch.JOIN_KEYS)

    def choose(rng: random.Random) -> None:
        monkeypatch.setattr(launch, "WIDE_FROM", rng.choice(({False: 0, True: 0}, short)))
        for name, cost in zip(("PIECE_KEYS", "JOIN_KEYS"), rng.choice(((0, 0), costs)), strict=True):
            monkeypatch.setattr(launch, name, cost)
        launch._plan.cache_clear()

    yield choose
    launch._plan.cache_clear()


def block_lists(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """bool [B, H, query blocks, key blocks]: one of the patterns that have broken such kernels elsewhere."""
    kept = torch.zeros(shape, dtype=torch.bool)
    pattern = rng.randrange(8)
    if pattern == 0:
        return kept  # nothing at all
    if pattern == 1:
        kept[..., rng.randrange(shape[-1])] = True  # one block, the same everywhere
    elif pattern == 2:
        kept[:] = True
    elif pattern == 3:
        kept[..., rng.randrange(2) :: 2] = True
    elif pattern == 4:
        kept[:, :, rng.randrange(shape[2])] = True  # all the work in one row of tiles
    elif pattern == 5:
        kept[..., -1] = True  # only the ragged end
    elif pattern == 6:
        kept = torch.rand(shape) < torch.rand(*shape[:3], 1)  # every density in one launch
    else:
        kept = torch.rand(shape) < rng.choice((0.02, 0.3, 0.9))
    return kept


def assert_same_rows(got: Tensor, want: Tensor, quantization: str = "int8-fp8") -> None:
    """Row by row, so that no row hides behind the others.

    Both round e4m3 probabilities to three bits, relative to maxima that may differ by the slack, and Hopper's kernel
    may divide by the sum of the rounded ones. Over few keys that is 1.6 % on average and 5.7 % in the worst of 6,000
    rows, and a rounding that falls the other way adds as much again; over 4,096 keys relative to maxima that differ it
    is 3.2 to 3.8 % (computed in float32). In 16 bits (bfloat16 has eight) it is a thirtieth of that.
    """
    one_row, all_rows = (0.12, 0.04) if quantization == "int8-fp8" else (0.02, 0.005)
    error, size = ((x.abs().sum(-1)) for x in (got - want, want))
    assert (error <= one_row * size).all()  # NaN fails, and so does anything but 0 where 0 is right
    if (size > 0).sum() >= 64:  # rows that saw something: the mean of few is any of them
        assert error.sum() <= all_rows * size.sum()


def of_both(inputs: Inputs, config: SparseConfig) -> tuple[Output, ...]:
    """What Hopper's and the portable kernel give, of the same copies and mask."""
    assert HOPPER.unsupported(inputs, config) is None
    blocks = HOPPER.summarize(inputs, config)
    mask = HOPPER.select(blocks, config)
    return tuple(backend.attend(blocks, mask, config) for backend in (HOPPER, PORTABLE))


def a_problem(rng: random.Random, dim: int) -> Inputs:
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 4))
    q_len, k_len = rng.randint(1, fewer(600, 400)), rng.randint(1, fewer(1500, 1000))
    if rng.random() < 0.3:
        k_len = q_len
    batch, dtype, tokens_first = rng.choice((1, 2)), rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.3

    def normal(heads: int, tokens: int) -> Tensor:
        if tokens_first:
            return torch.randn(batch, tokens, heads, dim, device=DEVICE, dtype=dtype).transpose(1, 2)
        return torch.randn(batch, heads, tokens, dim, device=DEVICE, dtype=dtype)

    q, k, v = normal(kv_heads * group, q_len), normal(kv_heads, k_len), normal(kv_heads, k_len)
    window = rng.choice((None, None, None, (rng.randint(0, 200), rng.randint(0, 200))))
    valid = None
    if rng.random() < 0.2:
        valid = torch.rand(q.shape[0], k_len, device=DEVICE) < rng.choice((0.0, 0.5, 0.95))
        if rng.random() < 0.5:  # one stretch, as padding leaves: most blocks hold no hidden key
            key, (low, high) = torch.arange(k_len, device=DEVICE), sorted(rng.sample(range(k_len + 1), 2))
            valid = ((key >= low) & (key < high)).expand(q.shape[0], -1)
    inputs = problem(q, k, v, is_causal=rng.random() < 0.5, window=window, key_valid=valid)
    return replace(inputs, needs_lse=rng.random() < 0.5)


ALL_KERNELS = KERNELS + WIDE_KERNELS + KERNELS_16_BIT


@pytest.mark.parametrize(("block", "dim", "quantization"), ALL_KERNELS, ids=str)
def test_any_block_lists_give_what_the_portable_kernel_gives(block, dim, quantization, watchdog, any_step):
    rng = random.Random(f"{block} {dim} {quantization}")
    torch.manual_seed(0)
    config = SparseConfig(quantization=quantization, block=block)
    launches = 0
    while launches < LAUNCHES // len(ALL_KERNELS):
        inputs = a_problem(rng, dim)
        any_step(rng)
        assert HOPPER.unsupported(inputs, config) is None
        blocks = HOPPER.summarize(inputs, config)
        batch, heads, q_len, _ = inputs.query.shape
        k_len = inputs.key.shape[2]
        shape = (rng.choice((1, batch)), rng.choice((1, heads)), -(-q_len // block[0]), -(-k_len // block[1]))
        for _ in range(fewer(20, 3)):
            mask = BlockMask.from_dense(block_lists(rng, shape).to(DEVICE), q_len, k_len, block)
            got, want = (backend.attend(blocks, mask, config) for backend in (HOPPER, PORTABLE))
            assert_same_rows(got.values.float(), want.values.float(), quantization)
            if inputs.needs_lse:
                seen = want.lse > -torch.inf
                assert torch.equal(got.lse > -torch.inf, seen)
                torch.testing.assert_close(got.lse[seen], want.lse[seen], atol=1e-3, rtol=1e-4)
            launches += 1


SECOND_STAGE_KERNELS = (
    ((128, 64), 128, "int8-fp8"), ((192, 64), 128, "int8-fp8"), ((256, 128), 64, "int8-fp8"),
    ((128, 64), 64, "int8-fp8"), ((128, 64), 256, "int8-fp8"), ((128, 64), 128, "int8"), ((256, 128), 128, "none"),
)  # fmt: skip


@pytest.mark.parametrize(("block", "dim", "quantization"), SECOND_STAGE_KERNELS, ids=str)
def test_the_second_stage_skips_what_the_portable_kernel_skips(block, dim, quantization, watchdog, any_step):
    rng = random.Random(f"second {block} {dim} {quantization}")
    torch.manual_seed(0)
    skipped, ties = 0, 0
    for _ in range(fewer(100, 5)):
        q_len, k_len, heads = rng.randint(1, fewer(600, 400)), rng.randint(1, fewer(1500, 1000)), rng.choice((1, 4))
        q, k, v = (torch.randn(1, h, n, dim, device=DEVICE, dtype=torch.bfloat16)
                   for h, n in ((heads, q_len), (1, k_len), (1, k_len)))  # fmt: skip
        loud = torch.rand(-(-k_len // block[1]), device=DEVICE).repeat_interleave(block[1])[:k_len, None] < 0.5
        k = torch.where(loud, 3 * k, 0.1 * k)
        inputs = replace(problem(q, k, v, is_causal=rng.random() < 0.5), needs_lse=rng.random() < 0.3)
        config = SparseConfig(quantization=quantization, block=block, pv_threshold=rng.choice((-1.0, -2.0, -4.0)))
        any_step(rng)
        blocks = HOPPER.summarize(inputs, config)
        shape = (1, heads, -(-q_len // block[0]), -(-k_len // block[1]))
        mask = BlockMask.from_dense(block_lists(rng, shape).to(DEVICE), q_len, k_len, block)
        got, want = (backend.attend(blocks, mask, config) for backend in (HOPPER, PORTABLE))
        difference = (got.skipped_pv - want.skipped_pv).abs().sum()
        skipped += want.skipped_pv.sum()
        ties += difference
        if difference == 0:
            assert_same_rows(got.values.float(), want.values.float(), quantization)
    assert skipped > fewer(100, 1)
    assert ties <= skipped // 100


@pytest.mark.parametrize("block", [(128, 64), (256, 128)], ids=str)
@pytest.mark.parametrize("broken", ["values", "a key", "a query"])
def test_wide_steps_of_the_second_stage_skip_nothing_that_is_broken(block, broken, watchdog, monkeypatch):
    """Who sees a value that is not finite must know; a key or a query of NaN is never below a threshold."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64, device=DEVICE, dtype=torch.bfloat16) for n in (300, 1000, 1000))
    loud = torch.arange(1000, device=DEVICE).remainder(256)[:, None] < 64
    k = torch.where(loud, 3 * k, 0.1 * k)
    x, row = {"values": (v, 500), "a key": (k, 500), "a query": (q, 40)}[broken]
    x[0, 1, row, 7] = float("inf" if broken == "values" else "nan")
    config = SparseConfig(quantization="int8-fp8", block=block, rule="topk", topk=1.0, pv_threshold=-2.0)
    monkeypatch.setattr(launch, "WIDE_FROM", {False: 0, True: 0})
    launch._plan.cache_clear()
    blocks = HOPPER.summarize(replace(problem(q, k, v), needs_lse=False), config)
    mask = HOPPER.select(blocks, config)
    got, want = (backend.attend(blocks, mask, config) for backend in (HOPPER, PORTABLE))
    launch._plan.cache_clear()
    assert torch.equal(got.skipped_pv, want.skipped_pv)
    assert got.skipped_pv[0, 0] > 0
    finite = want.values.isfinite()
    assert torch.equal(got.values.isfinite(), finite)
    assert not finite[0, 1].all()
    assert_same_rows(got.values[:, :1].float(), want.values[:, :1].float())


@pytest.mark.parametrize("block", [(128, 64), (192, 64), (256, 128)], ids=str)
def test_packed_sequences_give_what_the_portable_kernel_gives(block, watchdog, any_step):
    rng = random.Random(f"packed {block}")
    torch.manual_seed(0)
    for _ in range(fewer(40, 6)):
        kv_heads, group, dim = rng.choice((1, 2)), rng.choice((1, 4)), rng.choice((64, 128))
        lengths = (0, 1, rng.randint(2, fewer(700, 300)), rng.randint(2, fewer(4000, 500)))
        q_lens, k_lens = ([rng.choice(lengths) for _ in range(rng.randint(1, 6))] for _ in range(2))
        k_lens = (k_lens * 6)[: len(q_lens)]
        if sum(q_lens) == 0 or sum(k_lens) == 0:
            continue
        q = torch.randn(sum(q_lens), kv_heads * group, dim, device=DEVICE, dtype=torch.bfloat16)
        k, v = (torch.randn(sum(k_lens), kv_heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        ends = Packing(*(torch.tensor([0, *itertools.accumulate(x)], device=DEVICE).int() for x in (q_lens, k_lens)))
        longest, is_causal, needs_lse = (max(q_lens), max(k_lens)), rng.random() < 0.5, rng.random() < 0.5
        inputs = pack_inputs(q, k, v, ends, longest, is_causal, None, None, needs_lse)
        config = SparseConfig(quantization="int8-fp8", block=block, rule="topk", topk=rng.choice((0.3, 1.0)))
        any_step(rng)
        got, want = of_both(inputs, config)
        assert_same_rows(got.values.float(), want.values.float())
        if needs_lse:
            torch.testing.assert_close(got.lse, want.lse, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (64, 128), (128, 200)])
def test_values_of_another_width_give_what_the_portable_kernel_gives(dim, value_dim, watchdog, any_step):
    """192 channels of keys and 128 of values are what latent attention has."""
    rng = random.Random(f"widths {dim} {value_dim}")
    torch.manual_seed(0)
    config = SparseConfig(quantization="int8-fp8", rule="topk", topk=0.6)
    for _ in range(fewer(20, 2)):
        q_len, k_len = rng.randint(1, fewer(600, 300)), rng.randint(300, fewer(5000, 700))
        q, k, v = (torch.randn(1, 2, n, d, device=DEVICE, dtype=torch.bfloat16)
                   for n, d in ((q_len, dim), (k_len, dim), (k_len, value_dim)))  # fmt: skip
        inputs = replace(problem(q, k, v, is_causal=rng.random() < 0.5), needs_lse=rng.random() < 0.3)
        any_step(rng)
        got, want = of_both(inputs, config)
        assert_same_rows(got.values.float(), want.values.float())


@pytest.mark.parametrize("k_len", [40, 64, 150, 192])
def test_rows_whose_scores_are_all_far_below_zero(k_len, watchdog):
    """Empty units have scale 0; what hides them must not pass for a score of 0, the best of such a row."""
    direction = torch.randn(64, device=DEVICE)
    q = (4 * direction).expand(1, 1, k_len, 64).to(torch.bfloat16)
    k = torch.where(torch.arange(k_len, device=DEVICE)[:, None] < k_len // 2, -direction, direction)
    k, v = (k[None, None].to(torch.bfloat16), torch.randn(1, 1, k_len, 64, device=DEVICE, dtype=torch.bfloat16))
    inputs, config = problem(q, k, v, is_causal=True), SparseConfig(quantization="int8-fp8", rule="topk", topk=1.0)
    blocks = HOPPER.summarize(inputs, config)
    mask = HOPPER.select(blocks, config)
    got, want = (backend.attend(blocks, mask, config) for backend in (HOPPER, PORTABLE))
    assert want.values.abs().sum(-1).min() > 0
    assert_same_rows(got.values.float(), want.values.float())
    torch.testing.assert_close(got.lse, want.lse, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("scores", [2.0**10, 2.0**24, 2.0**30])
def test_wide_steps_with_scores_beyond_measure(scores, watchdog, monkeypatch):
    """Probabilities made by arithmetic are whole numbers of 16 bits: too large an exponent would turn their sign."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, fewer(4096, 512), 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    config = SparseConfig(rule="topk", topk=1.0, quantization="int8-fp8")
    louder = (scores / 5) ** 0.5  # a row's largest score is about 5
    inputs = replace(problem(q * louder, k * louder, v), needs_lse=False)
    monkeypatch.setattr(launch, "WIDE_FROM", {False: 0})
    launch._plan.cache_clear()
    blocks = HOPPER.summarize(inputs, config)
    out = HOPPER.attend(blocks, HOPPER.select(blocks, config), config).values.float()
    if scores < 2.0**26:  # means of values
        assert (out.abs() <= 1.1 * v.abs().max()).all()
        assert (out != 0).any(-1).all()
    else:
        assert out.isnan().all()


@pytest.mark.parametrize("loud", [3.0, 12.0, 30.0])
@pytest.mark.parametrize(
    ("block", "dim"), [((128, 64), 128), ((128, 64), 256), ((192, 64), 64), ((256, 128), 64)], ids=str
)
def test_a_rows_best_may_jump_by_any_number_of_octaves(block, dim, loud, watchdog, any_step):
    """What was made before it did moves along; loud rows beside quiet ones take other ways to their numbers."""
    rng = random.Random(f"jumps {block} {dim} {loud}")
    torch.manual_seed(0)
    config = SparseConfig(quantization="int8-fp8", block=block, rule="topk", topk=1.0)
    for _ in range(fewer(40, 3)):
        q_len, k_len, heads = rng.randint(1, fewer(600, 300)), rng.randint(300, fewer(3000, 1200)), 2
        q, k, v = (torch.randn(1, heads, n, dim, device=DEVICE) for n in (q_len, k_len, k_len))
        q *= torch.tensor([1.0, loud], device=DEVICE)[:, None, None] * torch.rand(q_len, 1, device=DEVICE) * 2
        k *= torch.rand(-(-k_len // 64), device=DEVICE).pow(4).repeat_interleave(64)[:k_len, None] * loud
        inputs = problem(*(x.bfloat16() for x in (q, k, v)), is_causal=rng.random() < 0.5)
        any_step(rng)
        got, want = of_both(replace(inputs, needs_lse=False), config)
        assert_same_rows(got.values.float(), want.values.float())


@pytest.mark.parametrize("quantization", ["int8-fp8", "int8", "none"])
def test_repeated_runs_are_bit_identical(quantization, watchdog):
    """Programs draw tiles in any order; no result may depend on it."""
    config = SparseConfig(quantization=quantization, rule="topk", topk=0.3)
    shape = fewer((1, 8, 3000, 128), (1, 2, 700, 128))
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    blocks = HOPPER.summarize(problem(q, k, v, is_causal=True), config)
    mask = HOPPER.select(blocks, config)
    first = HOPPER.attend(blocks, mask, config)
    for _ in range(fewer(50, 3)):
        again = HOPPER.attend(blocks, mask, config)
        assert torch.equal(first.values, again.values)
        assert torch.equal(first.lse, again.lse)


@pytest.mark.parametrize(("dim", "needs_lse"), [(128, False), (64, True)])
def test_divided_tiles_give_what_whole_ones_give_every_time(dim, needs_lse, watchdog, monkeypatch):
    """Whoever ends last adds up what the others left, in the order of the list; 512 queries are too few for all."""
    torch.manual_seed(0)
    config = SparseConfig(quantization="int8-fp8", rule="topk", topk=0.4)
    heads, q_len, k_len = fewer(8, 2), fewer(512, 256), fewer(32_768, 2000)
    q, k, v = (torch.randn(1, heads, n, dim, device=DEVICE, dtype=torch.bfloat16) for n in (q_len, k_len, k_len))
    blocks = HOPPER.summarize(replace(problem(q, k, v), needs_lse=needs_lse), config)
    mask = HOPPER.select(blocks, config)
    for name, cost in {"PIECE_KEYS": 0, "JOIN_KEYS": 0, "WIDE_FROM": {False: 0, True: 0}}.items():
        monkeypatch.setattr(launch, name, cost)
    launch._plan.cache_clear()
    assert launch._pieces(q_len // 128 * heads, launch._processors(q.device), k_len).count > 1
    first = HOPPER.attend(blocks, mask, config)
    for _ in range(fewer(50, 5)):
        again = HOPPER.attend(blocks, mask, config)
        assert torch.equal(first.values, again.values)
        assert not needs_lse or torch.equal(first.lse, again.lse)
    monkeypatch.setattr(launch, "MOST_PIECES", 1)
    launch._plan.cache_clear()
    whole = HOPPER.attend(blocks, mask, config)
    launch._plan.cache_clear()
    assert_same_rows(first.values.float(), whole.values.float())
    if needs_lse:
        torch.testing.assert_close(first.lse, whole.lse, atol=1e-4, rtol=1e-5)


def test_what_the_kernel_does_not_take_is_said():
    q = torch.randn(1, 2, 256, 192, device=DEVICE, dtype=torch.bfloat16)
    config = SparseConfig(quantization="int8-fp8")
    assert HOPPER.unsupported(problem(q, q, q), config) is None
    assert "head_dim" in HOPPER.unsupported(problem(*(q[..., :32],) * 3), config)
    assert "blocks of" in HOPPER.unsupported(problem(q, q, q), replace(config, block=(64, 64)))
    assert "int8-fp8 only" in HOPPER.unsupported(problem(q, q, q), replace(config, quantization="none"))


PROCESSORS = fewer((132, 3), (3,))  # as many as there are; few, so that each program takes many tiles


def shares_by_probe(blocks: Blocks, config: SparseConfig, processors: int) -> Tensor:
    """`Blocks.probed` as Hopper's kernel leaves it, key blocks rounded up to whole words."""
    ran = []

    def own_probe(blocks, config, plan, part, shares):
        shares.fill_(float("nan"))
        ran.append(launch_probe.probe(blocks, config, plan, part, shares, processors))
        return ran[-1]

    plan = select_plan(blocks.inputs.signature, config, CHIP)
    shares = torch.cat([shares_of(blocks, config, plan, part, own_probe) for part in plan.parts])
    assert all(ran)
    return shares.unflatten(0, blocks.inputs.query.shape[:2])


def assert_same_shares(inputs: Inputs, config: SparseConfig, processors: int = PROCESSORS[0]) -> None:
    """From the same copies, so that rounding them differently does not count."""
    blocks = HOPPER.summarize(inputs, config)
    got, want = shares_by_probe(blocks, config, processors), reference.probe(blocks, config)
    assert (got[..., want.shape[3] :] == 0).all()
    # In float16 neighbours are a two-thousandth apart.
    torch.testing.assert_close(got[..., : want.shape[3]].float(), want.float(), atol=2e-4, rtol=2e-3)


def sampled_problem(q_len: int, k_len: int, dim: int, heads: int = 4, kv_heads: int = 2, batch: int = 1, tokens_first:
                    bool = False, loud: float = 2.0, **settings) -> Inputs:  # fmt: skip
    def normal(heads: int, tokens: int) -> Tensor:
        if tokens_first:
            return torch.randn(batch, tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        return torch.randn(batch, heads, tokens, dim, device=DEVICE, dtype=torch.bfloat16)

    q, k = normal(heads, q_len), normal(kv_heads, k_len)
    return problem(loud * q, k, torch.randn_like(k), **settings)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("warpgroups", [1, 2, 4])
@pytest.mark.parametrize(
    ("block", "dim", "probe_rows"),
    [((64, 64), 128, 1), ((128, 64), 64, 2), ((128, 64), 128, 4), ((128, 128), 80, 4), ((192, 64), 64, 8),
     ((256, 128), 128, 2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("quantization", ["none", "int8-fp8"])
def test_the_probe_gives_the_shares_of_the_oracle(
    quantization, block, dim, probe_rows, warpgroups, is_causal, watchdog, monkeypatch
):
    monkeypatch.setattr(launch_probe, "STEP_CYCLES", {warpgroups: 1})
    monkeypatch.setattr(launch_probe, "_launch", launch_probe._launch.__wrapped__)  # nothing is remembered
    torch.manual_seed(0)
    config = SparseConfig(quantization=quantization, block=block, rule="probe", probe_rows=probe_rows)
    for q_len, k_len in fewer(((1000, 1300), (1300, 1000), (1, 1), (2048, 2048)), ((300, 430), (1, 1))):
        assert_same_shares(sampled_problem(q_len, k_len, dim, is_causal=is_causal), config)
    many = sampled_problem(
        *fewer((3000, 3000), (260, 260)), dim, heads=fewer(40, 4), kv_heads=fewer(8, 2), batch=2, tokens_first=True,
        is_causal=is_causal,
    )  # fmt: skip
    for processors in PROCESSORS:
        assert_same_shares(many, config, processors)


@pytest.mark.parametrize("loud", [0.0, 1.0, 10.0, 100.0])
def test_the_probe_of_long_keys(loud, watchdog):
    """Scores that jump by more than the slack, or not at all."""
    torch.manual_seed(0)
    config = SparseConfig(quantization="none", rule="probe")
    q_len, k_len = fewer(4000, 300), fewer(40_000, 2500)
    inputs = sampled_problem(q_len, k_len, 128, heads=fewer(8, 2), loud=loud, is_causal=True)
    rising = torch.linspace(0.1, 3.0, k_len, device=DEVICE)[:, None].bfloat16()
    for key in (inputs.key, inputs.key * rising, inputs.key * rising.flip(0)):
        for processors in PROCESSORS:
            assert_same_shares(replace(inputs, key=key), config, processors)


def test_the_probe_of_rows_that_are_not_finite(watchdog):
    torch.manual_seed(0)
    config = SparseConfig(quantization="none", rule="probe", probe_rows=1)
    inputs = sampled_problem(1024, 1024, 128, is_causal=True)
    inputs.query[0, 0, 64::256] = float("nan")
    inputs.key[0, 1, 700] = float("nan")
    assert_same_shares(inputs, config)


@pytest.mark.parametrize("part", range(10))  # so that machines with many cores share the compilation
def test_any_problem_has_the_shares_of_the_oracle(part, watchdog):
    rng = random.Random(f"probe {part}")
    torch.manual_seed(part)
    for _ in range(fewer(30, 2)):
        kv_heads, group, batch = rng.choice((1, 2, fewer(8, 3))), rng.choice((1, 2, 4)), rng.choice((1, 2))
        q_len, k_len = rng.randint(1, fewer(3000, 700)), rng.randint(1, fewer(3000, 1000))
        window = rng.choice((None, None, (None, rng.randint(0, 300))))
        inputs = sampled_problem(
            q_len, k_len, rng.choice((64, 128)), kv_heads * group, kv_heads, batch, rng.random() < 0.3,
            rng.choice((0.5, 2.0, 8.0)), is_causal=window is None and rng.random() < 0.7, window=window,
        )  # fmt: skip
        config = SparseConfig(
            quantization=rng.choice(("none", "int8", "int8-fp8")), rule="probe",
            block=(rng.choice((128, 192, 256)), rng.choice((64, 128))), probe_rows=rng.choice((1, 2, 4, 8)),
        )  # fmt: skip
        assert_same_shares(inputs, config, rng.choice((132, 40, 7, 1)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_probe_keeps_what_the_portable_kernel_keeps(is_causal, watchdog):
    torch.manual_seed(0)
    config = SparseConfig(quantization="none", rule=("gap", "probe"))
    inputs = sampled_problem(*fewer((6000, 6000), (900, 900)), 128, heads=fewer(16, 4), is_causal=is_causal)
    blocks = HOPPER.summarize(inputs, config)
    got, want = (backend.select(blocks, config).to_dense() for backend in (HOPPER, PORTABLE))
    assert (got != want).float().mean() <= 1e-3  # ties
    for _ in range(fewer(50, 2)):
        assert torch.equal(HOPPER.select(blocks, config).bits, HOPPER.select(blocks, config).bits)


def differing_bits(a: Tensor, b: Tensor) -> int:
    return sum(int(((a ^ b) >> n & 1).sum()) for n in range(32))


def both_selections(inputs: Inputs, config: SparseConfig) -> tuple[BlockMask, BlockMask]:
    """Hopper's and the portable one, of the same means and shares."""
    blocks, ran = HOPPER.summarize(inputs, config), []

    def own_probe(*arguments):
        return launch_probe.probe(*arguments, PROCESSORS[0])

    def own_select(*arguments):
        arguments[-1].fill_(-1)
        ran.append(launch_select.select(*arguments, PROCESSORS[0]))
        return ran[-1]

    want = select_by_parts(blocks, config, CHIP, own_probe)
    got = select_by_parts(blocks, config, CHIP, own_probe, own_select)
    assert ran == [True]
    return got, want


@pytest.mark.parametrize("warpgroups", [1, 2, 4])
@pytest.mark.parametrize("step", [60.0, 100.0, 130.0])
def test_selection_where_hidden_keys_score_highest(step, warpgroups, watchdog, monkeypatch):
    """By so many bits from each quarter of the keys to the next: nothing a row sees may be relative to them."""
    monkeypatch.setattr(launch_select, "STEP_CYCLES", {warpgroups: 1})
    monkeypatch.setattr(launch_select, "_launch", launch_select._launch.__wrapped__)  # nothing is remembered
    torch.manual_seed(0)
    length = fewer(8192, 2048)
    inputs = sampled_problem(length, length, 128, heads=2, is_causal=True)
    inputs.query[...] = 1
    rising = torch.arange(length, device=DEVICE) // (length // 4) * (step / 128 / inputs.scale / 1.4427)
    inputs.key[...] = (rising[:, None] + 0.1 * torch.randn_like(inputs.key)).to(inputs.key.dtype)
    for block in ((128, 64), (256, 64)):
        got, want = both_selections(inputs, SparseConfig(quantization="int8-fp8", block=block))
        assert 0 < int(want.kept_per_head.sum()) < int(want.visible_per_head.sum())
        assert differing_bits(got.bits, want.bits) <= int(want.kept_per_head.sum()) // 200


@pytest.mark.parametrize("warpgroups", [1, 2, 4])
@pytest.mark.parametrize("part", range(3))
def test_selection_keeps_what_the_portable_kernel_keeps(part, warpgroups, watchdog, monkeypatch):
    """Of the same means and shares."""
    monkeypatch.setattr(launch_select, "STEP_CYCLES", {warpgroups: 1})
    monkeypatch.setattr(launch_select, "_launch", launch_select._launch.__wrapped__)  # nothing is remembered
    rng = random.Random(f"selection {part} {warpgroups}")
    torch.manual_seed(part)
    block = ((128, 64), (256, 128), (192, 64))[part]
    differing, kept = 0, 0
    for _ in range(fewer(15, 3)):
        kv_heads, group, batch = rng.choice((1, 2)), rng.choice((1, 4)), rng.choice((1, 2))
        q_len, k_len = rng.randint(1, fewer(6000, 700)), rng.randint(1, fewer(12_000, 3000))
        window = rng.choice((None, None, (None, rng.randint(0, 3000))))
        inputs = sampled_problem(
            q_len, k_len, rng.choice((64, 96, 128)), kv_heads * group, kv_heads, batch, rng.random() < 0.3,
            rng.choice((0.5, 2.0, 8.0)), is_causal=window is None and rng.random() < 0.5, window=window,
        )  # fmt: skip
        if rng.random() < 0.3:
            inputs.value[-1, -1, k_len // 2, 3] = float("inf")
        if rng.random() < 0.3:
            inputs.query[0, 0, q_len // 2] = float("nan")
        heads = kv_heads * group
        gap = rng.choice((3.0, tuple(rng.uniform(0.5, 6.0) for _ in range(heads))))
        threshold = {"rule": "threshold", "threshold": rng.choice((0.001, 0.02))}
        means = ({"gap": gap}, {"rule": ("threshold", "gap")}, {"rule": "gap", "gap": gap}, threshold)
        rules = rng.choice(({}, {"rule": "probe"}, *means))
        config = SparseConfig(quantization="int8-fp8", block=block, sinks=rng.choice((0, 1, 40)), **rules)
        assert launch_select.takes(inputs.signature, config)
        got, want = both_selections(inputs, config)
        differing += differing_bits(got.bits, want.bits)
        kept += int(want.kept_per_head.sum())
    assert differing <= kept // 2000  # ties: weights are added up in another order


@pytest.mark.parametrize("warpgroups", [1, 2, 4])
def test_values_beside_the_probe_are_what_they_are_alone(warpgroups, watchdog, monkeypatch):
    """Bit for bit, and the mask too."""
    monkeypatch.setattr(launch_probe, "STEP_CYCLES", {warpgroups: 1})
    monkeypatch.setattr(launch_probe, "_launch", launch_probe._launch.__wrapped__)  # nothing is remembered
    rng = random.Random(f"values {warpgroups}")
    torch.manual_seed(warpgroups)
    config, taken = SparseConfig(quantization="int8-fp8"), 0
    while taken < fewer(20, 3):
        inputs = replace(a_problem(rng, rng.choice((64, 80, 128))), needs_lse=False)
        spoilt = rng.choice((None, float("inf"), float("nan"), 3e4))
        if spoilt is not None:
            inputs.value[0, -1, rng.randrange(inputs.value.shape[2]), 3] = spoilt
        alone, beside = HOPPER.summarize(inputs, config), HOPPER.summarize(inputs, config)
        if beside.put_off is None:
            continue
        taken += 1
        alone.finish()
        beside.quantized.value.view(torch.int8).fill_(77)
        masks = [HOPPER.select(blocks, config) for blocks in (alone, beside)]
        assert not beside.put_off.passes
        assert torch.equal(masks[0].bits, masks[1].bits)
        assert_same_numbers(beside.v_finite, alone.v_finite)
        for name in ("value", "value_scale", "value_mean"):
            assert_same_numbers(getattr(beside.quantized, name), getattr(alone.quantized, name))


def assert_same_numbers(got: Tensor, want: Tensor) -> None:
    """NaN in the same places too."""
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("part", range(4))
def test_preparation_gives_what_the_portable_one_gives(part, watchdog):
    """Bit for bit: both let the tensor core rotate and add, and round alike."""
    rng = random.Random(f"preparation {part}")
    torch.manual_seed(part)
    block, subblocks = rng.choice((((128, 64), (4, 2)), ((256, 128), (8, 4)), ((64, 64), (1, 8)), ((128, 128), (8, 2))))
    config = SparseConfig(quantization="int8-fp8", block=block, subblocks=subblocks)
    taken = 0
    while taken < fewer(12, 3):
        inputs = replace(a_problem(rng, rng.choice((64, 80, 128))), needs_lse=False)
        if not launch_prepare.takes(inputs.signature, config):
            continue
        taken += 1
        spoilt = rng.choice((inputs.key, inputs.value, None))
        if spoilt is not None:
            spoilt[0, -1, spoilt.shape[2] // 2, 3] = rng.choice((float("inf"), float("nan"), 3e4))
        got, want = HOPPER.summarize(inputs, config), PORTABLE.summarize(inputs, config)
        got.finish()
        for name in ("q_means", "k_means", "v_finite"):
            assert_same_numbers(getattr(got, name), getattr(want, name))
        for name in ("query", "query_scale", "key", "key_scale", "value", "value_scale", "value_mean"):
            assert_same_numbers(getattr(got.quantized, name), getattr(want.quantized, name))
