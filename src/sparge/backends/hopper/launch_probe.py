"""Hopper's kernel for the "probe" rule: which problems it takes, and its launches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparge.backends.hopper.launch_16bit import boxes_of, has_boxes
from sparge.backends.triton.dispatch import Launch, addresses_of
from sparge.backends.triton.plans import LOG2_E, REMEMBERED, WEIGHT_BYTES, SelectedHeads, SelectPlan, reach
from sparge.backends.triton.sizes import Sizes, padded_dim
from sparge.config import SparseConfig
from sparge.inputs import Inputs, Signature
from sparge.quantization import KEYS_PER_SCALE
from sparge.stages import Blocks
from sparge.words import WORD

ROWS = 64  # of one warpgroup
BLOCK_KEYS = (64, 128)
STAGES = 4  # of 128 keys
REGISTERS = {4: (112, 96), 2: (240, 168), 1: (168, 168)}  # warpgroups: what a thread of another has, and at launch
STEP_CYCLES = {4: 1445, 2: 867, 1: 678}  # measured in full int8 attention, 128 channels; others: in proportion
AHEAD = {4: False, 2: True, 1: True}  # whether registers hold the scores of two steps


def probe(
    blocks: Blocks, config: SparseConfig, plan: SelectPlan, part: SelectedHeads, shares: Tensor, processors: int
) -> bool:
    """Fill `shares` of a part's heads; False, and nothing is done, where the kernel does not take the problem."""
    inputs, copies = blocks.inputs, blocks.quantized
    if not takes(inputs, config):
        return False
    query, key = q_scale, k_scale = inputs.query, inputs.key
    if copies is not None:
        query, key, q_scale, k_scale = copies.query, copies.key, copies.query_scale, copies.key_scale
    heads, strides = range(part.first, part.stop), query.stride()[:3]
    scratch, launch = _launch(
        inputs.signature, config.block, config.probe_rows, copies is not None, strides, heads, plan.share_rows,
        processors,
    )  # fmt: skip
    boxes = boxes_of(key, padded_dim(inputs.query.shape[3], copies is not None))
    tensors = (query, q_scale, k_scale, query.new_empty(scratch, dtype=torch.float32), shares)
    launch((boxes, *tensors), (boxes, *addresses_of(tensors)))
    return True


def takes(inputs: Inputs, config: SparseConfig) -> bool:
    """The oracle multiplies bfloat16 numbers where there are no int8 ones: float16 ones would have to be rounded."""
    q, problem = inputs.query, inputs.signature
    readable = q.dtype == torch.bfloat16 and has_boxes(q) and has_boxes(inputs.key)
    return (
        (readable or config.quantization != "none")
        and 32 < q.shape[3] <= 128
        and min(problem.q_len, problem.k_len) > 0
        and config.block[1] in BLOCK_KEYS
        and problem.packing is None
        and not problem.has_valid
        and problem.left >= problem.k_len
        and inputs.scale > 0
    )


@functools.lru_cache(maxsize=REMEMBERED)
def _launch(
    problem: Signature,
    block: tuple[int, int],
    probe_rows: int,
    int8: bool,
    q_strides: tuple[int, ...],
    heads: range,
    share_rows: int,
    processors: int,
) -> tuple[int, Launch]:
    """How many numbers of scratch it takes, and the launch."""
    from sparge.backends.hopper import _probe as kernels

    size = Sizes.of(problem, block, int8)
    rows, words = size.q_blocks * probe_rows, -(-size.k_blocks // WORD)
    causal = reach(problem)[1] < size.k_len
    warpgroups = min(REGISTERS, key=lambda n: _cost(n, len(heads) * -(-rows // (n * ROWS)), processors, causal))
    tiles = len(heads) * -(-rows // (warpgroups * ROWS))
    per_program = warpgroups * ROWS * (words * WORD + 1)
    programs = min(tiles, processors, max(1, WEIGHT_BYTES // (4 * per_program)))
    registers, at_launch = REGISTERS[warpgroups]
    numbers = (
        size.heads, size.heads // size.kv_heads, size.q_len, size.k_len, size.q_blocks, share_rows, words,
        size.padded // KEYS_PER_SCALE, reach(problem)[1], tiles, heads.start, len(heads), problem.scale * LOG2_E,
        *q_strides,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "INT8": int8, "DIM": size.dp if int8 else size.dim, "D": size.dp, "BQ": block[0], "BK": block[1],
        "PROBES": probe_rows, "WGS": warpgroups, "AHEAD": AHEAD[warpgroups], "STAGES": STAGES, "REGISTERS": registers,
        "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip
    return programs * per_program, Launch(kernels.probe, programs, numbers, constants)


def _cost(warpgroups: int, tiles: int, processors: int, causal: bool) -> float:
    """Cycles for each step of the longest tile: the last turn may leave processors idle, a causal tile may be short."""
    turns = max(1.0, tiles / processors / 2) if causal else float(-(-tiles // processors))
    return turns * STEP_CYCLES[warpgroups]
