"""Hopper's kernel for preparation: which problems it takes, and its launches in place of the portable ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sparge.backends.hopper.boxes import descriptor
from sparge.backends.hopper.launch_16bit import DTYPES, box_sizes, in_boxes
from sparge.backends.triton.arguments import Operands
from sparge.backends.triton.dispatch import Launch
from sparge.backends.triton.plans import KINDS, REMEMBERED
from sparge.backends.triton.sizes import Sizes
from sparge.config import SparseConfig
from sparge.inputs import Signature
from sparge.stages import PutOff

TILE = 64  # tokens
MOST_SEGMENTS = 8  # sub-blocks of a tile
STAGES = {128: 2, 64: 4}  # by channels
PROGRAMS = {"QUERIES": 3, "KEYS": 3, "VALUES": 4}  # on each multiprocessor
REGISTERS = {3: 168, 4: 128}  # that so many programs have


@dataclass(frozen=True)
class OwnPass:
    """One kind of work; called as the portable launch is that it replaces."""

    launch: Launch
    source: int  # which of the portable kernel's tensors is read
    boxes: tuple[tuple[int, ...], ...]
    others: itemgetter[Any]  # of its tensors

    def __call__(self, operands: Operands, addresses: Sequence[int]) -> None:
        boxes = self.descriptor(operands)
        self.launch(lambda: (boxes, *self.others(operands())), (boxes, *self.others(addresses)))

    def descriptor(self, operands: Operands) -> Any:
        return descriptor(operands.tensor(self.source), *self.boxes)


VALUES_LATER = ("VALUES", "REPAIR")  # kinds that wait for the probe
BESIDE = ("V_SCALE", "V_MEAN", "V_FINITE", "V_REPAIR", "V8")  # what a kernel that prepares values too reads and writes


@functools.cache
def _beside() -> itemgetter[Any]:
    from sparge.backends.triton import _prepare as portable

    return itemgetter(*map(portable.prepare.arg_names.index, BESIDE))


def taken_along(put_off: PutOff) -> tuple[Callable[[], list[Any]], list[Any]] | None:
    """What a kernel that prepares values too is given, and the addresses of that: it must be launched, once. None if
    there are no values to prepare."""
    values, operands = put_off.passes.get("VALUES"), put_off.operands
    if not isinstance(values, OwnPass):
        return None
    del put_off.passes["VALUES"]
    boxes, of = values.descriptor(operands), _beside()
    return lambda: [boxes, *of(operands())], [boxes, *of(put_off.addresses)]


def takes(problem: Signature, config: SparseConfig) -> bool:
    (rows, keys), (a, b) = config.block, config.subblocks
    return (
        config.quantization == "int8-fp8"
        and config.similarity is None
        and problem.packing is None
        and not problem.needs_lse
        and not problem.has_valid
        and problem.dtype in DTYPES
        and all(min(shape[2:]) > 0 and 32 < shape[3] <= 128 for shape, _, _ in _read(problem))
        and all(in_boxes(shape, strides, misaligned) for shape, strides, misaligned in _read(problem))
        and (problem.q_shape[3] > 64) == (problem.value_dim > 64)
        and keys % TILE == 0
        and all(TILE % n == 0 and TILE // n <= MOST_SEGMENTS for n in (rows // a, keys // b))
    )


def _read(problem: Signature) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
    """Shape, strides and misalignment of query, key and value."""
    shapes = (tuple(problem.q_shape), tuple(problem.k_shape), (*problem.k_shape[:3], problem.value_dim))
    strides = (problem.q_strides, problem.k_strides, problem.v_strides)
    return tuple(zip(shapes, strides, problem.misalignments, strict=True))


@functools.lru_cache(maxsize=REMEMBERED)
def own_passes(problem: Signature, config: SparseConfig, processors: int) -> dict[str, OwnPass]:
    """By kind, what runs in place of the portable passes; none where the kernel does not take the problem."""
    if not takes(problem, config):
        return {}
    from sparge.backends.hopper import _prepare as kernels
    from sparge.backends.triton import _prepare as portable

    names = kernels.prepare.arg_names
    others = itemgetter(*(portable.prepare.arg_names.index(name) for name in names[1 : names.index("heads")]))
    size, block, passes = Sizes.of(problem, config.block, True), config.block, {}
    for source, (kind, per_processor) in enumerate(PROGRAMS.items()):
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
            "Q_SUBS": config.subblocks[0], "K_SUBS": config.subblocks[1], "STAGES": STAGES[size.dp],
            "KIND": KINDS.index(kind), "num_warps": 4, "maxnreg": REGISTERS[per_processor],
        }  # fmt: skip
        launch = Launch(kernels.prepare, min(per_processor * processors, all_tiles), numbers, constants)
        shape, strides, _ = _read(problem)[source]
        passes[kind] = OwnPass(launch, source, box_sizes(shape, strides, size.dp), others)
    return passes
