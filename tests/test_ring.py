"""The ring on every backend, its ranks as threads: parts are prepared as the whole is, and merge to the same result."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from problems import BY_NAME, INTERPRETED, each_backend, on_its_device, problem, relative_l1, tensors, without_probe
from test_parity import a_case
from threads import run_threads

from sparge import SparseConfig, reference
from sparge.distributed import probe, ring
from sparge.distributed.run import _attend_rows
from sparge.distributed.sharding import coalesced, split_evenly

pytestmark = pytest.mark.usefixtures("one_thread")

SPARSE = SparseConfig(rule=("threshold", "gap"), threshold=0.02, gap=1.0, quantization="none")
PROBE = SparseConfig(rule=("threshold", "gap", "probe"), threshold=0.2, gap=0.1, probe=0.04, quantization="none")
FINE = replace(PROBE, probe=0.003, sinks=0, block=(64, 32), subblocks=(1, 1))
ERROR = {"none": 1e-5, "int8": 0.004, "int8-fp8": 0.015}
CASES = {
    "plain": (SPARSE, {}, {}),
    "int8": (replace(SPARSE, quantization="int8"), {"dim": 64}, {"is_causal": True}),
    "int8-fp8": (replace(SPARSE, quantization="int8-fp8"), {"dim": 64}, {"is_causal": True}),
    "judged": (replace(SPARSE, similarity=0.05, block=(128, 128)), {"k_len": 500}, {"is_causal": True}),
    "windowed": (replace(SPARSE, sinks=0), {}, {"window": (150, 20)}),
    "padded fp8": (replace(SPARSE, quantization="int8-fp8"), {"dim": 64, "batch": 2}, {"padded": True}),
    "outliers": (replace(SPARSE, quantization="int8-fp8"), {"q_len": 130, "k_len": 4200, "dim": 64}, {}),
    "negative scale": (SPARSE, {}, {"scale": -0.3}),
    "protected": (replace(SPARSE, protected=((0, 20), (-9, None)), sinks=0), {"k_len": 700}, {}),
    "probe": (PROBE, {"kv_heads": 2, "k_len": 700}, {"is_causal": True}),
    "probe alone, fp8": (
        SparseConfig(rule="probe", probe=(1e-4, 1e-3), probe_rows=2, block=(192, 32), quantization="int8-fp8"),
        {"dim": 64},
        {},
    ),
    "probe, windowed": (FINE, {"q_len": 700}, {"window": (250, 60)}),
    "probe, padded": (replace(PROBE, protected=((0, 20),)), {"batch": 2}, {"padded": True}),
    "probe, rows before the keys": (FINE, {"q_len": 600, "k_len": 400}, {"is_causal": True}),
    "some scores of -inf": (SPARSE, {"infinite": 140}, {}),
    "all scores of -inf": (SPARSE, {"infinite": 420}, {}),
}


def the_problem(backend, sizes, sight):
    sizes = dict(sizes)
    infinite = sizes.pop("infinite", 0)
    q, k, v = tensors(5, **({"heads": 2, "kv_heads": 1, "q_len": 420, "dim": 32, "contrast": 4.0} | sizes))
    if k.shape[2] > 4095:  # outliers in tiles that are not sampled, and on one rank only
        token = torch.arange(640)
        v[0, 0, token[token // 64 % 2 == 1], 3] = 900.0
    if infinite:
        q, k[:, :, :infinite] = q.abs() + 0.1, -torch.inf
    if BY_NAME[backend].name in ("triton", "hopper"):
        q, k, v = (x.half() for x in (q, k, v))
    sight = dict(sight)
    if sight.pop("padded", False):
        sight["key_valid"] = (torch.arange(k.shape[2]) % 3 != 1).expand(q.shape[0], -1)
    return on_its_device(backend, problem(q, k, v, **sight))


QUICK = ("plain", "judged", "int8-fp8", "probe")  # in Triton's interpreter


def check_ring(backend, inputs, config, rows, keys, monkeypatch):
    """Ranks as threads hold `rows` and `keys`: their masks, outputs and counts must be those of the whole."""
    stages, masks, select = BY_NAME[backend], [], ring.Span._select

    def recorded(span, probed):
        masks.append((span.rows, select(span, probed)))
        return masks[-1][1]

    def work(team):
        query, key, value = (
            torch.cat([x[:, :, :0], *(x[:, :, start:stop] for start, stop in shares[team.rank])], 2)
            for x, shares in ((inputs.query, rows), (inputs.key, keys), (inputs.value, keys))
        )
        local = replace(inputs, query=query, key=key, value=value)
        return _attend_rows(local, rows, keys, inputs.visibility, config, team, True)

    with monkeypatch.context() as patch:
        patch.setattr(ring, "choose", lambda *_: ring.Choice(stages, config, "by the test"))
        patch.setattr(ring.Span, "_select", recorded)
        parts = run_threads(work, len(rows))
    blocks = stages.summarize(inputs, config)
    mask = stages.select(blocks, config)
    want, kept = stages.attend(blocks, mask, config), mask.to_dense()
    for span, part in masks:
        first, last = span.start // config.block[0], -(-span.stop // config.block[0])
        assert torch.equal(part.to_dense(), kept[:, :, first:last])
    assert sum(len(span) for span, _ in masks) == inputs.query.shape[2]
    executed = sum(stats.executed for _, _, stats in parts)
    assert torch.equal(executed, mask.kept_per_head.expand(executed.shape))

    values, lse = torch.empty_like(want.values), torch.empty_like(want.lse)
    for share, (part, part_lse, _) in zip(rows, parts, strict=True):
        index = [row for interval in share for row in range(*interval)]
        values[:, :, index], lse[:, :, index] = part, part_lse
    finite = want.values.isfinite()
    assert torch.equal(values.isfinite(), finite)
    if config.pv_threshold is not None:
        return
    if want.values[finite].any():
        rounding = torch.finfo(values.dtype).eps if values.dtype != torch.float32 else 0.0  # of the parts
        assert relative_l1(values[finite], want.values[finite]) < ERROR[config.quantization] + rounding
    near = 1e-4 if config.quantization == "none" else 1e-3
    torch.testing.assert_close(lse, want.lse, atol=near, rtol=0, equal_nan=True)


@each_backend("dense")
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", QUICK if INTERPRETED else CASES)
def test_the_ring_computes_what_one_rank_computes(backend, name, sharding, monkeypatch):
    config, sizes, sight = CASES[name]
    inputs = the_problem(backend, sizes, sight)
    refusal = BY_NAME[backend].unsupported(inputs, config)
    if refusal:
        pytest.skip(f"{backend}: {refusal}")
    rows, keys = (split_evenly(x.shape[2], 3, sharding) for x in (inputs.query, inputs.key))
    check_ring(backend, inputs, config, rows, keys, monkeypatch)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("probe")])
def test_the_probe_adds_blocks(name):
    """Without which the cases above would not tell whether it was asked."""
    config, sizes, sight = CASES[name]
    blocks = reference.summarize(the_problem("reference", sizes, sight), config)
    kept, by_scores = (reference.select(blocks, each).kept_per_head.sum() for each in (config, without_probe(config)))
    assert kept > by_scores + 5


@pytest.mark.parametrize(("left", "is_causal"), [(None, True), (300, False)])
def test_a_probe_over_many_keys_takes_some_at_a_time(left, is_causal, monkeypatch):
    config = replace(PROBE, block=(64, 32), probe_rows=2)
    sight = {"is_causal": is_causal, "window": (left, None)}
    inputs = the_problem("reference", {"q_len": 2400, "heads": 1, "dim": 16}, sight)
    monkeypatch.setattr(probe, "KEYS_AT_ONCE", 1024)  # 32 blocks
    monkeypatch.setattr(probe, "SCORES_AT_ONCE", 1024 * 2 * 5)  # of five query blocks
    largest, probe_scores = [0], probe.probe_scores

    def measured(*arguments):
        scores = probe_scores(*arguments)
        largest[0] = max(largest[0], scores.numel())
        return scores

    monkeypatch.setattr(probe, "probe_scores", measured)
    shares = split_evenly(2400, 2, "contiguous")
    check_ring("torch", inputs, config, shares, shares, monkeypatch)
    assert largest == [1024 * 2 * 5]


def any_cut(rng, length, ranks):
    """Some ranks may hold nothing."""
    if rng.random() < 0.4:
        return tuple(map(coalesced, split_evenly(length, ranks, "zigzag")))
    ends = [0, *sorted(rng.randint(0, length) for _ in range(ranks - 1)), length]
    return tuple(coalesced([interval]) for interval in pairwise(ends))


@pytest.mark.parametrize("seed", range(8))
def test_random_problems_in_random_shards(seed, monkeypatch):
    for n in range(10):
        rng = random.Random(10 * seed + n)
        case = a_case(10 * seed + n)
        config = replace(case.config, quantization=rng.choice(("none", "none", "none", "int8", "int8-fp8")))
        backend = "torch" if config.quantization == "none" else "reference"
        ranks = rng.randint(2, 4)
        rows, keys = (any_cut(rng, x.shape[2], ranks) for x in (case.inputs.query, case.inputs.key))
        check_ring(backend, case.inputs, config, rows, keys, monkeypatch)
