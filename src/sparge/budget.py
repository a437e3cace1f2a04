"""The error budget: a few rows per head are also computed exactly; heads whose error may exceed the budget are redone.

Only the device knows which heads those are, and nothing here waits for it: on a GPU the second attention is always
launched, and its tiles leave at once where a head is within the budget.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparge.backends import Backend, choose
from sparge.config import SparseConfig
from sparge.judging import Verdict, sampled_rows
from sparge.stages import Blocks, Output, Redo

SLOW = ("torch", "reference")  # these would make a GPU wait for the host


def enforce(output: Output, blocks: Blocks, backend: Backend, config: SparseConfig) -> tuple[Output, Verdict]:
    """The output with every head over the budget computed anew, in its place; and what is estimated of the result."""
    inputs, max_error = blocks.inputs, config.max_error
    assert max_error is not None
    if loses_nothing(config) or not backend.takes_masks:
        nothing = torch.zeros(inputs.query.shape[:2], device=inputs.query.device)
        return output, Verdict(nothing, nothing.bool())
    rows = sampled_rows(inputs.query.shape[2], inputs.query.device)
    exact = backend.exact_rows(inputs, rows)
    first = backend.judge(output.values, exact, rows, max_error)
    if inputs.query.device.type == "cpu" and not first.over.any():
        return output, first
    redo(first.over, output, blocks, backend, config)
    after = backend.judge(output.values, exact, rows, max_error)
    skipped = torch.where(first.over, 0, output.skipped_pv)
    return replace(output, skipped_pv=skipped), Verdict(after.error, first.over)


def loses_nothing(config: SparseConfig) -> bool:
    return config.keeps_everything and config.pv_threshold is None and config.quantization == "none"


def redo(over: Tensor, output: Output, blocks: Blocks, backend: Backend, config: SparseConfig) -> None:
    """Overwrites the heads that are over with attention over all visible blocks, unquantised where a backend can."""
    config = replace(config, pv_threshold=None)
    exact = replace(config, quantization="none")
    able, heads = choose(blocks.inputs, exact, own_mask=True).backend, Redo(over, output)
    if able is not backend and able.name in SLOW:
        backend.attend_again(blocks, config, heads)
    else:
        able.attend_again(replace(blocks, quantized=None), exact, heads)
