"""Launches the kernels that compute a few rows exactly: what they take, how rows and keys are divided."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.backends.triton.dispatch import Launch, addresses_of
from sparge.backends.triton.plans import LOG2_E, REMEMBERED, reach
from sparge.backends.triton.sizes import MIN_VALUE_CHANNELS, SMALL_CHIPS, power_of_two
from sparge.inputs import Inputs, Signature
from sparge.judging import Verdict, deviations_of

PROGRAMS = 1024  # fill a large chip, several for each multiprocessor so that uneven ones even out
FEWEST_KEYS = 1024  # of one part: fewer would not repay the merge
TILE = 64  # rows of one program


@dataclass(frozen=True)
class Plan:
    parts: int
    attend: Launch
    merge: Launch


def takes(inputs: Inputs) -> bool:
    """Float32 tiles would not fit every chip, and need no speed."""
    widest = max(inputs.query.shape[-1], inputs.value.shape[-1])
    return inputs.packing is None and inputs.query.dtype != torch.float32 and widest <= 256


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(problem: Signature, count: int, chip: int) -> Plan:
    from sparge.backends.triton import _exact as kernels

    (batch, heads, _, dim), kv_heads, value_dim = problem.q_shape, problem.k_shape[1], problem.value_dim
    tiles, step = -(-count // TILE), 64
    parts = max(1, min(PROGRAMS // (batch * heads * tiles), problem.k_len // FEWEST_KEYS))
    keys_per_part = -(-problem.k_len // (parts * step)) * step
    wide, small = max(dim, value_dim) > 128, chip in SMALL_CHIPS
    channels = {"DV": value_dim, "DVP": max(power_of_two(value_dim), MIN_VALUE_CHANNELS)}
    numbers = (
        heads, heads // kv_heads, count, problem.q_len, problem.k_len, *reach(problem), tiles, parts, keys_per_part,
        problem.scale * LOG2_E, *problem.q_strides, *problem.k_strides, *problem.v_strides,
    )  # fmt: skip
    constants = {
        "D": dim, "DP": max(16, power_of_two(dim)), **channels, "ROWS": TILE, "STEP": step,
        "HAS_VALID": problem.has_valid,
        "num_warps": 8 if wide or small else 4, "num_stages": 1 if wide and small else 2 if wide else 3,
    }  # fmt: skip
    attend = Launch(kernels.attend_rows, batch * heads * parts * tiles, numbers, constants)
    merged = 16  # rows of one program
    merge = Launch(
        kernels.merge_parts, batch * heads * -(-count // merged), (count, parts, -(-count // merged)),
        {**channels, "ROWS": merged, "num_warps": 4},
    )  # fmt: skip
    return Plan(parts, attend, merge)


@functools.lru_cache(maxsize=REMEMBERED)
def _judge(
    shape: tuple[int, ...], strides: tuple[int, ...], kind: tuple[torch.dtype, int], count: int, max_error: float
) -> Launch:
    """`kind`: the values' type and misalignment, which the compiled kernel depends on."""
    from sparge.backends.triton import _exact as kernels

    batch, heads, length, value_dim = shape
    numbers = (heads, count, max_error, deviations_of(count, length), *strides)
    constants = {"DV": value_dim, "DVP": power_of_two(value_dim), "ROWS": 64, "num_warps": 8}
    return Launch(kernels.judge, batch * heads, numbers, constants)


def judge(values: Tensor, exact: Tensor, rows: Tensor, max_error: float) -> Verdict:
    error = values.new_empty(values.shape[:2], dtype=torch.float32)
    over = values.new_empty(values.shape[:2], dtype=torch.bool)
    tensors = (values, exact.contiguous(), rows, error, over.view(torch.int8))
    kind = (values.dtype, values.data_ptr() & 15)
    launch = _judge(tuple(values.shape), values.stride(), kind, len(rows), float(max_error))
    launch(tensors, addresses_of(tensors))
    return Verdict(error, over)


def exact_rows(inputs: Inputs, rows: Tensor, chip: int) -> Tensor:
    """[B, Hq, R, Dv]: dense attention of rows [R], in the inputs' dtype."""
    q, sight = inputs.query, inputs.visibility
    (batch, heads), count, value_dim = q.shape[:2], len(rows), inputs.value.shape[-1]
    plan = _plan(inputs.signature, count, chip)
    values = q.new_empty(batch * heads, plan.parts, count, value_dim, dtype=torch.float32)
    lse = values.new_empty(batch * heads, plan.parts, count)
    output = q.new_empty(batch, heads, count, value_dim)
    valid = q if sight.key_valid is None else sight.key_valid.contiguous().view(torch.int8)
    unbroken = q if sight.unbroken is None else sight.unbroken
    attended = (q, inputs.key, inputs.value, valid, unbroken, rows, values, lse)
    plan.attend(attended, addresses_of(attended))
    merged = (values, lse, output)
    plan.merge(merged, addresses_of(merged))
    return output
