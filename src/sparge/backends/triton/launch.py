"""Launches the Triton kernels: shapes, strides, tile sizes and scratch; no host synchronisation anywhere."""

from __future__ import annotations

import functools
import importlib.util
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparge.block_mask import WORD, BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.quantization import KEYS_PER_SCALE, MIN_ROTATION, Quantized, sixteen_bit
from sparge.stages import Blocks, Output

LOG2_E = math.log2(math.e)
MAX_DIM = 128
FORMATS = {"none": 0, "int8": 1, "int8-fp8": 2}
KEY_TILE = 128  # keys one program of the second pass finishes; K and V copies are padded to it
STEPS = 16  # tiles one program of the second pass finishes, so that it loads the rotation once
LIST_BYTES = 1 << 28  # kept-block lists held at once; longer problems take several launches


class TritonBackend:
    """Plain Triton kernels for NVIDIA GPUs from Ampere (sm_80) on; int8 and fp8 where the chip has them."""

    name = "triton"

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
        if widest > MAX_DIM:
            return f"head_dim {widest} is over {MAX_DIM}, whose tiles do not fit every chip's shared memory yet"
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


def _padded_dim(dim: int, int8: bool) -> int:
    return max(power_of_two(dim), MIN_ROTATION if int8 else 16)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=32)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """+-1, unnormalised: exact in every format."""
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


def _summarize(inputs: Inputs, config: SparseConfig) -> Blocks:
    from sparge.backends.triton import _prepare as kernels

    if inputs.scale < 0:  # the kernels take a row's largest product for its largest score
        inputs = replace(inputs, query=-inputs.query, scale=-inputs.scale)
    q, k, v, valid = inputs.query, inputs.key, inputs.value, inputs.visibility.key_valid
    (batch, heads, q_len, dim), (kv_heads, k_len), value_dim = q.shape, k.shape[1:3], v.shape[-1]
    (rows, keys), (a, b) = config.block, config.subblocks
    q_blocks, k_blocks = -(-q_len // rows), -(-k_len // keys)
    int8, fp8, judge = config.quantization != "none", config.quantization == "int8-fp8", config.similarity is not None
    dp, dvp = _padded_dim(dim, int8), power_of_two(value_dim)
    padded = -(-k_len // KEY_TILE) * KEY_TILE
    new = functools.partial(torch.empty, device=q.device)
    float32, rotation_scale = torch.float32, 1 / math.sqrt(dp)

    segments = max(b, 16 if max(dp, dvp) > 128 else 32)
    programs = -(-k_blocks * b // segments)
    sums = new(batch, kv_heads, k_blocks, b, dim, dtype=float32)
    partial = new(batch, kv_heads, programs, dim, dtype=float32)
    v_max = new(batch, kv_heads, programs, value_dim, dtype=float32)
    v_finite = new(batch, kv_heads, k_blocks, dtype=torch.int8)
    mean = new(batch, kv_heads, dim, dtype=float32)
    rotated_mean = new(batch, kv_heads, dp, dtype=float32)
    v_scale = new(batch, kv_heads, value_dim, dtype=float32) if fp8 else None
    q_means = new(batch, heads, q_blocks, a, dim, dtype=torch.bfloat16)
    k_means = new(batch, kv_heads, b, k_blocks, dim, dtype=torch.bfloat16)
    q_similarity = new(batch, heads, q_blocks, dtype=float32) if judge else None
    k_similarity = new(batch, kv_heads, k_blocks, dtype=float32) if judge else None
    quantized = None
    if int8:
        quantized = Quantized(
            query=new(batch, heads, q_len, dp, dtype=torch.int8),
            query_scale=new(batch, heads, q_len, dtype=float32),
            key=new(batch, kv_heads, padded, dp, dtype=torch.int8),
            key_scale=new(batch, kv_heads, padded // KEYS_PER_SCALE, dtype=float32),
            key_mean=mean,
            value=new(batch, kv_heads, dvp, padded, dtype=torch.float8_e4m3fn) if fp8 else v.to(sixteen_bit(v.dtype)),
            value_scale=v_scale,
        )
    flags = None if valid is None else valid.contiguous().view(torch.int8)
    count = None if valid is None else valid.sum(1, dtype=torch.int32)
    exact = q.dtype != float32
    hadamard = _hadamard(dp, q.device)
    masked, warps = valid is not None, 4 if capability(q.device) == 90 else 8  # four would spill elsewhere
    kernels.key_sums[(programs, batch * kv_heads)](
        k, v, flags, sums, partial, v_max, v_finite, kv_heads, k_len, k_blocks, *k.stride(), *v.stride(),
        D=dim, DV=value_dim, DP=dp, DVP=dvp, SUBS=b, SUB_ROWS=keys // b, SEGMENTS=segments, HAS_VALID=masked,
    )  # fmt: skip
    kernels.key_mean[(batch * kv_heads,)](
        partial, v_max, count, hadamard, mean, rotated_mean, v_scale, kv_heads, k_len, programs,
        D=dim, DV=value_dim, DP=dp, DVP=dvp, TILE=64, HAS_VALID=masked, ROTATE=int8, FP8=fp8, num_warps=8,
    )  # fmt: skip
    tiles = padded // KEY_TILE
    kernels.prepare_keys[(-(-tiles // STEPS), batch * kv_heads)](
        k, flags, sums, mean, rotated_mean, hadamard, k_means, k_similarity,
        quantized and quantized.key, quantized and quantized.key_scale,
        kv_heads, k_len, k_blocks, padded, rotation_scale, *k.stride(),
        D=dim, DP=dp, BK=keys, SUBS=b, TILE=KEY_TILE, STEPS=STEPS, HAS_VALID=masked,
        JUDGE=judge, INT8=int8, EXACT_PRODUCT=exact, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if quantized is not None and fp8:
        kernels.prepare_values[(tiles, batch * kv_heads)](
            v, flags, v_scale, quantized.value, kv_heads, k_len, padded, *v.stride(),
            DV=value_dim, DVP=dvp, TILE=KEY_TILE, HAS_VALID=masked,
        )  # fmt: skip
    kernels.prepare_queries[(-(-q_blocks // STEPS), batch * heads)](
        q, hadamard, q_means, q_similarity, quantized and quantized.query, quantized and quantized.query_scale,
        heads, q_len, q_blocks, rotation_scale, *q.stride(),
        D=dim, DP=dp, SUBS=a, SUB_ROWS=rows // a, SUB_PADDED=power_of_two(rows // a), STEPS=STEPS,
        JUDGE=judge, INT8=int8, EXACT_PRODUCT=exact, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return Blocks(
        inputs, q_means, k_means, v_finite.view(torch.bool), q_similarity, k_similarity, quantized, config.block
    )


def _select(blocks: Blocks, config: SparseConfig) -> BlockMask:
    from sparge.backends.triton import _select as kernels

    inputs, sight = blocks.inputs, blocks.inputs.visibility
    batch, heads, q_blocks, a, dim = blocks.q_means.shape
    kv_heads, b, k_blocks = blocks.k_means.shape[1:4]
    device = inputs.query.device
    words = -(-k_blocks // WORD)
    if config.keeps_everything:
        return BlockMask.all_visible(sight, config.block, batch, heads)
    bits = torch.empty(batch, heads, q_blocks, words, dtype=torch.int32, device=device)
    valid, judge, protect = sight.key_valid is not None, config.similarity is not None, bool(config.protected)
    before = None
    if sight.key_valid is not None:
        before = torch.nn.functional.pad(sight.key_valid.cumsum(1, dtype=torch.int32), (1, 0))
    q_protected, k_protected = _protected(config, sight.q_len, sight.k_len, device) if protect else (None, None)
    settings = [_setting(config, name, inputs, name in config.rule) for name in ("threshold", "gap", "cdf", "topk")]
    sizes = select_sizes(b)
    kernels.select[(-(-q_blocks * a // sizes["ROWS"]), batch * heads)](
        blocks.q_means, blocks.k_means, blocks.k_filled.contiguous().view(torch.int8) if valid else None, before,
        blocks.v_finite.view(torch.int8), blocks.q_similarity, blocks.k_similarity, q_protected, k_protected,
        *settings, _setting(config, "similarity", inputs, judge), bits,
        heads, kv_heads, sight.q_len, sight.k_len, q_blocks, k_blocks, words, sight.offset, *_reach(inputs),
        config.sinks, inputs.scale * LOG2_E,
        D=dim, DP=power_of_two(dim), BQ=config.block[0], BK=config.block[1], Q_SUBS=a, K_SUBS=b,
        USE_THRESHOLD="threshold" in config.rule, USE_GAP="gap" in config.rule,
        USE_CDF="cdf" in config.rule, USE_TOPK="topk" in config.rule,
        RIGHT_EDGE=sight.right_bounded, HAS_VALID=valid, JUDGE=judge, PROTECT=protect, **sizes,
    )  # fmt: skip
    return BlockMask(bits, sight.q_len, sight.k_len, config.block, sight)


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


def select_sizes(subblocks: int) -> dict[str, int]:
    """Sub-rows per program, key blocks per step, sub-blocks per product."""
    return {"ROWS": 64, "PART": min(subblocks, 4), "CHUNK": 32, "num_warps": 4, "num_stages": 2}


def tile_sizes(chip: int, dp: int, block_q: int, block_k: int, number_format: int, second: bool) -> dict[str, int]:
    """Rows per tile, list entries per step, warps and pipeline stages: measured on sm_90, elsewhere free of spills."""
    pair = 2 if block_k <= 64 and not second else 1
    rows, warps, stages = 64, 8, 2
    if dp <= 64:
        rows, stages = 128, 2 if chip in (86, 89, 120) else 3
    elif chip in (90, 100):
        rows, warps, stages = (64, 4, 2) if number_format == 2 else (128, 8, 3)
    elif number_format == 2:
        rows, pair = 128, 1
    else:
        pair = 1
    if block_q % rows:
        rows, warps = 64, max(4, warps // 2)
    return {"BM": rows, "PAIR": pair, "num_warps": warps, "num_stages": stages}


def _attend(blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
    from sparge.backends.triton import _attend as kernels
    from sparge.backends.triton import _select as list_kernels

    inputs, sight, quantized = blocks.inputs, blocks.inputs.visibility, blocks.quantized
    batch, heads, q_len, dim = inputs.query.shape
    device, value_dim, number_format = inputs.query.device, inputs.value.shape[-1], FORMATS[config.quantization]
    dp, dvp = _padded_dim(dim, quantized is not None), power_of_two(value_dim)
    tiles = tile_sizes(capability(device), max(dp, dvp), *mask.block, number_format, config.pv_threshold is not None)
    per_block = mask.block[0] // tiles["BM"]
    second = config.pv_threshold is not None
    output = inputs.empty_output()
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=device) if inputs.needs_lse else None
    if quantized is None:
        q, k, v, padded = inputs.query, inputs.key, inputs.value, sight.k_len
        scales: tuple[Tensor | None, ...] = (None, None, None)
    else:
        q, k, v, padded = quantized.query, quantized.key, quantized.value, quantized.key.shape[2]
        scales = (quantized.query_scale, quantized.key_scale, quantized.value_scale)
    valid = None if sight.key_valid is None else sight.key_valid.contiguous().view(torch.int8)
    v_finite, limits = blocks.v_finite.view(torch.int8), _setting(config, "pv_threshold", inputs, second)
    step = min(mask.q_blocks, max(1, LIST_BYTES // (4 * batch * heads * mask.k_blocks)))
    counts = torch.empty(batch * heads * step, dtype=torch.int32, device=device)
    lists = torch.empty(batch * heads * step * mask.k_blocks, dtype=torch.int32, device=device)
    skipped = torch.zeros(batch, heads, dtype=torch.int64, device=device)
    bits_batch, bits_head = (mask.bits.stride(n) if mask.bits.shape[n] > 1 else 0 for n in (0, 1))
    for first in range(0, mask.q_blocks, step):
        here = min(step, mask.q_blocks - first)
        list_kernels.expand[(here, batch * heads)](
            mask.bits, counts, lists, mask.q_blocks, mask.k_blocks, mask.bits.shape[3], first, here,
            bits_batch, bits_head, heads, TILE=512, num_warps=4,
        )  # fmt: skip
        skips = torch.empty(batch, heads, here * per_block, dtype=torch.int32, device=device) if second else None
        launch = functools.partial(
            kernels.attend[(here * per_block, batch * heads)],
            q, k, v, *scales, v_finite, valid, limits, counts, lists,
            output, lse, skips,
            inputs.scale * LOG2_E, heads, inputs.group_size, q_len, sight.k_len, mask.k_blocks, padded, first, here,
            sight.offset, *_reach(inputs), *q.stride(), *k.stride(), *v.stride(), *output.stride(),
            D=dim, DV=value_dim, DP=dp, DVP=dvp, BQ=mask.block[0], BK=mask.block[1], FORMAT=number_format,
            MASK_ALL=valid is not None or sight.left < sight.k_len, HAS_VALID=valid is not None, SECOND=second,
            WRITE_LSE=lse is not None, **tiles,
        )  # fmt: skip
        launch(CAREFUL=False)
        if number_format < 2:
            launch(CAREFUL=True)
        if skips is not None:
            skipped += skips.sum(-1, dtype=torch.int64)
    if lse is not None and quantized is not None:
        lse += _smoothing_term(inputs, quantized.key_mean)
    return Output(output, lse, skipped)


def _smoothing_term(inputs: Inputs, key_mean: Tensor) -> Tensor:
    """scale * q . k_mean: what smoothing took from every logit of a row."""
    mean = key_mean.repeat_interleave(inputs.group_size, 1)
    return torch.einsum("bhnd,bhd->bhn", inputs.query.float(), mean) * inputs.scale
