"""Hopper's attention with 16-bit values: what it takes, and its launches beside the portable backend's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparge.backends.hopper.boxes import descriptor
from sparge.backends.triton.arguments import either, setting
from sparge.backends.triton.dispatch import Launch, addresses_of
from sparge.backends.triton.launch import Part, attend_by_parts, block_of
from sparge.backends.triton.plans import LOG2_E, REMEMBERED, cuts_anywhere, reach, rows_listed_at_once
from sparge.backends.triton.sizes import Sizes
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs, Signature
from sparge.stages import Blocks, Output, Redo

TILE = 128  # rows: two warpgroups
UNIT = 64  # tokens of one TMA box
REGISTERS, REGISTERS_AT_LAUNCH = 240, 168
SHARED_BYTES = 227 << 10
DTYPES = (torch.float16, torch.bfloat16)


def refusal_of(inputs: Inputs, config: SparseConfig) -> str | None:
    """Why the kernel cannot run a call that asks for 16-bit values, or None."""
    if inputs.query.dtype not in DTYPES:
        return f"multiplies 16-bit values, not {inputs.query.dtype}"
    if inputs.packing is not None:
        return f"takes packed sequences with int8-fp8 only, not {config.quantization}"
    if max(inputs.query.shape[-1], inputs.value.shape[-1]) > 128:
        return f"takes head_dim above 128 with int8-fp8 only, not {config.quantization}"
    if config.block[0] % TILE:
        return f"takes blocks of 128 or 256 rows with {config.quantization}, not {config.block}"
    tensors = (inputs.value,) if config.quantization == "int8" else (inputs.query, inputs.key, inputs.value)
    if not all(has_boxes(x) for x in tensors):
        return "needs channels next to each other and everything else 16 bytes apart"
    return None


def has_boxes(x: Tensor) -> bool:
    return in_boxes(x.shape, x.stride(), x.data_ptr() % 16)


def in_boxes(shape: Sequence[int], strides: Sequence[int], misalignment: int) -> bool:
    """Whether TMA can read 16-bit numbers: strides that count must be multiples of 16 bytes."""
    apart = [stride for stride, extent in zip(strides[:3], shape, strict=False) if extent > 1]
    return strides[3] == 1 and misalignment == 0 and all(stride > 0 and stride % 8 == 0 for stride in apart)


def boxes_of(x: Tensor, columns: int) -> Any:
    """A TMA descriptor of [batch, heads, tokens, channels]; channels beyond the last read as 0."""
    return descriptor(x, *box_sizes(x.shape, x.stride(), columns))


def box_sizes(shape: Sequence[int], strides: Sequence[int], columns: int) -> tuple[tuple[int, ...], ...]:
    """What a descriptor says of a tensor: shape, strides, and the shape of a box."""
    # The stride of an extent of 1 does not count, but TMA refuses odd ones.
    counted = [stride if extent > 1 else 8 * shape[3] for stride, extent in zip(strides, shape, strict=True)]
    return tuple(shape), (*counted[:3], 1), (1, 1, UNIT, columns)


@functools.lru_cache(maxsize=REMEMBERED)
def _launches(
    problem: Signature,
    block: tuple[int, int],
    int8: bool,
    skip_rows: int | None,
    output: tuple[int, ...],
    processors: int,
    some_heads: bool,
) -> tuple[Launch, ...]:
    """One per part of the query blocks, as the portable backend divides them."""
    from sparge.backends.hopper import _attend_16bit as kernels

    size = Sizes.of(problem, block, int8)
    heads, per_block, step = size.batch * size.heads, block[0] // TILE, rows_listed_at_once(size)
    constants: dict[str, Any] = {
        "D": size.dp, "DVP": size.dvp, "DV": size.value_dim, "INT8": int8, "BQ": block[0], "BK": block[1],
        "STAGES": _stages(size, int8), "CUTS_FIRST": cuts_anywhere(problem),
        "HAS_VALID": problem.has_valid, "WRITE_LSE": problem.needs_lse, "REGISTERS": REGISTERS,
        "SECOND": skip_rows is not None, "SKIP_ROWS": skip_rows or TILE, "SOME_HEADS": some_heads,
        "num_warps": 4, "maxnreg": REGISTERS_AT_LAUNCH,
    }  # fmt: skip
    launches = []
    for first in range(0, size.q_blocks, step):
        here = min(step, size.q_blocks - first)
        tiles = here * heads * per_block
        numbers = (
            size.heads, size.heads // size.kv_heads, size.q_len, size.k_len, here, first, size.k_blocks, size.k_slots,
            size.padded, tiles, *reach(problem), problem.scale * LOG2_E, *output,
        )  # fmt: skip
        launches.append(Launch(kernels.attend, min(tiles, processors), numbers, constants))
    return tuple(launches)


def _stages(size: Sizes, int8: bool) -> int:
    """K and V stages: four if they fit beside two tiles of Q and the rows on their way out, else two."""
    score_bytes = 1 if int8 else 2
    stage = 2 * UNIT * (score_bytes * size.dp + 2 * size.dvp)
    rest = TILE * (2 * score_bytes * size.dp + 2 * size.dvp) + 2048
    return 4 if 4 * stage + rest <= SHARED_BYTES else 2


def attend(blocks: Blocks, kept: BlockMask | Redo, config: SparseConfig, processors: int) -> Output:
    inputs, copies, valid = blocks.inputs, blocks.quantized, blocks.inputs.visibility.key_valid
    q, k, v = inputs.query, inputs.key, inputs.value
    q_scale = k_scale = lse_term = q
    if copies is not None:
        q, k, v, q_scale, k_scale = copies.query, copies.key, copies.value, copies.query_scale, copies.key_scale
        lse_term = q if copies.lse_term is None else copies.lse_term
    block = block_of(kept, config)
    size = Sizes.of(inputs.signature, block, copies is not None)
    boxes = (boxes_of(q, size.dp), boxes_of(k, size.dp), boxes_of(v, size.dvp))
    padding = q if valid is None else valid.contiguous().view(torch.int8)

    second = config.pv_threshold is not None
    thresholds, finite = setting(config, "pv_threshold", inputs, second), blocks.v_finite.view(torch.int8)

    def launch(part: Part) -> None:
        skip_rows = block[0] // part.tiles_per_block if second else None
        strides, again = part.output.stride()[:3], isinstance(kept, Redo)
        mine = _launches(inputs.signature, block, copies is not None, skip_rows, strides, processors, again)[
            part.number
        ]
        rows = mine.numbers[4] * size.batch * size.heads
        tensors = (
            part.counts, part.cuts, part.lists, part.counts[rows:], q_scale, k_scale, padding, finite, thresholds,
            lse_term, part.skips, part.output, either(part.lse, q),
        )  # fmt: skip
        mine((*boxes, *tensors), (*boxes, *addresses_of(tensors)))

    return attend_by_parts(blocks, kept, config, launch)
