"""Every backend against the oracle: the same random problem, the same mask, values, LSE and second-stage skips.

Kernels may be compiled per head_dim, block and dtype, so cases are drawn around a fixed set of those.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from problems import BY_NAME, INTERPRETED, on_its_device, problem, relative_l1, tensors
from torch import Tensor

from sparge import BlockMask, SparseConfig, reference
from sparge.config import BLOCK_KEYS, BLOCK_ROWS, RULES, SUBBLOCKS
from sparge.inputs import Inputs
from sparge.stages import Output

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {"cpu": 320, "torch": 60, "triton": 16 if INTERPRETED else 1000}
OTHERWISE = 100
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = tuple((rows, keys) for rows in BLOCK_ROWS for keys in BLOCK_KEYS)
DIMS = (16, 17, 31, 33, 48, 64, 80, 96, 127, 128, 191, 256)
MAX_ERROR, RMS_ERROR, LSE_ERROR = 4e-5, 2e-6, 3e-5  # beside the rounding of the output's dtype
TIE = 1e-4  # second-stage decisions this close to the threshold may fall either way
TIES_ALLOWED = 3

ties: Counter[str] = Counter()


@dataclass(frozen=True)
class Kernel:
    """What a backend may compile for."""

    dim: int
    v_dim: int
    block: tuple[int, int]
    dtype: torch.dtype
    filtered: bool  # second stage on


@dataclass(frozen=True)
class Case:
    inputs: Inputs
    config: SparseConfig
    mask: BlockMask


def kernels() -> list[Kernel]:
    rng = random.Random(2502)
    chosen = []
    for n in range(40):
        dim = DIMS[n % len(DIMS)] if n < 24 else rng.randint(16, 256)
        v_dim = rng.choice((dim, dim, rng.choice(DIMS), rng.randint(16, 256)))
        chosen.append(Kernel(dim, v_dim, BLOCKS[n * 5 % len(BLOCKS)], DTYPES[n // 2 % 3], n % 2 == 1))
    return chosen


KERNELS = kernels()


def a_length(rng: random.Random) -> int:
    return rng.choice((1, rng.randint(2, 70), rng.randint(120, 135), rng.randint(1, 400), rng.randint(200, 400)))


def oddly_strided(x: Tensor, rng: random.Random) -> Tensor:
    """The same values behind other strides."""
    kind = rng.choice(("contiguous", "heads after tokens", "inside a larger one", "channels first", "every second"))
    if kind == "heads after tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "inside a larger one":
        larger = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
        part = larger[tuple(slice(1, size + 1) for size in x.shape)]
        return part.copy_(x)
    if kind == "channels first":
        return x.mT.contiguous().mT
    if kind == "every second":
        return x.repeat_interleave(2, -1)[..., ::2]
    return x


def one_or_per_head(rng: random.Random, heads: int, low: float, high: float) -> float | tuple[float, ...]:
    if rng.random() < 0.5:
        return rng.uniform(low, high)
    return tuple(rng.uniform(low, high) for _ in range(heads))


def a_config(rng: random.Random, kernel: Kernel, heads: int) -> SparseConfig:
    rules = tuple(rng.sample(RULES, rng.choice((1, 1, 2, 4))))
    ranges = {"threshold": (0.03, 0.5), "gap": (0.2, 2.0), "cdf": (0.2, 0.8), "topk": (0.1, 0.6)}
    return SparseConfig(
        rule=rules,
        **{name: one_or_per_head(rng, heads, *ranges[name]) for name in rules},
        subblocks=(rng.choice(SUBBLOCKS), rng.choice(SUBBLOCKS)),
        similarity=rng.choice((None, None, one_or_per_head(rng, heads, -0.1, 0.3))),
        pv_threshold=one_or_per_head(rng, heads, -4.0, -0.1) if kernel.filtered else None,
        quantization="none",
        block=kernel.block,
        sinks=rng.choice((0, 1, 2)),
        protected=rng.choice(((), (), ((0, 3),), ((-40, None), (70, 75)))),
    )


def a_mask(rng: random.Random, inputs: Inputs, config: SparseConfig) -> BlockMask:
    """Usually the predicted one; sometimes any blocks at all, for one or every batch entry and head."""
    if rng.random() < 0.7:
        return reference.select(reference.summarize(inputs, config), config)
    batch, heads, q_len, _ = inputs.query.shape
    k_len, (rows, keys) = inputs.key.shape[2], config.block
    shape = (rng.choice((1, batch)), rng.choice((1, heads)), -(-q_len // rows), -(-k_len // keys))
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(rng.randint(0, 9999))) < rng.random()
    return BlockMask.from_dense(kept, q_len, k_len, config.block)


def a_case(seed: int) -> Case:
    rng = random.Random(seed)
    kernel = KERNELS[seed % len(KERNELS)]
    batch, kv_heads, group = rng.randint(1, 2), rng.randint(1, 2), rng.choice((1, 1, 2, 3))
    q_len, k_len = a_length(rng), a_length(rng)
    if rng.random() < 0.4:
        k_len = q_len
    elif q_len < 140 and rng.random() < 0.4:
        k_len = rng.randint(1100, 1400)  # more key blocks than bits in a word
    sizes = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads, "q_len": q_len, "k_len": k_len}
    q, k, v = tensors(
        seed, **sizes, dim=kernel.dim, v_dim=kernel.v_dim, dtype=kernel.dtype, contrast=rng.choice((0.0, 2.0, 6.0))
    )
    q, k, v = (oddly_strided(x, rng) for x in (q, k, v))
    layout = rng.choice(("BHSD", "BSHD"))
    if layout == "BSHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    side = (None, -1, 0, rng.randint(1, 30), rng.randint(1, 300))
    valid = None
    if rng.random() < 0.35:
        valid = torch.rand(batch, k_len, generator=torch.Generator().manual_seed(seed)) < rng.choice((0.0, 0.2, 0.9))
    inputs = problem(
        q,
        k,
        v,
        is_causal=rng.random() < 0.5,
        window=rng.choice((None, None, (rng.choice(side), rng.choice(side)))),
        key_valid=valid,
        scale=rng.choice((None, None, 0.0, *(x / kernel.dim**0.5 for x in (-1.0, 0.5, 2.0)))),
        layout=layout,
    )
    config = a_config(rng, kernel, kv_heads * group)
    return Case(inputs, config, a_mask(rng, inputs, config))


# ---- comparison


def assert_close(got: Tensor, want: Tensor, largest_value: float = 0.0) -> None:
    """Both the worst and the typical error, beside the rounding of the dtype.

    A backend that rounds its probabilities to the dtype errs in proportion to the values they weigh.
    """
    assert got.dtype == want.dtype
    eps = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    got, want = got.double(), want.double()
    error = (got - want).abs()
    assert not error.isnan().any(), "NaN: memory that was not written, or rows that should be zero"
    assert (error <= MAX_ERROR + eps * (want.abs() + largest_value)).all(), f"worst error {error.max():.2e}"
    allowed = RMS_ERROR + eps / 4 * (want.square().mean().sqrt() + largest_value / 4)
    assert error.square().mean().sqrt() <= allowed, f"rms error {error.square().mean().sqrt():.2e}"


def assert_same_lse(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype == torch.float32
    nothing = want == -torch.inf
    assert torch.equal(got == -torch.inf, nothing)
    torch.testing.assert_close(got[~nothing], want[~nothing], atol=LSE_ERROR, rtol=1e-5)


def skipped_with(case: Case, nudge: float) -> Tensor:
    """How many groups the oracle skips with every threshold moved a little."""
    limits = case.config.per_head("pv_threshold", case.inputs.query.shape[1], torch.device("cpu"))
    config = replace(case.config, pv_threshold=tuple((limits + nudge).tolist()))
    return reference.attend(reference.summarize(case.inputs, config), case.mask, config).skipped_pv


def undisputed(case: Case, got: Tensor, want: Tensor, backend: str) -> Tensor:
    """bool [B, H]: heads whose second-stage decisions agree; the others must be rounding ties, which are counted."""
    same = got == want
    if not same.all():
        fewest, most = skipped_with(case, -TIE), skipped_with(case, TIE)
        assert ((fewest <= got) & (got <= most)).all(), "second-stage decisions differ by more than rounding"
        ties[backend] += int((~same).sum())
    return same


def each_case(most: int = 10**6, own_selection: bool = False):
    cases = []
    for name, backend in BY_NAME.items():
        if own_selection and backend.select is reference.select:
            continue
        skip = pytest.mark.skipif(bool(backend.unavailable()), reason=str(backend.unavailable()))
        count = 0 if name == "reference" else min(most, CASES.get(name, OTHERWISE))
        if backend.unavailable():
            count = min(count, 1)  # one skip says it
        cases += [pytest.param(name, seed, marks=skip, id=f"{name}-{seed}") for seed in range(count)]
    return pytest.mark.parametrize(("backend", "seed"), cases)


@each_case()
def test_backend_equals_oracle(backend, seed, poisoned):
    case = a_case(seed)
    stages = BY_NAME[backend]
    refusal = stages.unsupported(case.inputs, case.config)
    if refusal:
        pytest.skip(refusal)
    blocks = stages.summarize(on_its_device(backend, case.inputs), case.config)
    torch.set_num_threads(1 + seed % 3)
    mask = replace(case.mask, bits=case.mask.bits.to(blocks.inputs.query.device))
    got = stages.attend(blocks, mask, case.config)
    got = Output(got.values.cpu(), got.lse.cpu(), got.skipped_pv.cpu())
    torch.set_num_threads(1)
    want = reference.attend(reference.summarize(case.inputs, case.config), case.mask, case.config)

    assert got.values.shape == want.values.shape
    assert got.lse.shape == want.lse.shape
    same = undisputed(case, got.skipped_pv, want.skipped_pv, backend)
    largest = float(case.inputs.value.abs().max()) if backend == "triton" else 0.0
    assert_close(got.values[same], want.values[same], largest)
    assert_same_lse(got.lse[same], want.lse[same])


@each_case(most=8 if INTERPRETED else 200, own_selection=True)
def test_backend_selects_the_oracles_mask(backend, seed, poisoned):
    case = a_case(seed)
    stages = BY_NAME[backend]
    refusal = stages.unsupported(case.inputs, case.config)
    if refusal:
        pytest.skip(refusal)
    want = reference.select(reference.summarize(case.inputs, case.config), case.config)
    got = stages.select(stages.summarize(on_its_device(backend, case.inputs), case.config), case.config)
    assert got.block == want.block == case.config.block
    assert (got.to_dense().cpu() != want.to_dense()).sum() <= 1  # a rounding tie
    assert torch.equal(got.visible_per_head.cpu(), want.visible_per_head)


@each_case(most=6 if INTERPRETED else 200)
@pytest.mark.parametrize("quantization", ["int8", "int8-fp8"])
def test_quantized_backend_equals_oracle(backend, seed, quantization, poisoned):
    case = a_case(seed)
    stages, config = BY_NAME[backend], replace(case.config, quantization=quantization)
    inputs = on_its_device(backend, case.inputs)
    refusal = stages.unsupported(inputs, config)
    if refusal:
        pytest.skip(refusal)
    blocks = stages.summarize(inputs, config)
    got = stages.attend(blocks, replace(case.mask, bits=case.mask.bits.to(inputs.query.device)), config)
    want = reference.attend(reference.summarize(case.inputs, config), case.mask, config)
    same = undisputed(replace(case, config=config), got.skipped_pv.cpu(), want.skipped_pv, f"{backend}, {quantization}")
    values, wanted = got.values.cpu()[same], want.values[same]
    assert not values.isnan().any()
    if wanted.any():
        assert relative_l1(values, wanted) < 4e-3  # roundings that fall the other way, not another computation
    assert torch.equal(got.lse.cpu() == -torch.inf, want.lse == -torch.inf)
    seen = (want.lse > -torch.inf) & same[..., None]
    torch.testing.assert_close(got.lse.cpu()[seen], want.lse[seen], atol=0.03, rtol=1e-3)


def test_rounding_ties_were_rare():
    assert all(count <= TIES_ALLOWED for count in ties.values()), dict(ties)


def test_the_cases_cover_what_they_claim():
    """All block sizes, dtypes and awkward shapes; masks that skip and rows that see nothing; skips in both stages."""
    assert {kernel.block for kernel in KERNELS} == set(BLOCKS)
    assert {kernel.dtype for kernel in KERNELS} == set(DTYPES)
    assert {kernel.dim for kernel in KERNELS} >= set(DIMS)
    assert any(kernel.dim != kernel.v_dim for kernel in KERNELS)
    seen: Counter[str] = Counter()
    for seed in range(200):
        case = a_case(seed)
        inputs, kept = case.inputs, case.mask.to_dense()
        seen["sparse"] += 0.1 < case.mask.sparsity.item() < 0.9
        seen["several words"] += case.mask.k_blocks > 32
        seen["strided"] += any(x.stride(-1) != 1 for x in (inputs.query, inputs.key, inputs.value))
        seen["grouped"] += inputs.group_size > 1
        seen["padded"] += inputs.visibility.key_valid is not None
        seen["empty rows"] += not (kept & inputs.visibility.blocks(*case.mask.block)).any(-1).all()
        seen["one query"] += inputs.query.shape[2] == 1
        if case.config.pv_threshold is not None:
            seen["skipped"] += bool(skipped_with(case, 0.0).any())
    assert min(seen.values()) >= 8, dict(seen)
    assert len(seen) == 8
