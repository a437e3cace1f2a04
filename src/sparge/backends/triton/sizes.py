"""Shapes and tile sizes: everything about a launch that depends on sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparge.inputs import Signature
from sparge.quantization import MIN_ROTATION, SAMPLE_TILE

KEY_TILE = 128  # 8-bit copies of K and V are padded to it, and packed sequences start at its multiples
MOST_STEPS = {"QUERIES": 8, "KEYS": 32, "VALUES": 4}  # blocks or key tiles one item of preparation goes through
ITEMS = 512  # enough to fill a chip: shorter problems have smaller items
PROBE_PROGRAMS = 264  # two for each of an H200's multiprocessors: each has scratch, which should stay in L2
SAMPLE_PARTS = 8  # programs that share one head's sample
MIN_VALUE_CHANNELS = 64  # Triton 3.6 on sm_90 multiplies fewer wrongly where rows are not 16-byte aligned
SMALL_CHIPS = (86, 89, 120)  # 99 KB of shared memory


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def padded_dim(dim: int, int8: bool) -> int:
    return max(power_of_two(dim), MIN_ROTATION if int8 else 16)


@dataclass(frozen=True)
class Sizes:
    """The shape of a problem as the kernels see it; packed sequences are batch entries of unequal length."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int  # of the longest sequence
    k_len: int
    q_tokens: int  # rows between one head and the next in per-token tensors
    k_tokens: int
    padded: int  # keys between one head and the next in the 8-bit copies
    q_slots: int  # blocks between one head and the next
    k_slots: int
    dim: int
    value_dim: int
    dp: int  # channels, padded for the tensor core
    dvp: int
    entries: int  # leading extent of the tensors between the stages
    q_blocks: int  # of the longest sequence
    k_blocks: int

    @classmethod
    def of(cls, problem: Signature, block: tuple[int, int], int8: bool) -> Sizes:
        (batch, heads, q_tokens, dim), (kv_heads, k_tokens) = problem.q_shape, problem.k_shape[1:3]
        if problem.packing is None:
            sequences, padded = batch, -(-k_tokens // KEY_TILE) * KEY_TILE
            q_slots, k_slots = -(-q_tokens // block[0]), -(-k_tokens // block[1])
        else:  # every sequence may waste part of a block
            sequences = problem.packing[0]
            padded = (k_tokens // KEY_TILE + sequences) * KEY_TILE
            q_slots, k_slots = q_tokens // block[0] + sequences, padded // block[1]
        return cls(
            sequences, heads, kv_heads, problem.q_len, problem.k_len, q_tokens, k_tokens, padded, q_slots, k_slots,
            dim, problem.value_dim, padded_dim(dim, int8),
            max(power_of_two(problem.value_dim), MIN_VALUE_CHANNELS), batch,
            -(-problem.q_len // block[0]), -(-problem.k_len // block[1]),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Key/value heads in all."""
        return self.batch * self.kv_heads

    def row_step(self, block_rows: int) -> int:
        """Query rows of one item of preparation."""
        return _steps("QUERIES", self.batch * self.heads * self.q_blocks) * block_rows

    @property
    def key_step(self) -> int:
        return _steps("KEYS", self.rows * -(-self.k_len // KEY_TILE)) * KEY_TILE

    @property
    def value_step(self) -> int:
        return _steps("VALUES", self.rows * -(-self.k_len // KEY_TILE)) * KEY_TILE

    def items(self, kind: str, block_rows: int) -> int:
        """How many items of one kind a key/value head has; queries are those of all heads that share it."""
        if kind == "QUERIES":
            return -(-self.q_len // self.row_step(block_rows)) * (self.heads // self.kv_heads)
        padded = -(-self.k_len // KEY_TILE) * KEY_TILE
        return {
            "SAMPLE": SAMPLE_PARTS, "KEYS": -(-padded // self.key_step), "VALUES": -(-padded // self.value_step),
            "REPAIR": 1,
        }[kind]  # fmt: skip


def _steps(kind: str, tiles: int) -> int:
    return max(1, min(MOST_STEPS[kind], tiles // ITEMS))


def prepare_sizes(kind: str, chip: int, widest: int, dtype: torch.dtype) -> dict[str, int]:
    """Keys finished at once, warps and pipeline stages of one kind of preparation."""
    if dtype == torch.float32 or widest > 128:
        stages = 1 if chip in SMALL_CHIPS or dtype == torch.float32 else 2
        tile = {"SAMPLE": SAMPLE_TILE, "REPAIR": 32}.get(kind, 64)
        return {"TILE": tile, "num_warps": 8, "num_stages": stages}
    warps = 4 if kind in ("SAMPLE", "VALUES") or (chip == 90 and kind != "REPAIR") else 8  # four would spill elsewhere
    stages = 3 if chip == 90 else 2
    sizes = {"TILE": SAMPLE_TILE if kind == "SAMPLE" else 64, "num_warps": warps, "num_stages": stages}
    if kind != "VALUES":
        return sizes
    # The assembler would take more, and fewer programs would share a multiprocessor; elsewhere so few would spill.
    most = {True: 168, False: 128} if chip == 90 else {True: 208, False: 152}
    return sizes | {"maxnreg": most[widest > 64]}


def select_sizes(chip: int, subblocks: int, widest: int, searches: bool) -> dict[str, int]:
    """Sub-rows per program, sub-blocks per product, key blocks per step."""
    part = min(subblocks, 4 if widest <= 128 and chip != 100 else 2)
    if widest > 128 and subblocks > 4 and chip in SMALL_CHIPS:
        part = 1  # else registers spill
    warps = 4 if chip == 90 and widest <= 128 and subblocks <= 4 and not searches else 8  # four would spill elsewhere
    # Where three stages let one program on a multiprocessor only, two are faster.
    stages = 2 if widest > 128 or (chip == 90 and part * widest > 256) else 3
    return {"ROWS": 64, "PART": part, "CHUNK": 32, "num_warps": warps, "num_stages": stages}


def probe_sizes(chip: int, widest: int, block_keys: int, float32: bool, rows: int) -> dict[str, int]:
    """Sampled rows per program, keys per step. All keys are read for each program's rows: the more rows the better."""
    many = chip == 90 and rows >= 128 * 128  # measured: half of the multiprocessors with such tiles are faster
    step = max(block_keys, 128 if widest <= 128 and not float32 and block_keys > 32 else 64)  # else it spills
    deep = chip == 100 or (many and widest <= 128)
    stages = 1 if float32 or (chip in SMALL_CHIPS and widest > 128) else 3 if deep else 2  # as it spills least
    warps = 8 if many or (chip in SMALL_CHIPS and widest > 128) else 4  # four would spill
    return {"ROWS": 128 if many else 64, "STEP": step, "num_warps": warps, "num_stages": stages}


def tile_sizes(
    chip: int, widest: int, block: tuple[int, int], number_format: int, second: bool, float32: bool, packed: bool
) -> dict[str, int]:
    """Rows per tile, blocks per step, steps per block, warps and pipeline stages.

    Measured on sm_90; elsewhere the largest that fit the registers and shared memory.
    """
    pair = 2 if block[1] <= 64 and not second else 1
    rows, warps, stages, split = 64, 8, 2, 1
    small = chip in SMALL_CHIPS
    if float32 and number_format == 0:
        pair, stages, split = 1, 1, 1 if second else max(1, block[1] // 32)
    elif widest > 128:
        pair = 1
        narrow = number_format == 0 and chip not in (90, 100)
        stages = 1 if (second and number_format == 2) or (narrow and (small or not second)) else 2
        warps = 4 if number_format == 2 and second and block[1] > 64 else 8  # eight give wrong results with Triton 3.6
        keys = 32 if narrow else 64
        split = 1 if second else max(1, block[1] // keys)
    elif chip == 90 and number_format == 2:
        warps, stages = 4, 4
    elif widest <= 64:
        rows, stages = 128, 2 if small else 3
    elif chip in (90, 100):
        rows, stages = 128, 3
    elif number_format == 2:
        rows, pair = 128, 1
    else:
        pair, stages = 1, 1 if small and packed and number_format == 1 else 2
    if block[0] % rows:
        rows, warps = 64, max(4, warps // 2)
    return {"BM": rows, "PAIR": pair, "SPLIT": split, "num_warps": warps, "num_stages": stages}
