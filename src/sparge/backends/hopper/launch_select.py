"""Hopper's kernel for selection: which problems it takes, and its launches."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from sparge.backends.hopper.boxes import descriptor
from sparge.backends.hopper.launch_probe import REGISTERS, cheapest
from sparge.backends.triton.arguments import seen_by_kernels, setting
from sparge.backends.triton.dispatch import Launch, addresses_of
from sparge.backends.triton.plans import LOG2_E, REMEMBERED, SelectedHeads, SelectPlan, reach
from sparge.backends.triton.sizes import Sizes
from sparge.config import SparseConfig
from sparge.inputs import Signature
from sparge.stages import Blocks
from sparge.words import WORD

RULES = ("threshold", "gap", "probe")  # that need no search
SUBS = (4, 4)
QUERY_BLOCKS = 16  # of one warpgroup
STAGES = 4  # of the sub-means of 32 key blocks
MOST_BLOCKS = 1 << 30  # of one head: places in its shares are numbers of 32 bits
STEP_CYCLES = {4: 7400, 2: 4800, 1: 3300}  # of both walks together, measured in full attention, 128 channels


def select(
    blocks: Blocks, config: SparseConfig, plan: SelectPlan, part: SelectedHeads, shares: Tensor, bits: Tensor,
    processors: int,
) -> bool:  # fmt: skip
    """Fill the bits of a part's heads; False, and nothing is done, where the kernel does not take the problem."""
    inputs = blocks.inputs
    if not takes(inputs.signature, config):
        return False
    heads = range(part.first, part.stop)
    sizes, launch = _launch(inputs.signature, config, heads, plan.words, plan.share_rows, processors)
    boxes = descriptor(blocks.k_means, *sizes)
    settings = (setting(config, name, inputs, name in config.rule) for name in RULES)
    tensors = (blocks.q_means, blocks.v_finite, *settings, shares, bits)
    launch(lambda: (boxes, *seen_by_kernels(tensors)), (boxes, *addresses_of(tensors)))
    return True


@functools.lru_cache(maxsize=REMEMBERED)
def takes(problem: Signature, config: SparseConfig) -> bool:
    dim, (rows, keys) = problem.q_shape[3], config.block
    return (
        set(config.rule) <= set(RULES)
        and config.subblocks == SUBS
        and config.similarity is None
        and not config.protected
        and 32 < dim <= 128
        and dim % 8 == 0  # rows that TMA can read
        and min(problem.q_len, problem.k_len) > 0
        and (problem.q_len // rows) * (problem.k_len // keys) < MOST_BLOCKS
        and problem.packing is None
        and not problem.has_valid
        and problem.left >= problem.k_len
        and problem.scale > 0
    )


def _columns(dim: int) -> int:
    return 128 if dim > 64 else 64


@functools.lru_cache(maxsize=REMEMBERED)
def _launch(
    problem: Signature, config: SparseConfig, heads: range, words: int, share_rows: int, processors: int
) -> tuple[tuple[tuple[int, ...], ...], Launch]:
    """What a descriptor says of the keys' means, and the launch."""
    from sparge.backends.hopper import _select as kernels

    size = Sizes.of(problem, config.block, False)
    tiles = {n: len(heads) * -(-size.q_blocks // (n * QUERY_BLOCKS)) for n in REGISTERS}
    warpgroups = cheapest(STEP_CYCLES, tiles, processors, reach(problem)[1] < size.k_len)
    registers, at_launch = REGISTERS[warpgroups]
    numbers = (
        size.heads, size.heads // size.kv_heads, size.q_len, size.k_len, size.q_slots, size.k_slots, words,
        reach(problem)[1], config.sinks, share_rows, heads.start, len(heads), problem.scale * LOG2_E,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "D": size.dim, "DP": _columns(size.dim), "BQ": config.block[0], "BK": config.block[1], "WGS": warpgroups,
        "STAGES": STAGES, **{f"USE_{name.upper()}": name in config.rule for name in RULES},
        "RIGHT_EDGE": problem.right < problem.q_len + problem.k_len, "REGISTERS": registers,
        "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip
    slots, dim = size.k_slots, size.dim
    rows = size.batch * size.kv_heads * SUBS[1]
    boxes = ((rows, slots, dim), (slots * dim, dim, 1), (SUBS[1], WORD, _columns(dim)))
    return boxes, Launch(kernels.select, tiles[warpgroups], numbers, constants)
