"""Whether a result is right: relative L1 against float64 attention over the same mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.block_mask import BlockMask
from sparge.inputs import Inputs

MAX_RELATIVE_L1 = {"none": 0.01, "int8": 0.03, "int8-fp8": 0.045}
MAX_RELATIVE_L1_FLOAT32 = 1e-4  # unquantised float32 has no rounding to excuse
ALL_ROWS_UP_TO = 8192  # tokens; above, float64 attention over every row would take longer than the benchmark
ROWS_AT_ONCE = 128
# On random inputs the noise of a head differs by 2 % from another's, by its values: few heads make an uncertain figure.
HEADS, HEADS_OF_ALL_ROWS = 8, 3


@dataclass(frozen=True)
class Sample:
    """What some rows of one head should be."""

    head: int
    rows: range
    exact: Tensor  # float64 [rows, value channels]


def bound(quantization: str, dtype: torch.dtype) -> float:
    exact = quantization == "none" and dtype == torch.float32
    return MAX_RELATIVE_L1_FLOAT32 if exact else MAX_RELATIVE_L1[quantization]


def exact_samples(inputs: Inputs, mask: BlockMask | None = None) -> list[Sample]:
    """Float64 attention: all rows of three heads for short masked problems, else sampled rows of eight.

    Without a mask the attention is dense, and the rows are always sampled.
    """
    sight, heads = inputs.visibility, inputs.query.shape[1]
    size = ROWS_AT_ONCE if mask is None else mask.block[0]
    count = -(-sight.q_len // size)
    all_rows = mask is not None and sight.q_len <= ALL_ROWS_UP_TO
    chosen = range(count) if all_rows else spread(count, 4)
    kept = None if mask is None else mask.to_dense()[0]
    samples = []
    for head in spread(heads, HEADS_OF_ALL_ROWS if all_rows else HEADS):
        key, value = (x[0, head // inputs.group_size].double() for x in (inputs.key, inputs.value))
        for i in chosen:
            rows = range(i * size, min((i + 1) * size, sight.q_len))
            seen = sight.pairs(rows, range(sight.k_len))[0, 0]
            if kept is not None and mask is not None:
                blocks = kept[min(head, len(kept) - 1), i]
                seen = seen & blocks.repeat_interleave(mask.block[1])[: sight.k_len]
            scores = inputs.query[0, head, rows.start : rows.stop].double() @ key.T * inputs.scale
            exact = torch.where(seen, scores, -torch.inf).softmax(-1) @ value
            samples.append(Sample(head, rows, torch.where(seen.any(-1, keepdim=True), exact, 0.0)))
    return samples


def spread(count: int, most: int) -> list[int]:
    """Up to `most` of `count` numbers, evenly from the first to the last."""
    return sorted({n * (count - 1) // (most - 1) for n in range(most)})


def relative_l1(values: Tensor, samples: list[Sample]) -> float:
    """Sum of |values - exact| over sum of |exact|; `values` is [1, heads, tokens, channels]."""
    parts = [values[0, sample.head, sample.rows.start : sample.rows.stop].double() for sample in samples]
    error = sum(float((part - sample.exact).abs().sum()) for part, sample in zip(parts, samples, strict=True))
    return error / max(sum(float(sample.exact.abs().sum()) for sample in samples), 1e-300)
