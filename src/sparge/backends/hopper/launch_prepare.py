"""Hopper's kernel for preparation: which problems it takes, and its launches in place of the portable ones."""

from __future__ import annotations

import functools
import math

from sparge.backends.hopper.launch_16bit import DTYPES, boxes_of, has_boxes
from sparge.backends.triton.dispatch import Launch, addresses_of
from sparge.backends.triton.launch import OwnPass, PrepareTensors
from sparge.backends.triton.plans import KINDS, REMEMBERED
from sparge.backends.triton.sizes import Sizes
from sparge.config import SparseConfig
from sparge.inputs import Inputs, Signature

TILE = 64  # tokens
MOST_SEGMENTS = 8  # sub-blocks of a tile
STAGES = {128: 2, 64: 4}  # by channels
PROGRAMS = {"QUERIES": 3, "KEYS": 3, "VALUES": 4}  # on each multiprocessor
REGISTERS = {3: 168, 4: 128}  # that so many programs have


def takes(inputs: Inputs, config: SparseConfig) -> bool:
    (rows, keys), (a, b), tensors = config.block, config.subblocks, (inputs.query, inputs.key, inputs.value)
    return (
        config.quantization == "int8-fp8"
        and config.similarity is None
        and inputs.packing is None
        and inputs.sample is None
        and not inputs.needs_lse
        and inputs.visibility.key_valid is None
        and min(inputs.query.shape[2], inputs.key.shape[2]) > 0
        and all(x.dtype in DTYPES and 32 < x.shape[3] <= 128 and has_boxes(x) for x in tensors)
        and (inputs.query.shape[3] > 64) == (inputs.value.shape[3] > 64)
        and keys % TILE == 0
        and all(TILE % n == 0 and TILE // n <= MOST_SEGMENTS for n in (rows // a, keys // b))
    )


def own_passes(inputs: Inputs, config: SparseConfig, processors: int) -> dict[str, OwnPass]:
    """What runs in place of the portable passes over queries, keys and values; nothing where the kernel does not take
    the problem."""
    if not takes(inputs, config):
        return {}
    launches = _launches(inputs.signature, config.block, config.subblocks, processors)

    def run(kind: str, x: PrepareTensors) -> None:
        boxes = boxes_of({"QUERIES": x.query, "KEYS": x.key, "VALUES": x.value}[kind], launches[kind].constants["DP"])
        picked = (
            x.hadamard, x.arrived, x.v_repair, x.mean, x.rotated_mean, x.v_scale, x.v_mean, x.v_finite,
            x.q_means, x.k_means, x.q8, x.k8, x.v8, x.q_scale, x.k_scale,
        )  # fmt: skip
        launches[kind]((boxes, *picked), (boxes, *addresses_of(picked)))

    return {kind: functools.partial(run, kind) for kind in launches}


@functools.lru_cache(maxsize=REMEMBERED)
def _launches(
    problem: Signature, block: tuple[int, int], subblocks: tuple[int, int], processors: int
) -> dict[str, Launch]:
    """By kind."""
    from sparge.backends.hopper import _prepare as kernels

    size, launches = Sizes.of(problem, block, True), {}
    for kind, per_processor in PROGRAMS.items():
        heads, tiles = size.kv_heads, size.padded // TILE
        if kind == "QUERIES":
            heads, tiles = size.heads, size.q_slots * block[0] // TILE
        all_tiles = size.batch * heads * tiles
        numbers = (
            heads, tiles, size.q_len, size.k_len, size.padded, size.q_slots, size.k_slots, all_tiles,
            1 / math.sqrt(size.dp), size.batch * size.kv_heads,
        )  # fmt: skip
        constants = {
            "D": size.dim, "DV": size.value_dim, "DP": size.dp, "BQ": block[0], "BK": block[1],
            "Q_SUBS": subblocks[0], "K_SUBS": subblocks[1], "STAGES": STAGES[size.dp], "KIND": KINDS.index(kind),
            "num_warps": 4, "maxnreg": REGISTERS[per_processor],
        }  # fmt: skip
        launches[kind] = Launch(kernels.prepare, min(per_processor * processors, all_tiles), numbers, constants)
    return launches
