"""Every backend against the oracle: the same random problem, the same mask, values, LSE and second-stage skips.

Kernels may be compiled per head_dim, block, dtype and kind of setting, so those are drawn from a fixed number of
flavours; lengths, values and thresholds are drawn anew for each case.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from problems import (
    BY_NAME,
    INTERPRETED,
    each_backend,
    hopper_slack,
    on_its_device,
    problem,
    randn,
    relative_l1,
    run,
    tensors,
)
from torch import Tensor

from sparge import BlockMask, SparseConfig, backends, reference, varlen_attention
from sparge.config import BLOCK_KEYS, BLOCK_ROWS, PROBE_ROWS, RULES, SUBBLOCKS
from sparge.inputs import Inputs, pack_inputs
from sparge.packing import Packing
from sparge.stages import Blocks, Output

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {"dense": 0, "cpu": 320, "torch": 60, "triton": 16 if INTERPRETED else 400, "hopper": 0}
QUANTIZED_CASES = {"int8": 6 if INTERPRETED else 250, "int8-fp8": 6 if INTERPRETED else 400}
HOPPER_CASES = 32 if INTERPRETED else 200
OTHERWISE = 100
FLAVOURS = 200
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = tuple((rows, keys) for rows in BLOCK_ROWS for keys in BLOCK_KEYS)
HOPPER_BLOCKS = ((192, 64), (128, 64), (256, 64), (128, 128))
DIMS = (16, 17, 31, 33, 48, 64, 80, 96, 127, 128, 191, 256)
MAX_ERROR, RMS_ERROR, LSE_ERROR = 4e-5, 2e-6, 3e-5  # beside the rounding of the output's dtype
# Relative L1, and the worst error beside the largest value. int8: roundings that fall the other way. e4m3: besides, P
# is rounded after it was divided by the running maximum, which depends on how many keys one step takes.
# Typical and worst. In e4m3 a probability is rounded as the largest score so far has it, which depends on how many keys
# are looked at together: two right orders differ by up to .017, and both by .037 from exact attention.
QUANTIZED_ERROR = {"int8": (0.004, 0.04), "int8-fp8": (0.02, 0.08)}
TIE = 1e-4  # second-stage decisions this close to the threshold may fall either way
TIES_ALLOWED = 3
MASK_TIES_ALLOWED = 2  # blocks, in every hundred cases

ties: Counter[str] = Counter()
cases_run: Counter[str] = Counter()


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


def hopper_kernels() -> list[Kernel]:
    rng = random.Random(90)
    chosen = []
    for n in range(16):
        dim = rng.choice((64, 128, rng.randint(33, 128)))
        v_dim = rng.choice((dim, dim, rng.randint(33, 128)))
        chosen.append(Kernel(dim, v_dim, HOPPER_BLOCKS[n % len(HOPPER_BLOCKS)], DTYPES[1 + n // 4 % 2], False))
    return chosen


KERNELS = {"hopper": hopper_kernels()}
ANY_KERNEL = kernels()


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


def a_config(rng: random.Random, flavour: random.Random, kernel: Kernel, heads: int) -> SparseConfig:
    rules = tuple(flavour.sample(RULES, flavour.choice((1, 1, 2, 4))))
    ranges = {"threshold": (0.03, 0.5), "gap": (0.2, 2.0), "cdf": (0.2, 0.8), "topk": (0.1, 0.6), "probe": (0.02, 0.4)}
    return SparseConfig(
        rule=rules,
        **{name: one_or_per_head(rng, heads, *ranges[name]) for name in rules},
        **({"probe_rows": flavour.choice(PROBE_ROWS)} if "probe" in rules else {}),
        subblocks=(flavour.choice(SUBBLOCKS), flavour.choice(SUBBLOCKS)),
        similarity=flavour.choice((None, None, one_or_per_head(rng, heads, -0.1, 0.3))),
        pv_threshold=one_or_per_head(rng, heads, -4.0, -0.1) if kernel.filtered else None,
        quantization="none",
        block=kernel.block,
        sinks=rng.choice((0, 1, 2)),
        protected=flavour.choice(((), (), ((0, 3),), ((-40, None), (70, 75)))),
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


def a_case(seed: int, backend: str = "") -> Case:
    rng, flavour = random.Random(seed), random.Random(seed % FLAVOURS)
    choice = KERNELS.get(backend, ANY_KERNEL)
    kernel = choice[seed % len(choice)]
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
    q, k, v = (oddly_strided(x, flavour) for x in (q, k, v))
    layout = flavour.choice(("BHSD", "BSHD"))
    if layout == "BSHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    side = (None, -1, 0, rng.randint(1, 30), rng.randint(1, 300))
    valid = None
    if flavour.random() < 0.35:
        valid = torch.rand(batch, k_len, generator=torch.Generator().manual_seed(seed)) < rng.choice((0.0, 0.2, 0.9))
    inputs = problem(
        q,
        k,
        v,
        is_causal=flavour.random() < 0.5,
        window=flavour.choice((None, None, (flavour.choice(side), flavour.choice(side)))),
        key_valid=valid,
        scale=rng.choice((None, None, 0.0, *(x / kernel.dim**0.5 for x in (-1.0, 0.5, 2.0)))),
        layout=layout,
    )
    config = a_config(rng, flavour, kernel, kv_heads * group)
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


def each_case(cases: dict[str, int], otherwise: int):
    parameters = []
    for name, backend in BY_NAME.items():
        skip = pytest.mark.skipif(bool(backend.unavailable()), reason=str(backend.unavailable()))
        count = 0 if name == "reference" else cases.get(name, otherwise)
        if backend.unavailable():
            count = min(count, 1)  # one skip says it
        parameters += [pytest.param(name, seed, marks=skip, id=f"{name}-{seed}") for seed in range(count)]
    return pytest.mark.parametrize(("backend", "seed"), parameters)


def summarized(backend: str, case: Case, what: str) -> Blocks:
    """The first stage where the backend runs; if it selects by itself, its mask is compared."""
    stages, inputs = BY_NAME[backend], on_its_device(backend, case.inputs)
    refusal = stages.unsupported(inputs, case.config)
    if refusal:
        assert "tensors are on" not in refusal  # else nothing would be tested
        pytest.skip(refusal)
    cases_run[what] += 1
    blocks = stages.summarize(inputs, case.config)
    if stages.select is not reference.select:
        assert_same_mask(backend, case, blocks, what)
    return blocks


def assert_same_mask(backend: str, case: Case, blocks: Blocks, what: str) -> None:
    """A backend's own selection: the oracle's blocks, but for rounding ties, which are counted."""
    want = reference.select(reference.summarize(case.inputs, case.config), case.config)
    got = BY_NAME[backend].select(blocks, case.config)
    assert got.block == want.block == case.config.block
    different = int((got.to_dense().cpu() != want.to_dense()).sum())
    assert different <= 1
    ties[f"{what}, mask"] += different
    assert torch.equal(got.visible_per_head.cpu(), want.visible_per_head)


@each_case(CASES, OTHERWISE)
def test_backend_equals_oracle(backend, seed, poisoned):
    case = a_case(seed)
    blocks = summarized(backend, case, backend)
    stages = BY_NAME[backend]
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


def quantized_equals_oracle(
    backend: str, seed: int, quantization: str, looser: float = 1.0, needs_lse: bool = True
) -> None:
    """`looser`: where probabilities are as precise as the oracle's and differ in which way they are rounded."""
    case = a_case(seed, backend)
    config, inputs = replace(case.config, quantization=quantization), replace(case.inputs, needs_lse=needs_lse)
    case = replace(case, config=config, inputs=inputs)
    blocks = summarized(backend, case, f"{backend}, {quantization}")
    mask = replace(case.mask, bits=case.mask.bits.to(blocks.inputs.query.device))
    got = BY_NAME[backend].attend(blocks, mask, case.config)
    want = reference.attend(reference.summarize(case.inputs, case.config), case.mask, case.config)
    same = undisputed(case, got.skipped_pv.cpu(), want.skipped_pv, f"{backend}, {quantization}")
    values, wanted = got.values.cpu()[same].double(), want.values[same].double()
    assert not values.isnan().any()
    error, largest = (values - wanted).abs(), float(case.inputs.value.abs().max())
    if wanted.any():
        typical, worst = (looser * bound for bound in QUANTIZED_ERROR[quantization])
        assert relative_l1(values, wanted) < typical
        assert error.max() <= worst * largest
        assert error.square().mean().sqrt() <= typical * largest
    if case.config.pv_threshold is None:
        exact_config = replace(case.config, quantization="none")
        exact = reference.attend(reference.summarize(case.inputs, exact_config), case.mask, exact_config).values[same]
        if (
            exact.any()
        ):  # not further from exact attention than the oracle is, but for chance, which few rows have more of
            chance = 1.1 + 0.3 / values[..., 0].numel() ** 0.5
            assert relative_l1(values, exact) <= chance * relative_l1(wanted, exact) + 0.002
    if not needs_lse:
        assert got.lse is None
        return
    assert torch.equal(got.lse.cpu() == -torch.inf, want.lse == -torch.inf)
    seen = (want.lse > -torch.inf) & same[..., None]
    torch.testing.assert_close(got.lse.cpu()[seen], want.lse[seen], atol=0.03, rtol=1e-3)


@each_case({"triton": QUANTIZED_CASES["int8"]}, 0)
def test_int8_backend_equals_oracle(backend, seed, poisoned):
    quantized_equals_oracle(backend, seed, "int8")


@each_case({"triton": QUANTIZED_CASES["int8-fp8"], "hopper": HOPPER_CASES}, 0)
def test_fp8_backend_equals_oracle(backend, seed, poisoned):
    with hopper_slack(0.0):
        quantized_equals_oracle(backend, seed, "int8-fp8")


@each_case({"hopper": HOPPER_CASES // 2}, 0)
def test_slack_costs_no_precision(backend, seed, poisoned):
    """As shipped, and in every other case without the LSE: then rows are summed by the tensor core."""
    quantized_equals_oracle(backend, seed, "int8-fp8", looser=2.0, needs_lse=seed % 2 == 0)


LONG_SELECTIONS = {  # more key blocks than one step takes: chunks that every row sees whole, and the edges beside them
    "full": ({}, SparseConfig(rule=("threshold", "gap"), threshold=0.02, gap=0.3, quantization="none"), 200, 4500),
    "causal": (
        {"is_causal": True},
        SparseConfig(rule=("threshold", "gap"), threshold=0.02, gap=0.3, quantization="none"),
        2500,
        2500,
    ),
    "small blocks": (
        {"is_causal": True},
        SparseConfig(rule="gap", gap=0.4, block=(64, 32), quantization="none"),
        300,
        2200,
    ),
    "left window": (
        {"window": (1500, None)},
        SparseConfig(rule="threshold", threshold=0.03, quantization="none"),
        300,
        4500,
    ),
    "right window": (
        {"window": (None, 3)},
        SparseConfig(rule="gap", gap=0.3, block=(192, 32), quantization="none"),
        500,
        2200,
    ),
    "topk": ({}, SparseConfig(rule="topk", topk=0.2, block=(64, 32), quantization="none"), 70, 2100),
    "probe": (
        {"is_causal": True},
        SparseConfig(rule=("gap", "probe"), gap=0.1, probe=0.05, probe_rows=2, quantization="none"),
        2500,
        2500,
    ),
    "probe, shares fall": (
        {},
        SparseConfig(rule=("gap", "probe"), gap=0.1, probe=0.02, quantization="none", block=(64, 128)),
        100,
        20000,
    ),
    "padding": (  # scores so small that empty blocks, of mean 0, would be kept
        {"key_valid": ((torch.arange(4500) < 2250) | (torch.arange(4500) >= 3900))[None], "scale": 0.003},
        SparseConfig(rule="gap", gap=0.07, quantization="none"),
        2100,
        4500,
    ),
}


@pytest.mark.parametrize(("name", "stored"), [*((x, True) for x in LONG_SELECTIONS), ("topk", False)])
def test_triton_selects_among_many_blocks(name, stored, poisoned, monkeypatch):
    triton = BY_NAME["triton"]
    if triton.unavailable():
        pytest.skip(triton.unavailable())
    from sparge.backends.triton import plans

    if not stored:  # as for problems too long to keep the weights of
        monkeypatch.setattr(plans, "WEIGHT_BYTES", 0)
    plans.select_plan.cache_clear()
    sight, config, q_len, k_len = LONG_SELECTIONS[name]
    inputs = problem(*tensors(7, heads=1, q_len=q_len, k_len=k_len, dim=32, contrast=6.0), **sight)
    want = reference.select(reference.summarize(inputs, config), config)
    got = triton.select(triton.summarize(on_its_device("triton", inputs), config), config)
    assert 0.5 < want.sparsity < 0.95
    assert (got.bits.cpu() != want.bits).sum() <= 1  # bits of blocks that no row sees too


@pytest.mark.parametrize("packed", [False, True])
def test_triton_probes_some_heads_at_a_time(packed, poisoned, monkeypatch):
    triton = BY_NAME["triton"]
    if triton.unavailable():
        pytest.skip(triton.unavailable())
    from sparge.backends.triton import plans

    config = SparseConfig(rule=("gap", "probe"), gap=0.1, probe=0.05, block=(64, 32), quantization="none")
    if packed:
        ends = torch.tensor([0, 130, 130, 300], dtype=torch.int32)
        q, k, v = (x[0].transpose(0, 1) for x in tensors(3, heads=6, kv_heads=3, q_len=300, dim=32, contrast=5.0))
        inputs = pack_inputs(q, k, v, Packing(ends, ends), (170, 170), True, None, None, True)
    else:
        made = tensors(3, batch=2, heads=6, kv_heads=3, q_len=200, dim=32, contrast=5.0)
        inputs = problem(*made, is_causal=True)
    inputs, masks = on_its_device("triton", inputs), []
    for room in (1 << 28, 1, 1300):  # all heads, one, some
        monkeypatch.setattr(plans, "SHARE_BYTES", room)
        plans.select_plan.cache_clear()
        blocks = triton.summarize(inputs, config)
        parts = len(plans.select_plan(inputs.signature, config, 90).parts)
        assert (parts == 1) == (room == 1 << 28)
        masks.append(triton.select(blocks, config).bits.cpu())
    plans.select_plan.cache_clear()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    if not packed:
        want = reference.select(reference.summarize(problem(*made, is_causal=True), config), config)
        assert (masks[1] != want.bits).sum() <= 1


@each_backend("dense", "reference")
@pytest.mark.parametrize(("window", "skipped"), [(None, 4), ((300, None), 2)], ids=["padding", "window"])
def test_the_second_stage_judges_blocks_last_first(backend, window, skipped, poisoned):
    """A block with hidden keys and one that outshines all others: in its turn it dims the first block alone."""
    q, k, v = tensors(3, heads=2, kv_heads=2, q_len=256, k_len=512, dim=64, dtype=torch.bfloat16)
    q += 1.0
    k[:, :, 70] = 2.0
    config = SparseConfig(rule="topk", topk=1.0, pv_threshold=-4.0, quantization="none", block=(128, 64))
    inputs = problem(q, k, v, window=window, key_valid=None if window else torch.arange(512)[None] != 65)
    there = on_its_device(backend, inputs)
    mask = BlockMask.all_visible(there.visibility, config.block, *q.shape[:2])
    got = BY_NAME[backend].attend(BY_NAME[backend].summarize(there, config), mask, config)
    assert got.skipped_pv.tolist() == [[skipped, skipped]]


@each_backend("dense", "cpu", "torch", "reference")  # those without int8, and the oracle itself
def test_the_second_stage_skips_no_block_with_a_key_that_is_nan(backend, poisoned):
    """Nor where only the second half of a block, which has a scale of its own, is broken."""
    q, k, v = tensors(7, heads=2, kv_heads=2, q_len=200, k_len=512, dim=64, dtype=torch.bfloat16)
    k[:, :, :384] *= 0.01
    k[0, 1, 100, 3] = torch.nan
    inputs = problem(4 * q, 3 * k, v)
    config = SparseConfig(rule="topk", topk=1.0, pv_threshold=-1.0, quantization="int8", block=(128, 128))
    mask = BlockMask.all_visible(inputs.visibility, config.block, *q.shape[:2])
    got, want = run(backend, inputs, config, mask), reference.attend(reference.summarize(inputs, config), mask, config)
    assert want.skipped_pv[0, 0] > want.skipped_pv[0, 1] > 0
    assert got.skipped_pv.tolist() == want.skipped_pv.tolist()
    assert torch.equal(got.values.isnan(), want.values.isnan())


@each_backend("dense", "cpu", "torch", "reference")  # those without fp8, and the oracle itself
@pytest.mark.parametrize("spoiler", [1e4] if INTERPRETED else [None, 1e4, 1e30, torch.inf, torch.nan], ids=str)
def test_keys_and_values_outside_the_sample(backend, spoiler, poisoned):
    """Long enough that every second 64 keys are sampled; one value of the second head is far from the others."""
    q, k, v = tensors(5, heads=2, q_len=10, k_len=64 * 64, dim=64, dtype=torch.bfloat16, contrast=2.0)
    k[:, :, 64:128] += 3.0
    if spoiler is not None:
        v[0, 1, 100, 7] = spoiler
    inputs, config = problem(q, k, v), SparseConfig(rule="topk", topk=0.3, quantization="int8-fp8")
    want_blocks = reference.summarize(inputs, config)
    stages = BY_NAME[backend]
    refusal = stages.unsupported(on_its_device(backend, inputs), config)
    if refusal:
        assert "has no fp8" in refusal  # an older chip; else nothing would be tested
        pytest.skip(refusal)
    blocks = stages.summarize(on_its_device(backend, inputs), config)
    mask = reference.select(want_blocks, config)
    assert (stages.select(blocks, config).to_dense().cpu() != mask.to_dense()).sum() <= 1
    assert torch.equal(blocks.v_finite.cpu(), want_blocks.v_finite)
    for name in ("value_scale", "value_mean"):
        pair = (getattr(blocks.quantized, name).cpu(), getattr(want_blocks.quantized, name))
        torch.testing.assert_close(*pair, rtol=1e-6 if name == "value_mean" else 0, atol=0, equal_nan=True)
    got = run(backend, inputs, config, mask).values
    want = reference.attend(want_blocks, mask, config).values
    assert torch.equal(got.isnan(), want.isnan())
    for head in (0, 1):
        assert relative_l1(got[:, head].nan_to_num(), want[:, head].nan_to_num()) < (
            0.03 if backend == "hopper" else 0.01  # 128 keys a step, and a maximum with slack
        )


@each_backend("dense", "cpu", "torch", "reference")
@pytest.mark.parametrize("dim", [64] if INTERPRETED else [64, 96, 128, 200])
@pytest.mark.parametrize("second", [None, -3.0])
def test_constant_values_come_out_exact(backend, dim, second, poisoned):
    """What smoothing took comes back, but not to rows that see nothing; hidden keys, the first too, hold garbage."""
    q, k, v = tensors(6, batch=2, heads=4, kv_heads=2, q_len=300, k_len=200, dim=dim, dtype=torch.bfloat16)
    v = (v[:, :, :1] + 5.0).repeat(1, 1, 200, 1)
    valid = torch.arange(200).expand(2, -1) >= torch.tensor([[0], [7]])
    for x, garbage in ((k, 1e4), (v, torch.nan)):
        x[1, :, :7] = garbage
    inputs = problem(q, k, v, is_causal=True, key_valid=valid)
    config = SparseConfig(rule="topk", topk=1.0, quantization="int8-fp8", pv_threshold=second)
    refusal = BY_NAME[backend].unsupported(on_its_device(backend, inputs), config)
    if refusal:
        assert "has no fp8" in refusal
        pytest.skip(refusal)
    got = run(backend, inputs, config)
    seen = (torch.arange(300) >= torch.tensor([[100], [107]]))[:, None, :, None]
    assert torch.equal(got.values, torch.where(seen, v[:, :, -1:].repeat_interleave(2, 1), 0.0))
    assert torch.equal(got.lse > -torch.inf, seen[..., 0].expand(-1, 4, -1))


PACKED_LENGTHS = (
    ([130, 0, 5, 257], [200, 64, 5, 129]), ([64], [300]), ([1, 1, 90], [70, 1, 90]),
    ([9, 40, 9], [70, 4200, 0]),  # every block size needs more than one word for the longest
)  # fmt: skip


@pytest.mark.parametrize("seed", range(len(PACKED_LENGTHS) if INTERPRETED else 24))
def test_packed_sequences_equal_separate_ones(seed, poisoned, monkeypatch):
    """One launch over packed sequences against the oracle, sequence by sequence."""
    triton = BY_NAME["triton"]
    if triton.unavailable():
        pytest.skip(triton.unavailable())
    rng, device = random.Random(seed), "cpu" if INTERPRETED else "cuda"
    q_lens, k_lens = PACKED_LENGTHS[seed % len(PACKED_LENGTHS)]
    if seed >= len(PACKED_LENGTHS):
        q_lens, k_lens = ([a_length(rng) for _ in range(4)] for _ in range(2))
    dim, v_dim = rng.choice(((64, 64), (48, 80), (128, 128), (200, 64)))
    q, k, v = (randn(seed, sum(n), h, d, dtype=torch.bfloat16)
               for n, h, d in ((q_lens, 4, dim), (k_lens, 2, dim), (k_lens, 2, v_dim)))  # fmt: skip
    config = SparseConfig(
        rule=("gap", "topk", "probe"), gap=0.3, topk=0.2, probe=0.2, subblocks=(2, 4),
        block=BLOCKS[seed * 5 % len(BLOCKS)],
        quantization=("none", "int8-fp8", "int8")[seed % 3], similarity=(None, 0.0)[seed % 2],
        pv_threshold=(None, -2.0)[seed // 2 % 2],
    )  # fmt: skip
    ends = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (q_lens, k_lens)]
    arguments = (max(q_lens), max(k_lens), rng.random() < 0.5)
    results = {}
    for name, where in (("triton", device), ("reference", "cpu")):
        monkeypatch.setattr(backends, "BACKENDS", (BY_NAME[name],))
        tensors_there = [x.to(where) for x in (q, k, v, *ends)]
        out, lse, stats = varlen_attention(
            *tensors_there, *arguments, config=config, return_lse=True, return_stats=True
        )
        assert stats.backend == name
        results[name] = [x.cpu() for x in (out, lse, stats.executed, stats.visible, stats.skipped_pv)]
    got, want = results["triton"], results["reference"]
    assert torch.equal(got[3], want[3])
    assert (got[2] - want[2]).abs().sum() <= 1  # a rounding tie
    assert (got[4] - want[4]).abs().sum() <= TIES_ALLOWED
    assert torch.equal(got[1] == -torch.inf, want[1] == -torch.inf)
    seen = want[1] > -torch.inf
    torch.testing.assert_close(got[1][seen], want[1][seen], atol=0.03, rtol=1e-3)
    assert relative_l1(got[0], want[0]) < 0.006


def test_rounding_ties_were_rare():
    for what, count in ties.items():
        run = cases_run[what.removesuffix(", mask")]
        allowed = 1 + MASK_TIES_ALLOWED * run // 100 if what.endswith("mask") else TIES_ALLOWED
        assert count <= allowed, f"{count} ties of {what} in {run} cases"


def test_the_cases_cover_what_they_claim():
    """All block sizes, dtypes and awkward shapes; masks that skip and rows that see nothing; skips in both stages."""
    assert {kernel.block for kernel in ANY_KERNEL} == set(BLOCKS)
    assert {kernel.dtype for kernel in ANY_KERNEL} == set(DTYPES)
    assert {kernel.dim for kernel in ANY_KERNEL} >= set(DIMS)
    assert any(kernel.dim != kernel.v_dim for kernel in ANY_KERNEL)
    assert {kernel.block for kernel in KERNELS["hopper"]} == set(HOPPER_BLOCKS)
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
