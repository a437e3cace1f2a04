"""Hopper's kernel for the "probe" rule: which problems it takes, and its launches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparge.backends.hopper import launch_prepare
from sparge.backends.hopper.boxes import descriptor
from sparge.backends.hopper.launch_16bit import box_sizes, in_boxes
from sparge.backends.triton.dispatch import Launch, addresses_of
from sparge.backends.triton.plans import LOG2_E, REMEMBERED, SelectedHeads, SelectPlan, reach
from sparge.backends.triton.sizes import Sizes
from sparge.config import SparseConfig
from sparge.inputs import Signature
from sparge.quantization import KEYS_PER_SCALE
from sparge.stages import Blocks
from sparge.words import WORD

ROWS = 64  # of one warpgroup
BLOCK_KEYS = (64, 128)
STAGES = 4  # of 128 keys
REGISTERS = {4: (112, 96), 2: (240, 168), 1: (168, 168)}  # warpgroups: what a thread of another has, and at launch
STEP_CYCLES = {4: 1445, 2: 867, 1: 678}  # measured in full int8 attention, 128 channels; others: in proportion
# With two warps that prepare values: what a thread of another warpgroup has, one of theirs, and at launch.
REGISTERS_BESIDE = {4: (96, 96, 96), 2: (200, 104, 168), 1: (168, 104, 168)}
V_STAGES = 4  # of 64 values
SCRATCH_BYTES = 1 << 28  # of logarithms of weights; from about 128K tokens on fewer programs share it
AHEAD = {4: False, 2: True, 1: True}  # whether registers hold the scores of two steps


def probe(
    blocks: Blocks, config: SparseConfig, plan: SelectPlan, part: SelectedHeads, shares: Tensor, processors: int
) -> bool:
    """Fill `shares` of a part's heads; False, and nothing is done, where the kernel does not take the problem.

    Values whose preparation was put off are prepared beside it.
    """
    inputs, copies = blocks.inputs, blocks.quantized
    if not takes(inputs.signature, config):
        return False
    query, key = q_scale, k_scale = inputs.query, inputs.key
    if copies is not None:
        query, key, q_scale, k_scale = copies.query, copies.key, copies.query_scale, copies.key_scale
    heads, strides = range(part.first, part.stop), query.stride()[:3]
    values = None if blocks.put_off is None else launch_prepare.taken_along(blocks.put_off)
    scratch, key_boxes, launch = _launch(
        inputs.signature, config.block, config.probe_rows, copies is not None, strides, heads, plan.share_rows,
        processors, values is not None,
    )  # fmt: skip
    boxes = descriptor(key, *key_boxes)
    tensors = (query, q_scale, k_scale, query.new_empty(scratch, dtype=torch.float32), shares)
    addresses = addresses_of(tensors)
    if values is None:
        unused = len(launch_prepare.BESIDE)
        launch((boxes, *tensors, boxes, *[query] * unused), (boxes, *addresses, boxes, *addresses[:1] * unused))
    else:
        also, places = values
        launch(lambda: (boxes, *tensors, *also()), (boxes, *addresses, *places))
    return True


@functools.lru_cache(maxsize=REMEMBERED)
def takes(problem: Signature, config: SparseConfig) -> bool:
    """The oracle multiplies bfloat16 numbers where there are no int8 ones: float16 ones would have to be rounded."""
    q_place, k_place, _ = problem.misalignments
    boxes = in_boxes(problem.q_shape, problem.q_strides, q_place) and in_boxes(
        problem.k_shape, problem.k_strides, k_place
    )
    readable = problem.dtype == torch.bfloat16 and boxes
    return (
        (readable or config.quantization != "none")
        and 32 < problem.q_shape[3] <= 128
        and min(problem.q_len, problem.k_len) > 0
        and config.block[1] in BLOCK_KEYS
        and problem.packing is None
        and not problem.has_valid
        and problem.left >= problem.k_len
        and problem.scale > 0
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
    values_too: bool,
) -> tuple[int, tuple[tuple[int, ...], ...], Launch]:
    """How many numbers of scratch it takes, what a descriptor says of its keys, and the launch."""
    from sparge.backends.hopper import _probe as kernels

    size = Sizes.of(problem, block, int8)
    rows, words = size.q_blocks * probe_rows, -(-size.k_blocks // WORD)
    causal = reach(problem)[1] < size.k_len
    warpgroups = cheapest(STEP_CYCLES, {n: len(heads) * -(-rows // (n * ROWS)) for n in REGISTERS}, processors, causal)
    tiles = len(heads) * -(-rows // (warpgroups * ROWS))
    per_program = warpgroups * ROWS * (words * WORD + 1)
    probing = min(tiles, processors, max(1, SCRATCH_BYTES // (4 * per_program)))
    (registers, at_launch), v_registers = REGISTERS[warpgroups], 0
    if values_too:
        registers, v_registers, at_launch = REGISTERS_BESIDE[warpgroups]
    numbers = (
        size.heads, size.heads // size.kv_heads, size.q_len, size.k_len, size.q_blocks, share_rows, words,
        size.padded // KEYS_PER_SCALE, reach(problem)[1], probing, tiles, heads.start, len(heads),
        problem.scale * LOG2_E, *q_strides, size.batch, size.padded // launch_prepare.TILE, size.padded, size.k_slots,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "INT8": int8, "DIM": size.dp if int8 else size.dim, "D": size.dp, "BQ": block[0], "BK": block[1],
        "PROBES": probe_rows, "WGS": warpgroups, "AHEAD": AHEAD[warpgroups], "STAGES": STAGES,
        "VALUES_TOO": values_too, "DV": size.value_dim, "V_STAGES": V_STAGES if values_too else 0,
        "REGISTERS": registers, "V_REGISTERS": v_registers,
        "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip
    programs = processors if values_too else probing
    k_shape, k_strides = tuple(problem.k_shape), tuple(problem.k_strides)
    if int8:  # the copies
        k_shape = (size.batch, size.kv_heads, size.padded, size.dp)
        k_strides = (size.kv_heads * size.padded * size.dp, size.padded * size.dp, size.dp, 1)
    key_boxes = box_sizes(k_shape, k_strides, size.dp)
    return probing * per_program, key_boxes, Launch(kernels.probe, programs, numbers, constants)


def cheapest(cycles: dict[int, int], tiles: dict[int, int], processors: int, causal: bool) -> int:
    """How many warpgroups take least time, by the cycles of a step and by how many tiles there then are."""

    def turns(n: int) -> float:
        """The last one may leave processors idle; a causal tile may be short."""
        return max(1.0, tiles[n] / processors / 2) if causal else float(-(-tiles[n] // processors))

    return min(cycles, key=lambda n: turns(n) * cycles[n])
