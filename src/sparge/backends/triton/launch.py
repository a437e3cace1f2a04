"""Launches the Triton kernels: shapes, strides, tile sizes and scratch; no host synchronisation anywhere."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge import exact
from sparge.backends.triton import launch_exact
from sparge.backends.triton.arguments import (
    Operands,
    Scratch,
    either,
    no_skips,
    sequence_ends,
    setting,
)
from sparge.backends.triton.dispatch import addresses_of
from sparge.backends.triton.launch_select import select_by_parts
from sparge.backends.triton.plans import (
    LISTS,
    MaskBits,
    PreparePlan,
    Strides,
    attend_plan,
    prepare_plan,
)
from sparge.backends.triton.sizes import Sizes
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs, Sample, Signature
from sparge.judging import Verdict
from sparge.quantization import KEYS_PER_SCALE, Quantized, sixteen_bit, widened
from sparge.stages import Blocks, Output, PutOff, Redo
from sparge.visibility import Visibility

MAX_FLOAT32_DIM = 128
SAMPLING = ("SAMPLE", "REPAIR")  # the kinds of preparation that find means and scales
LARGEST_ROTATION = 128  # done as one product; more channels take a butterfly besides
NOTHING = nullcontext()  # to enter, any number of times


class TritonBackend:
    """Plain Triton kernels for NVIDIA GPUs from Ampere (sm_80) on; int8 and fp8 where the chip has them."""

    name = "triton"
    takes_masks = True
    merit = "first choice"

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "needs triton: pip install triton"
        if _interpreted():
            return None
        if not torch.cuda.is_available():
            return "no CUDA device"
        return None

    def unsupported(self, inputs: Inputs, config: SparseConfig) -> str | None:
        device = inputs.query.device
        widest = max(inputs.query.shape[-1], inputs.value.shape[-1])
        if inputs.query.dtype == torch.float32 and config.quantization == "none" and widest > MAX_FLOAT32_DIM:
            return f"float32 tiles of head_dim {widest} exceed the chips' shared memory: use 16-bit inputs or int8"
        if inputs.packing is not None and config.max_error is not None:
            return "max_error is checked one sequence at a time"
        if inputs.packing is not None and config.protected:
            return "protected ranges count from the ends of packed sequences, which only the device knows"
        if _interpreted():
            return None
        if device.type != "cuda":
            return f"tensors are on {device.type}"
        chip = capability(device)
        if chip < 80:
            return f"needs an NVIDIA GPU of compute capability 8.0 or newer, not {chip / 10:.1f}"
        if config.quantization == "int8-fp8" and chip < 89:
            return f"compute capability {chip / 10:.1f} has no fp8: use int8"
        return None

    def default_quantization(self, device: torch.device) -> str:
        if device.type != "cuda":
            return "none"
        chip = capability(device)
        if chip in (89, 90) or chip >= 120:
            return "int8-fp8"
        return "int8" if chip < 89 else "none"

    def summarize(self, inputs: Inputs, config: SparseConfig) -> Blocks:
        with on_device(inputs.query):
            return summarize_by_kinds(inputs, config)

    def select(self, blocks: Blocks, config: SparseConfig) -> BlockMask:
        with on_device(blocks.inputs.query):
            return select_by_parts(blocks, config, capability(blocks.inputs.query.device))

    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
        with on_device(blocks.inputs.query):
            return attend_by_parts(blocks, mask, config)

    def attend_again(self, blocks: Blocks, config: SparseConfig, redo: Redo) -> None:
        with on_device(blocks.inputs.query):
            attend_by_parts(blocks, redo, config)

    def exact_rows(self, inputs: Inputs, rows: Tensor) -> Tensor:
        if not launch_exact.takes(inputs):
            return exact.exact_rows(inputs, rows)
        with on_device(inputs.query):
            return launch_exact.exact_rows(inputs, rows, capability(inputs.query.device))

    def judge(self, values: Tensor, exact: Tensor, rows: Tensor, max_error: float) -> Verdict:
        with on_device(values):
            return launch_exact.judge(values, exact, rows, max_error)


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def capability(device: torch.device) -> int:
    """10 * major + minor; the interpreter poses as Hopper."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return major * 10 + minor


def on_device(x: Tensor) -> Any:
    """Kernels launch on the current device: make it the tensor's. Mostly it is already."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else NOTHING


@functools.lru_cache(maxsize=32)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """+-1, unnormalised: exact in every format."""
    size = min(size, LARGEST_ROTATION)
    index = torch.arange(size, device="cpu")
    parity = torch.zeros(size, size, dtype=torch.int64, device="cpu")
    for bit in range(size.bit_length()):
        parity ^= (index[:, None] & index) >> bit & 1
    return (1 - 2 * parity).to(device, torch.bfloat16)


# A kind of preparation: called with what its kernels read and write, in their order, and the addresses of that.
Pass = Callable[[Operands, Sequence[int]], None]
COUNTERS = ("arrived", "v_repair")  # int32 scratch


def summarize_by_kinds(
    inputs: Inputs,
    config: SparseConfig,
    own_passes: Callable[[Signature], Mapping[str, Pass]] | None = None,
    later: Sequence[str] = (),
) -> Blocks:
    """One kind of work after the other; own passes run in place of the portable kernels of their kinds.

    Kinds that come later are put off, if there are own passes.
    """
    if inputs.scale < 0:  # the kernels take a row's largest product for its largest score
        inputs = replace(inputs, query=-inputs.query, scale=-inputs.scale)
    q, sampled = inputs.query, inputs.sample is not None
    plan = prepare_plan(inputs.signature, config, capability(q.device))
    own = {} if own_passes is None or sampled else own_passes(inputs.signature)
    put_off = PutOff({kind: own.get(kind, plan.launches[kind]) for kind in later}) if own and later else None
    scratch = Scratch(q, plan.scratch)
    blocks = _blocks(inputs, config, plan.sizes, scratch, put_off)
    if inputs.sample is not None:
        _sample(inputs, inputs.sample, blocks, config, scratch)
    operands = _to_prepare(inputs, blocks, plan, scratch, blocks.v_finite, plan.clears)
    addresses = operands.addresses()
    if put_off is not None:
        put_off.operands, put_off.addresses = operands, addresses
    for kind, launch in plan.launches.items():
        if not ((put_off is not None and kind in later) or (sampled and kind in SAMPLING)):
            own.get(kind, launch)(operands, addresses)
    return blocks


def _to_prepare(
    inputs: Inputs, blocks: Blocks, plan: PreparePlan, scratch: Scratch, v_finite: Tensor, cleared: bool
) -> Operands:
    """What the kernels of preparation read and write, in their order. `cleared`: they will set counters to zero."""
    q, valid, copied = inputs.query, inputs.visibility.key_valid, blocks.quantized
    if not cleared:
        for name in COUNTERS:
            scratch.piece(name).zero_()
    items = (
        q, inputs.key, inputs.value, q if valid is None else valid.contiguous(),
        *sequence_ends(inputs), _hadamard(plan.sizes.dp, q.device), *COUNTERS,
        "count", "sum", "v_max", "v_sum", "rotated_mean", "key_mean", "value_scale", "value_mean",
        v_finite, blocks.q_means, blocks.k_means, "q_similarity", "k_similarity",
        *((q, q, q) if copied is None else (copied.query, copied.key, copied.value)),
        "query_scale", "key_scale", "lse_term",
    )  # fmt: skip
    return Operands(scratch, items, COUNTERS)


def _sample(inputs: Inputs, sample: Sample, blocks: Blocks, config: SparseConfig, scratch: Scratch) -> None:
    """Means and value scales of the longer sequence that these keys are part of, by the kernel that samples.

    It looks at every tile of up to 63, and a sample has no more. Scales are final: no rank may repair its own.
    """
    value = sample.value
    if value is None:
        value = inputs.value.new_zeros(1).expand(*sample.key.shape[:3], inputs.value.shape[3])
    sight = Visibility(inputs.visibility.q_len, sample.key.shape[2], sample.key.device, key_valid=sample.valid)
    whole = replace(inputs, key=sample.key, value=value, visibility=sight, sample=None)
    plan = prepare_plan(whole.signature, config, capability(inputs.query.device))
    unread = inputs.query.new_empty(plan.sizes.rows * plan.sizes.k_slots, dtype=torch.bool)
    operands = _to_prepare(whole, blocks, plan, scratch, unread, False)
    plan.launches["SAMPLE"](operands, operands.addresses())
    blocks.v_finite.fill_(True)  # which the kernel does for as many keys as it samples from
    copied = blocks.quantized
    if sample.value_max is not None and copied is not None and copied.value_scale is not None:
        assert copied.value_mean is not None
        copied.value_scale.copy_(widened(copied.value_scale, sample.value_max + copied.value_mean.abs()))


def _blocks(inputs: Inputs, config: SparseConfig, size: Sizes, scratch: Scratch, put_off: PutOff | None) -> Blocks:
    """What the kernels will fill."""
    (a, b), new, value = config.subblocks, inputs.query.new_empty, inputs.value
    queries, keys = (size.entries, size.heads), (size.entries, size.kv_heads)
    fp8, judge = config.quantization == "int8-fp8", config.similarity is not None
    quantized = None
    if config.quantization != "none":
        v8 = new(*keys, size.dvp, size.padded, dtype=torch.float8_e4m3fn) if fp8 else value.to(sixteen_bit(value.dtype))
        quantized = Quantized(
            query=new(*queries, size.q_tokens, size.dp, dtype=torch.int8),
            query_scale=scratch.shaped("query_scale", *queries, size.q_tokens),
            key=new(*keys, size.padded, size.dp, dtype=torch.int8),
            key_scale=scratch.shaped("key_scale", *keys, size.padded // KEYS_PER_SCALE),
            key_mean=scratch.shaped("key_mean", size.batch, size.kv_heads, size.dim),
            value=v8,
            value_scale=scratch.shaped("value_scale", size.batch, size.kv_heads, size.value_dim) if fp8 else None,
            value_mean=scratch.shaped("value_mean", size.batch, size.kv_heads, size.value_dim) if fp8 else None,
            values_transposed=fp8,
            lse_term=scratch.shaped("lse_term", *queries, size.q_tokens) if inputs.needs_lse else None,
        )
    return Blocks(
        inputs,
        q_means=new(*queries, size.q_slots, a, size.dim, dtype=torch.bfloat16),
        k_means=new(*keys, b, size.k_slots, size.dim, dtype=torch.bfloat16),
        v_finite=new(*keys, size.k_slots, dtype=torch.bool),
        q_similarity=scratch.shaped("q_similarity", *queries, size.q_slots) if judge else None,
        k_similarity=scratch.shaped("k_similarity", *keys, size.k_slots) if judge else None,
        quantized=quantized,
        block=config.block,
        put_off=put_off,
    )


@dataclass(frozen=True)
class Part:
    """As many query blocks as there is scratch for lists of: what a kernel reads and writes for them."""

    number: int
    tiles_per_block: int
    counts: Tensor
    cuts: Tensor
    lists: Tensor
    skips: Tensor  # with the second stage zeros, one per tile
    output: Tensor
    lse: Tensor | None


def block_of(kept: BlockMask | Redo, config: SparseConfig) -> tuple[int, int]:
    """A caller's mask may have blocks of its own."""
    return config.block if isinstance(kept, Redo) else kept.block


def attend_by_parts(
    blocks: Blocks,
    kept: BlockMask | Redo,
    config: SparseConfig,
    own_kernel: Callable[[Part], None] | None = None,
) -> Output:
    """Part by part; heads to redo, over all visible blocks. `own_kernel` runs in place of the portable one."""
    blocks.finish()
    inputs, quantized = blocks.inputs, blocks.quantized
    redo, bits = (kept, None) if isinstance(kept, Redo) else (None, kept.bits)
    q, valid, second = inputs.query, inputs.visibility.key_valid, config.pv_threshold is not None
    output = inputs.empty_output() if redo is None else redo.output.values
    operands = (q, inputs.key, inputs.value, q, q, q, q, q)
    if quantized is not None:
        operands = (
            quantized.query, quantized.key, quantized.value, quantized.query_scale, quantized.key_scale,
            either(quantized.value_scale, q), either(quantized.value_mean, q), either(quantized.lse_term, q),
        )  # fmt: skip
    layout = Strides(
        operands[0].stride(), operands[1].stride(), operands[2].stride(), output.stride(), operands[2].data_ptr() & 15
    )
    listed, block = None if bits is None else MaskBits.of(bits), block_of(kept, config)
    plan = attend_plan(inputs.signature, config, block, layout, listed, capability(q.device))
    size = plan.sizes
    lse = q.new_empty(*q.shape[:3], dtype=torch.float32) if inputs.needs_lse else None
    wanted = q
    if redo is not None:
        lse, wanted = redo.output.lse, redo.heads.view(torch.int8)
    scratch = Scratch(q, plan.lists)
    counts, cuts, lists = (scratch.piece(name).view(torch.int32) for name in LISTS)
    skipped = no_skips(q.device, size.batch, size.heads)
    before = either(inputs.visibility.valid_before, q)
    listing = (either(bits, q), *sequence_ends(inputs), before, wanted, counts, cuts, lists)
    for number, part in enumerate(plan.parts):
        skips = q
        if second:
            tiles = (size.batch, size.heads, part.blocks * part.tiles_per_block)
            skips = (torch.empty if own_kernel is None else torch.zeros)(tiles, dtype=torch.int32, device=q.device)
        tensors = (
            *operands, blocks.v_finite.view(torch.int8), q if valid is None else valid.contiguous().view(torch.int8),
            *sequence_ends(inputs), setting(config, "pv_threshold", inputs, second), counts, cuts, lists,
            output, either(lse, q), skips,
        )  # fmt: skip
        part.expand(listing, addresses_of(listing))
        addresses = addresses_of(tensors)
        if own_kernel is None:
            part.attend(tensors, addresses)
        else:
            own_kernel(Part(number, part.tiles_per_block, counts, cuts, lists, skips, output, lse))
        if part.careful is not None:
            part.careful(tensors, addresses)
        if second:
            skipped = skipped + skips.sum(-1, dtype=torch.int64)
    return Output(output, lse, skipped)
