"""What one attention layer does when it is computed sparse: work, error, time, and pictures, head by head."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge.api import Run
from sparge.backends.dense import DensePlan
from sparge.inputs import Inputs
from sparge.reference import GROUP
from sparge.report.mass import Exact, exact_attention, picture

TIMED_RUNS = 2  # the better of them counts


@dataclass(frozen=True)
class Seconds:
    """Of the stages of one call, and of torch's dense attention over the same tensors."""

    prediction: float
    quantization: float
    attention: float
    dense: float


@dataclass(frozen=True)
class LayerFindings:
    """One call of one layer. Lists have an entry for each query head."""

    name: str
    backend: str
    reason: str  # why this backend
    quantization: str
    block: tuple[int, int]
    tokens: tuple[int, int]  # query rows, keys
    head_dim: int
    executed: list[int]  # blocks
    visible: list[int]
    error: list[float]  # relative L1 against exact attention over the same tensors
    missed: list[float]  # share of the true attention that lies in skipped blocks
    skipped_values: list[float]  # share of the computed blocks whose values the second stage left out
    seconds: Seconds
    pictures: list[dict[str, object]]

    @property
    def sparsity(self) -> list[float]:
        pairs = zip(self.executed, self.visible, strict=True)
        return [(visible - executed) / max(1, visible) for executed, visible in pairs]

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "sparsity": self.sparsity}


def look_at(run: Run, name: str, side: int, exact: Exact | None = None) -> LayerFindings:
    """Everything about one run of the pipeline; batch entries are taken together, pictures are of the first.

    exact  its attention without approximation, where that is known already
    """
    inputs, config = run.inputs, run.choice.config
    if inputs.packing is not None:
        raise ValueError("a report looks at whole sequences, not at packed ones.")
    stats = run.stats()
    heads, rows, head_dim = inputs.query.shape[1:]
    exact = exact or exact_attention(inputs, config.block)
    if not bool(exact.values.isfinite().all()):
        raise ValueError(f"{name}: its Q, K or V hold NaN or infinity, so that there is no error to measure.")
    visible = inputs.visibility.blocks(*config.block).expand_as(exact.mass)
    kept = run.mask.to_dense().expand_as(exact.mass) & visible
    if stats.redone is not None:
        kept = kept | (stats.redone[..., None, None] & visible)
    left_out = stats.skipped_pv.sum(0) * GROUP / config.block[0]
    whole = exact.mass.sum((0, 2, 3)).clamp(min=1e-30)
    return LayerFindings(
        name=name,
        backend=stats.backend,
        reason=stats.reason,
        quantization=stats.quantization,
        block=config.block,
        tokens=(rows, inputs.key.shape[2]),
        head_dim=head_dim,
        executed=stats.executed.sum(0).tolist(),
        visible=stats.visible.sum(0).tolist(),
        error=relative_error(run, exact.values),
        missed=_list(exact.mass.masked_fill(kept, 0.0).sum((0, 2, 3)) / whole),
        skipped_values=_list(left_out / stats.executed.sum(0).clamp(min=1)),
        seconds=_seconds(run),
        pictures=[picture(kept[0, head], visible[0, head], exact.mass[0, head], side) for head in range(heads)],
    )


def relative_error(run: Run, exact: Tensor) -> list[float]:
    """L1, head by head."""
    off = (run.output.values.float() - exact).abs().sum((0, 2, 3))
    return _list(off / exact.abs().sum((0, 2, 3)).clamp(min=1e-30))


def _list(values: Tensor) -> list[float]:
    return [float(value) for value in values.cpu()]


def _seconds(run: Run) -> Seconds:
    """Each stage once more by itself: where stages overlap, as on a GPU, their sum is a little too long."""
    backend, config, inputs = run.choice.backend, run.choice.config, run.inputs
    plain = replace(config, quantization="none")
    blocks = backend.summarize(inputs, config)
    blocks.finish()
    summarize = _taken(inputs, lambda: backend.summarize(inputs, config).finish())
    unquantized = summarize if plain == config else _taken(inputs, lambda: backend.summarize(inputs, plain))
    select = _taken(inputs, lambda: backend.select(blocks, config))
    attend = _taken(inputs, lambda: backend.attend(blocks, run.mask, config))
    dense = _taken(inputs, _dense(inputs))
    return Seconds(unquantized + select, max(0.0, summarize - unquantized), attend, dense)


def _dense(inputs: Inputs) -> Callable[[], Tensor]:
    """torch's attention; it takes a matrix of every pair where windows or padding leave no other way."""
    query, key, value, sight = inputs.query, inputs.key, inputs.value, inputs.visibility
    if sight.key_valid is None and not sight.windowed:
        plan = DensePlan.of(inputs)
        return lambda: plan.attention(query, key, value)
    seen = sight.pairs(range(sight.q_len), range(sight.k_len))
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=inputs.scale, enable_gqa=inputs.group_size > 1
    )


def _taken(inputs: Inputs, call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(TIMED_RUNS):
        start = _now(inputs)
        call()
        best = min(best, _now(inputs) - start)
    return best


def _now(inputs: Inputs) -> float:
    if inputs.query.is_cuda:
        torch.cuda.synchronize(inputs.query.device)
    return time.perf_counter()
