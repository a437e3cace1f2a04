"""The ring on every backend, its ranks as threads: parts are prepared as the whole is, and merge to the same result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import BY_NAME, INTERPRETED, each_backend, on_its_device, problem, relative_l1, run, tensors
from threads import run_threads

from sparge import SparseConfig
from sparge.distributed import ring
from sparge.distributed.run import _attend_rows
from sparge.distributed.sharding import split_evenly

pytestmark = pytest.mark.usefixtures("one_thread")

SPARSE = SparseConfig(threshold=0.02, gap=1.0, quantization="none")
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


QUICK = ("plain", "judged", "int8-fp8")  # in Triton's interpreter


@each_backend("dense")
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", QUICK if INTERPRETED else CASES)
def test_the_ring_computes_what_one_rank_computes(backend, name, sharding, monkeypatch):
    config, sizes, sight = CASES[name]
    inputs, stages = the_problem(backend, sizes, sight), BY_NAME[backend]
    refusal = stages.unsupported(inputs, config)
    if refusal:
        pytest.skip(f"{backend}: {refusal}")
    monkeypatch.setattr(ring, "choose", lambda *_: ring.Choice(stages, config, "by the test"))
    masks = []
    select = ring.Span._select

    def recorded(span):
        masks.append((span.rows, select(span)))
        return masks[-1][1]

    monkeypatch.setattr(ring.Span, "_select", recorded)
    rows, keys = (split_evenly(x.shape[2], 3, sharding) for x in (inputs.query, inputs.key))

    def work(team):
        query, key, value = (
            torch.cat([x[:, :, start:stop] for start, stop in shares[team.rank]], 2)
            for x, shares in ((inputs.query, rows), (inputs.key, keys), (inputs.value, keys))
        )
        local = replace(inputs, query=query, key=key, value=value)
        return _attend_rows(local, rows, keys, inputs.visibility, config, team, True)

    values, lse = torch.empty_like(inputs.query), torch.empty(inputs.query.shape[:3])
    for share, (part, part_lse, _) in zip(rows, run_threads(work, 3), strict=True):
        index = [row for interval in share for row in range(*interval)]
        values[:, :, index], lse[:, :, index] = part, part_lse.cpu()

    want = run(backend, inputs, config)
    rounding = 6e-4 if values.dtype == torch.half else 0.0  # of the parts
    whole = want.values.isfinite()
    assert torch.equal(values.isfinite().cpu(), whole)
    assert (
        not whole.any() or relative_l1(values.cpu()[whole], want.values[whole]) < ERROR[config.quantization] + rounding
    )
    torch.testing.assert_close(
        lse, want.lse, atol=1e-4 if config.quantization == "none" else 1e-3, rtol=0, equal_nan=True
    )
    mask_of_all = stages.select(stages.summarize(inputs, config), config).to_dense()
    for span, mask in masks:
        first, last = span.start // config.block[0], -(-span.stop // config.block[0])
        assert torch.equal(mask.to_dense(), mask_of_all[:, :, first:last])
    assert sum(len(span) for span, _ in masks) == inputs.query.shape[2]
