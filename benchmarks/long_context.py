"""One attention layer of Llama-3.1-8B's shape (32 query and 8 key/value heads of 128 channels), causal, to 1M tokens.

    python benchmarks/long_context.py --json benchmarks/results/gpu_h200_long_context.json

Inputs are clustered, so that every query block finds most of its weight in a few places: key blocks lie around
`--clusters` random directions, and query blocks look for one of them. Times are of whole calls with the default rule.
Dense attention is cuDNN's, measured up to `--dense` tokens and beyond that extrapolated by the square of the length,
and marked so. Memory is what a call allocates at its peak beyond Q, K, V, the output and their 8-bit copies; also with
stats, and with an error budget.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import BlockMask, SparseConfig
from sparge.bench.machine import hardware, versions

HEADS, KV_HEADS, DIM = 32, 8, 128
QUERY_BLOCK, KEY_BLOCK = 128, 64
BUDGET = 0.1  # relative L1 per head, where memory is measured with max_error
Row = dict[str, Any]


def clustered(tokens: int, heads: int, block: int, centers: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, tokens, channels]: each block of tokens near one of the centers."""
    blocks = -(-tokens // block)
    x = torch.empty(1, heads, tokens, centers.shape[1], device=centers.device, dtype=dtype)
    for head in range(heads):  # one at a time: float32 of all heads would not fit
        which = torch.randint(len(centers), (blocks,), device=centers.device)
        near = centers[which].repeat_interleave(block, 0)[:tokens]
        x[0, head] = (near + 0.5 * torch.randn_like(near)).to(dtype)
    return x


def problem(tokens: int, clusters: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    centers = 1.5 * torch.randn(clusters, DIM, device=device)
    query = clustered(tokens, HEADS, QUERY_BLOCK, centers, dtype)
    key = clustered(tokens, KV_HEADS, KEY_BLOCK, centers, dtype)
    value = torch.randn(1, KV_HEADS, tokens, DIM, device=device, dtype=dtype)
    return query, key, value


def seconds(device: str, call: Any, repeats: int) -> float:
    """The best of some calls, after one that compiles."""
    call()
    taken = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


def extra_bytes(device: str, call: Any, tensors: tuple[Tensor, ...], quantized: bool) -> int | None:
    """At the peak, beyond the output and 8-bit copies of Q, K and V. A CPU does not say."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    query = tensors[0]
    copies = sum(x.numel() for x in tensors) if quantized else 0
    return torch.cuda.max_memory_allocated() - before - query.numel() * query.element_size() - copies


def dense_seconds(device: str, query: Tensor, key: Tensor, value: Tensor) -> float:
    def call() -> Tensor:
        if device == "cpu":
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return seconds(device, call, 2)


def worst_difference_in_chunks(query: Tensor, key: Tensor, value: Tensor, chunk: int, device: str) -> dict[str, float]:
    """Prefill by chunks against one shot: relative L1 with the default; bits under a given mask, unquantised."""
    whole = sparge.attention(query, key, value, is_causal=True, enable_gqa=True)
    mask = sparge.predict_mask(query, key, is_causal=True, enable_gqa=True)
    under_mask = sparge.block_sparse_attention(
        query, key, value, mask, is_causal=True, enable_gqa=True, quantization="none"
    )
    dense_mask, tokens = mask.to_dense(), query.shape[2]
    error = size = 0.0
    unequal = 0
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        rows, seen = query[:, :, start:stop], (key[:, :, :stop], value[:, :, :stop])
        part = sparge.attention(rows, *seen, is_causal=True, enable_gqa=True)
        error += (part.float() - whole[:, :, start:stop].float()).abs().sum().item()
        size += whole[:, :, start:stop].float().abs().sum().item()
        kept = dense_mask[:, :, start // QUERY_BLOCK : -(-stop // QUERY_BLOCK), : -(-stop // KEY_BLOCK)]
        own = BlockMask.from_dense(kept, stop - start, stop, (QUERY_BLOCK, KEY_BLOCK))
        exact = sparge.block_sparse_attention(rows, *seen, own, is_causal=True, enable_gqa=True, quantization="none")
        unequal += int((exact != under_mask[:, :, start:stop]).sum())
    return {"relative_l1": error / size, "numbers_that_differ_under_a_mask": unequal}


@torch.inference_mode()
def measure(tokens: int, options: argparse.Namespace, dense_before: tuple[int, float] | None) -> Row:
    tensors = problem(tokens, options.clusters, options.device)
    config = SparseConfig(quantization="int8-fp8" if options.device == "cuda" else "none")

    def call(config: SparseConfig = config, **asked: bool) -> Any:
        return sparge.attention(*tensors, is_causal=True, enable_gqa=True, config=config, **asked)

    def extra(more: Any) -> int | None:
        return extra_bytes(options.device, more, tensors, config.quantization != "none")

    ours = seconds(options.device, call, 2)
    _, stats = call(return_stats=True)
    row: Row = {
        "tokens": tokens, "sparge_s": ours, "executed": (stats.executed.sum() / stats.visible.sum()).item(),
        "backend": stats.backend, "quantization": stats.quantization,
        "extra_bytes": extra(call),
        "extra_bytes_with_stats": extra(partial(call, return_stats=True)),
        "extra_bytes_with_max_error": extra(partial(call, replace(config, max_error=BUDGET))),
    }  # fmt: skip
    if tokens <= options.dense:
        row["dense_s"], row["dense_is"] = dense_seconds(options.device, *tensors), "measured"
    elif dense_before is not None:
        row["dense_s"] = dense_before[1] * (tokens / dense_before[0]) ** 2
        row["dense_is"] = f"extrapolated from {dense_before[0]} tokens"
    if "dense_s" in row:
        row["speed_up"] = row["dense_s"] / ours
    if tokens <= options.chunked:
        row["prefill_in_chunks"] = worst_difference_in_chunks(*tensors, options.chunk, options.device)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << n for n in range(17, 21)])
    parser.add_argument(
        "--dense", type=int, default=1 << 18, help="the longest sequence that dense attention is timed on"
    )
    parser.add_argument("--chunked", type=int, default=1 << 17, help="the longest that prefill in chunks is checked on")
    parser.add_argument("--chunk", type=int, default=1 << 15, help="rows of one chunk, a multiple of 128")
    parser.add_argument("--clusters", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for tokens in sorted(options.tokens):
        measured = [(row["tokens"], row["dense_s"]) for row in rows if row.get("dense_is") == "measured"]
        rows.append(measure(tokens, options, measured[-1] if measured else None))
        print(json.dumps(rows[-1]), flush=True)
        if options.json is not None:
            found = {"machine": hardware(torch.device(options.device)), "versions": versions(), "rows": rows}
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
