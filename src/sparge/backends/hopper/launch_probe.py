"""Hopper's kernel for the "probe" rule: which problems it takes, and its launches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparge.backends.hopper.launch_16bit import boxes_of, has_boxes
from sparge.backends.triton.dispatch import Launch, addresses_of
from sparge.backends.triton.plans import LOG2_E, REMEMBERED, WEIGHT_BYTES, SelectedHeads, SelectPlan, reach
from sparge.backends.triton.sizes import Sizes
from sparge.config import SparseConfig
from sparge.inputs import Inputs, Signature
from sparge.stages import Blocks
from sparge.words import WORD

ROWS = 64  # of one warpgroup
BLOCK_KEYS = (64, 128)
STAGES = 4  # of 128 keys
REGISTERS = {2: (240, 168), 1: (240, 128)}  # consumer warpgroups: what a thread of the second has, and at launch


def probe(
    blocks: Blocks, config: SparseConfig, plan: SelectPlan, part: SelectedHeads, shares: Tensor, processors: int
) -> bool:
    """Fill `shares` of a part's heads; False, and nothing is done, where the kernel does not take the problem."""
    inputs = blocks.inputs
    if not takes(inputs, config):
        return False
    q, heads = inputs.query, range(part.first, part.stop)
    scratch, launch = _launch(inputs.signature, config.block, config.probe_rows, heads, plan.share_rows, processors)
    boxes = boxes_of(inputs.key, plan.sizes.dp)
    tensors = (q, q.new_empty(scratch, dtype=torch.float32), shares)
    launch((boxes, *tensors), (boxes, *addresses_of(tensors)))
    return True


def takes(inputs: Inputs, config: SparseConfig) -> bool:
    """The oracle multiplies bfloat16 numbers, whatever the inputs are: float16 ones would have to be rounded."""
    q, problem = inputs.query, inputs.signature
    return (
        q.dtype == torch.bfloat16
        and 32 < q.shape[3] <= 128
        and min(problem.q_len, problem.k_len) > 0
        and config.block[1] in BLOCK_KEYS
        and problem.packing is None
        and not problem.has_valid
        and problem.left >= problem.k_len
        and inputs.scale > 0
        and has_boxes(q)
        and has_boxes(inputs.key)
    )


@functools.lru_cache(maxsize=REMEMBERED)
def _launch(
    problem: Signature, block: tuple[int, int], probe_rows: int, heads: range, share_rows: int, processors: int
) -> tuple[int, Launch]:
    """How many numbers of scratch it takes, and the launch."""
    from sparge.backends.hopper import _probe as kernels

    size = Sizes.of(problem, block, False)
    rows, words = size.q_blocks * probe_rows, -(-size.k_blocks // WORD)
    warpgroups = 2
    if 2 * len(heads) * -(-rows // (2 * ROWS)) <= processors:  # larger tiles would leave half of them idle
        warpgroups = 1
    tiles = len(heads) * -(-rows // (warpgroups * ROWS))
    per_program = warpgroups * ROWS * (words * WORD + 1)
    programs = min(tiles, processors, max(1, WEIGHT_BYTES // (4 * per_program)))
    registers, at_launch = REGISTERS[warpgroups]
    numbers = (
        size.heads, size.heads // size.kv_heads, size.q_len, size.k_len, size.q_blocks, share_rows, words,
        reach(problem)[1], tiles, heads.start, len(heads), problem.scale * LOG2_E, *problem.q_strides[:3],
    )  # fmt: skip
    constants: dict[str, Any] = {
        "DIM": size.dim, "D": size.dp, "BQ": block[0], "BK": block[1], "PROBES": probe_rows, "WGS": warpgroups,
        "STAGES": STAGES, "REGISTERS": registers, "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip
    return programs * per_program, Launch(kernels.probe, programs, numbers, constants)
