"""What a problem launches: worked out once per problem and settings, then reused. No tensors here."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparge.backends.triton.arguments import ScratchLayout
from sparge.backends.triton.dispatch import Launch
from sparge.backends.triton.sizes import (
    PROBE_PROGRAMS,
    SAMPLE_PARTS,
    Sizes,
    padded_dim,
    power_of_two,
    prepare_sizes,
    probe_sizes,
    select_sizes,
    tile_sizes,
)
from sparge.config import RULES, SparseConfig
from sparge.inputs import Signature
from sparge.quantization import KEYS_PER_SCALE
from sparge.words import WORD

LOG2_E = math.log2(math.e)
FORMATS = {"none": 0, "int8": 1, "int8-fp8": 2}
KINDS = ("SAMPLE", "QUERIES", "KEYS", "VALUES", "REPAIR")  # of preparation work, a launch each, as kernels number them
WEIGHT_BYTES = 1 << 27  # of predicted weights kept for a search's walks; longer problems compute them again
SHARE_BYTES = 1 << 28  # of shares that the probe leaves at once; longer problems take several launches
LISTS = ("counts", "cuts", "lists")  # int32 scratch
LIST_BYTES = 1 << 28  # kept-block lists held at once; longer problems take several launches
REMEMBERED = 512  # problems


@dataclass(frozen=True)
class PreparePlan:
    sizes: Sizes
    scratch: ScratchLayout
    clears: bool  # the first launch sets counters to zero; else they must be
    launches: dict[str, Launch]  # by kind, in their order


@dataclass(frozen=True)
class SelectedHeads:
    """Some heads whose shares fit the scratch: probe them, then select."""

    first: int
    stop: int
    probe: Launch | None
    select: Launch


@dataclass(frozen=True)
class SelectPlan:
    sizes: Sizes
    words: int
    stored: ScratchLayout | None  # weights kept between walks, and shifts; None: they are computed again
    logs: int  # kept by the probe
    share_rows: int  # of each head that the probe leaves
    parts: tuple[SelectedHeads, ...]


@dataclass(frozen=True)
class ListedRows:
    """Some query blocks whose lists fit the scratch: make the lists, then attend over them."""

    blocks: int
    tiles_per_block: int
    expand: Launch
    attend: Launch
    careful: Launch | None  # for masked blocks with values that are not finite


@dataclass(frozen=True)
class AttendPlan:
    sizes: Sizes
    lists: ScratchLayout
    parts: tuple[ListedRows, ...]


def _strides(problem: Signature, *strides: tuple[int, ...]) -> tuple[int, ...]:
    """Packed tensors have one batch entry, whose stride must not count."""
    if problem.packing is None:
        return tuple(n for one in strides for n in one)
    return tuple(n for one in strides for n in (0, *one[1:]))


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_plan(problem: Signature, config: SparseConfig, chip: int) -> PreparePlan:
    from sparge.backends.triton import _prepare as kernels

    int8, fp8, judge = config.quantization != "none", config.quantization == "int8-fp8", config.similarity is not None
    size, (rows, keys), (a, b) = Sizes.of(problem, config.block, int8), config.block, config.subblocks
    kinds = KINDS if fp8 else KINDS[:-1]
    tunings = {kind: prepare_sizes(kind, chip, max(size.dp, size.dvp), problem.dtype) for kind in kinds}
    items = {kind: size.items(kind, rows) for kind in kinds}
    q_heads, k_heads = size.entries * size.heads, size.entries * size.kv_heads
    clears = not (int8 and problem.needs_lse)
    if clears:  # queries do not need the sample
        kinds = ("QUERIES", "SAMPLE", *kinds[2:])
    scratch = {
        "arrived": size.rows,
        "v_repair": size.rows,
        "count": size.rows * SAMPLE_PARTS,
        "sum": size.rows * SAMPLE_PARTS * size.dim,
        "rotated_mean": size.rows * size.dp * int8,
        "v_max": size.rows * SAMPLE_PARTS * size.value_dim * fp8,
        "key_mean": size.rows * size.dim,
        "v_sum": size.rows * SAMPLE_PARTS * size.value_dim * fp8,
        "value_scale": size.rows * size.value_dim * fp8,
        "value_mean": size.rows * size.value_dim * fp8,
        "q_similarity": q_heads * size.q_slots * judge,
        "k_similarity": k_heads * size.k_slots * judge,
        "query_scale": q_heads * size.q_tokens * int8,
        "key_scale": k_heads * (size.padded // KEYS_PER_SCALE) * int8,
        "lse_term": q_heads * size.q_tokens * (int8 and problem.needs_lse),
    }
    numbers = (
        size.q_len, size.k_len, size.q_tokens, size.k_tokens, size.padded, size.q_slots, size.k_slots,
        size.kv_heads, size.heads // size.kv_heads, size.row_step(rows), size.key_step, size.value_step,
        1 / math.sqrt(size.dp), problem.scale,
        *_strides(problem, problem.q_strides, problem.k_strides, problem.v_strides),
    )  # fmt: skip
    constants = {
        "D": size.dim, "DV": size.value_dim, "DP": size.dp, "DVP": size.dvp, "BQ": rows, "BK": keys,
        "Q_SUBS": a, "K_SUBS": b, "PACKED": problem.packing is not None, "HAS_VALID": problem.has_valid,
        "JUDGE": judge, "INT8": int8, "FP8": fp8, "WRITE_TERM": int8 and problem.needs_lse, "CLEAR": clears,
    }  # fmt: skip
    launches = {
        kind: Launch(
            kernels.prepare, size.rows * items[kind], (items[kind], *numbers),
            constants | {"KIND": KINDS.index(kind)} | tunings[kind],
        )
        for kind in kinds
    }  # fmt: skip
    return PreparePlan(size, ScratchLayout(scratch), clears, launches)


def reach(problem: Signature) -> tuple[int, int]:
    """How far a row sees to the left and right; further than every key is enough, and keeps positions in 32 bits."""
    everything = problem.q_len + problem.k_len
    return min(problem.left, everything), min(problem.right, everything)


@functools.lru_cache(maxsize=REMEMBERED)
def select_plan(problem: Signature, config: SparseConfig, chip: int) -> SelectPlan:
    from sparge.backends.triton import _select as kernels

    size, (rows, keys), (a, b) = Sizes.of(problem, config.block, False), config.block, config.subblocks
    words, everything = -(-size.k_blocks // WORD), config.keeps_everything
    searches = not everything and not {"cdf", "topk"}.isdisjoint(config.rule)
    tuning = select_sizes(chip, b, size.dim, searches)
    tiles = -(-size.q_blocks * a // tuning["ROWS"])
    programs, chunks = tiles * size.batch * size.heads, -(-size.k_blocks // tuning["CHUNK"])
    shifts = programs * chunks * tuning["ROWS"]
    fits = chip == 90 or size.dim <= 128  # elsewhere registers spill
    stored = searches and fits and 4 * shifts * tuning["CHUNK"] <= WEIGHT_BYTES
    if stored:
        tuning["num_stages"] = 2  # with three, one program per multiprocessor
    numbers = (
        size.heads, size.kv_heads, size.q_len, size.k_len, size.q_tokens, size.k_tokens, size.q_slots, size.k_slots,
        words, *reach(problem), config.sinks, tiles, chunks,
    )  # fmt: skip
    constants = {
        "D": size.dim, "DP": size.dp, "BQ": rows, "BK": keys, "Q_SUBS": a, "K_SUBS": b,
        **{f"USE_{name.upper()}": name in config.rule and not everything for name in RULES}, "KEEP_ALL": everything,
        "RIGHT_EDGE": problem.right < problem.q_len + problem.k_len, "HAS_VALID": problem.has_valid,
        "JUDGE": config.similarity is not None, "PROTECT": bool(config.protected),
        "PACKED": problem.packing is not None, "STORED": stored,
        "PAIRED": chip == 90 and problem.packing is None, **tuning,  # elsewhere registers spill
    }  # fmt: skip
    probes = "probe" in config.rule and not everything
    together = 1 if problem.packing is None else size.batch  # sequences whose heads lie in one part
    share_rows = size.q_slots + together  # what stands before each sequence too
    heads = size.batch * size.heads // together
    step = min(heads, max(1, SHARE_BYTES // (2 * share_rows * words * WORD))) if probes else heads
    parts, logs = [], 0
    for first in range(0, heads, step):
        here = min(step, heads - first)
        part = (share_rows, first, here)
        select = Launch(
            kernels.select, tiles * here * together, (*numbers, *part, problem.scale * LOG2_E), constants
        )  # fmt: skip
        probe = None
        if probes:
            count, probe = _probe(problem, config, size, words, part, here * together, chip)
            logs = max(logs, count)
        parts.append(SelectedHeads(first, first + here, probe, select))
    kept = ScratchLayout({"weights": shifts * tuning["CHUNK"], "shifts": shifts}) if stored else None
    return SelectPlan(size, words, kept, logs, share_rows, tuple(parts))


def _probe(
    problem: Signature, config: SparseConfig, size: Sizes, words: int, part: tuple[int, int, int], heads: int, chip: int
) -> tuple[int, Launch]:
    """How many numbers of scratch it takes, and the launch for as many heads, of all sequences together."""
    from sparge.backends.triton import _probe as kernels

    int8, rows = config.quantization != "none", size.q_blocks * config.probe_rows
    float32 = problem.dtype == torch.float32 and not int8
    tuning = probe_sizes(chip, size.dim, config.block[1], float32, rows * heads)
    tiles = -(-rows // tuning["ROWS"])
    all_tiles, per_program = tiles * heads, tuning["ROWS"] * words * WORD
    programs = min(all_tiles, PROBE_PROGRAMS, max(1, WEIGHT_BYTES // (4 * per_program)))
    dim, q_strides, k_strides = size.dim, problem.q_strides, problem.k_strides
    if int8:
        dim = padded_dim(size.dim, True)
        q_strides = (size.heads * size.q_tokens * dim, size.q_tokens * dim, dim, 1)
        k_strides = (size.kv_heads * size.padded * dim, size.padded * dim, dim, 1)
    numbers = (
        size.heads, size.kv_heads, size.q_len, size.k_len, size.q_tokens, size.k_tokens, part[0], words,
        *reach(problem), tiles, all_tiles, *part[1:], size.padded // KEYS_PER_SCALE, problem.scale * LOG2_E,
        *_strides(problem, q_strides, k_strides),
    )  # fmt: skip
    constants = {
        "D": dim, "DP": max(16, power_of_two(dim)), "BQ": config.block[0], "BK": config.block[1],
        "PROBES": config.probe_rows, "HAS_VALID": problem.has_valid, "PACKED": problem.packing is not None,
        "INT8": int8, **tuning,
    }  # fmt: skip
    return programs * per_program, Launch(kernels.probe, programs, numbers, constants)


class MaskBits(NamedTuple):
    """How a mask's bits lie in memory; batch entries or heads that share them have stride 0."""

    batch: int
    head: int
    words: int  # per row
    misalignment: int

    @classmethod
    def of(cls, bits: Tensor) -> MaskBits:
        batch, head = (bits.stride(n) if bits.shape[n] > 1 else 0 for n in (0, 1))
        return cls(batch, head, bits.shape[3], bits.data_ptr() & 15)


class Strides(NamedTuple):
    """Strides of what the attention kernel reads and writes."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    output: tuple[int, ...]
    value_misalignment: int


def rows_listed_at_once(size: Sizes) -> int:
    """Query blocks whose lists fit the scratch together."""
    return min(size.q_blocks, max(1, LIST_BYTES // (4 * size.batch * size.heads * size.k_blocks)))


def list_scratch(rows: int, size: Sizes, counters: int = 1) -> ScratchLayout:
    """Of so many lists; behind their counts stand counters, the first of which is what programs draw first."""
    return ScratchLayout(dict(zip(LISTS, (rows + counters, rows, rows * size.k_blocks), strict=True)))


def cuts_anywhere(problem: Signature) -> bool:
    """Whether blocks other than the last that a row sees may hold keys hidden from it."""
    return problem.has_valid or problem.left < problem.k_len


def list_rows(
    problem: Signature,
    size: Sizes,
    block: tuple[int, int],
    bits: MaskBits | None,
    first: int,
    rows: int,
    second: bool,
    counters: int = 1,
) -> Launch:
    """Lists of the kept blocks of `rows` query blocks of each head; without bits, of all visible ones of some heads.

    The second stage judges a block after those behind it, so it wants them in that order. Counters are a power of two.
    """
    from sparge.backends.triton import _select as kernels

    words, batch, head = (0, 0, 0) if bits is None else (bits.words, bits.batch, bits.head)
    numbers = (
        size.heads, size.q_len, size.k_len, size.q_tokens, size.k_tokens, size.k_blocks, words, first, rows,
        batch, head, *reach(problem),
    )  # fmt: skip
    constants = {
        "BQ": block[0], "BK": block[1], "TILE": 256, "PACKED": problem.packing is not None,
        "CUTS_FIRST": cuts_anywhere(problem), "IN_ORDER": second and cuts_anywhere(problem),
        "HAS_VALID": problem.has_valid, "SOME_HEADS": bits is None, "COUNTERS": counters,
        "num_warps": 1,  # sums in order need no barrier
    }  # fmt: skip
    return Launch(kernels.expand, rows * size.batch * size.heads, numbers, constants)


@functools.lru_cache(maxsize=REMEMBERED)
def attend_plan(
    problem: Signature,
    config: SparseConfig,
    block: tuple[int, int],
    operands: Strides,
    bits: MaskBits | None,
    chip: int,
) -> AttendPlan:
    from sparge.backends.triton import _attend as kernels

    number_format, second = FORMATS[config.quantization], config.pv_threshold is not None
    size, packed = Sizes.of(problem, block, number_format > 0), problem.packing is not None
    tiles = tile_sizes(
        chip, max(size.dp, size.dvp), block, number_format, second, problem.dtype == torch.float32, packed
    )
    per_block, heads = block[0] // tiles["BM"], size.batch * size.heads
    step = rows_listed_at_once(size)
    constants: dict[str, Any] = {
        "D": size.dim, "DV": size.value_dim, "DP": size.dp, "DVP": size.dvp,
        "BQ": block[0], "BK": block[1], "FORMAT": number_format,
        "CUTS_FIRST": cuts_anywhere(problem), "HAS_VALID": problem.has_valid, "SECOND": second,
        "WRITE_LSE": problem.needs_lse, "CAREFUL": False, "PACKED": packed, "SOME_HEADS": bits is None, **tiles,
    }  # fmt: skip
    strides = _strides(problem, operands.query, operands.key, operands.value, operands.output)
    parts = []
    for first in range(0, size.q_blocks, step):
        here = min(step, size.q_blocks - first)
        expand = list_rows(problem, size, block, bits, first, here, second)
        numbers = (
            problem.scale * LOG2_E, size.heads, size.heads // size.kv_heads, size.q_len, size.k_len, size.q_tokens,
            size.k_tokens, size.k_blocks, size.k_slots, size.padded, first, here, *reach(problem), *strides,
        )  # fmt: skip
        programs = here * per_block * heads
        attend = Launch(kernels.attend, programs, numbers, constants)
        careful = Launch(kernels.attend, programs, numbers, constants | {"CAREFUL": True})
        parts.append(ListedRows(here, per_block, expand, attend, careful if number_format < 2 else None))
    return AttendPlan(size, list_scratch(heads * step, size), tuple(parts))
