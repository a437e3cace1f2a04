"""Launches the Triton kernels: shapes, strides, tile sizes and scratch; no host synchronisation anywhere."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparge.backends.triton.dispatch import addresses_of, facts, launch
from sparge.backends.triton.sizes import Sizes, prepare_sizes, select_sizes, tile_sizes
from sparge.block_mask import WORD, BlockMask
from sparge.config import RULES, SparseConfig
from sparge.inputs import Inputs
from sparge.quantization import KEYS_PER_SCALE, Quantized, sixteen_bit
from sparge.stages import Blocks, Output

LOG2_E = math.log2(math.e)
FORMATS = {"none": 0, "int8": 1, "int8-fp8": 2}
KINDS = ("SUM", "QUERIES", "KEYS", "VALUES")  # of preparation work, a launch each
MAX_FLOAT32_DIM = 128
LARGEST_ROTATION = 128  # done as one product; more channels take a butterfly besides
LIST_BYTES = 1 << 28  # kept-block lists held at once; longer problems take several launches


class TritonBackend:
    """Plain Triton kernels for NVIDIA GPUs from Ampere (sm_80) on; int8 and fp8 where the chip has them."""

    name = "triton"
    takes_masks = True

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
        with _on_device(inputs.query):
            return _summarize(inputs, config)

    def select(self, blocks: Blocks, config: SparseConfig) -> BlockMask:
        with _on_device(blocks.inputs.query):
            return _select(blocks, config)

    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
        with _on_device(blocks.inputs.query):
            return _attend(blocks, mask, config)


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def capability(device: torch.device) -> int:
    """10 * major + minor; the interpreter poses as Hopper."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return major * 10 + minor


def _on_device(x: Tensor) -> Any:
    """Kernels launch on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=32)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """+-1, unnormalised: exact in every format."""
    size = min(size, LARGEST_ROTATION)
    index = torch.arange(size, device="cpu")
    parity = torch.zeros(size, size, dtype=torch.int64, device="cpu")
    for bit in range(size.bit_length()):
        parity ^= (index[:, None] & index) >> bit & 1
    return (1 - 2 * parity).to(device, torch.bfloat16)


@functools.lru_cache(maxsize=256)
def _per_head(config: SparseConfig, name: str, heads: int, device: torch.device) -> Tensor:
    """A setting on the device; cached, because the copy there would synchronise."""
    return config.per_head(name, heads, device, torch.float64 if name == "topk" else torch.float32)


def _setting(config: SparseConfig, name: str, inputs: Inputs, used: bool) -> Tensor:
    """A setting per head; kernels that do not use it get a pointer they never read."""
    return _per_head(config, name, inputs.query.shape[1], inputs.query.device) if used else inputs.query


def _or(x: Tensor | None, unused: Tensor) -> Tensor:
    """A tensor, or a pointer that the kernel never reads."""
    return unused if x is None else x


def _pieces(like: Tensor, dtype: torch.dtype, *lengths: int) -> Sequence[Tensor]:
    """Uninitialised scratch in one allocation; each piece begins aligned."""
    rounded = [-(-n // 64) * 64 for n in lengths]
    return torch.split_with_sizes(like.new_empty(sum(rounded), dtype=dtype), rounded)


def _shaped(piece: Tensor, *shape: int) -> Tensor:
    """The beginning of a piece, as a tensor."""
    return piece[: math.prod(shape)].view(shape)


def _ends(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Sequence ends of queries and keys."""
    packing = inputs.packing
    return (inputs.query, inputs.key) if packing is None else (packing.q_ends, packing.k_ends)


def _strides(inputs: Inputs, *tensors: Tensor) -> tuple[int, ...]:
    """Packed tensors have one batch entry, whose stride must not count."""
    if inputs.packing is None:
        return tuple(n for x in tensors for n in x.stride())
    return tuple(n for x in tensors for n in (0, *x.stride()[1:]))


def _summarize(inputs: Inputs, config: SparseConfig) -> Blocks:
    from sparge.backends.triton import _prepare as kernels

    if inputs.scale < 0:  # the kernels take a row's largest product for its largest score
        inputs = replace(inputs, query=-inputs.query, scale=-inputs.scale)
    q, k, v, valid = inputs.query, inputs.key, inputs.value, inputs.visibility.key_valid
    int8, fp8 = config.quantization != "none", config.quantization == "int8-fp8"
    size, (a, b) = Sizes.of(inputs, config.block, int8), config.subblocks
    kinds = KINDS if fp8 else KINDS[:-1]
    chip, widest = capability(q.device), max(size.dp, size.dvp)
    tunings = {kind: prepare_sizes(kind, chip, widest, q.dtype, b) for kind in kinds}
    items = {kind: size.items(kind, config.block[0], b, tuning) for kind, tuning in tunings.items()}
    scratch = _float_scratch(inputs, config, size, items["SUM"])
    blocks = _blocks(inputs, config, size, scratch)
    copies = (
        (q, q, q) if blocks.quantized is None else [getattr(blocks.quantized, x) for x in ("query", "key", "value")]
    )
    pointers = (
        q, k, v, q if valid is None else valid.contiguous().view(torch.int8),
        q if valid is None else valid.sum(1, dtype=torch.int32), *_ends(inputs), _hadamard(size.dp, q.device),
        torch.zeros(size.rows, dtype=torch.int32, device=q.device),
        *(scratch[x] for x in ("sums", "partial", "v_max", "key_mean", "rotated_mean", "value_scale")),
        blocks.v_finite.view(torch.int8), blocks.q_means, blocks.k_means,
        scratch["q_similarity"], scratch["k_similarity"], *copies,
        *(scratch[x] for x in ("query_scale", "key_scale", "lse_term")),
    )  # fmt: skip
    numbers = (
        size.q_len, size.k_len, size.q_tokens, size.k_tokens, size.padded, size.q_slots, size.k_slots,
        size.kv_heads, inputs.group_size, size.row_step(config.block[0]), size.key_step,
        1 / math.sqrt(size.dp), inputs.scale, *_strides(inputs, q, k, v),
    )  # fmt: skip
    constants = {
        "D": size.dim, "DV": size.value_dim, "DP": size.dp, "DVP": size.dvp,
        "BQ": config.block[0], "BK": config.block[1], "Q_SUBS": a, "K_SUBS": b,
        "PACKED": inputs.packing is not None, "HAS_VALID": valid is not None,
        "JUDGE": config.similarity is not None, "INT8": int8, "FP8": fp8, "WRITE_TERM": int8 and inputs.needs_lse,
    }  # fmt: skip
    known, addresses = facts(q, k, v, *_ends(inputs)), addresses_of(pointers)
    for kind in kinds:
        settings = constants | {"KIND": KINDS.index(kind)} | tunings[kind]
        launch(kernels.prepare, size.rows * items[kind], pointers, (items[kind], *numbers), settings, known, addresses)
    return blocks


def _float_scratch(inputs: Inputs, config: SparseConfig, size: Sizes, sum_items: int) -> dict[str, Tensor]:
    """The float32 tensors of preparation, in one allocation; those the settings do not use are empty."""
    int8, fp8, judge = config.quantization != "none", config.quantization == "int8-fp8", config.similarity is not None
    q_heads, k_heads = size.entries * size.heads, size.entries * size.kv_heads
    lengths = {
        "sums": k_heads * size.k_slots * config.subblocks[1] * size.dim,
        "partial": size.rows * sum_items * size.dim,
        "v_max": size.rows * sum_items * size.value_dim,
        "key_mean": size.rows * size.dim,
        "rotated_mean": size.rows * size.dp,
        "value_scale": size.rows * size.value_dim * fp8,
        "q_similarity": q_heads * size.q_slots * judge,
        "k_similarity": k_heads * size.k_slots * judge,
        "query_scale": q_heads * size.q_tokens * int8,
        "key_scale": k_heads * (size.padded // KEYS_PER_SCALE) * int8,
        "lse_term": q_heads * size.q_tokens * (int8 and inputs.needs_lse),
    }
    return dict(zip(lengths, _pieces(inputs.query, torch.float32, *lengths.values()), strict=True))


def _blocks(inputs: Inputs, config: SparseConfig, size: Sizes, scratch: dict[str, Tensor]) -> Blocks:
    """What the kernels will fill."""
    (a, b), new, value = config.subblocks, inputs.query.new_empty, inputs.value
    queries, keys = (size.entries, size.heads), (size.entries, size.kv_heads)
    fp8, judge = config.quantization == "int8-fp8", config.similarity is not None
    quantized = None
    if config.quantization != "none":
        v8 = new(*keys, size.dvp, size.padded, dtype=torch.float8_e4m3fn) if fp8 else value.to(sixteen_bit(value.dtype))
        quantized = Quantized(
            query=new(*queries, size.q_tokens, size.dp, dtype=torch.int8),
            query_scale=_shaped(scratch["query_scale"], *queries, size.q_tokens),
            key=new(*keys, size.padded, size.dp, dtype=torch.int8),
            key_scale=_shaped(scratch["key_scale"], *keys, size.padded // KEYS_PER_SCALE),
            key_mean=_shaped(scratch["key_mean"], size.batch, size.kv_heads, size.dim),
            value=v8,
            value_scale=_shaped(scratch["value_scale"], size.batch, size.kv_heads, size.value_dim) if fp8 else None,
            lse_term=_shaped(scratch["lse_term"], *queries, size.q_tokens) if inputs.needs_lse else None,
        )
    return Blocks(
        inputs,
        q_means=new(*queries, size.q_slots, a, size.dim, dtype=torch.bfloat16),
        k_means=new(*keys, b, size.k_slots, size.dim, dtype=torch.bfloat16),
        v_finite=new(*keys, size.k_slots, dtype=torch.bool),
        q_similarity=_shaped(scratch["q_similarity"], *queries, size.q_slots) if judge else None,
        k_similarity=_shaped(scratch["k_similarity"], *keys, size.k_slots) if judge else None,
        quantized=quantized,
        block=config.block,
    )


def _select(blocks: Blocks, config: SparseConfig) -> BlockMask:
    from sparge.backends.triton import _select as kernels

    inputs, sight = blocks.inputs, blocks.inputs.visibility
    size, (a, b), q = Sizes.of(inputs, config.block, False), config.subblocks, inputs.query
    everything = config.keeps_everything
    if everything and inputs.packing is None:
        return BlockMask.all_visible(sight, config.block, size.batch, size.heads)
    words = -(-size.k_blocks // WORD)
    bits = q.new_empty(size.entries, size.heads, size.q_slots, words, dtype=torch.int32)
    valid, judge, protect = sight.key_valid is not None, config.similarity is not None, bool(config.protected)
    before = None
    if sight.key_valid is not None:
        before = torch.nn.functional.pad(sight.key_valid.cumsum(1, dtype=torch.int32), (1, 0))
    protected = _protected(config, sight.q_len, sight.k_len, q.device) if protect else (q, q)
    settings = [_setting(config, name, inputs, name in config.rule) for name in RULES]
    sizes = select_sizes(b, size.dim)
    tiles = -(-size.q_blocks * a // sizes["ROWS"])
    pointers = (
        blocks.q_means, blocks.k_means, blocks.k_filled.contiguous().view(torch.int8) if valid else q, _or(before, q),
        *_ends(inputs), blocks.v_finite.view(torch.int8), _or(blocks.q_similarity, q), _or(blocks.k_similarity, q),
        *protected, *settings, _setting(config, "similarity", inputs, judge), bits,
    )  # fmt: skip
    numbers = (
        size.heads, size.kv_heads, size.q_len, size.k_len, size.q_tokens, size.k_tokens, size.q_slots, size.k_slots,
        words, *_reach(inputs), config.sinks, tiles, inputs.scale * LOG2_E,
    )  # fmt: skip
    constants = {
        "D": size.dim, "DP": size.dp, "BQ": config.block[0], "BK": config.block[1], "Q_SUBS": a, "K_SUBS": b,
        **{f"USE_{name.upper()}": name in config.rule and not everything for name in RULES}, "KEEP_ALL": everything,
        "RIGHT_EDGE": sight.right_bounded, "HAS_VALID": valid, "JUDGE": judge, "PROTECT": protect,
        "PACKED": inputs.packing is not None, **sizes,
    }  # fmt: skip
    known = facts(*_ends(inputs)) if inputs.packing is not None else ()
    launch(kernels.select, tiles * size.batch * size.heads, pointers, numbers, constants, known)
    q_len = sight.q_len if inputs.packing is None else size.q_slots * config.block[0]
    return BlockMask(bits, q_len, sight.k_len, config.block, sight)


@functools.lru_cache(maxsize=64)
def _protected(config: SparseConfig, q_len: int, k_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int8 flags of the query and key blocks that hold protected tokens."""
    rows, keys = config.block
    q_flags, k_flags = (
        torch.zeros(-(-n // size), dtype=torch.int8, device="cpu") for n, size in ((q_len, rows), (k_len, keys))
    )
    for start, stop in config.protected_ranges(k_len):
        if start < stop:
            k_flags[start // keys : -(-stop // keys)] = 1
        top, bottom = max(0, start - (k_len - q_len)), min(q_len, stop - (k_len - q_len))
        if top < bottom:
            q_flags[top // rows : -(-bottom // rows)] = 1
    return q_flags.to(device), k_flags.to(device)


def _reach(inputs: Inputs) -> tuple[int, int]:
    """How far a row sees to the left and right; further than every key is enough, and keeps positions in 32 bits."""
    sight = inputs.visibility
    everything = sight.q_len + sight.k_len
    return min(sight.left, everything), min(sight.right, everything)


def _attend(blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
    from sparge.backends.triton import _attend as kernels
    from sparge.backends.triton import _select as list_kernels

    inputs, sight, quantized = blocks.inputs, blocks.inputs.visibility, blocks.quantized
    size, q = Sizes.of(inputs, mask.block, quantized is not None), inputs.query
    second, number_format, packed = (
        config.pv_threshold is not None,
        FORMATS[config.quantization],
        inputs.packing is not None,
    )
    tiles = tile_sizes(
        capability(q.device), max(size.dp, size.dvp), mask.block, number_format, second, q.dtype == torch.float32
    )
    per_block = mask.block[0] // tiles["BM"]
    output = inputs.empty_output()
    lse = q.new_empty(*q.shape[:3], dtype=torch.float32) if inputs.needs_lse else None
    operands = (q, inputs.key, inputs.value, q, q, q, q)
    if quantized is not None:
        operands = (
            quantized.query, quantized.key, quantized.value, quantized.query_scale, quantized.key_scale,
            _or(quantized.value_scale, q), _or(quantized.lse_term, q),
        )  # fmt: skip
    valid = None if sight.key_valid is None else sight.key_valid.contiguous().view(torch.int8)
    v_finite, limits = blocks.v_finite.view(torch.int8), _setting(config, "pv_threshold", inputs, second)
    heads = size.batch * size.heads
    step = min(size.q_blocks, max(1, LIST_BYTES // (4 * heads * size.k_blocks)))
    lists, counts = _pieces(q, torch.int32, heads * step * size.k_blocks, heads * step)
    skipped = _zero(q.device).expand(size.batch, size.heads)
    bits_batch, bits_head = (mask.bits.stride(n) if mask.bits.shape[n] > 1 else 0 for n in (0, 1))
    constants = {
        "D": size.dim, "DV": size.value_dim, "DP": size.dp, "DVP": size.dvp,
        "BQ": mask.block[0], "BK": mask.block[1], "FORMAT": number_format,
        "MASK_ALL": valid is not None or sight.left < sight.k_len, "HAS_VALID": valid is not None, "SECOND": second,
        "WRITE_LSE": lse is not None, "CAREFUL": False, "PACKED": packed, **tiles,
    }  # fmt: skip
    for first in range(0, size.q_blocks, step):
        here = min(step, size.q_blocks - first)
        list_numbers = (
            size.heads, size.q_len, size.q_tokens, size.k_blocks, mask.bits.shape[3], first, here,
            bits_batch, bits_head,
        )  # fmt: skip
        list_constants = {"BQ": mask.block[0], "TILE": 512, "PACKED": packed, "num_warps": 4}
        list_pointers = (mask.bits, _ends(inputs)[0], counts, lists)
        list_known = (mask.bits.data_ptr() & 15, list_pointers[1].dtype, list_pointers[1].data_ptr() & 15)
        launch(list_kernels.expand, here * heads, list_pointers, list_numbers, list_constants, list_known)
        skips = q.new_empty(size.batch, size.heads, here * per_block, dtype=torch.int32) if second else None
        pointers = (
            *operands, v_finite, _or(valid, q), *_ends(inputs), limits, counts, lists,
            output, _or(lse, q), _or(skips, q),
        )  # fmt: skip
        numbers = (
            inputs.scale * LOG2_E, size.heads, inputs.group_size, size.q_len, size.k_len, size.q_tokens, size.k_tokens,
            size.k_blocks, size.k_slots, size.padded, first, here, *_reach(inputs),
            *_strides(inputs, *operands[:3], output),
        )  # fmt: skip
        known = facts(*operands[:3], output, *_ends(inputs))
        launch(kernels.attend, here * per_block * heads, pointers, numbers, constants, known)
        if number_format < FORMATS["int8-fp8"]:
            launch(kernels.attend, here * per_block * heads, pointers, numbers, {**constants, "CAREFUL": True}, known)
        if skips is not None:
            skipped = skipped + skips.sum(-1, dtype=torch.int64)
    return Output(output, lse, skipped)
