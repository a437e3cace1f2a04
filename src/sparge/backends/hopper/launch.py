"""Hopper's attention, behind its own preparation where that takes a call: what it takes, its tiles, its launches."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.backends.hopper import launch_16bit, launch_prepare, launch_probe, launch_select
from sparge.backends.hopper.boxes import descriptor
from sparge.backends.triton.arguments import (
    Operands,
    Scratch,
    ScratchLayout,
    either,
    no_skips,
    sequence_ends,
    setting,
)
from sparge.backends.triton.dispatch import Launch
from sparge.backends.triton.launch import TritonBackend, capability, on_device, summarize_by_kinds
from sparge.backends.triton.launch_select import select_by_parts
from sparge.backends.triton.plans import (
    LISTS,
    LOG2_E,
    REMEMBERED,
    MaskBits,
    cuts_anywhere,
    list_rows,
    list_scratch,
    reach,
    rows_listed_at_once,
)
from sparge.backends.triton.sizes import Sizes, power_of_two
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs, Signature
from sparge.stages import Blocks, Output, Redo

CHIP = 90
TRIED = ((3, 6), (3, 9))  # the oldest and newest Triton that the kernel is compiled with in CI; Gluon changes with each
ROWS = 64  # of one warpgroup
UNIT = 64  # keys of one TMA box
BLOCK_KEYS = (64, 128)
REGISTERS = {2: (240, 168), 3: (160, 128)}  # consumer warpgroups: what each thread of one has, and at launch
SHARED_BYTES = 227 << 10
SMALL_BYTES = 3 << 10  # ones to sum rows with, votes, barriers
NARROW = 128  # value channels whose float32 sums fit shared memory, and registers of three warpgroups
# Keys from which on wide steps pay, without and with an LSE: in shorter lists the tail is a large part. With an LSE
# every probability takes an exponential, and they lose at 4,096 and gain at 8,192.
WIDE_FROM = {False: 4096, True: 6144}
# The last tiles are divided where they would leave most processors idle: what dividing costs, as if the keys were more,
# for each piece, and for the one that adds up the others. Over many rounds programs drift apart by what it would gain.
PIECE_KEYS, JOIN_KEYS = 2000, 300
MOST_PIECES, MOST_ROUNDS = 16, 16
EVEN = 4  # times as many keys as queries: causal rows then see much the same
SLACK = 0.75  # bits: e4m3 probabilities are scaled by 2^8, and 2^8.75 is below 448


class HopperBackend(TritonBackend):
    """A warp-specialised kernel for sm_90; whatever it does not take, the portable kernels do."""

    name = "hopper"
    merit = "first choice"

    def unavailable(self) -> str | None:
        refusal = super().unavailable()
        if refusal is not None:
            return refusal
        if not torch.cuda.is_available():
            return "no CUDA device"
        release = _release()
        if not TRIED[0] <= release <= TRIED[1]:
            return "its Gluon kernel is built with Triton {}.{} to {}.{}, not {}.{}".format(
                *TRIED[0], *TRIED[1], *release
            )
        return None

    def unsupported(self, inputs: Inputs, config: SparseConfig) -> str | None:
        refusal = super().unsupported(inputs, config)
        if refusal is not None:
            return refusal
        if capability(inputs.query.device) != CHIP:
            return "needs compute capability 9.0"
        if not all(32 < x.shape[-1] <= 256 for x in (inputs.query, inputs.value)):
            return "takes head_dim 33 to 256"
        if _warpgroups(config.block[0]) is None or config.block[1] not in BLOCK_KEYS:
            return f"takes blocks of 128, 192 or 256 rows and 64 or 128 keys, not {config.block}"
        if _warpgroups(config.block[0]) == 3 and max(inputs.query.shape[-1], inputs.value.shape[-1]) > NARROW:
            return f"takes blocks of 128 or 256 rows with head_dim above {NARROW}, not {config.block}"
        return None if config.quantization in ("auto", "int8-fp8") else launch_16bit.refusal_of(inputs, config)

    def summarize(self, inputs: Inputs, config: SparseConfig) -> Blocks:
        own = functools.partial(launch_prepare.own_passes, config=config, processors=_processors(inputs.query.device))
        probed = "probe" in config.rule and not config.keeps_everything and launch_probe.takes(inputs.signature, config)
        with on_device(inputs.query):
            return summarize_by_kinds(inputs, config, own, launch_prepare.VALUES_LATER if probed else ())

    def select(self, blocks: Blocks, config: SparseConfig) -> BlockMask:
        device = blocks.inputs.query.device
        with on_device(blocks.inputs.query):
            own_probe, own_select = (
                functools.partial(own, processors=_processors(device))
                for own in (launch_probe.probe, launch_select.select)
            )
            return select_by_parts(blocks, config, capability(device), own_probe, own_select)

    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
        batch, sight = blocks.inputs.query.shape[0], blocks.inputs.visibility
        with on_device(blocks.inputs.query):
            # The kernel masks few blocks of a list: none may be there that no row sees. The pipeline's masks hold none.
            if not sight.same_as(mask.visible):
                mask = mask.cut_to(sight, batch)
            if config.quantization == "int8-fp8":
                return _attend(blocks, mask, config)
            return launch_16bit.attend(blocks, mask, config, _processors(blocks.inputs.query.device))

    def attend_again(self, blocks: Blocks, config: SparseConfig, redo: Redo) -> None:
        if config.quantization == "int8-fp8":  # rare: heads are redone in 16 bits where a kernel takes them
            super().attend_again(blocks, config, redo)
            return
        with on_device(blocks.inputs.query):
            launch_16bit.attend(blocks, redo, config, _processors(blocks.inputs.query.device))


@functools.cache
def _release() -> tuple[int, int]:
    """Triton's; asking reads a file."""
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def _warpgroups(rows: int) -> int | None:
    return next((n for n in (3, 2) if rows % (n * ROWS) == 0), None)


@dataclass(frozen=True)
class Pieces:
    """How a launch's tiles are dealt out: those from the first `whole` on in `count` pieces each."""

    tiles: int
    whole: int
    count: int

    @property
    def divided(self) -> int:
        return self.tiles - self.whole

    @property
    def tickets(self) -> int:
        return self.whole + self.divided * self.count


@dataclass(frozen=True)
class ListedRows:
    """Some query blocks whose lists fit the scratch: make the lists, then attend over them."""

    rows: int  # lists in all
    tiles_per_head: int
    expand: Launch
    attend: Launch


@dataclass(frozen=True)
class Plan:
    sizes: Sizes
    lists: ScratchLayout
    scratch: int  # float32 sums that do not fit shared memory, or of pieces
    parts: tuple[ListedRows, ...]


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(
    problem: Signature, block: tuple[int, int], second: bool, bits: MaskBits, output: tuple[int, ...], processors: int
) -> Plan:
    from sparge.backends.hopper import _attend as kernels

    size, warpgroups = Sizes.of(problem, block, True), _warpgroups(block[0])
    assert warpgroups is not None
    heads, per_block = size.batch * size.heads, block[0] // (ROWS * warpgroups)
    step = rows_listed_at_once(size)
    registers, at_launch = REGISTERS[warpgroups]
    divisible = _divisible(problem, size, second)
    counters = power_of_two(1 + processors * warpgroups) if divisible else 1
    units = _units(problem, size, warpgroups)
    constants: dict[str, Any] = {
        "D": size.dp, "DVP": size.dvp, "DV": size.value_dim, "WGS": warpgroups, "BQ": block[0], "BK": block[1],
        "UNITS": units, "STAGES": _stages(size, warpgroups, units), "CUTS_FIRST": cuts_anywhere(problem),
        "HAS_VALID": problem.has_valid, "WRITE_LSE": problem.needs_lse, "PACKED": problem.packing is not None,
        "SECOND": second, "SLACK": SLACK, "DIVIDED": False, "REGISTERS": registers,
        "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip
    parts, scratch = [], processors * warpgroups * ROWS * size.dvp if size.dvp > NARROW else 0
    for first in range(0, size.q_blocks, step):
        here = min(step, size.q_blocks - first)
        tiles = here * heads * per_block
        pieces = _pieces(tiles, processors, size.k_len) if divisible else Pieces(tiles, tiles, 1)
        scratch = max(scratch, pieces.divided * pieces.count * warpgroups * ROWS * (size.dvp + 2))
        numbers = (
            size.heads, size.heads // size.kv_heads, size.q_len, size.k_len, size.q_tokens, size.k_tokens, here, first,
            size.k_blocks, size.k_slots, size.padded, tiles, pieces.whole, pieces.count, *reach(problem),
            problem.scale * LOG2_E, *output,
        )  # fmt: skip
        constants = constants | {"DIVIDED": pieces.divided > 0}
        attend = Launch(kernels.attend, min(pieces.tickets, processors), numbers, constants)
        expand = list_rows(problem, size, block, bits, first, here, second, counters)
        parts.append(ListedRows(here * heads, here * per_block, expand, attend))
    return Plan(size, list_scratch(heads * step, size, counters), scratch, tuple(parts))


def _divisible(problem: Signature, size: Sizes, second: bool) -> bool:
    """Whether tiles may be divided: what the second stage skips depends on all keys before, and where tiles differ much
    in length, the last ones even out by themselves."""
    even = reach(problem)[1] >= size.k_len or size.k_len >= EVEN * size.q_len
    return even and not second and problem.packing is None and size.dvp <= NARROW


def _pieces(tiles: int, processors: int, k_len: int) -> Pieces:
    """The last round of tiles in as many pieces as end soonest."""
    rest, most = tiles % processors, MOST_PIECES if tiles < MOST_ROUNDS * processors else 1

    def time(count: int) -> float:
        """Of that round, in whole tiles."""
        cost = (PIECE_KEYS + JOIN_KEYS * count) / k_len if count > 1 else 0
        return -(-rest * count // processors) / count + cost

    count = min(range(1, most + 1), key=time)
    return Pieces(tiles, tiles - rest if count > 1 else tiles, count)


def _units(problem: Signature, size: Sizes, warpgroups: int) -> int:
    """Of 64 keys in a whole step: four where registers and shared memory allow it, and lists are long enough to fill
    such steps."""
    widest = NARROW // 2 if problem.needs_lse else NARROW  # exact sums of rows keep probabilities in registers
    fits = warpgroups == 2 and size.dvp <= widest and _shared_bytes(size, warpgroups, 4, 2) <= SHARED_BYTES
    return 4 if fits and size.k_len >= WIDE_FROM[problem.needs_lse] else 2


def _stages(size: Sizes, warpgroups: int, units: int) -> int:
    return 4 if _shared_bytes(size, warpgroups, units, 4) <= SHARED_BYTES else 2


def _shared_bytes(size: Sizes, warpgroups: int, units: int, stages: int) -> int:
    """K and V stages of so many units, two tiles of Q, the float32 sums, and some for what is small."""
    sums = 4 * size.dvp if size.dvp <= NARROW else 0
    return stages * units * UNIT * (size.dp + size.dvp) + warpgroups * ROWS * (2 * size.dp + sums) + SMALL_BYTES


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _boxes(x: Tensor, rows: int, columns: int) -> Any:
    """A TMA descriptor of x as a matrix whose rows are its last dimension."""
    length = x.shape[-1]
    return descriptor(x, (x.numel() // length, length), (length, 1), (rows, columns))


def _strides(inputs: Inputs, output: Tensor) -> tuple[int, ...]:
    """Of batch entries, heads and rows; packed sequences share one batch entry."""
    batch, head, row, _ = output.stride()
    return (0 if inputs.packing is not None else batch, head, row)


def _attend(blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
    blocks.finish()
    inputs, copies, bits = blocks.inputs, blocks.quantized, mask.bits
    valid, second = inputs.visibility.key_valid, config.pv_threshold is not None
    assert copies is not None
    assert copies.value_scale is not None
    assert copies.value_mean is not None
    q, output = inputs.query, inputs.empty_output()
    plan = _plan(
        inputs.signature, mask.block, second, MaskBits.of(bits), _strides(inputs, output), _processors(q.device)
    )
    size = plan.sizes
    lse = q.new_empty(*q.shape[:3], dtype=torch.float32) if inputs.needs_lse else None
    lists = Scratch(q, plan.lists)
    sums = q.new_empty(plan.scratch, dtype=torch.float32) if plan.scratch else q
    ends, skipped, skips = sequence_ends(inputs), no_skips(q.device, size.batch, size.heads), q
    boxes = (
        _boxes(copies.query, ROWS, size.dp), _boxes(copies.key, UNIT, size.dp), _boxes(copies.value, size.dvp, UNIT)
    )  # fmt: skip
    for part in plan.parts:
        unfilled = (bits, *ends, either(inputs.visibility.valid_before, q), q, *LISTS)
        listing = Operands(lists, unfilled, LISTS)
        part.expand(listing, listing.addresses())
        if second:
            skips = torch.zeros(size.batch, size.heads, part.tiles_per_head, dtype=torch.int32, device=q.device)
        items = (
            *LISTS, copies.query_scale, copies.key_scale,
            q if valid is None else valid.contiguous(), *ends, blocks.v_finite,
            setting(config, "pv_threshold", inputs, second), copies.value_scale, copies.value_mean,
            either(copies.lse_term, q), skips, sums, output, either(lse, q),
        )  # fmt: skip
        _start(part, boxes, Operands(lists, items, LISTS))
        if second:
            skipped = skipped + skips.sum(-1, dtype=torch.int64)
    return Output(output, lse, skipped)


def _start(part: ListedRows, boxes: tuple[Any, ...], operands: Operands) -> None:
    """With what programs draw first, which lies behind the part's counts, between its lists and the rest."""
    rows, behind = part.rows, len(LISTS)
    addresses = operands.addresses()

    def tensors() -> list[Any]:
        found = operands()
        return [*boxes, *found[:behind], found[0][rows:], *found[behind:]]

    tickets = addresses[0] + 4 * rows
    part.attend(tensors, (*boxes, *addresses[:behind], tickets, *addresses[behind:]))
